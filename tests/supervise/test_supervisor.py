"""Real mpirun, real ranks: a run is started, monitored, stopped and cleaned up."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.run_record.run_files import (
    RankExit,
    RankProgress,
    RunPaths,
    StopRequest,
    Summary,
    read_json,
    write_json,
)
from payload.run_record.run_lock import FORCE_SIGNAL
from payload.supervise.processes import processes_of
from tests.supervise.planned import (
    REPO,
    ask_to_stop,
    plan_stand_in,
    state_of,
    supervise,
    wait_for,
    wait_for_steps,
    wait_until_gone,
)
from tests.support.waiting import DEADLINE_S
from tests.test_checkpoint_listing import make_checkpoint
from tests.test_metrics_log import step_line

pytestmark = pytest.mark.ranks
ENDLESS = ("--steps", "100000")
TORCHRUN_TOO = pytest.param("torchrun", marks=pytest.mark.slow)
"""Each of its starts imports torch; `make test` has the whole of one run by it."""


def _summary(paths: RunPaths) -> Summary:
    summary = read_json(Summary, paths.summary)
    assert summary is not None
    return summary


def _phase(paths: RunPaths) -> str | None:
    progress = read_json(RankProgress, paths.rank_progress(0))
    return progress.phase if progress else None


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_a_run_ends_well_with_every_rank_in_its_place_and_leaves_no_temporary_file(
    tmp_path: Path, launcher: str
) -> None:
    paths = plan_stand_in(tmp_path / "a folder" / "a-run", launcher=launcher)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    # A scheduler's shell around us must not take the run elsewhere.
    elsewhere = {"SLURM_JOBID": "5", "PE_HOSTFILE": "/nowhere"}
    supervisor = supervise(paths, env={**elsewhere, "TMPDIR": str(temporary)})
    assert supervisor.wait(DEADLINE_S) == ExitCode.OK
    assert [path.name for path in temporary.iterdir()] == []
    state = state_of(paths)
    assert (state.status, state.exit_class, state.error) == ("finished", "ok", None)
    assert not processes_of(paths.root)
    placed = json.loads(paths.ranks.read_text())["ranks"]
    for rank in range(2):
        seen = json.loads((paths.root / f"stand_in_{rank}.json").read_text())
        assert seen["cores"] == placed[rank]["cores"]
        assert seen["env"]["OMP_NUM_THREADS"] == str(placed[rank]["threads"])
        assert seen["env"]["LOCAL_RANK"] == str(rank)
        assert seen["env"]["GLOO_SOCKET_IFNAME"] == "lo"
        assert "glibc.malloc" in seen["env"]["GLIBC_TUNABLES"]
        assert paths.rank_log(rank).read_text().splitlines()[0] == f"rank {rank} begins"
        record = read_json(RankExit, paths.rank_exit(rank))
        assert record is not None and record.exit_code == 0
    assert paths.supervisor_log.exists() is False


@pytest.mark.parametrize("launcher", ["mpirun", TORCHRUN_TOO])
def test_a_run_s_folder_may_have_a_longer_path_than_a_socket_s_address(
    tmp_path: Path, launcher: str
) -> None:
    """A Unix socket's path has at most 107 bytes (unix(7)); no part of a run has one there."""
    paths = plan_stand_in(tmp_path / ("deep" * 40) / "run", "--steps", "2", launcher=launcher)
    assert supervise(paths, env={"TMPDIR": str(paths.root)}).wait(DEADLINE_S) == ExitCode.OK
    assert _summary(paths).status == "finished"


@pytest.mark.parametrize("launcher", ["mpirun", TORCHRUN_TOO])
def test_a_killed_rank_is_named_and_nothing_is_left(tmp_path: Path, launcher: str) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, launcher=launcher)
    supervisor = supervise(paths)
    os.kill(wait_for_steps(paths)[1], signal.SIGKILL)
    assert supervisor.wait(DEADLINE_S) == ExitCode.RANK_LOST
    state, summary = state_of(paths), _summary(paths)
    assert state.failed_rank == 1
    assert str(state.error).startswith(f"rank 1 on {state.node} was killed by signal 9 (SIGKILL)")
    assert (summary.status, summary.exit_class) == ("failed", "rank_lost")
    assert summary.error == state.error
    assert summary.steps >= 1
    assert not processes_of(paths.root)


