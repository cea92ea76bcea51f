"""Answers of Slurm's commands, by stand-ins for them, and our commands' reactions."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from payload.config.run_config import parse_run_config
from payload.core.errors import ConfigError, ExitCode, PreflightError, UsageError
from payload.orchestrate.__main__ import main
from payload.orchestrate.sites import allocation
from payload.orchestrate.sites.allocation import SlurmAccess, run_slurm
from payload.orchestrate.sites.registry import find_site
from payload.orchestrate.sites.slurm import SlurmRun
from payload.run_record.approved_settings import record_approved, settings_to_approve
from payload.run_record.run_files import RunJob, RunPaths, RunStatus, StopRequest, write_json
from payload.run_record.run_lock import RunLock, start_lock
from tests.orchestrate.operator import SETTINGS
from tests.orchestrate.test_commands import Workplace
from tests.support.data_folders import make_data_folder
from tests.support.run_folders import write_state

pytestmark = pytest.mark.processes

NO_CONTROLLER = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
NO_PARTITION = (
    "echo 'sbatch: error: Batch job submission failed: Invalid partition name specified' >&2; "
    "exit 1"
)


def slurm(folder: Path, **programs: str) -> Mapping[str, str]:
    """Return an environment with these shell programs instead of Slurm's."""
    folder.mkdir(exist_ok=True)
    for name, text in programs.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:/usr/bin:/bin"}


def run_in_job(
    folder: Path, *, pid: int | None = None, exit_class: str | None = None, status: RunStatus
) -> RunPaths:
    paths = RunPaths(folder / "one")
    paths.root.mkdir(parents=True)
    write_json(paths.job, RunJob(site="slurm", job_id="12", pid=pid))
    if pid is not None:
        write_state(paths, status=status, exit_class=exit_class, supervisor_pid=pid, node="node-1")
    return paths


def test_a_controller_that_cannot_be_reached_ends_no_run(tmp_path: Path) -> None:
    paths = run_in_job(tmp_path, pid=7, status="running")
    run = SlurmRun(paths, "12", slurm(tmp_path / "bin", scontrol=NO_CONTROLLER))
    seen = run.look()
    assert seen.alive and "Unable to contact slurm controller" in seen.news[0]
    with pytest.raises(PreflightError, match="Unable to contact"):
        run.signal(signal.SIGTERM, StopRequest())
    assert not run.collect_results().alive


def test_a_job_that_slurm_has_forgotten_has_ended(tmp_path: Path) -> None:
    paths = run_in_job(tmp_path, pid=7, status="running")
    run = SlurmRun(paths, "12", slurm(tmp_path / "bin", scontrol=FORGOTTEN))
    assert not run.look().alive
    assert not run.signal(signal.SIGTERM, StopRequest())


@pytest.mark.parametrize(
    ("exit_class", "alive"), [("ok", False), ("training", False), ("rank_lost", True), (None, True)]
)
def test_without_slurm_an_ended_run_is_shown_as_ended(
    tmp_path: Path, exit_class: str | None, alive: bool
) -> None:
    paths = run_in_job(tmp_path, pid=7, exit_class=exit_class, status="finished")
    run = SlurmRun(paths, "12", slurm(tmp_path / "bin"))
    assert run.look().alive is alive
    if alive:
        with pytest.raises(PreflightError, match="no scontrol on PATH"):
            run.signal(signal.SIGTERM, StopRequest())
    else:
        assert not run.signal(signal.SIGTERM, StopRequest())


