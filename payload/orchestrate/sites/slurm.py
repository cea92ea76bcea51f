"""The site for Slurm. Submits a run as a job; commands on the login node follow and stop the job.

The run folder is on a file system that the login node and the nodes share, so nothing is copied.
"""

from __future__ import annotations

import re
import shlex
import signal
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from payload.config.run_config import RunConfig
from payload.core.errors import INTERRUPTED, ConfigError, ExitCode, PreflightError
from payload.core.files import write_whole
from payload.core.printable_text import PLAIN_TEXT, shown, shown_name
from payload.core.python_processes import code_environment, module_command
from payload.launch.launchers.srun import ranks_command
from payload.orchestrate.follow.run_text import log_tail
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.launcher_choice import require_fit_for_job
from payload.orchestrate.runs.mirror import mirror_file
from payload.orchestrate.runs.resolved_plan import ResolvedPlan
from payload.orchestrate.runs.run_request import RunRequest
from payload.orchestrate.runs.site import CollectResult, NamedSite, RunPoll, SiteRun
from payload.orchestrate.sites.allocation import SlurmError, fields, require_program, run_slurm
from payload.run_record.run_files import (
    DEFAULT_GRACE_S,
    RunJob,
    RunPaths,
    RunState,
    StopRequest,
    last_record,
    write_json,
)
from payload.run_record.run_lock import FORCE_SIGNAL
from payload.run_record.run_repair import known_config
from payload.storage.store_access import require_new_in_store

_QUERY_EVERY_S = 3.0
_SCRIPT = "job.sbatch"
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD")
_ACTIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_CODES = {
    "CANCELLED": INTERRUPTED,
    "TIMEOUT": ExitCode.BUDGET,
    "DEADLINE": ExitCode.BUDGET,
    "NODE_FAIL": ExitCode.RANK_LOST,
    "PREEMPTED": ExitCode.RANK_LOST,
    "OUT_OF_MEMORY": ExitCode.RANK_LOST,
}
"""Exit codes of jobs that ended before the run could write a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The current state of a job in Slurm."""

    state: str
    """State of the job in Slurm, such as PENDING; UNKNOWN if Slurm no longer lists the job."""
    reason: str = ""
    """Why the job is pending, or why it ended."""
    exit_code: int = 0
    nodes: str = ""
    name: str = ""
    script: str = ""
    """The path of the submitted batch script."""

    @property
    def alive(self) -> bool:
        """Return whether the job is running or pending."""
        return self.state in _WAITING or self.state in _ACTIVE


class Slurm(NamedSite):
    """The Slurm cluster; this machine is a login node."""

    def check(self, config: RunConfig, env: Mapping[str, str]) -> None:
        """Raise ConfigError or PreflightError for settings that would fail in the queued job."""
        require_fit_for_job(config)
        require_program("sbatch", env)

    def start(self, request: RunRequest) -> SlurmRun:
        """Submit a job. The job's program plans the run on the nodes that the job receives."""
        access = LocalAccess(request.env)
        if not request.resumes:
            require_new_in_store(
                request.config, request.paths.run_id, env=access.code_environment()
            )
        with request.folder() as paths:
            script = paths.root / _SCRIPT
            text = render_script(paths, request.config, access=access, grace_s=request.grace_s)
            write_whole(script, text)
            job = RunJob(site=self.name, job_id=submit(script, request.config, request.env))
            write_json(paths.job, job)
            mirror_file(paths).unlink(missing_ok=True)
        return self.run_of(paths, job, request.env)

    def run_of(self, paths: RunPaths, job: RunJob, env: Mapping[str, str]) -> SlurmRun:
        """Return the run that a job record describes."""
        return SlurmRun(paths, job.job_id, env)


