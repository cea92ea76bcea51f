"""Two commands of one operator that bring the same run home at the same time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import pytest

from payload.orchestrate.run.mirror import note_collected, read_mirrored
from payload.orchestrate.run.there import RemoteRun
from payload.orchestrate.ssh.connection import Cluster
from payload.orchestrate.ssh.streams import Login
from payload.results import RunPaths
from tests.orchestrate.run_copies import write_ranks
from tests.orchestrate.sshd import Sshd, make_cluster

pytestmark = pytest.mark.sshd

NAME = "step_00000010"
SIZE_BYTES = 20_000_000
# 16 MB: more than one answer of a node has room for, and three.
ROWS = "".join(f'{{"step": {step}, "loss": {"1" * 300}}}\n' for step in range(50_000))


def test_a_checkpoint_and_metrics_come_once_however_many_ask(
    node: Sshd, login: Login, tmp_path: Path
) -> None:
    run_dir = node.home / "tileforge" / "runs" / "one"
    checkpoint = run_dir / "checkpoints" / NAME
    checkpoint.mkdir(parents=True)
    content = os.urandom(SIZE_BYTES)
    (checkpoint / "model.safetensors").write_bytes(content)
    entry = {"bytes": SIZE_BYTES, "sha256": hashlib.sha256(content).hexdigest()}
    manifest = {"schema_version": 1, "files": {"model.safetensors": entry}}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    (run_dir / "metrics.jsonl").write_text(ROWS)
    inventory = make_cluster(node.node)
    paths = RunPaths(tmp_path / "one")
    write_ranks(paths, "node-0")

    def bring_home(_: int) -> Path | None:
        run = RemoteRun(
            paths,
            inventory,
            run_dir=PurePosixPath(run_dir),
            key=login.key,
            connect=lambda: Cluster(inventory, login=login, env=os.environ),
        )
        try:
            run.refresh()
            return run.collect_checkpoint()
        finally:
            run.close()

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(bring_home, range(3)))
    assert found == [paths.checkpoint(10)] * 3
    assert (paths.checkpoint(10) / "model.safetensors").read_bytes() == content
    assert paths.metrics.read_text() == ROWS
    assert [path.name for path in paths.checkpoints.iterdir()] == [NAME]
    # It has ended, so nothing more is to come; unless it is started again.
    note_collected(paths, found[0])
    mirrored = read_mirrored(paths)
    assert mirrored is not None and mirrored.collected == NAME
    with (run_dir / "supervisor.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        bring_home(0)
        note_collected(paths, found[0])
    mirrored = read_mirrored(paths)
    assert mirrored is not None and mirrored.alive and mirrored.collected is None
