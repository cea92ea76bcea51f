"""Two commands of one operator that collect the same run at the same time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import pytest

from payload.core.errors import RankLostError
from payload.machines.inventory import Node
from payload.orchestrate.runs import remote_run as there
from payload.orchestrate.runs.mirror import read_mirrored, record_collected
from payload.orchestrate.runs.remote_run import RemoteRun, remote_hashes
from payload.orchestrate.ssh.cluster import Cluster
from payload.orchestrate.ssh.remote_calls import Left, Login
from payload.run_record.checkpoint_manifest_hashes import ManifestHashes, known_hashes, note_hash
from payload.run_record.run_files import RunPaths
from tests.orchestrate.conftest import PATIENT, remote_run
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

    def collect_results(_: int) -> Path | None:
        run = RemoteRun(
            paths,
            inventory,
            run_dir=PurePosixPath(run_dir),
            key=login.key,
            connect=lambda: Cluster(inventory, login=login, env=os.environ, deadlines=PATIENT),
        )
        try:
            run.refresh()
            return run.collect_checkpoint()
        finally:
            run.close()

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(collect_results, range(3)))
    assert found == [paths.checkpoint(10)] * 3
    assert (paths.checkpoint(10) / "model.safetensors").read_bytes() == content
    assert paths.metrics.read_text() == ROWS
    assert [path.name for path in paths.checkpoints.iterdir()] == [NAME]
    # It has ended, so nothing more will come unless it is started again.
    record_collected(paths, found[0])
    mirrored = read_mirrored(paths)
    assert mirrored is not None and mirrored.collected == NAME
    with (run_dir / "supervisor.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        collect_results(0)
        record_collected(paths, found[0])
    mirrored = read_mirrored(paths)
    assert mirrored is not None and mirrored.alive and mirrored.collected is None


def test_a_killed_rank_is_waited_for_and_its_forks_are_killed(
    run: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([(7,), (7,), (7, 8), (8,), ()])
    kills: list[bool] = []

    def act(
        self: RemoteRun, node: Node, answer: type[object], *, kill: bool, **arguments: object
    ) -> Left:
        """Answer as a head whose rank frees its memory."""
        kills.append(kill)
        return Left(pids=next(answers))

    monkeypatch.setattr(RemoteRun, "_act", act)
    monkeypatch.setattr(RemoteRun, "is_alive", lambda self: False)
    monkeypatch.setattr(there, "_LEAVE_S", 0.0)
    run.end_leftovers(at_once=True)
    assert kills == [False, True, True, True, True]


def test_a_process_that_cannot_be_killed_is_named(
    run: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteRun, "_act", lambda *_, **arguments: Left(pids=(7,)))
    monkeypatch.setattr(RemoteRun, "is_alive", lambda self: False)
    monkeypatch.setattr(there, "_LEAVE_S", 0.0)
    monkeypatch.setattr(there, "_KILL_S", 0.0)
    with pytest.raises(RankLostError, match=r"run one do not end: node-0: \[7\]"):
        run.end_leftovers(at_once=True)


def test_the_head_s_hashes_come_here_by_every_look(
    node: Sshd, login: Login, tmp_path: Path
) -> None:
    there, paths = RunPaths(node.home / "tileforge" / "runs" / "two"), RunPaths(tmp_path / "two")
    there.root.mkdir(parents=True)
    write_ranks(paths, "node-0")
    run = remote_run(paths, make_cluster(node.node), there=there.root, login=login)
    head = run.cluster.connect(node.node)
    for content in (None, "half", "x" * 2_000_000):
        if content is not None:
            there.manifest_hashes.write_text(content)
        assert remote_hashes(head, run.run_dir) == ManifestHashes()
        run.refresh()
    assert not paths.manifest_hashes.exists()
    there.manifest_hashes.unlink()
    note_hash(there, "step_00000010", "a" * 64)
    run.refresh()
    assert known_hashes(paths) == remote_hashes(head, run.run_dir) == known_hashes(there)
    assert known_hashes(paths).by_name() == {"step_00000010": "a" * 64}
    run.close()