def test_a_killed_wrapper_is_named_from_mpiruns_report(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS)
    supervisor = supervise(paths)
    trainer = wait_for_steps(paths)[1]
    parent = Path(f"/proc/{trainer}/stat").read_text().rpartition(")")[2].split()[1]
    os.kill(int(parent), signal.SIGKILL)
    assert supervisor.wait(DEADLINE_S) == ExitCode.RANK_LOST
    assert str(state_of(paths).error).startswith("rank 1 on ")
    assert state_of(paths).failed_rank == 1
    assert not processes_of(paths.root)


@pytest.mark.slow
def test_a_killed_mpirun_ends_the_run(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, ranks=1)
    supervisor = supervise(paths)
    wait_for_steps(paths, ranks=1)
    (launcher,) = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
    os.kill(int(launcher), signal.SIGKILL)
    assert supervisor.wait(DEADLINE_S) == ExitCode.RANK_LOST
    assert str(state_of(paths).error).startswith("the launcher was killed by signal 9")
    assert not processes_of(paths.root)


def test_a_ranks_own_error_is_the_runs_error(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, "--fail", "1:40")
    assert supervise(paths).wait(DEADLINE_S) == ExitCode.TRAINING
    state = state_of(paths)
    assert state.error == f"rank 1 on {state.node}: the loss is nan"
    assert (state.exit_class, state.failed_rank) == ("training", 1)


@pytest.mark.slow
def test_rank_0_ends_its_checkpoint_when_another_rank_has_failed(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, "--fail", "1:40", "--save-s", "1.5")
    assert supervise(paths, echo_s=0.5).wait(DEADLINE_S) == ExitCode.TRAINING
    assert str(state_of(paths).error).startswith("rank 1 on ")
    record = read_json(RankExit, paths.rank_exit(0))
    assert record is not None and record.error == "rank 0 lost contact with another rank"


def test_a_crash_without_a_record_is_recorded_by_the_wrapper(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, "--crash", "1")
    assert supervise(paths).wait(DEADLINE_S) == ExitCode.TRAINING
    assert "rank 1" in str(state_of(paths).error)
    assert "RuntimeError: unforeseen" in paths.rank_log(1).read_text()


