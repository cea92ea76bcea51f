"""Slurm from a login node: a run becomes a job, which is followed and stopped from here.

The run folder is on the file system that login node and nodes share, so nothing is copied.
"""

from __future__ import annotations

import re
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from payload.config.run_config import RunConfig
from payload.core.errors import INTERRUPTED, ConfigError, ExitCode, PreflightError
from payload.core.files import write_whole
from payload.core.printable_text import PLAIN_TEXT, shown, shown_name
from payload.core.python_processes import code_environment, module_words
from payload.orchestrate.follow.run_text import log_tail
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.launcher_choice import require_launcher_of_jobs
from payload.orchestrate.runs.mirror import mirror_file
from payload.orchestrate.runs.run_request import RunRequest
from payload.orchestrate.runs.site import CollectResult, NamedSite, RunPoll, SiteRun
from payload.orchestrate.sites.allocation import SlurmError, ask, fields, require_program
from payload.run_record.run_files import (
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

_ASK_EVERY_S = 3.0
_SCRIPT = "job.sbatch"
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD")
_GOING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_CODES = {
    "CANCELLED": INTERRUPTED,
    "TIMEOUT": ExitCode.BUDGET,
    "DEADLINE": ExitCode.BUDGET,
    "NODE_FAIL": ExitCode.RANK_LOST,
    "PREEMPTED": ExitCode.RANK_LOST,
    "OUT_OF_MEMORY": ExitCode.RANK_LOST,
}
"""Exit codes of jobs that ended before the run could leave a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as Slurm has it now."""

    state: str
    """Such as PENDING; UNKNOWN where Slurm has forgotten it."""
    reason: str = ""
    """Why it waits, or why it ended."""
    exit_code: int = 0
    nodes: str = ""
    name: str = ""
    script: str = ""
    """The path of its batch script, as it was submitted."""

    @property
    def alive(self) -> bool:
        """Return whether it runs or waits to."""
        return self.state in _WAITING or self.state in _GOING


class Slurm(NamedSite):
    """The cluster whose login node this is."""

    def check(self, config: RunConfig, env: Mapping[str, str]) -> None:
        """Raise ConfigError or PreflightError for what would fail in the job after its wait."""
        require_launcher_of_jobs(config, nodes=config.slurm.nodes)
        if config.launch.ranks_per_node is not None:
            config.require_even(config.slurm.nodes * config.launch.ranks_per_node)
        require_program("sbatch", env)

    def start(self, request: RunRequest) -> SlurmRun:
        """Submit a job whose program plans the run on the nodes that the job gets."""
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
        """Return the run in that job."""
        return SlurmRun(paths, job.job_id, env)


def render_script(
    paths: RunPaths, config: RunConfig, *, access: LocalAccess, grace_s: float
) -> str:
    """Return the batch script: what the job needs, and the program that plans and supervises.

    Raises ConfigError for a folder with a line break or another control character in its name:
    sbatch and the shell would take what follows it for a line of the script.
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
    for key in ("partition", "account", "qos", "time"):
        value = getattr(slurm, key)
        if value is not None:
            options.append(f"--{key}={value}")
    options += shlex.split(slurm.extra)
    words = ["--run-dir", str(paths.root), "--grace", f"{grace_s:g}"]
    program = module_words("payload.orchestrate.sites.allocation", *words, python=access.python)
    root = access.python_path()
    lines = ["#!/bin/sh", *(f"#SBATCH {shlex.quote(option)}" for option in options)]
    lines += [f"cd {shlex.quote(str(Path.cwd()))} || exit {int(ExitCode.PREFLIGHT)}"]
    lines += [f"export PYTHONPATH={shlex.quote(root)}"] if root else []
    # In the shell's place: Slurm's signals to the batch script then reach the supervisor.
    lines += [f"exec {shlex.join(program)}"]
    for line in lines:
        if not PLAIN_TEXT.fullmatch(line):
            raise ConfigError(
                f"{_SCRIPT}: {shown(line)} has a control character, such as a line break. Rename "
                "the folder."
            )
    return "\n".join([*lines, ""])


def _pattern(path: Path) -> str:
    """Return a path as an option of sbatch, in which % begins a placeholder."""
    return str(path).replace("%", "%%")


def submit(script: Path, config: RunConfig, env: Mapping[str, str]) -> str:
    """Hand the script to sbatch; return the job's number. Raises ConfigError, PreflightError."""
    try:
        printed = ask(["sbatch", "--parsable", str(script)], _outside(code_environment(env)))
    except SlurmError as error:
        raise ConfigError(_refusal(error.words, config, env)) from None
    job_id = printed.strip().partition(";")[0]
    if not re.fullmatch(r"\d{1,20}", job_id):
        raise PreflightError(f"sbatch printed {job_id!r} in place of a job's number.")
    return job_id


def _outside(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without another job's options, which sbatch would take for ours."""
    prefixes = ("SLURM_JOB", "SLURM_STEP", "SLURM_TASK", "SLURM_MEM", "SLURM_CPU", "SBATCH_")
    return {name: value for name, value in env.items() if not name.startswith(prefixes)}


def _refusal(words: str, config: RunConfig, env: Mapping[str, str]) -> str:
    """Return why sbatch refused, with the setting that it is about."""
    slurm, said = config.slurm, words.removeprefix("Batch job submission failed: ")
    lowered = said.lower()
    if "partition" in lowered and "node" not in lowered:
        try:
            known = ask(["sinfo", "--noheader", "--format", "%R"], env).split()
        except PreflightError:
            known = []
        listed = f" This cluster has {', '.join(known)}." if known else " See `sinfo`."
        return f"slurm.partition = {slurm.partition!r}: {said}.{listed}"
    for key in ("account", "qos", "time"):
        if key in lowered and getattr(slurm, key) is not None:
            return f"slurm.{key} = {getattr(slurm, key)!r}: {said}. Correct it, or leave it out."
    if "node" in lowered or "cpu" in lowered:
        return (
            f"slurm.nodes = {slurm.nodes}, slurm.cpus_per_node = {slurm.cpus_per_node or 'none'}: "
            f"{said}. Ask for what `sinfo` shows."
        )
    return f"sbatch refused the job: {said}. Correct the settings of [slurm]."


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
        self._asked_s = float("-inf")

    def job(self) -> Job:
        """Ask Slurm how the job is. Raises PreflightError."""
        try:
            return _of_scontrol(ask(["scontrol", "show", "job", "-o", self.job_id], self._env))
        except SlurmError as error:
            # A controller that cannot be reached says nothing of the job.
            if "invalid job id" not in error.words.lower():
                raise
            # scontrol forgets a job some minutes after its end; accounting does not.
            return self._of_accounting()

    def _of_accounting(self) -> Job:
        words = ["sacct", "--noheader", "--allocations", "--parsable2", "--jobs", self.job_id]
        try:
            printed = ask([*words, "--format", "State,ExitCode"], self._env)
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
        """Ask Slurm every few seconds; the run's files are here anyway."""
        if time.monotonic() - self._asked_s < _ASK_EVERY_S:
            return RunPoll(alive=self._job.alive)
        self._asked_s = time.monotonic()
        try:
            self._job = self.job()
        except PreflightError as error:
            if self._has_left_its_word():
                return RunPoll(alive=False)
            return RunPoll(alive=True, news=[f"warning: {error} How the job is, is not known."])
        return RunPoll(alive=self._job.alive, news=_news(self.job_id, self._job))

    def signal(self, number: signal.Signals, request: StopRequest) -> bool:
        """Let the job's supervisor save and stop; a job that has not begun is cancelled."""
        try:
            job = self.job()
        except PreflightError:
            if self._has_left_its_word():
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

        Raises ConfigError where the job of that number is another one: job.json may be a copy or
        somebody else's, and Slurm takes numbers again.
        """
        job, script = self.job(), self.paths.root / _SCRIPT
        if job.name != self.paths.run_id or Path(job.script).resolve() != script.resolve():
            raise ConfigError(
                f"{self.paths.job}: Slurm's job {self.job_id} is {shown_name(job.name)} of "
                f"{shown_name(job.script)}, and not this run's. It is left alone. If the run has "
                f"no job, remove {self.paths.job}; to end that one: scancel {self.job_id}"
            )
        ask(["scancel", *options, self.job_id], self._env)
        self._asked_s = float("-inf")

    def abandon(self) -> str:
        """Let Slurm end the job."""
        self._cancel()
        return f"job {self.job_id} was cancelled; the last checkpoint is as it was"

    def bring_home(self, *, at_once: bool = False) -> CollectResult:
        """Return whether the job goes on; its files are here."""
        try:
            return CollectResult(alive=self.job().alive)
        except PreflightError:
            return CollectResult(alive=False)  # `look` has seen its end

    def _has_left_its_word(self) -> bool:
        """Return whether the job's supervisor has ended the run, so that Slurm need not say so.

        A lost rank is no such end: Slurm may have queued the job again.
        """
        record, state = last_record(RunJob, self.paths.job), last_record(RunState, self.paths.state)
        if record is None or state is None or record.pid is None:
            return False
        is_its_own = state.supervisor_pid == record.pid
        return is_its_own and state.exit_class not in (None, ExitCode.RANK_LOST.label)

    def end_without_record(self) -> tuple[int, str] | None:
        """Return how the job ended, where it ended before its supervisor left a word."""
        record, state = last_record(RunJob, self.paths.job), last_record(RunState, self.paths.state)
        pid = None if record is None else record.pid
        if pid is not None and state is not None and state.supervisor_pid == pid:
            return None if state.exit_class is not None else self._killed()
        job = self._job
        if job.state == "CANCELLED":
            return INTERRUPTED, f"job {self.job_id} was cancelled before the run began"
        if job.state in _CODES:
            words = f"job {self.job_id} ended before the run began: {job.state}"
            return int(_CODES[job.state]), f"error: {words}{_reason(job)}"
        said = log_tail(self.paths.supervisor_log)
        known = {int(code) for code in ExitCode if code != ExitCode.OK}
        code = job.exit_code if job.exit_code in known else int(ExitCode.PREFLIGHT)
        words = said[-1] if said else f"error: job {self.job_id} ended as {job.state}"
        return code, f"{words}\nlog: {self.paths.supervisor_log}"

    def _killed(self) -> tuple[int, str]:
        job = self._job
        code = _CODES.get(job.state, ExitCode.RANK_LOST)
        code = ExitCode.RANK_LOST if code == INTERRUPTED else code
        return int(code), (
            f"error: job {self.job_id} was killed by Slurm ({job.state}{_reason(job)}) before the "
            "run could save; it goes on from its last checkpoint"
        )


def _of_scontrol(line: str) -> Job:
    found = fields(line)
    # A path may have blanks. The script that a submitted one was copied to has no other field here.
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
    """Return the status of Slurm's `status:signal`."""
    status = text.partition(":")[0]
    return int(status) if status.isdecimal() else 0


def _reason(job: Job) -> str:
    return f" ({job.reason})" if job.reason else ""


_REASONS = {
    "Resources": "no nodes are free yet",
    "Priority": "other jobs are before it",
    "BeginTime": "Slurm has queued it again, and waits a while",
    "PartitionConfig": "the partition never allows so much: cancel it, and ask for less",
    "PartitionNodeLimit": "the partition never allows so many nodes: cancel it, ask for fewer",
    "PartitionTimeLimit": "the partition never allows so long: cancel it, and lower slurm.time",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
}


def _news(job_id: str, job: Job) -> Sequence[str]:
    """Return what the operator should know of a job that waits, or has begun."""
    if job.state in _WAITING:
        reason = job.reason.partition(",")[0]
        meaning = f": {_REASONS[reason]}" if reason in _REASONS else ""
        return [f"job {job_id} is {job.state.lower()} ({reason or 'no reason yet'}){meaning}"]
    if job.state == "RUNNING":
        return [f"job {job_id} is running on {job.nodes}"]
    return []


SITE = Slurm()
