"""`collect` of a checkpoint too large for one undisturbed connection."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import ExitCode
from tests.orchestrate.cluster.conftest import STEPS, Trained
from tests.orchestrate.operator import finish
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.sshd, pytest.mark.ranks]

NAME = "step_00000500"
SIZE_BYTES = 500_000_000
MARK_BYTES = 100_000_000
_ASKED = re.compile(r"tail -c \+(\d+) -- \S+/optimizer\.safetensors")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@pytest.fixture
def large(trained: Trained) -> Iterator[Path]:
    """The run's checkpoint on the head, as after more steps of a model with 500 MB of state."""
    here = trained.operator.paths("far")
    mirror = here.root / "mirror.json"
    known = mirror.read_bytes()
    small = trained.on_head("checkpoints") / here.checkpoint(STEPS).name
    folder = small.with_name(NAME)
    shutil.copytree(small, folder)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    state = folder / "optimizer.safetensors"
    with state.open("ab") as file:
        for _ in range(10):
            file.write(os.urandom(SIZE_BYTES // 10))
    entry: dict[str, Any] = manifest["files"][state.name]
    entry |= {"bytes": state.stat().st_size, "sha256": sha256_of(state)}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    yield folder
    for path in (folder, here.checkpoints / NAME):
        shutil.rmtree(path, ignore_errors=True)
    mirror.write_bytes(known)


def test_a_checkpoint_of_500_mb_arrives_whole_through_three_interruptions(
    trained: Trained, large: Path
) -> None:
    operator, nodes = trained.operator, trained.operator.nodes
    checkpoints = operator.paths("far").checkpoints
    partial = checkpoints / f".{NAME}.collecting" / "optimizer.safetensors.partial"

    def arrived_bytes() -> int:
        return partial.stat().st_size if partial.exists() else 0

    def wait_for_bytes(count: int) -> None:
        wait_until(lambda: arrived_bytes() > count, what=f"{count} bytes")

    trusted = nodes.home_of(1) / ".ssh" / "authorized_keys"
    with trusted.open("a", encoding="ascii") as file:
        file.write("restrict ssh-ed25519 AAAA tileforge-run:far.0a1b2c3d\n")
    (nodes.home_of(0) / ".ssh" / "tileforge" / "far.0a1b2c3d").mkdir(parents=True)
    asked_to_end = operator.start("collect", "far")
    wait_for_bytes(0)
    asked_to_end.send_signal(signal.SIGINT)
    code, said = finish(asked_to_end)
    assert code == 130 and "collect far fetches only what is missing" in said, said
    assert "tileforge-run:" not in trusted.read_text(encoding="ascii")
    early_bytes = arrived_bytes()
    killed = operator.start("collect", "far")
    wait_for_bytes(early_bytes + MARK_BYTES)
    killed.send_signal(signal.SIGKILL)
    finish(killed)
    first_bytes = arrived_bytes()
    cut = operator.start("collect", "far")
    wait_for_bytes(first_bytes + MARK_BYTES)
    nodes.cut_sessions(0)
    code, said = finish(cut)
    assert code == ExitCode.SSH_UNREACHABLE, said
    assert "node-0" in said and "collect far fetches only what is missing" in said
    second_bytes = arrived_bytes()
    assert first_bytes + MARK_BYTES < second_bytes < SIZE_BYTES
    third = operator.start("collect", "far")
    asked: set[str] = set()
    while third.poll() is None:
        asked |= set(_ASKED.findall("\n".join(nodes.processes())))
        time.sleep(0.02)  # the request takes far longer
    code, said = finish(third)
    assert code == ExitCode.OK and f"checkpoint: {checkpoints / NAME}" in said, said
    # Only the rest was requested from the node, by the number of its first byte.
    assert asked == {str(second_bytes + 1)}
    here = checkpoints / NAME
    assert {path.name for path in here.iterdir()} == {path.name for path in large.iterdir()}
    for path in large.iterdir():
        assert sha256_of(here / path.name) == sha256_of(path), path.name
    assert not list(checkpoints.glob(".*"))