def test_a_stop_saves_and_has_a_result(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, ranks=1)
    supervisor = supervise(paths)
    wait_for_steps(paths, ranks=1)
    ask_to_stop(paths, supervisor)
    assert supervisor.wait(DEADLINE_S) == ExitCode.OK
    assert (state_of(paths).status, state_of(paths).error) == ("stopped", None)
    assert _summary(paths).status == "stopped"
    assert not processes_of(paths.root)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_a_supervisor_that_the_system_ends_saves_and_its_run_is_lost_and_no_result(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As when the head is preempted; a request for an earlier supervisor does not count."""
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, settings=("limits.max_restarts=1",), ranks=1)
    old = StopRequest(pids=(os.getpid(),), grace_s=0.0)
    write_json(paths.stop_request, old)
    supervisor = supervise(paths)
    wait_for_steps(paths, ranks=1)
    assert not paths.stop_request.exists()
    write_json(paths.stop_request, old)
    supervisor.send_signal(number)
    assert supervisor.wait(DEADLINE_S) == ExitCode.RANK_LOST
    state, summary = state_of(paths), _summary(paths)
    assert (state.status, state.exit_class, state.attempt) == ("failed", "rank_lost", 1)
    assert str(state.error).startswith("the supervisor was stopped by the system, not by")
    assert "the ranks saved and ended" in str(state.error)
    assert (summary.status, summary.exit_class) == ("failed", "rank_lost")
    assert paths.rank_log(0).read_text().splitlines()[-1] == "rank 0 stopped"
    assert not processes_of(paths.root)


@pytest.mark.parametrize("victim", ["program", pytest.param("wrapper", marks=pytest.mark.slow)])
def test_sigterm_to_one_rank_is_a_lost_rank(tmp_path: Path, victim: str) -> None:
    """As when its machine is preempted: the ranks save and end without a request."""
    paths = plan_stand_in(tmp_path / "run", *ENDLESS)
    supervisor = supervise(paths)
    pid = wait_for_steps(paths)[1]
    if victim == "wrapper":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGTERM)
    assert supervisor.wait(DEADLINE_S) == ExitCode.RANK_LOST
    state, summary = state_of(paths), _summary(paths)
    assert (state.status, state.exit_class) == ("failed", "rank_lost")
    assert "not by this run's supervisor" in str(state.error)
    assert (summary.status, summary.exit_class) == ("failed", "rank_lost")
    assert not processes_of(paths.root)


def test_a_signal_that_comes_before_the_supervisor_is_ready_is_not_lost(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, ranks=1)
    supervisor = LocalAccess(os.environ).start_supervisor(paths, detached=True, grace_s=60.0)
    ask_to_stop(paths, supervisor)
    assert supervisor.wait(DEADLINE_S) == ExitCode.OK
    assert state_of(paths).status == "stopped"
    assert not processes_of(paths.root)


def test_a_signal_after_the_end_does_not_change_it(tmp_path: Path) -> None:
    """Python restores the default handlers of signals when the interpreter shuts down."""
    program = (
        "import os, signal, sys\n"
        "from payload.supervise import __main__ as supervise\n"
        "status = supervise.main(sys.argv[1:], os.environ)\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):\n"
        "        kill(pid, number)\n"
        "late = Late()\n"
        "sys.exit(status)\n"
    )
    paths = plan_stand_in(tmp_path / "run", "--steps", "2", ranks=1)
    command = [sys.executable, "-c", program, "--run-dir", str(paths.root)]
    ended = subprocess.run(command, cwd=REPO, check=False, timeout=DEADLINE_S)
    assert ended.returncode == ExitCode.OK
    assert state_of(paths).status == "finished"


def test_records_of_the_wrong_kind_in_a_running_runs_folder_do_not_kill_its_supervisor(
    tmp_path: Path,
) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS)
    supervisor = supervise(paths)
    wait_for_steps(paths)
    texts = ('{"schema_version": 1, "rank": "0"}', "[" * 20_000)
    for number, text in enumerate(texts):
        paths.rank_progress(number).write_text(text)
        paths.rank_exit(7 + number).write_text(text)
    paths.state.unlink()
    paths.state.mkdir()
    paths.launcher_log.unlink()
    (paths.rank_progress(0).parent / "rank_0009.json").mkdir()
    wait_for_steps(paths, ranks=1)
    ask_to_stop(paths, supervisor)
    assert supervisor.wait(DEADLINE_S) == ExitCode.OK
    assert _summary(paths).status == "stopped"


def test_a_state_that_is_gone_is_rebuilt_from_the_summary(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", "--steps", "3", ranks=1)
    assert supervise(paths).wait(DEADLINE_S) == ExitCode.OK
    spent_s = _summary(paths).wall_s
    paths.state.write_bytes(b"\xff{")
    write_json(paths.summary, replace(_summary(paths), wall_s=1000.0, restarts=4, resumes=2))
    assert supervise(paths).wait(DEADLINE_S) == ExitCode.OK
    assert spent_s < 1000.0 < state_of(paths).spent_s
    assert state_of(paths).attempt == 8
    assert (_summary(paths).restarts, _summary(paths).resumes) == (4, 3)


def test_a_run_started_through_a_link_is_identified_by_its_resolved_path(tmp_path: Path) -> None:
    """Its ranks, and those of a killed supervisor, are found by the folder's one name."""
    paths = plan_stand_in(tmp_path / "real" / "run", *ENDLESS, ranks=1)
    (tmp_path / "link").symlink_to("real")
    linked = RunPaths(tmp_path / "link" / "run")
    supervisor = supervise(paths)
    wait_for_steps(paths, ranks=1)
    assert processes_of(linked.root) == processes_of(paths.root) != set()
    supervisor.kill()
    supervisor.wait(DEADLINE_S)
    assert supervise(linked).wait(DEADLINE_S) == ExitCode.RANK_LOST
    begins, stops = "rank 0 begins", "rank 0 stopped"
    assert paths.rank_log(0).read_text().splitlines() == [begins, stops, begins, stops]


def test_state_is_kept_up_to_date_while_the_wall_clock_stands_or_goes_back(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\n"
        "began = time.time()\n"
        "time.time = lambda: began - 3600 * time.monotonic()\n"
        "from payload.supervise import supervisor\n"
        "from payload.supervise.__main__ import main\n"
        "supervisor._STATE_EVERY_S = 0.1\n"
        "sys.exit(main(sys.argv[1:], os.environ))\n"
    )
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, settings=("limits.max_hours=5",), ranks=1)
    command = [sys.executable, "-c", program, "--run-dir", str(paths.root)]
    running = subprocess.Popen(command, cwd=REPO)
    wait_for_steps(paths, ranks=1)
    first = state_of(paths).spent_s
    wait_for(lambda: state_of(paths).spent_s > first + 1.0, "the time that counts to go on")
    ask_to_stop(paths, running)
    assert running.wait(DEADLINE_S) == ExitCode.OK
    assert _summary(paths).wall_s >= 0