@pytest.mark.parametrize(
    ("name", "script", "is_ours"),
    [
        ("one", "{root}/job.sbatch", True),
        ("one", "/srv/ada/runs/one/job.sbatch", False),
        ("one", "(null)", False),
        ("train", "{root}/job.sbatch", False),
    ],
)
@pytest.mark.parametrize(
    "job", ["JobState=PENDING Reason=Priority", "JobState=RUNNING Reason=None"]
)
def test_a_job_that_only_has_the_recorded_number_is_not_ended(
    job: str, name: str, script: str, is_ours: bool, tmp_path: Path
) -> None:
    paths = run_in_job(tmp_path / "a b", pid=7, status="running")
    cancelled = tmp_path / "cancelled"
    answer = (
        f"JobId=12 JobName={name} UserId=ada(1000) {job} BatchHost=n1 "
        f"Command={script.format(root=paths.root)} WorkDir=/srv/ada StdErr=/srv/ada/log"
    )
    programs = {"scontrol": f"echo '{answer}'", "scancel": f'echo "$@" >{cancelled}'}
    run = SlurmRun(paths, "12", slurm(tmp_path / "bin", **programs))
    if is_ours:
        assert run.signal(signal.SIGTERM, StopRequest())
        words = "12" if "PENDING" in job else "--signal=TERM --batch 12"
        assert cancelled.read_text() == f"{words}\n"
        return
    with pytest.raises(
        ConfigError, match=rf"Slurm's job 12 is {name} of .* not the job of this run"
    ):
        run.signal(signal.SIGTERM, StopRequest())
    with pytest.raises(ConfigError, match="so it is not cancelled"):
        run.abandon()
    assert not cancelled.exists()


def test_status_reports_that_slurm_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_in_job(tmp_path / "runs", pid=7, status="running")
    env = slurm(tmp_path / "bin", scontrol=NO_CONTROLLER)
    for words in (["status", "one"], ["list"]):
        assert main([*words, "--runs-dir", str(tmp_path / "runs")], env) == ExitCode.OK
        said = capsys.readouterr()
        assert "warning: scontrol: " in said.err and "(run one)" in said.err
        assert "running" in said.out


def test_ctrl_c_does_not_reach_slurm_s_commands(tmp_path: Path) -> None:
    env = slurm(tmp_path / "bin", scontrol="cut -d' ' -f6 /proc/$$/stat")
    assert int(run_slurm(["scontrol"], env)) != os.getsid(0)


def test_ranks_that_hold_one_model_together_share_no_batch(tmp_path: Path) -> None:
    env = slurm(tmp_path / "bin", sbatch="exit 0")
    wanted = ["slurm.nodes=2", "launch.ranks_per_node=2", "distributed.tensor_parallel=2"]
    sizes = ["batch.global_batch_size=24", "batch.micro_batch_size=12"]
    find_site("slurm").check(parse_run_config("", overrides=[*wanted, *sizes], where="t"), env)
    sizes[1] = "batch.micro_batch_size=24"
    with pytest.raises(ConfigError, match="24 is not a multiple of"):
        find_site("slurm").check(parse_run_config("", overrides=[*wanted, *sizes], where="t"), env)


def test_a_job_that_begins_before_its_record_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path)
    write_json(paths.job, RunJob(site="slurm", job_id="11"))  # of the job before
    record = RunJob(site="slurm", job_id="12")
    late = threading.Timer(0.7, write_json, (paths.job, record))
    late.start()
    assert allocation._own_record(paths, "12") == record
    late.join()
    monkeypatch.setattr(allocation, "_RECORD_S", 0.1)
    with pytest.raises(UsageError, match=r"not the record of Slurm job 13\. Submit the run again"):
        allocation._own_record(paths, "13")
    with pytest.raises(UsageError, match=r"SLURM_JOB_ID is not set, .* --site slurm"):
        allocation._own_record(paths, None)


@pytest.mark.parametrize(
    ("env", "missing"),
    [({}, "SLURM_JOB_ID"), ({"SLURM_JOB_ID": "12"}, "SLURM_JOB_NODELIST")],
)
def test_outside_of_a_job_the_missing_variable_is_named(env: dict[str, str], missing: str) -> None:
    with pytest.raises(ConfigError, match=f"{missing} is not set, so this is not a Slurm job"):
        allocation.allocation(env, why="--inventory slurm")


def test_a_run_within_a_job_knows_when_the_job_ends(tmp_path: Path) -> None:
    env = {**slurm(tmp_path / "bin", squeue="echo 10:00"), "SLURM_JOB_ID": "12"}
    asked_unix = time.time()
    option, ends = SlurmAccess(env, {}).supervisor_words()
    assert option == "--job-ends"
    assert asked_unix - 1 <= float(ends) - 600 <= time.time() + 1
    unlimited = slurm(tmp_path / "bin", squeue="echo UNLIMITED")
    assert SlurmAccess({**unlimited, "SLURM_JOB_ID": "12"}, {}).supervisor_words() == []


