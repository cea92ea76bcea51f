"""A hostile node's checkpoints: which are fetched, and what they leave in the copy."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import ConfigError, PreflightError
from payload.core.printable_text import printable
from payload.orchestrate.runs.mirror import record_contact
from payload.orchestrate.runs.remote_run import RemoteRun
from payload.run_record.run_files import RunPaths
from tests.orchestrate.hostile import STRINGS, files_below
from tests.orchestrate.run_copies import progress_text
from tests.orchestrate.sshd import Sshd


def write_checkpoint(folder: Path, **files: bytes) -> dict[str, Any]:
    """A checkpoint as the trainer leaves it; returns its manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = {}
    small = {"config.json": b"{}", "trainer.json": b"{}", "optimizer.safetensors": b""}
    for name, content in {"model.safetensors": b"weights", **small, **files}.items():
        (folder / name).write_bytes(content)
        entries[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = {"schema_version": 1, "files": entries}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return manifest


@pytest.mark.sshd
@pytest.mark.parametrize("how", ["another's", "damaged", "linked", "manifest alone"])
def test_a_local_checkpoint_counts_only_if_it_matches_the_head_s(
    run: RemoteRun, head: Sshd, tmp_path: Path, how: str
) -> None:
    there = head.home / "tileforge" / "runs" / "one" / "checkpoints" / "step_00000010"
    write_checkpoint(there)
    here = run.paths.checkpoint(10)
    outside = tmp_path / "outside"
    outside.write_bytes(b"weights")
    if how == "another's":
        write_checkpoint(here, **{"model.safetensors": b"planted"})
    else:
        write_checkpoint(here)
        (here / "model.safetensors").unlink()
    if how == "damaged":
        (here / "model.safetensors").write_bytes(b"weightz")
    elif how == "linked":
        (here / "model.safetensors").symlink_to(outside)
    assert run.collect_checkpoint() == here
    assert files_below(here) == files_below(there)
    assert not (here / "model.safetensors").is_symlink() and outside.read_bytes() == b"weights"
    inode = (here / "model.safetensors").stat().st_ino
    assert run.collect_checkpoint() == here  # now it is
    assert (here / "model.safetensors").stat().st_ino == inode
    assert [path.name for path in run.paths.checkpoints.iterdir()] == [here.name]


@pytest.mark.sshd
@pytest.mark.parametrize(
    ("name", "is_kept"),
    [
        ("checkpoints", True),
        ("checkpoints/step_00000010", True),
        ("checkpoints/.step_00000010.collecting", True),
        ("checkpoints/.step_00000009.collecting", False),
        ("logs", True),
        ("progress", True),
    ],
)
def test_a_file_in_the_place_of_a_copy_s_folder_stops_no_collect(
    run: RemoteRun, head: Sshd, name: str, is_kept: bool
) -> None:
    there = head.home / "tileforge" / "runs" / "one"
    write_checkpoint(there / "checkpoints" / "step_00000010")
    (there / "progress").mkdir()
    (there / "progress" / "rank_0000.json").write_text(progress_text(0, node="node-0"))
    path = run.paths.root / name
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        path.rmdir()
    path.write_text("mine")
    run.refresh()
    assert run.collect_checkpoint() == run.paths.checkpoint(10)
    assert files_below(run.paths.checkpoint(10)) == files_below(there / "checkpoints/step_00000010")
    aside = path.with_name(f"{path.name}.damaged-1")
    assert aside.read_text() == "mine" if is_kept else not path.exists()


@pytest.mark.sshd
@pytest.mark.parametrize("odd", ["model.safetensors", "config.json.partial", "old/er"])
def test_a_folder_left_where_a_checkpoint_is_collected_stops_no_collect(
    run: RemoteRun, head: Sshd, odd: str
) -> None:
    there = head.home / "tileforge" / "runs" / "one" / "checkpoints" / "step_00000010"
    write_checkpoint(there)
    (run.paths.checkpoints / ".step_00000010.collecting" / odd / "x").mkdir(parents=True)
    assert run.collect_checkpoint() == run.paths.checkpoint(10)
    assert files_below(run.paths.checkpoint(10)) == files_below(there)
    assert [path.name for path in run.paths.checkpoints.iterdir()] == ["step_00000010"]


def test_a_folder_in_the_place_of_a_copy_s_lock_is_set_aside(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "one")
    (paths.root / ".mirror.lock" / "x").mkdir(parents=True)
    record_contact(paths, alive=False, ssh_key=Path("/k"))
    assert (paths.root / ".mirror.lock.damaged-1" / "x").is_dir()


MANIFESTS: list[Any] = [
    *({"files": {name: {"bytes": 1, "sha256": "0" * 64}}} for name in STRINGS),
    *(
        {"files": {name: {"bytes": 1, "sha256": "0" * 64}}}
        for name in (
            "manifest.json",
            "../x.json",
            "/x.json",
            "pytorch_model.bin",
            "x.py",
            ".x.json",
        )
    ),
    *(
        {"files": {"config.json": {"bytes": size, "sha256": "0" * 64}}}
        for size in (-1, 10**30, "1")
    ),
    *(
        {"files": {"config.json": {"bytes": 2, "sha256": text}}}
        for text in ("", "0" * 63, "G" * 64, 7)
    ),
    {"files": {}},
    {"files": []},
    {},
    [],
]


@pytest.mark.sshd
def test_a_hostile_manifest_writes_nothing_and_the_checkpoint_before_it_is_collected(
    run: RemoteRun, head: Sshd
) -> None:
    there = head.home / "tileforge" / "runs" / "one" / "checkpoints"
    write_checkpoint(there / "step_00000010")
    operator = run.paths.root.parent.parent
    for manifest in MANIFESTS:
        if isinstance(manifest, dict):
            manifest.setdefault("schema_version", 1)
        newest = there / "step_00000020"
        newest.mkdir(exist_ok=True)
        (newest / "manifest.json").write_text(json.dumps(manifest))
        said: list[str] = []
        assert run.collect_checkpoint(say=said.append) == run.paths.checkpoint(10), manifest
        assert len(said) == 1 and "step_00000020 is skipped" in said[0]
        assert printable(said[0]) == said[0] and "\n" not in said[0]
        left = {path for path in files_below(operator) if "step_00000010/" not in path}
        staged = "runs/one/checkpoints/.step_00000020.collecting/manifest.json"
        assert left <= {"runs/one/ranks.json", "runs/one/.checkpoint.lock", staged}
        assert not run.paths.checkpoint(20).exists()


@pytest.mark.sshd
@pytest.mark.parametrize(
    "name", ["checkpoints", "checkpoints/.step_00000010.collecting", ".checkpoint.lock"]
)
def test_a_checkpoint_is_not_collected_through_a_symlink(
    run: RemoteRun, head: Sshd, tmp_path: Path, name: str
) -> None:
    write_checkpoint(head.home / "tileforge" / "runs" / "one" / "checkpoints" / "step_00000010")
    outside = tmp_path / "outside"
    if name.endswith(".lock"):
        outside.write_text("mine")
    else:
        outside.mkdir()
    link = run.paths.root / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside)
    with pytest.raises(ConfigError, match="is a symlink"):
        run.collect_checkpoint()
    assert outside.read_text() == "mine" if outside.is_file() else not list(outside.iterdir())


