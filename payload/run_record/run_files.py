"""CONTRACT OUT: the paths of the files in a run folder, and the records that they contain.

Programs read these files; no program parses a log.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Literal, TypeAlias, TypeVar

from payload.core.errors import ConfigError, UsageError
from payload.core.files import (
    write_whole,
)
from payload.core.printable_text import shown
from payload.core.regular_files import read_bytes
from payload.core.symlink_safety import links_out
from payload.core.validation.fields import MAX_SECONDS, checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import MEMBER_NAME, NODE_NAME, RUN_ID
from payload.core.validation.records import build, check_schema
from payload.formats.checkpoint_listing import (
    CHECKPOINTS_NAME,
    MANIFEST_FILE,
    checkpoint_folders,
    folder_name,
)
from payload.run_record.store_state import StoreState
from payload.run_record.stragglers import Straggler

SCHEMA_VERSION = 1
DEFAULT_RUNS_DIR = "runs"
DEFAULT_GRACE_S = 60.0
LATEST = "latest"
"""The symlink in a runs folder to the newest run that has finished a step."""

RunStatus = Literal["starting", "running", "finished", "stopped", "failed"]
EventKind = Literal["start", "resume", "failure", "restart", "finished", "stopped", "failed"]
MOST_EVENTS = 500

_PHASE = re.compile(r"[a-z ]{1,40}")

_seconds = partial(checked, low=0, high=MAX_SECONDS)
"""Declare a field with a time in a plausible range."""

_JOB_ID = re.compile(r"[0-9]{1,20}")

_T = TypeVar(
    "_T",
    "Summary",
    "RunState",
    "StopRequest",
    "RunJob",
    "StoreState",
    "RankProgress",
    "RankExit",
)


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Paths of the files in a run folder; no other module contains the file names."""

    root: Path

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return self.root.name

    @property
    def config(self) -> Path:
        """run.toml: the resolved config."""
        return self.root / "run.toml"

    @property
    def identity(self) -> Path:
        """identity.json: distinguishes the run from other runs with the same name."""
        return self.root / "identity.json"

    @property
    def named(self) -> Path:
        """named.json: settings that this user approved on this machine."""
        return self.root / "named.json"

    @property
    def manifest_hashes(self) -> Path:
        """manifest_hashes.json: hashes of the checkpoint manifests, as the head wrote them."""
        return self.root / "manifest_hashes.json"

    @property
    def inventory(self) -> Path:
        """inventory.json: the nodes of this run."""
        return self.root / "inventory.json"

    @property
    def plan(self) -> Path:
        """plan.json: the launcher's argv and environment."""
        return self.root / "plan.json"

    @property
    def hosts(self) -> Path:
        """hosts: the host file for `mpirun -f`."""
        return self.root / "hosts"

    @property
    def ranks(self) -> Path:
        """ranks.json: the node and the cores of each rank."""
        return self.root / "ranks.json"

    @property
    def state(self) -> Path:
        """state.json: the run's status, written by the supervisor."""
        return self.root / "state.json"

    @property
    def stop_request(self) -> Path:
        """stop.json: a command's request to stop the run."""
        return self.root / "stop.json"

    @property
    def job(self) -> Path:
        """job.json: the scheduler job of the run; absent without a scheduler."""
        return self.root / "job.json"

    @property
    def metrics(self) -> Path:
        """metrics.jsonl: one JSON object per step and one per evaluation."""
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """summary.json: the run's result."""
        return self.root / "summary.json"

    @property
    def store_state(self) -> Path:
        """storage.json: the state of uploads to the run's store; absent without a store."""
        return self.root / "storage.json"

    @property
    def restored(self) -> RunPaths:
        """restored/: records from the run's store, as an earlier machine of the run wrote them."""
        return RunPaths(self.root / "restored")

    @property
    def samples(self) -> Path:
        """samples.json: texts that the model generated before and after the run."""
        return self.root / "samples.json"

    @property
    def report(self) -> Path:
        """report.html: the report of the run on one page."""
        return self.root / "report.html"

    @property
    def profile(self) -> Path:
        """profile/: the trace of a profiled step and the table of its operators."""
        return self.root / "profile"

    @property
    def track(self) -> Path:
        """track/: one folder for each tracker of the run."""
        return self.root / "track"

    @property
    def checkpoints(self) -> Path:
        """checkpoints/: one folder per checkpoint."""
        return self.root / CHECKPOINTS_NAME

    @property
    def logs(self) -> Path:
        """logs/: one file per rank, and the launcher's log."""
        return self.root / "logs"

    @property
    def launcher_log(self) -> Path:
        """logs/launcher.log: the output of mpirun or torchrun itself."""
        return self.logs / "launcher.log"

    @property
    def supervisor_log(self) -> Path:
        """logs/supervisor.log: the supervisor's output; empty if the supervisor did not fail."""
        return self.logs / "supervisor.log"

    @property
    def lock(self) -> Path:
        """supervisor.lock: locked while the supervisor runs."""
        return self.root / "supervisor.lock"

    def accelerate_config(self, node_rank: int) -> Path:
        """The Accelerate config for one node, equivalent to the plan."""
        return self.root / f"accelerate_node_{node_rank}.yaml"

    @property
    def deepspeed_config(self) -> Path:
        """deepspeed.json: DeepSpeed's config, with `distributed.strategy = "zero3"`."""
        return self.root / "deepspeed.json"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint after `step` steps."""
        return self.checkpoints / folder_name(step)

    def newest_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint, or None."""
        folders = checkpoint_folders(self.checkpoints)
        whole = (each for each in reversed(folders) if (each / MANIFEST_FILE).exists())
        return next(whole, None)

    def rank_log(self, rank: int) -> Path:
        """The output of one rank."""
        return self.logs / f"rank_{rank:04d}.log"

    def rank_progress(self, rank: int) -> Path:
        """Return the path of one rank's heartbeat."""
        return self.root / "progress" / f"rank_{rank:04d}.json"

    def rank_exit(self, rank: int) -> Path:
        """The exit record of one rank; absent while the rank runs, or if its wrapper was killed."""
        return self.root / "exits" / f"rank_{rank:04d}.json"