@pytest.fixture
def resume(tmp_path: Path) -> list[str]:
    """Return the arguments that resume an ended job's run of this folder in another job."""
    data = make_data_folder(
        tmp_path / "data", num_train_tokens=4000, num_val_tokens=200, vocab_size=512
    )
    paths = run_in_job(tmp_path / "runs", pid=7, exit_class="rank_lost", status="stopped")
    config = parse_run_config("", overrides=[*SETTINGS, f"data.dir={data}"], where="test")
    paths.config.write_text(config.to_toml(), encoding="utf-8")
    record_approved(paths, settings_to_approve(config))
    runs = ["--runs-dir", str(tmp_path / "runs")]
    return ["run", "--site", "slurm", "--resume", "one", *runs, "--set", "slurm.partition=bad"]


def test_a_store_that_cannot_be_used_is_refused_before_a_job_is_submitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, submitted = Workplace(tmp_path), tmp_path / "submitted"
    (tmp_path / "results").write_text("no folder", encoding="utf-8")
    env = slurm(tmp_path / "bin", sbatch=f"touch {submitted}; echo 12", scontrol=FORGOTTEN)
    words = ["run", "--site", "slurm", "--run-id", "one", "--detach", *place.settings()]
    words += ["--set", f"storage.results={tmp_path / 'results'}", "--runs-dir", str(place.runs)]
    assert main(words, env) in (ExitCode.CONFIG, ExitCode.PREFLIGHT)
    assert str(tmp_path / "results") in capsys.readouterr().err
    assert not submitted.exists() and not (place.runs / "one").exists()


def test_a_refused_resume_leaves_the_settings_as_they_were(
    tmp_path: Path, resume: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path / "runs" / "one")
    before = paths.config.read_text(encoding="utf-8")
    env = slurm(tmp_path / "bin", scontrol=FORGOTTEN, sbatch=NO_PARTITION)
    assert main(resume, env) == ExitCode.CONFIG
    assert "slurm.partition = 'bad': Invalid partition name" in capsys.readouterr().err
    assert paths.config.read_text(encoding="utf-8") == before


@pytest.mark.parametrize("held", [RunLock, start_lock], ids=["it trains", "it is being started"])
def test_a_run_that_another_command_has_is_not_handed_to_slurm(
    tmp_path: Path, resume: list[str], held: type, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path / "runs" / "one")
    before = paths.config.read_text(encoding="utf-8")
    env = slurm(tmp_path / "bin", scontrol=FORGOTTEN, sbatch="echo 13")
    with held(paths):
        assert main([*resume, "--detach"], env) in (ExitCode.CONFIG, ExitCode.USAGE)
    said = capsys.readouterr().err
    assert "is running" in said or "is starting, ending or removing" in said
    assert paths.config.read_text(encoding="utf-8") == before
    assert not (paths.root / "job.sbatch").exists()


def test_a_job_that_may_go_on_is_not_resumed_while_slurm_does_not_answer(
    tmp_path: Path, resume: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    env = slurm(tmp_path / "bin", scontrol=NO_CONTROLLER, sbatch="echo 13")
    assert main([*resume, "--detach"], env) == ExitCode.CONFIG
    assert "run one has not ended: job 12 on" in capsys.readouterr().err


@pytest.mark.ranks
@pytest.mark.usefixtures("resume")
def test_a_job_s_run_that_is_resumed_here_is_a_run_here(tmp_path: Path) -> None:
    workplace = Workplace(tmp_path)
    paths = workplace.run_paths("one")
    write_state(paths, status="finished", exit_class="ok", supervisor_pid=7, node="node-1")
    assert paths.job.exists()
    again = workplace.start(("--steps", "2"), "run", "--resume", "one", "--set", "train.steps=9999")
    assert again.wait(60) == ExitCode.OK, again.communicate()[1]
    assert not paths.job.exists()