def render_script(
    paths: RunPaths, config: RunConfig, *, access: LocalAccess, grace_s: float
) -> str:
    """Return the batch script: the options of the job, and the program that supervises the run.

    Raises ConfigError for a folder with a line break or another control character in its name:
    sbatch and the shell would read the rest of the name as a new line of the script.
    """
    slurm = config.slurm
    options = [
        f"--job-name={paths.run_id}",
        f"--nodes={slurm.nodes}",
        "--ntasks-per-node=1",
        f"--output={_pattern(paths.supervisor_log)}",
        "--open-mode=append",
        "--requeue",
        "--export=ALL",
    ]
    options += (
        ["--exclusive", "--mem=0"]
        if slurm.cpus_per_node is None
        else [f"--cpus-per-task={slurm.cpus_per_node}"]
    )
    options += slurm.job_options()
    arguments = ["--run-dir", str(paths.root), "--grace", f"{grace_s:g}"]
    program = module_command(
        "payload.orchestrate.sites.allocation", *arguments, python=access.python
    )
    root = access.python_path()
    lines = ["#!/bin/sh", *(f"#SBATCH {shlex.quote(option)}" for option in options)]
    lines += [f"cd {shlex.quote(str(Path.cwd()))} || exit {int(ExitCode.PREFLIGHT)}"]
    lines += [f"export PYTHONPATH={shlex.quote(root)}"] if root else []
    # The program replaces the shell, so Slurm's signals to the batch script reach the supervisor.
    lines += [f"exec {shlex.join(program)}"]
    for line in lines:
        if not PLAIN_TEXT.fullmatch(line):
            raise ConfigError(
                f"{_SCRIPT}: {shown(line)} has a control character, such as a line break. Rename "
                "the folder."
            )
    return "\n".join([*lines, ""])


def job_text(planned: ResolvedPlan, *, access: LocalAccess) -> str:
    """Return the batch script of a planned run, and the commands that submit it and start ranks."""
    plan, paths = planned.plan, RunPaths(Path.cwd() / planned.paths.root)
    script = render_script(paths, planned.config, access=access, grace_s=DEFAULT_GRACE_S)
    ranks = ranks_command(
        "srun",
        nodes=plan.nodes,
        world_size=plan.world_size,
        ranks_per_node=plan.ranks_per_node,
    )
    program = module_command("payload.train", "--run-dir", str(paths.root), python=access.python)
    parts = (
        ("submitted with", shlex.join(["sbatch", "--parsable", str(paths.root / _SCRIPT)])),
        (f"{_SCRIPT}", script.rstrip()),
        ("the job starts the ranks with", shlex.join([*ranks, *program])),
    )
    return "\n\n".join(f"{title}\n{textwrap.indent(text, '  ')}" for title, text in parts) + "\n"


def _pattern(path: Path) -> str:
    """Escape a path for an option of sbatch, in which % starts a placeholder."""
    return str(path).replace("%", "%%")


def submit(script: Path, config: RunConfig, env: Mapping[str, str]) -> str:
    """Submit the script with sbatch; return the job id. Raises ConfigError, PreflightError."""
    try:
        printed = run_slurm(
            ["sbatch", "--parsable", str(script)], _without_job_options(code_environment(env))
        )
    except SlurmError as error:
        raise ConfigError(_refusal(error.message, config, env)) from None
    job_id = printed.strip().partition(";")[0]
    if not re.fullmatch(r"\d{1,20}", job_id):
        raise PreflightError(
            f"sbatch printed {job_id!r} instead of a job id. Look for the job: squeue --me"
        )
    return job_id


