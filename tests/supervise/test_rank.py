"""One rank's wrapper, without a launcher around it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from payload.core.errors import ConfigError, PreflightError
from payload.launch.ranks import Rank
from payload.run_record.run_files import RankExit, read_json
from payload.supervise.rank import bind_to_cores, find_rank, rank_command
from tests.supervise.planned import REPO, plan_stand_in


def make_rank(rank: int = 0, *, cores: tuple[int, ...] = (0,), domain: int | None = 0) -> Rank:
    return Rank(
        rank=rank,
        node="a",
        node_rank=0,
        local_rank=rank,
        numa_domain=domain,
        cores=cores,
        threads=1,
    )


def test_intel_mpis_number_wins_over_a_leftover() -> None:
    ranks = [make_rank(0), make_rank(1)]
    assert find_rank(ranks, {"PMI_RANK": "1", "RANK": "0"}).rank == 1
    assert find_rank(ranks, {"RANK": "0"}).rank == 0


def test_without_a_launcher_the_error_shows_how_to_start() -> None:
    with pytest.raises(ConfigError, match="none of PMI_RANK"):
        find_rank([make_rank()], {})


def test_a_number_without_a_place_is_named() -> None:
    with pytest.raises(ConfigError, match="PMI_RANK = '4', but the rank file has ranks 0 to 0"):
        find_rank([make_rank()], {"PMI_RANK": "4"})


def test_memory_is_bound_only_where_there_are_several_domains_and_numactl() -> None:
    def command(rank: Rank, *, several: bool, numactl: str | None) -> list[str]:
        return rank_command(["p"], rank, several_domains=several, numactl=numactl)

    rank = make_rank(domain=1)
    assert command(rank, several=True, numactl="/bin/numactl") == [
        "/bin/numactl",
        "--membind=1",
        "p",
    ]
    assert command(rank, several=True, numactl=None) == ["p"]
    assert command(rank, several=False, numactl="/bin/numactl") == ["p"]
    assert command(make_rank(domain=None), several=True, numactl="/bin/numactl") == ["p"]


def test_cores_that_this_machine_lacks_are_named() -> None:
    with pytest.raises(PreflightError, match=r"cores \[100000\] of node a cannot be used"):
        bind_to_cores(make_rank(cores=(100_000,)))


@pytest.mark.processes
def test_a_program_that_cannot_start_leaves_a_record(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", ranks=1)
    text = paths.plan.read_text().replace('"program": [\n    "', '"program": [\n    "/nowhere')
    paths.plan.write_text(text)
    ended = subprocess.run(
        [sys.executable, "-m", "payload.supervise.rank", "--run-dir", str(paths.root)],
        cwd=REPO,
        env={**os.environ, "PMI_RANK": "0"},
        check=False,
    )
    record = read_json(RankExit, paths.rank_exit(0))
    assert record is not None
    assert ended.returncode == record.exit_code == PreflightError.exit_code
    assert "cannot be started: No such file" in str(record.error)