def test_a_stop_before_the_first_step_is_a_stop(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, ranks=1)
    supervisor = supervise(paths)
    wait_for(lambda: paths.state.exists() or supervisor.poll() is not None, "the supervisor")
    ask_to_stop(paths, supervisor)
    ended, state = supervisor.wait(DEADLINE_S), state_of(paths)
    assert (ended, state.status) == (ExitCode.OK, "stopped"), state.error
    assert not processes_of(paths.root)


def test_a_stop_while_the_ranks_load_ends_at_once_and_loses_nothing(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, "--deaf", "--loads")
    supervisor = supervise(paths, "--grace", "1000")
    wait_for_steps(paths, step=0)
    ask_to_stop(paths, supervisor)
    assert supervisor.wait(DEADLINE_S) == ExitCode.OK
    state = state_of(paths)
    assert (state.status, state.error) == (
        "stopped",
        "stopped while the ranks loaded; the last checkpoint is unchanged",
    )
    assert not processes_of(paths.root)


def test_the_force_signal_ends_deaf_ranks_at_once(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, "--deaf", "--stray")
    supervisor = supervise(paths)
    wait_for_steps(paths)
    ask_to_stop(paths, supervisor)
    ask_to_stop(paths, supervisor)
    supervisor.send_signal(FORCE_SIGNAL)
    assert supervisor.wait(DEADLINE_S) == ExitCode.OK
    assert "steps since the last checkpoint are lost" in str(state_of(paths).error)
    assert not processes_of(paths.root)


def test_ranks_that_do_not_stop_in_the_time_that_the_stop_came_with_are_killed(
    tmp_path: Path,
) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, "--deaf", ranks=1)
    supervisor = supervise(paths, "--grace", "1000")
    wait_for_steps(paths, ranks=1)
    ask_to_stop(paths, supervisor)
    ask_to_stop(paths, supervisor)
    assert (state_of(paths).grace_s, supervisor.poll()) == (1000.0, None)
    ask_to_stop(paths, supervisor, grace_s=0.5)
    assert supervisor.wait(DEADLINE_S) == ExitCode.HANG
    assert (state_of(paths).exit_class, state_of(paths).grace_s) == ("hang", 0.5)
    assert not processes_of(paths.root)


@pytest.mark.slow
def test_a_stop_waits_for_a_checkpoint_that_makes_progress(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, "--save-s", "1.5", ranks=1)
    supervisor = supervise(paths)
    wait_for_steps(paths, ranks=1)
    ask_to_stop(paths, supervisor)
    wait_for(lambda: _phase(paths) == "checkpoint", "rank 0 to save")
    ask_to_stop(paths, supervisor, grace_s=0.0)
    assert supervisor.wait(DEADLINE_S) == ExitCode.OK
    assert (state_of(paths).status, state_of(paths).error) == ("stopped", None)
    assert _summary(paths).status == "stopped"


@pytest.mark.slow
def test_ranks_that_are_deaf_do_not_outlive_a_killed_supervisor(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, "--deaf")
    supervisor = supervise(paths, "--grace", "0.5")
    wait_for_steps(paths)
    supervisor.kill()
    supervisor.wait(DEADLINE_S)
    wait_until_gone(paths)


@pytest.mark.slow
def test_ranks_save_when_their_supervisor_is_killed_and_the_next_one_waits(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, "--save-s", "1.5", ranks=1)
    first = supervise(paths)
    wait_for_steps(paths, ranks=1)
    first.kill()
    first.wait(DEADLINE_S)
    # The stand-in's request to stop outlives its attempt, and the second attempt gets no request.
    assert supervise(paths).wait(DEADLINE_S) == ExitCode.RANK_LOST
    begins, stops = "rank 0 begins", "rank 0 stopped"
    assert paths.rank_log(0).read_text().splitlines() == [begins, stops, begins, stops]
    state = state_of(paths)
    assert (state.status, state.attempt, state.note) == ("failed", 2, None)
    assert not processes_of(paths.root)


