"""A whole rehearsed stage beside TRL, and the last fallback on the same work."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu import write_model
from benchmarks.gpu.beside_peer import beside_peer
from benchmarks.gpu.models import write_config
from benchmarks.gpu.peer_runs import PEERS, Peer, run_peer
from benchmarks.gpu.programs import Programs
from benchmarks.gpu.runs import Runs
from benchmarks.gpu.speed_cases import SPEED_CASES
from benchmarks.gpu.visit import run_stage
from benchmarks.peers.work import Work

pytestmark = pytest.mark.slow


@pytest.mark.processes
def test_a_rehearsed_stage_measures_our_run_and_the_peers(tmp_path: Path) -> None:
    runs = Runs(tmp_path, Programs(tmp_path / "logs"), rehearsal=True)
    found = run_stage(beside_peer(SPEED_CASES[2]), runs, ends_s=time.monotonic() + 600)
    assert found.outcome == "passed", found.cause
    names = [each["program"] for each in found.numbers["programs"]]
    assert names[0] == "Tileforge" and names[-1].startswith("TRL's SFTTrainer, trl ")
    assert all(each["allocated_bytes"] > 0 for each in found.numbers["programs"])
    assert "Longest operators of Tileforge" in found.details
    assert not list(tmp_path.glob("model-*"))
    assert json.dumps(dict(found.numbers))


@pytest.mark.processes
@pytest.mark.parametrize("peer", PEERS[2:], ids=lambda peer: peer.name)
def test_the_last_fallback_trains_an_adapter(peer: Peer, tmp_path: Path) -> None:
    case = SPEED_CASES[2].rehearsed()
    folder = write_config(tmp_path / "model", case.config)
    write_model.main(folder, "cpu")
    np.arange(3 * 2 * 32, dtype=np.uint16).tofile(tmp_path / "tokens")
    work = Work(
        folder=str(folder),
        tokens=str(tmp_path / "tokens"),
        tokens_dtype="uint16",
        report=str(tmp_path / "report.json"),
        device="cpu",
        sequence_length=case.sequence_length,
        micro_batch_size=case.micro_batch_size,
        warm_up_steps=1,
        steps=2,
        adapter=case.adapter(),
    )
    programs = Programs(tmp_path / "logs")
    programs.limit(300.0)
    found = run_peer(programs, work, name="peer", limit_s=300.0, peers=[peer])
    assert found.name.startswith(f"{peer.name}, transformers ")
    # Random weights know nothing of 512 tokens.
    assert found.report["loss"] == pytest.approx(math.log(512), abs=0.1)
    assert found.report["took_s"] > 0