def _without_job_options(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the options of a surrounding job.

    sbatch would apply these options to the new job.
    """
    prefixes = ("SLURM_JOB", "SLURM_STEP", "SLURM_TASK", "SLURM_MEM", "SLURM_CPU", "SBATCH_")
    return {name: value for name, value in env.items() if not name.startswith(prefixes)}


def _refusal(text: str, config: RunConfig, env: Mapping[str, str]) -> str:
    """Return an error that names the setting for which sbatch refused the job."""
    slurm, message = config.slurm, text.removeprefix("Batch job submission failed: ")
    lowered = message.lower()
    if "partition" in lowered and "node" not in lowered:
        try:
            known = run_slurm(["sinfo", "--noheader", "--format", "%R"], env).split()
        except PreflightError:
            known = []
        listed = f" This cluster has {', '.join(known)}." if known else " See `sinfo`."
        return f"slurm.partition = {slurm.partition!r}: {message}.{listed}"
    for key in ("account", "qos", "time"):
        if key in lowered and getattr(slurm, key) is not None:
            return f"slurm.{key} = {getattr(slurm, key)!r}: {message}. Correct or remove this key."
    if "node" in lowered or "cpu" in lowered:
        return (
            f"slurm.nodes = {slurm.nodes}, slurm.cpus_per_node = {slurm.cpus_per_node or 'none'}: "
            f"{message}. Request only what `sinfo` lists."
        )
    return f"sbatch refused the job: {message}. Correct the settings of [slurm]."


class SlurmRun(SiteRun):
    """A run in a Slurm job."""

    every_s = 0.5

    def __init__(self, paths: RunPaths, job_id: str, env: Mapping[str, str]) -> None:
        self.paths = paths
        self.job_id = job_id
        slurm = known_config(paths).slurm
        self.nodes = slurm.nodes
        part = slurm.partition or "the default partition"
        self.where = f"job {job_id} on {slurm.nodes} node(s) of {part}"
        self._env = env
        self._job = Job(state="PENDING")
        self._queried_s = float("-inf")

    def job(self) -> Job:
        """Query the job's state. Raises PreflightError."""
        try:
            return _of_scontrol(
                run_slurm(["scontrol", "show", "job", "-o", self.job_id], self._env)
            )
        except SlurmError as error:
            # Other errors, such as an unreachable controller, give no information about the job.
            if "invalid job id" not in error.message.lower():
                raise
            # scontrol forgets a job some minutes after it ends; the accounting database does not.
            return self._of_accounting()

    def _of_accounting(self) -> Job:
        argv = ["sacct", "--noheader", "--allocations", "--parsable2", "--jobs", self.job_id]
        try:
            printed = run_slurm([*argv, "--format", "State,ExitCode"], self._env)
        except PreflightError:
            printed = ""
        state, _, code = (printed.strip().splitlines() or [""])[-1].partition("|")
        return Job(state=state.split()[0] if state else "UNKNOWN", exit_code=_status(code))

    def look(
        self,
        *,
        say: Callable[[str], None] = lambda _: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> RunPoll:
        """Query Slurm every few seconds; the run's files are on a shared file system."""
        if time.monotonic() - self._queried_s < _QUERY_EVERY_S:
            return RunPoll(alive=self._job.alive)
        self._queried_s = time.monotonic()
        try:
            self._job = self.job()
        except PreflightError as error:
            if self._has_recorded_end():
                return RunPoll(alive=False)
            return RunPoll(alive=True, news=[f"warning: {error} The job's state is unknown."])
        return RunPoll(alive=self._job.alive, news=_messages(self.job_id, self._job))

    def signal(self, number: signal.Signals, request: StopRequest) -> bool:
        """Signal the supervisor of the job to save and stop, or cancel a pending job."""
        try:
            job = self.job()
        except PreflightError:
            if self._has_recorded_end():
                return False
            raise
        if not job.alive:
            return False
        record = last_record(RunJob, self.paths.job)
        if job.state in _WAITING or record is None or record.pid is None:
            self.abandon()
            return True
        write_json(
            self.paths.stop_request, StopRequest(pids=(record.pid,), grace_s=request.grace_s)
        )
        name = "TERM" if number == signal.SIGTERM else FORCE_SIGNAL.name.removeprefix("SIG")
        self._cancel(f"--signal={name}", "--batch")
        return True

    def _cancel(self, *options: str) -> None:
        """Call scancel for the run's job.

        Raises ConfigError if the job with that id belongs to a different run: job.json may have
        been copied, and Slurm reuses ids.
        """
        job, script = self.job(), self.paths.root / _SCRIPT
        if job.name != self.paths.run_id or Path(job.script).resolve() != script.resolve():
            raise ConfigError(
                f"{self.paths.job}: Slurm's job {self.job_id} is {shown_name(job.name)} of "
                f"{shown_name(job.script)}, not the job of this run, so it is not cancelled. If "
                f"the run has no job, remove {self.paths.job}; to end that job: scancel "
                f"{self.job_id}"
            )
        run_slurm(["scancel", *options, self.job_id], self._env)
        self._queried_s = float("-inf")

    def abandon(self) -> str:
        """Cancel the job."""
        self._cancel()
        return f"job {self.job_id} was cancelled; the last checkpoint is unchanged"

    def collect_results(self, *, at_once: bool = False) -> CollectResult:
        """Return whether the job is active; nothing is copied because the folder is shared."""
        try:
            return CollectResult(alive=self.job().alive)
        except PreflightError:
            return CollectResult(alive=False)  # `look` has seen the job end

    def _has_recorded_end(self) -> bool:
        """Return whether the supervisor has recorded the end of the run.

        After a recorded end, Slurm need not be queried. The end by a lost rank does not count,
        because Slurm may have requeued the job.
        """
        record, state = last_record(RunJob, self.paths.job), last_record(RunState, self.paths.state)
        if record is None or state is None or record.pid is None:
            return False
        is_own = state.supervisor_pid == record.pid
        return is_own and state.exit_class not in (None, ExitCode.RANK_LOST.label)

    def end_without_record(self) -> tuple[int, str] | None:
        """Return how the job ended if its supervisor could not record the end."""
        record, state = last_record(RunJob, self.paths.job), last_record(RunState, self.paths.state)
        pid = None if record is None else record.pid
        if pid is not None and state is not None and state.supervisor_pid == pid:
            return None if state.exit_class is not None else self._killed()
        job = self._job
        if job.state == "CANCELLED":
            return INTERRUPTED, f"job {self.job_id} was cancelled before the run began"
        if job.state in _CODES:
            message = f"job {self.job_id} ended before the run began: {job.state}"
            return int(_CODES[job.state]), f"error: {message}{_reason(job)}"
        lines = log_tail(self.paths.supervisor_log)
        known = {int(code) for code in ExitCode if code != ExitCode.OK}
        code = job.exit_code if job.exit_code in known else int(ExitCode.PREFLIGHT)
        message = lines[-1] if lines else f"error: job {self.job_id} ended in state {job.state}"
        return code, f"{message}\nlog: {self.paths.supervisor_log}"

    def _killed(self) -> tuple[int, str]:
        job = self._job
        code = _CODES.get(job.state, ExitCode.RANK_LOST)
        code = ExitCode.RANK_LOST if code == INTERRUPTED else code
        return int(code), (
            f"error: job {self.job_id} was killed by Slurm ({job.state}{_reason(job)}) before the "
            "run could save; a resume continues from its last checkpoint"
        )


def _of_scontrol(line: str) -> Job:
    found = fields(line)
    # A path may contain blanks. In this output, Command is followed by WorkDir.
    script = re.search(r" Command=(.*?) WorkDir=", line)
    return Job(
        state=found.get("JobState", "UNKNOWN"),
        reason=found.get("Reason", "").replace("None", ""),
        exit_code=_status(found.get("ExitCode", "")),
        nodes=found.get("NodeList", "").replace("(null)", ""),
        name=found.get("JobName", ""),
        script=script[1] if script else "",
    )


def _status(text: str) -> int:
    """Return the status part of Slurm's `status:signal`."""
    status = text.partition(":")[0]
    return int(status) if status.isdecimal() else 0


def _reason(job: Job) -> str:
    return f" ({job.reason})" if job.reason else ""


# Slurm's names of the reasons why a job is pending, and what each means for the user.
PENDING_REASONS = {
    "Resources": "no nodes are free yet",
    "Priority": "other jobs have a higher priority",
    "BeginTime": "Slurm has requeued the job, and will start it later",
    "PartitionConfig": "the partition never allows this size: cancel the job, and request less",
    "PartitionNodeLimit": "the partition has too few nodes: cancel the job, and request fewer",
    "PartitionTimeLimit": "the partition never allows this time: cancel the job, lower slurm.time",
    "ReqNodeNotAvail": "nodes that the job needs are down, drained or reserved",
}


def _messages(job_id: str, job: Job) -> Sequence[str]:
    """Return a message for the operator about a job that is pending or has started."""
    if job.state in _WAITING:
        reason = job.reason.partition(",")[0]
        meaning = f": {PENDING_REASONS[reason]}" if reason in PENDING_REASONS else ""
        return [f"job {job_id} is {job.state.lower()} ({reason or 'no reason yet'}){meaning}"]
    if job.state == "RUNNING":
        return [f"job {job_id} is running on {job.nodes}"]
    return []


SITE = Slurm()