@pytest.mark.slow
def test_a_stop_lets_the_ranks_of_an_earlier_supervisor_save(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, "--save-s", "5", ranks=1)
    first = supervise(paths)
    wait_for_steps(paths, ranks=1)
    first.kill()
    first.wait(DEADLINE_S)
    # Its own grace period does not apply to them.
    second = supervise(paths, "--grace", "0.1")
    wait_for(lambda: state_of(paths).note is not None, "it to say what it waits for")
    ask_to_stop(paths, second)
    assert second.wait(DEADLINE_S) == ExitCode.OK
    assert paths.rank_log(0).read_text().splitlines() == ["rank 0 begins", "rank 0 stopped"]
    assert state_of(paths).error == "stopped before it was started"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", TORCHRUN_TOO])
def test_a_stopped_rank_is_a_hang_that_names_it(tmp_path: Path, launcher: str) -> None:
    quick = ("limits.hang_timeout_s=2",)
    paths = plan_stand_in(
        tmp_path / "run", *ENDLESS, "--lockstep", launcher=launcher, settings=quick
    )
    supervisor = supervise(paths)
    os.kill(wait_for_steps(paths, step=2)[1], signal.SIGSTOP)
    assert supervisor.wait(DEADLINE_S) == ExitCode.HANG
    state = state_of(paths)
    assert (state.exit_class, state.failed_rank) == ("hang", 1)
    # Both grow on a busy machine: the limit with the steps, the first with the time of the check.
    told = re.search(r"no rank made progress for (\d+) s \(limit (\d+) s\)", str(state.error))
    assert told is not None and int(told[1]) >= int(told[2]) >= 2, state.error
    assert f"stopped by a signal: rank 1 on {state.node} at step" in str(state.error)
    assert not processes_of(paths.root)


@pytest.mark.slow
def test_a_run_stops_with_a_result_before_its_money_is_gone_and_stays_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, settings=("limits.max_hours=5",), ranks=1)
    # A dollar a second.
    text = paths.inventory.read_text().replace('"hourly_usd": null', '"hourly_usd": 3600.0')
    paths.inventory.write_text(text)
    limits = paths.config.read_text().replace('max_usd = "none"', "max_usd = 5.0")
    paths.config.write_text(limits)
    assert supervise(paths).wait(DEADLINE_S) == ExitCode.BUDGET
    state, result = state_of(paths), _summary(paths)
    assert (state.status, state.exit_class) == ("stopped", "budget")
    assert str(state.error).startswith("limits.max_usd = 5 is reached")
    assert (result.status, result.exit_class, result.error) == ("stopped", "budget", state.error)
    assert state.cost_usd == pytest.approx(state.spent_s)
    assert result.cost_usd is not None and 4.5 <= result.cost_usd <= state.spent_s
    assert result.usd_per_million_tokens == pytest.approx(result.cost_usd / result.tokens * 1e6)
    assert not processes_of(paths.root)
    assert supervise(paths).wait(DEADLINE_S) == ExitCode.BUDGET
    assert "error: limits.max_usd = 5 is reached" in capfd.readouterr().err
    assert state_of(paths) == state


def test_a_run_stops_when_its_owner_is_killed(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, ranks=1)
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, subprocess, sys; subprocess.Popen([sys.executable, '-m',"
            " 'payload.supervise', '--run-dir', sys.argv[1], '--owner-pid', str(os.getpid())])"
            ".wait()",
            str(paths.root),
        ],
        cwd=REPO,
    )
    wait_for_steps(paths, ranks=1)
    owner.kill()
    owner.wait(DEADLINE_S)
    wait_for(lambda: state_of(paths).status == "stopped", "the run to stop")
    wait_until_gone(paths)


@pytest.mark.slow
def test_processes_that_a_rank_left_behind_are_ended(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", "--stray", ranks=1)
    assert supervise(paths).wait(DEADLINE_S) == ExitCode.OK
    assert state_of(paths).status == "finished"
    assert not processes_of(paths.root)


def test_two_runs_at_once_do_not_collide(tmp_path: Path) -> None:
    runs = [plan_stand_in(tmp_path / name / "run", ranks=1) for name in ("a", "b")]
    supervisors = [supervise(paths) for paths in runs]
    assert [supervisor.wait(DEADLINE_S) for supervisor in supervisors] == [0, 0]
    assert [state_of(paths).status for paths in runs] == ["finished", "finished"]


@pytest.mark.slow
def test_a_second_supervisor_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, ranks=1)
    first = supervise(paths)
    wait_for_steps(paths, ranks=1)
    assert supervise(paths).wait(DEADLINE_S) == ExitCode.USAGE
    assert "has a supervisor already" in capfd.readouterr().err
    ask_to_stop(paths, first)
    assert first.wait(DEADLINE_S) == ExitCode.OK


