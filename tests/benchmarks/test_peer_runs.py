"""The peer of a GPU visit: the first one that runs, and why the others did not."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.peer_runs import NoPeerError, Peer, run_peer
from benchmarks.gpu.programs import Programs
from benchmarks.peers.work import Work

_ABSENT = Peer(name="Absent", module="no_such_module", packages=("no_such_package",))
_BROKEN = Peer(name="Broken", module="no_such_module", packages=("numpy",))
_RUNS = Peer(name="Simple", module="tests.benchmarks.reporting_peer", packages=("numpy",))


def work_in(folder: Path) -> Work:
    return Work(
        folder="model",
        tokens=str(folder / "tokens"),
        tokens_dtype="uint16",
        report=str(folder / "report.json"),
        device="cpu",
        sequence_length=4,
        micro_batch_size=2,
        warm_up_steps=1,
        steps=2,
        adapter={"rank": 2, "alpha": 4.0, "dropout": 0.0},
    )


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    made = Programs(tmp_path / "logs")
    made.limit(60.0)
    return made


@pytest.mark.processes
def test_a_missing_or_broken_peer_is_replaced_by_the_next_and_named(
    tmp_path: Path, programs: Programs
) -> None:
    peers = (_ABSENT, _BROKEN, _RUNS)
    found = run_peer(programs, work_in(tmp_path), name="peer", limit_s=60.0, peers=peers)
    assert (found.name, found.report["took_s"]) == ("Simple, numpy 1.0", 2.0)
    absent, broken = found.reasons
    assert absent == "Absent did not run: not installed: no_such_package."
    assert broken.startswith("Broken failed: peer, exit code 1: ")
    assert "no_such_module" in broken


def test_without_a_peer_the_error_names_what_to_install(tmp_path: Path, programs: Programs) -> None:
    with pytest.raises(NoPeerError, match="Absent did not run: not installed: no_such_package"):
        run_peer(programs, work_in(tmp_path), name="peer", limit_s=60.0, peers=(_ABSENT,))


def test_peers_train_on_the_first_rows_of_the_token_file(tmp_path: Path) -> None:
    work = work_in(tmp_path)
    Path(work.tokens).write_bytes(b"".join(n.to_bytes(2, "little") for n in range(40)))
    rows = work.rows()
    assert rows.shape == (3 * 2, 4)
    assert rows.reshape(-1).tolist() == list(range(24))
    assert Work.of(work.to_json()) == work