@pytest.mark.sshd
def test_a_checkpoint_that_does_not_fit_here_is_not_begun(run: RemoteRun, head: Sshd) -> None:
    there = head.home / "tileforge" / "runs" / "one" / "checkpoints"
    write_checkpoint(there / "step_00000010")
    manifest = write_checkpoint(there / "step_00000020")
    manifest["files"]["config.json"]["bytes"] = 2**62
    (there / "step_00000020" / "manifest.json").write_text(json.dumps(manifest))
    # The one before it is no result: the original of a collected run may be destroyed.
    with pytest.raises(PreflightError, match=r"^node-0: a checkpoint of .* bytes does not fit"):
        run.collect_checkpoint()


@pytest.mark.sshd
@pytest.mark.parametrize("how", ["missing", "flipped", "shorter"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_collected(
    run: RemoteRun, head: Sshd, how: str
) -> None:
    there = head.home / "tileforge" / "runs" / "one" / "checkpoints"
    for step in (9, 10, 100_000_000):
        write_checkpoint(there / f"step_{step:08d}")
    weights = there / "step_100000000" / "model.safetensors"
    if how == "missing":
        weights.unlink()
    else:
        weights.write_bytes(b"wEights" if how == "flipped" else b"w")
    said: list[str] = []
    assert run.collect_checkpoint(say=said.append) == run.paths.checkpoint(10)
    assert len(said) == 1 and "checkpoint step_100000000 is skipped: node-0: " in said[0]


@pytest.mark.sshd
def test_a_file_of_a_checkpoint_that_grows_beyond_its_size_is_refused(
    run: RemoteRun, head: Sshd
) -> None:
    there = head.home / "tileforge" / "runs" / "one" / "checkpoints" / "step_00000010"
    write_checkpoint(there)
    (there / "model.safetensors").write_bytes(bytes(10 * 2**20))
    with pytest.raises(PreflightError, match=r"^node-0: sent more data than requested"):
        run.collect_checkpoint()
    left = run.paths.checkpoints / ".step_00000010.collecting" / "model.safetensors.partial"
    assert left.stat().st_size <= 2**20
