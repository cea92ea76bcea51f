"""The wheels and packages that machines get; needs no root."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.rig.cache import cached
from tests.rig.image import TRIXIE
from tests.rig.wheelhouse import LOCK, python_of, requirements


def test_the_wheelhouse_follows_the_machines_python_and_not_this_one() -> None:
    lock = "\n".join(
        [
            "# package==version ; where  # extras",
            "a==1  # dev, train",
            "b==1 ; python_full_version < '3.12'  # train",
            "c==1 ; python_version >= '3.12'  # train",
            "d==1  # dev",
        ]
    )
    assert requirements(lock, extra="train", torch="1") == ["a==1", "b==1"]
    trixie = python_of(TRIXIE)
    assert requirements(lock, extra="train", torch="1", python=trixie) == ["a==1", "c==1"]


@pytest.mark.parametrize("build", ["2.13.0", "2.13.0+cpu"])
def test_the_machines_get_the_build_of_torch_that_the_host_has(build: str) -> None:
    required = requirements(LOCK.read_text("utf-8"), extra="train", torch=build)
    names = {line.partition("==")[0].partition("[")[0] for line in required}
    assert [line for line in required if line.startswith("torch==")] == [f"torch=={build}"]
    assert "impi-rt" in names
    cuda = {"cuda-toolkit", "nvidia-cublas", "triton"}
    assert names & cuda == (cuda if build == "2.13.0" else set())


def test_what_is_cached_is_whole_or_absent_and_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        cached("thing", recipe=["1"], build=fail)
    made = cached("thing", recipe=["1"], build=lambda folder: (folder / "whole").touch())
    assert [path.name for path in made.iterdir()] == ["whole"]
    assert cached("thing", recipe=["1"], build=fail) == made


def test_what_nobody_used_for_a_week_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    old = cached("thing", recipe=["1"], build=lambda folder: None)
    recent = cached("thing", recipe=["2"], build=lambda folder: None)
    eight_days_ago = time.time() - 8 * 24 * 3600
    os.utime(old, (eight_days_ago, eight_days_ago))
    cached("thing", recipe=["3"], build=lambda folder: None)
    assert recent.is_dir() and not old.exists()
