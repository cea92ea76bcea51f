"""CONTRACT OUT: what a run leaves behind, and where.

Programs read these files; nobody parses a log.
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
from payload.core.links import links_out
from payload.core.printable_text import shown
from payload.core.regular_files import read_bytes
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
"""The link in a runs folder to the newest run that has finished a step."""

RunStatus = Literal["starting", "running", "finished", "stopped", "failed"]
EventKind = Literal["start", "resume", "failure", "restart", "finished", "stopped", "failed"]
MOST_EVENTS = 500

_PHASE = re.compile(r"[a-z ]{1,40}")

_seconds = partial(checked, low=0, high=MAX_SECONDS)
"""A field with a time that people and sums can do something with."""

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
    """The one place that knows the names in a run folder."""

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
        """identity.json: what tells the run from another one of the same name."""
        return self.root / "identity.json"

    @property
    def named(self) -> Path:
        """named.json: settings that a person has named on this machine."""
        return self.root / "named.json"

    @property
    def manifest_hashes(self) -> Path:
        """manifest_hashes.json: hashes of the checkpoints' manifests, as the head wrote them."""
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
        """hosts: what `mpirun -f` reads."""
        return self.root / "hosts"

    @property
    def ranks(self) -> Path:
        """ranks.json: which rank runs on which node, on which cores."""
        return self.root / "ranks.json"

    @property
    def state(self) -> Path:
        """state.json: what the supervisor knows of the run."""
        return self.root / "state.json"

    @property
    def stop_request(self) -> Path:
        """stop.json: that a command asks for a stop, and how."""
        return self.root / "stop.json"

    @property
    def job(self) -> Path:
        """job.json: the scheduler's job that the run is in; absent where there is none."""
        return self.root / "job.json"

    @property
    def metrics(self) -> Path:
        """metrics.jsonl: one object a step, and one an evaluation."""
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """summary.json: the run's result."""
        return self.root / "summary.json"

    @property
    def store_state(self) -> Path:
        """storage.json: what of the run is in its store; absent without one."""
        return self.root / "storage.json"

    @property
    def restored(self) -> RunPaths:
        """restored/: the records of the place that had the run before, from its store."""
        return RunPaths(self.root / "restored")

    @property
    def samples(self) -> Path:
        """samples.json: what the model wrote before and after the run."""
        return self.root / "samples.json"

    @property
    def report(self) -> Path:
        """report.html: all of it as one page, for people."""
        return self.root / "report.html"

    @property
    def profile(self) -> Path:
        """profile/: the trace of a profiled step, and its operators."""
        return self.root / "profile"

    @property
    def track(self) -> Path:
        """track/: what the run's trackers keep, a folder each."""
        return self.root / "track"

    @property
    def checkpoints(self) -> Path:
        """checkpoints/: one folder a checkpoint."""
        return self.root / CHECKPOINTS_NAME

    @property
    def logs(self) -> Path:
        """logs/: one file a rank, and the launcher's own."""
        return self.root / "logs"

    @property
    def launcher_log(self) -> Path:
        """Output of mpirun or torchrun itself."""
        return self.logs / "launcher.log"

    @property
    def supervisor_log(self) -> Path:
        """Output of the supervisor itself: nothing, unless it failed."""
        return self.logs / "supervisor.log"

    @property
    def lock(self) -> Path:
        """Locked by the supervisor for as long as it lives."""
        return self.root / "supervisor.lock"

    def accelerate_config(self, node_rank: int) -> Path:
        """The Accelerate config that says the same as the plan, for one node."""
        return self.root / f"accelerate_node_{node_rank}.yaml"

    @property
    def deepspeed_config(self) -> Path:
        """DeepSpeed's configuration, in a run with `distributed.strategy = "zero3"`."""
        return self.root / "deepspeed.json"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint after `step` steps."""
        return self.checkpoints / folder_name(step)

    def newest_checkpoint(self) -> Path | None:
        """The last checkpoint that was written to its end."""
        folders = checkpoint_folders(self.checkpoints)
        whole = (each for each in reversed(folders) if (each / MANIFEST_FILE).exists())
        return next(whole, None)

    def rank_log(self, rank: int) -> Path:
        """Everything that one rank printed."""
        return self.logs / f"rank_{rank:04d}.log"

    def rank_progress(self, rank: int) -> Path:
        """Return the path of one rank's heartbeat."""
        return self.root / "progress" / f"rank_{rank:04d}.json"

    def rank_exit(self, rank: int) -> Path:
        """How one rank ended; absent while it runs and when it died without a word."""
        return self.root / "exits" / f"rank_{rank:04d}.json"


