"""The verdict on a run's end, from its records and its launcher's output."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from payload.config.launch_sections import LaunchSection
from payload.core.errors import ExitCode
from payload.launch.launchers.registry import find
from payload.launch.outcome import Evidence, Verdict, judge
from payload.launch.ranks import place_ranks
from payload.run_record.run_files import RankExit
from tests.launch.inventories import make_inventory

RANKS = place_ranks(make_inventory().nodes, LaunchSection(ranks_per_node=3)).ranks
CLEAN = Evidence(
    ranks=RANKS,
    exits={},
    launcher_status=0,
    launcher_text="",
    launcher=find("mpirun"),
    trainer_status=None,
    stop="none",
    ended_by_us_s=None,
    trained=True,
)
KILLED_TEXT = """
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   RANK 1 PID 5171 RUNNING AT 127.0.0.1
=   KILLED BY SIGNAL: 9 (Killed)
"""


def ended(
    rank: int, code: int, *, at: float = 1.0, signal: int | None = None, error: str | None = None
) -> RankExit:
    return RankExit(
        rank=rank,
        node="node-0",
        exit_code=code,
        signal=signal,
        error=error,
        time_unix=1.0,
        monotonic_s=at,
    )


def evidence(*exits: RankExit, **changes: Any) -> Evidence:
    by_rank = {record.rank: record for record in exits}
    return dataclasses.replace(CLEAN, exits=by_rank, **changes)


def test_a_run_without_errors_has_the_trainer_s_status() -> None:
    exits = [ended(rank, 0) for rank in range(3)]
    verdict = judge(evidence(*exits, trainer_status="finished"))
    assert (verdict.status, verdict.exit_code) == ("finished", ExitCode.OK)


def test_status_zero_without_a_result_is_a_failure() -> None:
    verdict = judge(evidence(*[ended(rank, 0) for rank in range(3)]))
    assert (verdict.status, verdict.exit_code) == ("failed", ExitCode.TRAINING)
    assert verdict.error is not None and "wrote no result" in verdict.error


def test_an_own_error_ranks_before_the_echoes_that_came_first() -> None:
    verdict = judge(
        evidence(
            ended(0, 41, at=1.0, error="rank 0 lost contact"),
            ended(1, 40, at=1.5, error="the loss is nan"),
            ended(2, 41, at=1.1),
        )
    )
    assert verdict.exit_code is ExitCode.TRAINING
    assert verdict.error == "rank 1 on node-0: the loss is nan"
    assert verdict.rank == 1


def test_a_signal_names_rank_signal_and_node() -> None:
    verdict = judge(evidence(ended(0, 41, at=2.0), ended(1, 137, signal=9)))
    assert verdict.exit_code is ExitCode.RANK_LOST
    assert verdict.rank == 1
    assert str(verdict.error).startswith("rank 1 on node-0 was killed by signal 9 (SIGKILL)")


def test_the_earliest_of_error_and_signal_is_the_cause() -> None:
    verdict = judge(evidence(ended(1, 139, at=1.0, signal=11), ended(0, 40, at=2.0, error="x")))
    assert verdict.rank == 1
    assert judge(evidence(ended(1, 139, signal=11), ended(0, 10, error="x"))).rank == 0


def test_a_rank_that_the_supervisor_killed_is_not_the_cause() -> None:
    verdict = judge(
        evidence(
            ended(0, 137, at=6.0, signal=9), ended(1, 40, at=1.0, error="x"), ended_by_us_s=5.0
        )
    )
    assert (verdict.rank, verdict.exit_code) == (1, ExitCode.TRAINING)


def test_an_unknown_exit_status_is_a_training_error() -> None:
    verdict = judge(evidence(ended(2, 1)))
    assert verdict.exit_code is ExitCode.TRAINING
    assert verdict.error == "rank 2 on node-0: ended with status 1 and no message; see its log"


def test_a_rank_without_a_record_is_named_by_mpirun() -> None:
    verdict = judge(evidence(ended(0, 41), ended(2, 41), launcher_text=KILLED_TEXT))
    assert verdict.rank == 1
    assert str(verdict.error).startswith("rank 1 on node-0 was killed by signal 9")


def test_a_rank_without_a_record_is_named_without_mpirun_too() -> None:
    verdict = judge(evidence(ended(0, 41), ended(2, 41)))
    assert verdict.error == "rank 1 on node-0 ended before it could report an error"
    assert verdict.exit_code is ExitCode.RANK_LOST


def test_errors_of_lost_contact_alone_are_a_lost_rank() -> None:
    verdict = judge(
        evidence(ended(0, 41, error="gone"), ended(2, 137, at=9.0, signal=9), ended_by_us_s=5.0)
    )
    assert verdict.exit_code is ExitCode.RANK_LOST
    assert verdict.error == "rank 1 on node-0 was lost; rank 0 on node-0 reports: gone"


@pytest.mark.parametrize("status", [-9, 137])
def test_a_killed_launcher_is_reported_as_killed(status: int) -> None:
    verdict = judge(
        evidence(ended(0, 137, at=9.0, signal=9), ended_by_us_s=5.0, launcher_status=status)
    )
    assert verdict.exit_code is ExitCode.RANK_LOST
    assert str(verdict.error).startswith("the launcher was killed by signal 9")


@pytest.mark.parametrize("exits", [(0,), (0, 1, 2)])
def test_ranks_that_a_killed_launcher_ended_are_not_the_cause(exits: tuple[int, ...]) -> None:
    records = [ended(rank, 137, at=5.1, signal=9) for rank in exits]
    verdict = judge(evidence(*records, launcher_killed_s=5.0, launcher_status=-9))
    assert str(verdict.error).startswith("the launcher was killed by signal 9")
    assert verdict.rank is None


def test_a_rank_killed_before_its_launcher_is_the_cause() -> None:
    record = ended(1, 137, at=4.0, signal=9)
    verdict = judge(evidence(record, launcher_killed_s=5.0, launcher_status=-9))
    assert str(verdict.error).startswith("rank 1 on node-0 was killed by signal 9")


def test_a_launcher_that_started_nothing_is_preflight_with_its_last_line() -> None:
    verdict = judge(evidence(launcher_status=255, launcher_text="usage\nno such host: x\n\n"))
    assert verdict.exit_code is ExitCode.PREFLIGHT
    assert verdict.error == "the launcher started no rank (status 255): no such host: x"


def test_an_unresolvable_own_name_is_recognised() -> None:
    text = "[mpiexec@h] getaddrinfo returned -3: Temporary failure in name resolution\n"
    verdict = judge(evidence(launcher_status=255, launcher_text=text))
    assert "/etc/hosts" in str(verdict.error)


def test_a_stop_that_saved_is_no_error() -> None:
    verdict = judge(
        evidence(*[ended(r, 0) for r in range(3)], stop="graceful", trainer_status="stopped")
    )
    assert (verdict.status, verdict.exit_code, verdict.error) == ("stopped", ExitCode.OK, None)


def test_a_stop_by_the_system_is_a_lost_run_and_no_result() -> None:
    stopped = evidence(stop="graceful", stop_by_system=True, trainer_status="stopped")
    verdict = judge(stopped)
    assert (verdict.status, verdict.exit_code) == ("failed", ExitCode.RANK_LOST)
    assert "stopped by the system, not by a command" in str(verdict.error)
    assert judge(dataclasses.replace(stopped, trainer_status="finished")).status == "finished"


def test_a_run_that_finished_while_asked_to_stop_is_finished() -> None:
    verdict = judge(
        evidence(*[ended(r, 0) for r in range(3)], stop="graceful", trainer_status="finished")
    )
    assert verdict.status == "finished"


def test_a_forced_stop_says_what_is_lost() -> None:
    verdict = judge(evidence(ended(0, 137, at=9.0, signal=9), stop="forced", ended_by_us_s=5.0))
    assert (verdict.status, verdict.exit_code) == ("stopped", ExitCode.OK)
    assert "steps since the last checkpoint are lost" in str(verdict.error)


def test_a_stop_before_training_began_lost_nothing() -> None:
    verdict = judge(evidence(stop="graceful", ended_by_us_s=5.0, trained=False, begun=True))
    assert (verdict.status, verdict.exit_code) == ("stopped", ExitCode.OK)
    assert verdict.error == "stopped while the ranks loaded; the last checkpoint is unchanged"


def test_ranks_that_do_not_stop_are_hanging() -> None:
    assert judge(evidence(stop="expired", ended_by_us_s=5.0)).exit_code is ExitCode.HANG


def test_an_own_error_during_a_stop_is_still_an_error() -> None:
    verdict = judge(evidence(ended(0, 40, error="disk full"), stop="graceful"))
    assert verdict.error == "rank 0 on node-0: disk full"


def test_the_verdict_of_the_heartbeats_wins_over_its_consequences() -> None:
    frozen = Verdict(status="failed", exit_code=ExitCode.HANG, error="node frozen: node-1")
    assert judge(evidence(ended(0, 41, error="rank 0 lost contact"), trouble=frozen)) is frozen
    assert judge(evidence(ended(2, 143, signal=15), trouble=frozen)) is frozen
    assert judge(evidence(trouble=frozen, ended_by_us_s=5.0)) is frozen


def test_a_ranks_own_error_wins_over_the_silence_after_it() -> None:
    frozen = Verdict(status="failed", exit_code=ExitCode.HANG, error="node frozen: node-1")
    verdict = judge(evidence(ended(0, 40, error="disk full"), trouble=frozen))
    assert verdict.error == "rank 0 on node-0: disk full"


def test_ranks_that_saved_and_ended_unasked_are_a_lost_rank_and_no_result() -> None:
    # As after SIGTERM to one rank, or to all ranks of a machine that is preempted.
    told = ended(1, 0, error="was sent SIGTERM")
    verdict = judge(evidence(ended(0, 0), told, ended(2, 0), trainer_status="stopped"))
    assert (verdict.status, verdict.exit_code, verdict.rank) == ("failed", ExitCode.RANK_LOST, 1)
    assert str(verdict.error).startswith("rank 1 on node-0 was sent SIGTERM, but not by this run's")
    unknown = judge(evidence(*[ended(rank, 0) for rank in range(3)], trainer_status="stopped"))
    assert (unknown.exit_code, unknown.rank) == (ExitCode.RANK_LOST, None)


def test_an_error_that_all_ranks_report_names_no_rank() -> None:
    words = "after step 20 the ranks no longer hold the same model: no majority"
    records = [ended(rank, 40, at=3.0 - rank, error=words) for rank in range(3)]
    verdict = judge(evidence(*records))
    assert (verdict.exit_code, verdict.rank) == (ExitCode.TRAINING, None)
    assert verdict.error == f"all ranks: {words}"
    assert judge(evidence(*records[1:])).rank == 2


@pytest.mark.parametrize(
    "how", ["exited with status 255", "exited abnormally", "was killed by signal 9 (Killed)"]
)
def test_a_node_whose_launcher_process_ended_is_named(how: str) -> None:
    verdict = judge(
        evidence(
            launcher_status=255,
            launcher_text=f"[mpiexec@head] downstream from host 10.0.0.3 {how}\n",
            begun=True,
            node_of={"10.0.0.3": "node-1"},
        )
    )
    assert verdict.exit_code is ExitCode.RANK_LOST
    assert str(verdict.error).startswith("node lost: the launcher's process on node-1 ")


def test_a_launcher_that_gives_up_with_ranks_at_work_lost_them() -> None:
    verdict = judge(evidence(launcher_status=255, launcher_text="downstream ended\n", begun=True))
    assert verdict.exit_code is ExitCode.RANK_LOST
    assert verdict.error == "the launcher failed (status 255): downstream ended"
