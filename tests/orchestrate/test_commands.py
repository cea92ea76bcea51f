"""Commands as an operator types them, with real rank processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest

from payload.config.run_config import load_run_config, parse_run_config
from payload.core.errors import INTERRUPTED, ExitCode
from payload.orchestrate.__main__ import main
from payload.orchestrate.runs.run_input_checks import rate_warning
from payload.run_record.run_files import RunPaths, write_json
from payload.run_record.run_lock import is_supervised
from payload.run_record.suggested_run_commands import no_runs
from payload.supervise.processes import processes_of
from tests.orchestrate.test_runs import make_data
from tests.supervise.planned import (
    REPO,
    StandInAccess,
    state_of,
    wait_for,
    wait_for_steps,
    wait_until_gone,
)
from tests.support.recorded_output import record_output
from tests.support.waiting import DEADLINE_S

ENDLESS = ("--steps", "100000")
_ON_A_RUN = ("status", "stop", "logs", "collect", "run --resume latest")
ONE_RANK = ("--set", "launch.ranks_per_node=1")
"""For tests in which the number of ranks is irrelevant: two thirds of the time is their start."""


class Workplace:
    """A folder of runs, a data folder, and the command line for both."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"
        self.data = make_data(folder / "data")

    def arguments(self, command: str, *arguments: str) -> list[str]:
        return [command, *arguments, "--runs-dir", str(self.runs)]

    def settings(self) -> list[str]:
        values = (
            f"data.dir={self.data}",
            "data.sequence_length=16",
            "model.preset=tiny",
            "launch.ranks_per_node=2",
        )
        return [word for value in values for word in ("--set", value)]

    def start(
        self, stand_in: tuple[str, ...], command: str, *arguments: str, under: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        """Start a command in its own process, with the stand-in program as the trainer."""
        return subprocess.Popen(
            [
                *under,
                *(sys.executable, "-m", "tests.orchestrate.cli", *stand_in, "--"),
                *self._words(command, *arguments),
            ],
            cwd=REPO,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Like a foreground job of a shell: Ctrl-C reaches the group.
            start_new_session=True,
        )

    def call(self, command: str, *arguments: str) -> tuple[int, str, str]:
        """Run a command in this process; return its exit code, stdout and stderr."""
        words = self._words(command, *arguments)
        with chdir(REPO), record_output() as said:
            try:
                status = main(words, os.environ, access=StandInAccess(os.environ))
            except SystemExit as end:
                assert isinstance(end.code, int)
                status = end.code
        return status, said.out, said.err

    def _words(self, command: str, *arguments: str) -> list[str]:
        if command in ("run", "plan"):
            arguments = (*self.settings(), *arguments)
        if command == "run":
            # The user who runs the tests can have a stack that is up.
            arguments = (*arguments, "--inventory", "local")
        return self.arguments(command, *arguments)

    def run_paths(self, run_id: str) -> RunPaths:
        return RunPaths(self.runs / run_id)


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


@pytest.mark.processes
def test_plan_shows_everything_and_starts_nothing(workplace: Workplace) -> None:
    status, out, err = workplace.call("plan")
    assert status == 0
    assert err.startswith("inventory: local (this machine, the default")
    for part in (
        "127.0.0.1",
        "mpirun -noconf -f",
        "-genv",
        "GLOO_SOCKET_IFNAME=lo",
        "machine_rank: 0",
    ):
        assert part in out
    assert "parameters" in out and "synchronisation" in out
    assert not workplace.runs.exists()


@pytest.mark.processes
def test_a_rate_from_scratch_for_trained_weights_is_a_warning(workplace: Workplace) -> None:
    settings = ("model.init=gpt2", "optimizer.lr=2e-3")
    words = [word for setting in settings for word in ("--set", setting)]
    status, _, err = workplace.call("plan", *words)
    assert status == ExitCode.OK
    assert "note: optimizer.lr = 0.002 is a rate for training from scratch" in err
    for one in settings:
        assert rate_warning(parse_run_config("", overrides=[one], where="test")) is None
    with_adapter = parse_run_config("", overrides=[*settings, "adapter.kind=lora"], where="test")
    assert rate_warning(with_adapter) is None


@pytest.mark.processes
def test_plan_as_json_is_what_run_would_write(workplace: Workplace) -> None:
    status, out, _ = workplace.call("plan", "--json")
    assert status == 0
    plan = json.loads(out)
    assert [rank["rank"] for rank in plan["ranks"]] == [0, 1]
    assert plan["plan"]["argv"][0].endswith("mpirun")
    assert plan["plan"]["arithmetic"]["grad_accum_steps"] == 4


@pytest.mark.processes
def test_plan_resolves_a_micro_batch_of_auto_with_a_reason(workplace: Workplace) -> None:
    status, out, err = workplace.call("plan", "--json", "--set", "batch.micro_batch_size=auto")
    assert status == 0
    numbers = json.loads(out)["plan"]["arithmetic"]
    assert (numbers["micro_batch_size"], numbers["grad_accum_steps"]) == (16, 1)
    assert (
        'note: batch.micro_batch_size = "auto": a micro-batch has 16 of at most 16 sequences' in err
    )


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_keeps_the_micro_batch_that_it_was_planned_with(workplace: Workplace) -> None:
    chosen = ("--set", "batch.micro_batch_size=auto")
    status, _, err = workplace.call("run", "--run-id", "one", *chosen)
    assert status == 0, err
    assert 'batch.micro_batch_size = "auto": a micro-batch has 16' in err
    paths = workplace.run_paths("one")
    assert load_run_config(paths.config).batch.micro_batch_size == 16
    config = load_run_config(paths.config)
    fewer = replace(config, batch=replace(config.batch, micro_batch_size=4))
    paths.config.write_text(fewer.to_toml())
    status, _, err = workplace.call(
        "run", "--resume", "one", *chosen, "--set", f"train.steps={2 * config.train.steps}"
    )
    assert status == 0, err
    assert load_run_config(paths.config).batch.micro_batch_size == 4


@pytest.mark.slow
@pytest.mark.ranks
def test_auto_given_at_the_resume_of_a_run_with_a_number_is_settled(workplace: Workplace) -> None:
    status, _, err = workplace.call("run", "--run-id", "one", "--set", "batch.micro_batch_size=4")
    assert status == 0, err
    paths = workplace.run_paths("one")
    steps = 2 * load_run_config(paths.config).train.steps
    auto = ("--set", "batch.micro_batch_size=auto")
    status, _, err = workplace.call(
        "run", "--resume", "one", *auto, "--set", f"train.steps={steps}"
    )
    assert status == 0, err
    assert 'batch.micro_batch_size = "auto": a micro-batch has 16' in err
    assert load_run_config(paths.config).batch.micro_batch_size == 16


@pytest.mark.ranks
def test_a_run_passes_rank_0s_lines_on_and_ends_with_a_table(workplace: Workplace) -> None:
    status, out, err = workplace.call("run", "--run-id", "one")
    assert status == 0, err
    assert "rank 0 begins\n" in err and "rank 1 begins" not in err
    assert "status           finished" in out
    assert "ranks identical  yes" in out
    assert (workplace.runs / "latest").readlink() == Path("one")
    names = {path.name for path in (workplace.runs / "one").iterdir()}
    assert {
        *("run.toml", "inventory.json", "plan.json", "hosts", "ranks.json", "state.json"),
        *("summary.json", "metrics.jsonl", "accelerate_node_0.yaml"),
    } <= names


@pytest.mark.ranks
def test_json_puts_the_summary_alone_on_stdout(workplace: Workplace) -> None:
    status, out, _ = workplace.call("run", "--json", *ONE_RANK)
    assert status == 0
    assert json.loads(out)["status"] == "finished"


@pytest.mark.ranks
def test_a_failure_shows_the_rank_s_own_error(workplace: Workplace) -> None:
    process = workplace.start((*ENDLESS, "--fail", "1:40"), "run", "--run-id", "bad")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == ExitCode.TRAINING
    assert "status           failed" in out
    assert ": the loss is nan\nlog: " in err
    assert f"log: {workplace.run_paths('bad').rank_log(1)}" in err
    assert "  | rank 1 begins" in err and err.count("the loss is nan") == 1
    assert "BAD TERMINATION" not in err


@pytest.mark.ranks
def test_ctrl_c_saves_and_stops_and_the_run_can_go_on(workplace: Workplace) -> None:
    # It forwards its own and received signals to the process and its group.
    under = ("timeout", "-s", "INT", str(DEADLINE_S))
    process = workplace.start(ENDLESS, "run", "--run-id", "one", *ONE_RANK, under=under)
    wait_for_steps(workplace.run_paths("one"), ranks=1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == INTERRUPTED
    assert "stopping: saving a checkpoint first" in err and "stopping immediately" not in err
    assert "status           stopped" in out
    assert not processes_of(workplace.run_paths("one").root)
    (workplace.run_paths("one").root / "stand_in_stop").unlink()
    status, out, err = workplace.call("run", "--resume", "one")
    assert status == 0, err
    assert "status           finished" in out
    assert state_of(workplace.run_paths("one")).attempt == 2


@pytest.mark.ranks
@pytest.mark.parametrize(
    "number", [signal.SIGHUP, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_closed_terminal_is_a_stop_as_ctrl_c_is(
    workplace: Workplace, number: signal.Signals
) -> None:
    # Under `nohup` the tests ignore SIGHUP, and child processes would inherit that.
    before = signal.signal(number, signal.SIG_DFL)
    process = workplace.start(ENDLESS, "run", "--run-id", "one", *ONE_RANK)
    signal.signal(number, before)
    paths = workplace.run_paths("one")
    wait_for_steps(paths, ranks=1)
    process.send_signal(number)
    assert process.stderr is not None
    while "stopping: saving a checkpoint first" not in process.stderr.readline():
        assert process.poll() is None
    os.killpg(process.pid, number)  # like `timeout`, or a shell that ends
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == INTERRUPTED
    assert "stopping immediately" not in err
    assert (state_of(paths).status, state_of(paths).error) == ("stopped", None)
    assert not processes_of(paths.root)


@pytest.mark.ranks
def test_ctrl_c_right_after_the_start_is_a_stop_and_no_killed_supervisor(
    workplace: Workplace,
) -> None:
    """The supervisor starts with blocked signals until its handlers are installed."""
    process = workplace.start(ENDLESS, "run", "--run-id", "one", *ONE_RANK)
    paths = workplace.run_paths("one")
    # It exists before the supervisor: `run` opens it to start the supervisor.
    wait_for(paths.supervisor_log.exists, "the supervisor to be started")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == INTERRUPTED, err
    assert "killed by signal" not in err
    wait_until_gone(paths)


@pytest.mark.ranks
def test_stop_signals_the_supervisor_and_never_a_process_that_got_its_number(
    workplace: Workplace,
) -> None:
    workplace.start(ENDLESS, "run", "--detach", "--run-id", "one", *ONE_RANK).wait(DEADLINE_S)
    paths = workplace.run_paths("one")
    wait_for_steps(paths, ranks=1)
    with subprocess.Popen(["sleep", "600"]) as innocent:
        write_json(paths.state, replace(state_of(paths), supervisor_pid=innocent.pid))
        assert workplace.call("stop", "one")[0] == ExitCode.OK
        assert innocent.poll() is None
        innocent.kill()
    assert state_of(paths).status == "stopped"


@pytest.mark.ranks
def test_a_followed_run_that_another_command_stops_does_not_end_as_if_it_were_done(
    workplace: Workplace,
) -> None:
    process = workplace.start(ENDLESS, "run", "--run-id", "one", *ONE_RANK)
    wait_for_steps(workplace.run_paths("one"), ranks=1)
    assert workplace.call("stop", "one")[0] == ExitCode.OK
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == INTERRUPTED
    assert "status           stopped" in out


@pytest.mark.ranks
def test_a_run_whose_supervisor_the_system_ends_is_lost(workplace: Workplace) -> None:
    process = workplace.start(ENDLESS, "run", "--run-id", "one", *ONE_RANK)
    paths = workplace.run_paths("one")
    wait_for_steps(paths, ranks=1)
    supervisor = state_of(paths).supervisor_pid
    assert supervisor is not None
    os.kill(supervisor, signal.SIGTERM)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == ExitCode.RANK_LOST
    assert "error: the supervisor was stopped by the system, not by a command" in err
    assert "status           failed" in out
    assert not processes_of(paths.root)


@pytest.mark.ranks
def test_stop_by_force_ends_a_run_whose_supervisor_is_frozen(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("payload.orchestrate.sites.local.LocalRun.force_s", 1.0)
    workplace.start(ENDLESS, "run", "--detach", "--run-id", "one").wait(DEADLINE_S)
    paths = workplace.run_paths("one")
    wait_for_steps(paths)
    supervisor = state_of(paths).supervisor_pid
    assert supervisor is not None
    os.kill(supervisor, signal.SIGSTOP)
    paths.state.write_text("garbage")
    status, _, err = workplace.call("stop", "one", "--force")
    assert status == ExitCode.OK, err
    assert "the run's supervisor does not answer: killing" in err
    assert "again" not in err
    assert not processes_of(paths.root) and not is_supervised(paths)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_without_its_plan_is_seen_and_resumed(workplace: Workplace) -> None:
    assert workplace.call("run", "--run-id", "one", *ONE_RANK)[0] == ExitCode.OK
    paths = workplace.run_paths("one")
    for lost in (paths.plan, paths.ranks, paths.hosts):
        lost.unlink()
    status, _, err = workplace.call("run", "--run-id", "one")
    assert status == ExitCode.CONFIG and "Continue it with --resume one" in err
    status, out, _ = workplace.call("list")
    assert status == ExitCode.OK and "one" in out
    status, _, err = workplace.call("run", "--resume", "one", "--set", "train.steps=200", *ONE_RANK)
    assert status == ExitCode.OK, err
    assert paths.plan.exists()


@pytest.mark.ranks
def test_a_second_ctrl_c_stops_at_once(workplace: Workplace) -> None:
    process = workplace.start((*ENDLESS, "--deaf"), "run", "--run-id", "one", *ONE_RANK)
    wait_for_steps(workplace.run_paths("one"), ranks=1)
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == INTERRUPTED
    assert "stopping immediately" in err
    assert not processes_of(workplace.run_paths("one").root)


@pytest.mark.ranks
def test_a_killed_orchestrator_leaves_nothing_behind(workplace: Workplace) -> None:
    process = workplace.start(ENDLESS, "run", "--run-id", "one", *ONE_RANK)
    paths = workplace.run_paths("one")
    wait_for_steps(paths, ranks=1)
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    wait_for(lambda: state_of(paths).status == "stopped", "the run to stop")
    wait_until_gone(paths)


@pytest.mark.ranks
def test_a_killed_supervisor_is_reported_and_seen_by_status(workplace: Workplace) -> None:
    process = workplace.start(ENDLESS, "run", "--run-id", "one", *ONE_RANK)
    paths = workplace.run_paths("one")
    wait_for_steps(paths, ranks=1)
    supervisor = state_of(paths).supervisor_pid
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == ExitCode.RANK_LOST
    assert "the supervisor was killed by signal 9" in err
    wait_until_gone(paths)
    status, out, _ = workplace.call("status", "--json")
    assert (status, json.loads(out)["status"]) == (0, "failed")


@pytest.mark.ranks
def test_a_detached_run_is_looked_at_and_stopped(workplace: Workplace) -> None:
    started = workplace.start(ENDLESS, "run", "--detach")
    _, err = started.communicate(timeout=DEADLINE_S)
    assert started.returncode == 0, err
    (paths,) = [RunPaths(p) for p in workplace.runs.iterdir() if not p.is_symlink()]
    wait_for_steps(paths)
    wait_for(lambda: state_of(paths).status == "running", "the supervisor to notice")
    status, out, _ = workplace.call("status")
    assert status == 0
    assert "running" in out and "last heartbeat" in out
    status, out, _ = workplace.call("logs", "--rank", "1")
    assert (status, out) == (0, "rank 1 begins\n")
    follower = workplace.start((), "logs", "-f")
    status, _, err = workplace.call("run", "--resume", paths.run_id)
    assert status == ExitCode.CONFIG and "is running" in err
    status, _, err = workplace.call("stop", "--grace", "120")
    assert status == 0 and "stopped after step" in err
    assert state_of(paths).grace_s == 120.0
    assert "rank 0 stopped" in follower.communicate(timeout=DEADLINE_S)[0]
    assert not processes_of(paths.root)
    status, out, _ = workplace.call("list")
    assert paths.run_id in out and "stopped" in out
    status, _, err = workplace.call("stop")
    assert status == 0 and "is not running: stopped" in err


@pytest.mark.ranks
def test_stop_by_force_ends_deaf_ranks(workplace: Workplace) -> None:
    workplace.start((*ENDLESS, "--deaf"), "run", "--detach", "--run-id", "one").wait(DEADLINE_S)
    wait_for_steps(workplace.run_paths("one"))
    status, _, err = workplace.call("stop", "one", "--force")
    assert status == 0 and "steps since the last checkpoint are lost" in err
    assert not processes_of(workplace.run_paths("one").root)


@pytest.mark.ranks
def test_two_runs_at_once_get_ports_of_their_own(workplace: Workplace) -> None:
    processes = [workplace.start((), "run", "--run-id", name, *ONE_RANK) for name in ("one", "two")]
    for process in processes:
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, err
    plans = [json.loads(workplace.run_paths(name).plan.read_text()) for name in ("one", "two")]
    assert plans[0]["master_port"] != plans[1]["master_port"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["run", "--inventory", "stack"], ExitCode.CONFIG, "`pulumi` not found on PATH"),
        (["run", "--inventory", "/no.json"], ExitCode.CONFIG, "No such file"),
        (["run", "--config", "/no.toml"], ExitCode.CONFIG, "No such file"),
        (["run", "--set", "train.stepz=1"], ExitCode.CONFIG, "unknown key in [train]: 'stepz'"),
        (["run", "--set", "data.dir=/nowhere"], ExitCode.CONFIG, "does not exist"),
        (["run", "--resume", "x"], ExitCode.USAGE, "no run 'x'"),
        *((verb.split(), ExitCode.USAGE, "no runs in") for verb in _ON_A_RUN),
        (["logs", "x"], ExitCode.USAGE, "no run 'x'"),
    ],
)
def test_mistakes_are_one_line_and_an_exit_code(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: ExitCode,
    message: str,
) -> None:
    assert main([*arguments, "--runs-dir", str(tmp_path)], {}) == status
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert list(tmp_path.iterdir()) == []


def test_a_list_without_a_run_says_the_same_as_the_commands_on_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for words in (["list"], *(verb.split() for verb in _ON_A_RUN)):
        main([*words, "--runs-dir", str(tmp_path)], {})
        said.append(capsys.readouterr().err.splitlines()[-1].removeprefix("error: "))
    assert said == [no_runs(tmp_path)] * len(said)


def test_a_dry_run_is_refused_with_the_command_that_estimates(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", "payload/configs/quickstart.toml", "--dry-run"], {})
    last = capsys.readouterr().err.splitlines()[-1]
    assert "no option --dry-run. The estimates of a run: " in last and " plan FILE.toml" in last


@pytest.mark.processes
def test_batches_that_do_not_divide_are_refused_before_a_folder_is_made(
    workplace: Workplace,
) -> None:
    status, _, err = workplace.call(
        "run", "--set", "batch.global_batch_size=3", "--set", "batch.micro_batch_size=1"
    )
    assert status == ExitCode.CONFIG
    assert "global_batch_size = 3 is not a multiple" in err
    assert not workplace.runs.exists()