NAMES = RunPaths(Path())
"""Each file's place in a run folder, as a relative path."""


def new_run_id(name: str, *, now: datetime, suffix: str) -> str:
    """Return `name-YYYYmmdd-HHMMSS-suffix`, in which a shell or a path trips over nothing."""
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-._") or "run"
    return f"{plain}-{now:%Y%m%d-%H%M%S}-{suffix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """summary.json: what came of the run."""

    run_id: str = checked(pattern=RUN_ID, wanted="a run id")
    status: RunStatus
    exit_class: str
    world_size: int
    nodes: int
    steps: int = checked(0, low=0)
    tokens: int = checked(0, low=0)
    missing_metrics: tuple[tuple[int, int], ...] = checked((), low=1)
    """First and last of each range of steps whose rows of metrics.jsonl are lost."""
    first_loss: float | None = None
    final_loss: float | None = None
    best_val_loss: float | None = None
    final_val_loss: float | None = None
    best_checkpoint: str | None = None
    """Name of the checkpoint with the lowest validation loss; None where none was evaluated."""
    tokens_per_s: float | None = None
    """Median over the steps after warm-up."""
    mfu: float | None = None
    peak_flops_per_s: float | None = None
    """Sum over all ranks of what a matrix product reached, or None."""
    dequantized_per_s: float | None = None
    """Weights that a rank dequantised in a second, for a base of 4 bits; else None."""
    ready_unix: float | None = _seconds(None)
    """When the last start came to its first step, or evaluation, by rank 0's clock."""
    start_s: dict[str, float] = field(default_factory=dict)
    """Rank 0's work from its birth until then, and how long each part took."""
    ranks_identical: bool = False
    """True only if the last check, after the last step, found all ranks' parameters equal."""
    restarts: int = checked(0, low=0)
    """Number of times the supervisor restarted the ranks after a failure."""
    resumes: int = checked(0, low=0)
    """Number of times a command resumed the run."""
    stragglers: tuple[Straggler, ...] = ()
    """Ranks that the others waited for, in the order of time."""
    wall_s: float = _seconds(0.0)
    cost_usd: float | None = None
    """Cost of the nodes while the run had them, over all attempts; None without prices."""
    usd_per_million_tokens: float | None = None
    store: StoreState | None = None
    """State of the run's store; None without one."""
    error: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Something that happened to a run, for its report's timeline."""

    kind: EventKind
    """`start` and `resume` by a command, `restart` by the supervisor after a `failure`; the last
    three are ends."""
    time_unix: float = _seconds()
    attempt: int = checked(1, low=1)
    text: str = ""
    """In the words of the error or note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """state.json: written by the supervisor."""

    run_id: str = checked(pattern=RUN_ID, wanted="a run id")
    status: RunStatus
    exit_class: str | None = None
    """None while the run is alive."""
    error: str | None = None
    failed_rank: int | None = None
    """The rank whose end is the cause, where one is."""
    supervisor_pid: int | None = checked(None, low=1)
    """None where it is not known any more, as in a state that was rebuilt."""
    node: str | None = checked(None, pattern=NODE_NAME, wanted="a node name")
    """Name of the node that the supervisor runs on; None likewise."""
    started_unix: float = _seconds()
    updated_unix: float = _seconds()
    attempt: int = checked(1, low=1)
    resumes: int = checked(0, low=0)
    """Number of attempts that a command started by resuming the run."""
    note: str | None = None
    """The last event of a run that goes on: why it was started again, and from where."""
    spent_s: float = _seconds(0.0)
    """Time that a supervisor had this run, over all attempts and resumes."""
    cost_usd: float | None = None
    """Cost of the nodes in that time; None without prices."""
    grace_s: float = checked(DEFAULT_GRACE_S, low=0)
    """Time that a stop leaves the ranks to save, a checkpoint that gets on not counted."""
    events: tuple[RunEvent, ...] = checked((), max_items=MOST_EVENTS)
    """Over all attempts and resumes, the oldest first."""
    store: StoreState | None = None
    """State of the run's store; None without one."""
    schema_version: int = SCHEMA_VERSION

    def restarts(self) -> int:
        """Return the number of restarts by the supervisor after a failure."""
        return max(0, self.attempt - 1 - self.resumes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """stop.json: lies there before a command signals the supervisor; the system leaves none."""

    pids: tuple[int, ...] = ()
    """The supervisor's process id, so that no other one takes it for its own."""
    grace_s: float | None = checked(None, low=0)
    """As RunState's, which it replaces; None keeps that."""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """job.json: written where the job is submitted, then by the job itself."""

    site: str = checked(pattern=MEMBER_NAME, wanted="a site's name")
    job_id: str = checked(pattern=_JOB_ID, wanted="a job's number")
    pid: int | None = checked(None, low=1)
    """The supervisor's process id; None before the job has begun."""
    restarts: int = checked(0, low=0)
    """How often the scheduler had queued the job again when that supervisor began."""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """One rank's heartbeat, replaced at every step."""

    rank: int = checked(low=0)
    node: str = checked(pattern=NODE_NAME, wanted="a node name")
    pid: int = checked(low=1)
    step: int = checked(low=0)
    phase: str = checked(pattern=_PHASE, wanted="a phase")
    """The phase that it was in: load, calibration, start, kernels (building them), weights
    (to every rank), step, eval, sync check, checkpoint, end."""
    time_unix: float = _seconds()
    """For people."""
    micro_step: int | None = checked(None, low=0)
    """Forward and backward passes done of this step, or batches of this evaluation."""
    micro_steps: int | None = checked(None, low=0)
    """All of them."""
    rss_bytes: int | None = checked(None, low=0, high=2**63)
    """The process's memory in RAM."""
    monotonic_s: float = _seconds(default_factory=time.monotonic, low=-MAX_SECONDS)
    """By the node's monotonic clock: nobody sets it, so it orders what happened there."""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """How one rank ended."""

    rank: int = checked(low=0)
    node: str = checked(pattern=NODE_NAME, wanted="a node name")
    exit_code: int = checked(low=0, high=255)
    """An `ExitCode`, or 128 + the signal's number."""
    signal: int | None = checked(None, low=1, high=64)
    error: str | None = None
    """The rank's own words, one line."""
    time_unix: float = _seconds()
    """For people."""
    monotonic_s: float = _seconds(default_factory=time.monotonic, low=-MAX_SECONDS)
    """As RankProgress's."""
    schema_version: int = SCHEMA_VERSION


Record: TypeAlias = Summary | RunState | StopRequest | RunJob | StoreState | RankProgress | RankExit
"""The records that are one JSON file each of a run folder."""


def point_latest_at(paths: RunPaths) -> None:
    """Make the link `latest` lead to this run, unless it leads to a newer one. Raises OSError."""
    link = paths.root.with_name(LATEST)
    there = RunPaths(link).plan
    if there.exists() and there.stat().st_mtime_ns > paths.plan.stat().st_mtime_ns:
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
    """Write `value` so that a reader finds the old file or the new one, never half of one."""
    write_whole(path, to_json(value), durable=durable)


def to_json(value: Record) -> str:
    """Return the text that `write_json` writes."""
    return json.dumps(asdict(value), indent=2) + "\n"


def read_json(cls: type[_T], path: Path) -> _T | None:
    """Read a file that `write_json` wrote; None when it is absent. Raises ConfigError."""
    fix = "Remove the file or name another run."
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
    """Read a file that `write_json` wrote; None when it is absent, damaged or not readable.

    For whoever can go on without it: a damaged record never stops a run or a command.
    """
    try:
        return read_json(cls, path)
    except ConfigError:
        return None


def default_runs_dir(*, option: str = "--runs-dir", run: str = "") -> Path:
    """Return the folder of runs where nobody has named one: `runs` in the current folder.

    Whoever made the current folder could have a link there lead to other runs, which commands then
    write to or remove. Raises UsageError for a link, with the `option` that names its place, or
    the folder `run` there.
    """
    default = Path(DEFAULT_RUNS_DIR)
    if default.is_symlink():
        place = str(Path(os.path.realpath(default), run))
        raise UsageError(
            f"{default} in this folder is a link, which is not followed unless you name its place: "
            f"{option} {quote(place) if place.isprintable() else 'DIR'}"
        )
    return default


def require_own_folders(paths: RunPaths) -> None:
    """Raise ConfigError where a folder in the run's folder is a link that leads out of it.

    Whoever made the run's folder could have any other folder read, uploaded or overwritten. The
    run's folder itself may be a link: a person names it.
    """
    for link in links_out(paths.root):
        with suppress(OSError):  # what this user may not look at
            if link.is_dir():
                raise ConfigError(
                    f"{link} is a link that leads out of the run's folder, to "
                    f"{shown(os.path.realpath(link))}: it is not followed. Move it away. To keep "
                    "a run on another disk, let the run's folder itself be the link."
                )