@pytest.mark.slow
def test_a_second_attempt_forgets_the_first(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, "--fail", "1:40")
    assert supervise(paths).wait(DEADLINE_S) == ExitCode.TRAINING
    (paths.root / "plan.json").write_text(
        paths.plan.read_text().replace('"--fail",\n    "1:40"', '"--steps",\n    "3"')
    )
    assert supervise(paths).wait(DEADLINE_S) == ExitCode.OK
    assert (state_of(paths).attempt, state_of(paths).status) == (2, "finished")


@pytest.mark.slow
def test_the_note_of_a_restart_names_the_newest_valid_checkpoint(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, settings=("limits.max_restarts=1",))
    make_checkpoint(paths.checkpoint(1))
    (make_checkpoint(paths.checkpoint(2)) / "model.safetensors").write_bytes(b"damaged")
    supervisor = supervise(paths)
    os.kill(wait_for_steps(paths, step=3)[1], signal.SIGKILL)
    wait_for(lambda: "Continuing from" in str(state_of(paths).note), "the restart to be told")
    assert "Continuing from checkpoint step_00000001 (restart 1 of 1)" in str(state_of(paths).note)
    ask_to_stop(paths, supervisor)
    assert supervisor.wait(DEADLINE_S) == ExitCode.OK


@pytest.mark.slow
def test_a_step_that_only_metrics_have_is_worth_a_restart(tmp_path: Path) -> None:
    """A heartbeat may be half a second older than the last row."""
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, settings=("limits.max_restarts=1",))
    make_checkpoint(paths.checkpoint(5000))
    supervisor = supervise(paths)
    pids = wait_for_steps(paths)
    with paths.metrics.open("a") as file:
        file.write(step_line(5001))
    os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: "(restart 1 of 1)" in str(state_of(paths).note), "the restart")
    ask_to_stop(paths, supervisor)
    assert supervisor.wait(DEADLINE_S) == ExitCode.OK


def test_a_restart_that_never_comes_is_not_counted(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", *ENDLESS, settings=("limits.max_restarts=3",))
    supervisor = supervise(paths)
    os.kill(wait_for_steps(paths)[1], signal.SIGKILL)
    wait_for(lambda: bool(state_of(paths).note), "the failure to be told")
    note = str(state_of(paths).note)
    assert "was killed by signal 9" in note and "Checking whether the run can be restarted" in note
    ask_to_stop(paths, supervisor)
    assert supervisor.wait(DEADLINE_S) == ExitCode.OK
    state = state_of(paths)
    assert (state.status, state.attempt, state.note) == ("stopped", 1, None)
    assert "stopped before the restart; the run had failed: rank 1 on" in str(state.error)
    assert _summary(paths).restarts == 0


def test_a_port_in_use_is_named_before_anything_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        port = listener.getsockname()[1]
        paths = plan_stand_in(tmp_path / "run", port=port)
        assert supervise(paths).wait(DEADLINE_S) == ExitCode.PREFLIGHT
    assert f"port {port}" in capfd.readouterr().err
    assert not paths.launcher_log.exists()


def test_a_launcher_that_cannot_start_a_rank_is_preflight(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run")
    paths.plan.write_text(paths.plan.read_text().replace('"-ppn"', '"-no-such-option"'))
    assert supervise(paths).wait(DEADLINE_S) == ExitCode.PREFLIGHT
    assert "the launcher started no rank" in str(state_of(paths).error)


def test_a_missing_launcher_is_preflight_and_the_last_result_stays(
    tmp_path: Path,
) -> None:
    paths = plan_stand_in(tmp_path / "run", "--steps", "3", ranks=1)
    assert supervise(paths).wait(DEADLINE_S) == ExitCode.OK
    plan = json.loads(paths.plan.read_text())
    plan["argv"][0] = "/nowhere/mpirun"
    paths.plan.write_text(json.dumps(plan))
    assert supervise(paths).wait(DEADLINE_S) == ExitCode.PREFLIGHT
    state, result = state_of(paths), _summary(paths)
    assert (state.status, state.exit_class) == ("failed", "preflight")
    assert "the launcher /nowhere/mpirun cannot be started" in str(state.error)
    assert (result.status, result.error, result.steps) == ("failed", state.error, 3)


def test_a_folder_without_a_plan_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert supervise(RunPaths(tmp_path)).wait(DEADLINE_S) == ExitCode.CONFIG
    assert "not the folder of a planned run" in capfd.readouterr().err