NAMES = RunPaths(Path())
"""Relative path of each file in a run folder."""


def new_run_id(name: str, *, now: datetime, suffix: str) -> str:
    """Return `name-YYYYmmdd-HHMMSS-suffix`, which is safe in shells and paths."""
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-._") or "run"
    return f"{plain}-{now:%Y%m%d-%H%M%S}-{suffix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """summary.json: the run's result."""

    run_id: str = checked(pattern=RUN_ID, wanted="a run id")
    status: RunStatus
    exit_class: str
    world_size: int
    nodes: int
    steps: int = checked(0, low=0)
    tokens: int = checked(0, low=0)
    missing_metrics: tuple[tuple[int, int], ...] = checked((), low=1)
    """First and last step of each range of steps for which metrics.jsonl has lost the rows."""
    first_loss: float | None = None
    final_loss: float | None = None
    best_val_loss: float | None = None
    final_val_loss: float | None = None
    final_val_step: int | None = checked(None, low=0)
    """Step of the last evaluation; None in older summaries."""
    best_checkpoint: str | None = None
    """Name of the checkpoint with the lowest validation loss; None if no checkpoint was
    evaluated."""
    is_better_than_untrained: bool | None = None
    """True if a later evaluation has a lower loss than step 0; None without both, and in older
    summaries."""
    val_metrics: dict[str, float] = field(default_factory=dict)
    """The task's metrics in the last evaluation, such as `accuracy`; empty in older summaries."""
    val_confusion: tuple[tuple[int, ...], ...] = checked((), low=0)
    """A classifier's confusion matrix in the last evaluation, with a row per true label."""
    tokens_per_s: float | None = None
    """Median over the steps after warm-up."""
    mfu: float | None = None
    peak_flops_per_s: float | None = None
    """Measured peak FLOP/s of a matmul, summed over all ranks; None if not measured."""
    dequantized_per_s: float | None = None
    """Number of weights that a rank dequantizes per second; None for a base that is not in 4
    bits."""
    predicted_step_s: float | None = checked(None, low=0)
    """Seconds per step, predicted by the calibration at the last start; None in older summaries."""
    ready_unix: float | None = _seconds(None)
    """Time of the first step or evaluation after the last start, by rank 0's clock."""
    start_s: dict[str, float] = field(default_factory=dict)
    """Duration in seconds of each part of rank 0's start-up until `ready_unix`."""
    ranks_identical: bool = False
    """True if the check after the last step found equal parameters on all ranks."""
    restarts: int = checked(0, low=0)
    """Number of times the supervisor restarted the ranks after a failure."""
    resumes: int = checked(0, low=0)
    """Number of times a command resumed the run."""
    stragglers: tuple[Straggler, ...] = ()
    """Episodes of slow ranks for which the others waited, in chronological order."""
    wall_s: float = _seconds(0.0)
    cost_usd: float | None = None
    """Cost of the nodes over all attempts; None without prices."""
    usd_per_million_tokens: float | None = None
    store: StoreState | None = None
    """State of the run's store; None without a store."""
    error: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """An event of a run, for the timeline of its report."""

    kind: EventKind
    """Kind of the event. A command causes `start` and `resume`; the supervisor causes `restart`
    after a `failure`. `finished`, `stopped` and `failed` end the run."""
    time_unix: float = _seconds()
    attempt: int = checked(1, low=1)
    text: str = ""
    """Text of the error or note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """state.json: written by the supervisor."""

    run_id: str = checked(pattern=RUN_ID, wanted="a run id")
    status: RunStatus
    exit_class: str | None = None
    """Name of the run's exit code; None while the run is active."""
    error: str | None = None
    failed_rank: int | None = None
    """The rank that caused the failure; None if no rank did."""
    supervisor_pid: int | None = checked(None, low=1)
    """Process id of the supervisor; None if unknown, for example after the state was rebuilt from
    other records."""
    node: str | None = checked(None, pattern=NODE_NAME, wanted="a node name")
    """Name of the node that the supervisor runs on; None if unknown."""
    started_unix: float = _seconds()
    updated_unix: float = _seconds()
    attempt: int = checked(1, low=1)
    resumes: int = checked(0, low=0)
    """Number of attempts that a command started by resuming the run."""
    note: str | None = None
    """The latest event, such as why the run was restarted and from which checkpoint."""
    spent_s: float = _seconds(0.0)
    """Time during which the run had a supervisor, over all attempts and resumes."""
    cost_usd: float | None = None
    """Cost of the nodes during `spent_s`; None without prices."""
    grace_s: float = checked(DEFAULT_GRACE_S, low=0)
    """Time for the ranks to save after a stop request; a checkpoint in progress extends this time.
    """
    events: tuple[RunEvent, ...] = checked((), max_items=MOST_EVENTS)
    """Events of all attempts and resumes, the oldest first."""
    store: StoreState | None = None
    """State of the run's store; None without a store."""
    schema_version: int = SCHEMA_VERSION

    def restarts(self) -> int:
        """Return the number of restarts by the supervisor after a failure."""
        return max(0, self.attempt - 1 - self.resumes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """stop.json: written by a command before it signals the supervisor.

    If the signal comes from the operating system, this file does not exist.
    """

    pids: tuple[int, ...] = ()
    """Ids of the supervisor processes that must stop; other supervisors ignore the file."""
    grace_s: float | None = checked(None, low=0)
    """Replaces `RunState.grace_s`; None keeps that value."""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """job.json: written by the command that submits the job, then by the job itself."""

    site: str = checked(pattern=MEMBER_NAME, wanted="a site's name")
    job_id: str = checked(pattern=_JOB_ID, wanted="a job's number")
    pid: int | None = checked(None, low=1)
    """The supervisor's process id; None before the job has begun."""
    restarts: int = checked(0, low=0)
    """Number of times the scheduler had requeued the job before the supervisor `pid` started."""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """One rank's heartbeat, overwritten at every step."""

    rank: int = checked(low=0)
    node: str = checked(pattern=NODE_NAME, wanted="a node name")
    pid: int = checked(low=1)
    step: int = checked(low=0)
    phase: str = checked(pattern=_PHASE, wanted="a phase")
    """Current phase: load, calibration, start, kernels (building kernels), weights (sending weights
    to every rank), step, eval, sync check, checkpoint, end."""
    time_unix: float = _seconds()
    """Wall-clock time of the node, for display only."""
    micro_step: int | None = checked(None, low=0)
    """Number of micro-batches done in this step, or of batches done in this evaluation."""
    micro_steps: int | None = checked(None, low=0)
    """Total number of micro-batches in this step, or of batches in this evaluation."""
    rss_bytes: int | None = checked(None, low=0, high=2**63)
    """Resident memory of the process."""
    monotonic_s: float = _seconds(default_factory=time.monotonic, low=-MAX_SECONDS)
    """Monotonic clock of the node. It is never set back, so it can order events on the node."""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """The exit record of one rank."""

    rank: int = checked(low=0)
    node: str = checked(pattern=NODE_NAME, wanted="a node name")
    exit_code: int = checked(low=0, high=255)
    """An `ExitCode`, or 128 + the number of the signal."""
    signal: int | None = checked(None, low=1, high=64)
    error: str | None = None
    """Error message of the rank, one line."""
    time_unix: float = _seconds()
    """Wall-clock time of the node, for display only."""
    monotonic_s: float = _seconds(default_factory=time.monotonic, low=-MAX_SECONDS)
    """Monotonic clock of the node, as in RankProgress."""
    schema_version: int = SCHEMA_VERSION


Record: TypeAlias = Summary | RunState | StopRequest | RunJob | StoreState | RankProgress | RankExit
"""The records that a run folder holds, each as a JSON file."""


def latest_folder(runs_dir: Path) -> Path | None:
    """Return the run folder in `runs_dir` that the symlink `latest` names, or None.

    Only the last path component of the link's target is used. In a cloned project, the link could
    lead to any folder.
    """
    with suppress(OSError):
        name = (runs_dir / LATEST).readlink().name
        folder = runs_dir / name
        if RUN_ID.fullmatch(name) and folder.is_dir() and not folder.is_symlink():
            return folder
    return None


def point_latest_at(paths: RunPaths) -> None:
    """Point the symlink `latest` at this run, unless it points at a newer run. Raises OSError."""
    link = paths.root.with_name(LATEST)
    current = RunPaths(link).plan
    if current.exists() and current.stat().st_mtime_ns > paths.plan.stat().st_mtime_ns:
        return
    fresh = link.with_name(f".{LATEST}.{paths.run_id}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(paths.run_id)
    fresh.replace(link)


def write_json(
    path: Path,
    value: Record,
    *,
    durable: bool = True,
) -> None:
    """Write `value` atomically: a reader gets the complete old file or the complete new file."""
    write_whole(path, to_json(value), durable=durable)


def to_json(value: Record) -> str:
    """Return the text that `write_json` writes."""
    return json.dumps(asdict(value), indent=2) + "\n"


def read_json(cls: type[_T], path: Path) -> _T | None:
    """Read a file that `write_json` wrote; return None if it is absent. Raises ConfigError."""
    fix = "Remove the file or choose another run."
    try:
        text = read_bytes(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}. {fix}") from None
    raw = parse_json(text, where=str(path), fix=fix)
    check_schema(raw, SCHEMA_VERSION, where=str(path), fix=fix)
    return build(cls, raw, where=str(path), fix=fix)


def last_record(cls: type[_T], path: Path) -> _T | None:
    """Read a file that `write_json` wrote; return None if it is absent, damaged or not readable.

    Callers use this function if they do not depend on the record, so that a damaged file does not
    stop a run.
    """
    try:
        return read_json(cls, path)
    except ConfigError:
        return None


def default_runs_dir(*, option: str = "--runs-dir", run: str = "") -> Path:
    """Return the default folder of runs: `runs` in the current folder.

    A symlink at that path, for example in a cloned project, could make commands write to or remove
    other runs. Raises UsageError for a symlink. The message suggests `option` with the target of
    the symlink, or with the folder `run` in the target.
    """
    default = Path(DEFAULT_RUNS_DIR)
    if default.is_symlink():
        place = str(Path(os.path.realpath(default), run))
        raise UsageError(
            f"{default} in this folder is a link, which is not followed. To use its target, add "
            f"{option} {quote(place) if place.isprintable() else 'DIR'}"
        )
    return default


def require_own_folders(paths: RunPaths) -> None:
    """Raise ConfigError if the run folder contains a symlink to a folder outside of it.

    Through such a symlink, a crafted run folder could make the program read, upload or overwrite
    any folder. The run folder itself may be a symlink, because the user names that folder.
    """
    for link in links_out(paths.root):
        with suppress(OSError):  # this user has no access
            if link.is_dir():
                raise ConfigError(
                    f"{link} is a link that leads out of the run's folder, to "
                    f"{shown(os.path.realpath(link))}, and is not followed. Move the link away. To "
                    "keep a run on another disk, make the run's folder itself a link."
                )
