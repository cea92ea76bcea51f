"""Reads the runs folder: run ids, the newest run, and the state of each run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from payload.config.run_config import RunConfig, load_run_config
from payload.core.errors import ConfigError, ExitCode, PreflightError, UsageError
from payload.core.file_hash import sha256_of
from payload.core.regular_files import can_see
from payload.core.suggested_commands import command
from payload.core.validation.names import RUN_ID
from payload.formats.checkpoint_listing import MANIFEST_FILE, checkpoint_step, newest_valid
from payload.launch.plan_record import LaunchPlan, operators_data
from payload.launch.ranks import Rank, load_ranks
from payload.machines.inventory import ClusterInventory
from payload.orchestrate.runs.mirror import locked, mirror_file, read_mirrored
from payload.run_record.approved_settings import record_approved
from payload.run_record.checkpoint_manifest_hashes import known_hashes, verdict
from payload.run_record.metrics_log import read_metrics
from payload.run_record.run_files import (
    LATEST,
    NAMES,
    RankExit,
    RankProgress,
    RunPaths,
    RunState,
    RunStatus,
    Summary,
    last_record,
    latest_folder,
    read_json,
)
from payload.run_record.run_identity import known_identity
from payload.run_record.run_lock import is_supervised
from payload.run_record.run_repair import known_config, known_state
from payload.run_record.safe_copy_paths import path_in_copy
from payload.run_record.store_state import StoreState
from payload.run_record.suggested_run_commands import no_runs
from payload.run_record.task_metrics import val_metrics
from payload.storage.checkpoints import fetch_newest
from payload.storage.isolated_reader import watched_store
from payload.storage.objects import StoreError, StoreReader, StoreRefusedError
from payload.storage.owner import require_own_store
from payload.storage.records import fetch_records
from payload.storage.restore import has_run, last_step
from payload.storage.store_access import fetch_run_atomically, is_address, run_address

# A supervisor locks the run within this time after the plan was written.
_START_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """The state of one rank, from its files."""

    rank: int
    node: str
    step: int | None
    phase: str | None
    age_s: float | None
    """Time since the rank's last heartbeat."""
    exit_code: int | None
    """Exit code of the rank; None while the rank runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The state of one run, from its files and its lock."""

    run_id: str
    status: RunStatus
    exit_class: str | None
    error: str | None
    note: str | None
    """The latest event, while the run is active."""
    failed_rank: int | None
    step: int
    steps: int
    """Number of planned steps."""
    loss: float | None
    val_loss: float | None
    val_step: int | None
    """Step of the last evaluation."""
    val_metrics: Mapping[str, float]
    """The task's metrics in the last evaluation, such as `accuracy`."""
    tokens_per_s: float | None
    age_s: float | None
    """Time since rank 0's last heartbeat."""
    store: StoreState | None
    """State of the run's store; None without a store."""
    started_unix: float
    ranks: tuple[RankView, ...]
    damaged: tuple[str, ...]
    """Messages about records that cannot be read."""


def check_new_id(run_id: str) -> None:
    """Refuse an id that is not valid as the name of a run's folder. Raises ConfigError."""
    if not RUN_ID.fullmatch(run_id):
        raise ConfigError(
            f"--run-id {run_id!r}: use letters, digits, dots, dashes and underscores, begin with a "
            f"letter or digit, and do not use {LATEST!r}."
        )


def check_named_id(run_id: str) -> None:
    """Refuse text that is not a run id, before it becomes part of a path. Raises UsageError."""
    if run_id != LATEST and not RUN_ID.fullmatch(run_id):
        raise UsageError(
            f"run {run_id!r}: not a valid run id. List the runs with: "
            + command("orchestrate", "list")
        )


def require_new(paths: RunPaths) -> None:
    """Raise ConfigError if the run exists."""
    if paths.root.exists():
        raise _taken(paths)


def _taken(paths: RunPaths) -> ConfigError:
    return ConfigError(
        f"run {paths.run_id} exists in {paths.root.parent}. Continue it with --resume "
        f"{paths.run_id}, or choose another --run-id."
    )


def create_run(runs_dir: Path, run_id: str) -> RunPaths:
    """Create a new, empty run folder. Raises ConfigError."""
    check_new_id(run_id)
    paths = RunPaths(runs_dir / run_id)
    try:
        paths.root.mkdir(parents=True)
    except FileExistsError:
        raise _taken(paths) from None
    except OSError as error:
        raise ConfigError(
            f"{paths.root}: {error.strerror}. Choose a writable folder with --runs-dir."
        ) from None
    return paths


@contextmanager
def room_for(paths: RunPaths) -> Iterator[None]:
    """Convert an OSError, such as a full disk, into a PreflightError with a fix."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise PreflightError(
            f"{paths.root} cannot be written: {error.strerror}{where}. Free disk space, or choose "
            "another folder with --runs-dir, and start the run again."
        ) from None


def all_runs(runs_dir: Path) -> list[RunPaths]:
    """Return every run, the newest first."""
    found = [(_started_unix(paths), paths.run_id, paths) for paths in _folders(runs_dir)]
    return [paths for _, _, paths in sorted(found, reverse=True)]


def find_run(runs_dir: Path, run_id: str | None) -> RunPaths:
    """Return the run with that id, or the newest one. Raises UsageError.

    `latest` is the newest run that has completed a step, if any.
    """
    runs = all_runs(runs_dir)
    if run_id == LATEST:
        latest = latest_folder(runs_dir)
        run_id = latest.name if latest and RunPaths(latest) in runs else None
    if run_id is None:
        if not runs:
            raise UsageError(no_runs(runs_dir))
        return runs[0]
    for paths in runs:
        if paths.run_id == run_id:
            return paths
    # A folder with only checkpoints is sufficient for a resume.
    bare = RunPaths(runs_dir / run_id)
    if RUN_ID.fullmatch(run_id) and bare.newest_checkpoint() is not None:
        return bare
    newest = ", ".join(paths.run_id for paths in runs[:5]) or "none"
    raise UsageError(f"no run {run_id!r} in {runs_dir}. The newest runs: {newest}.")


def view_run(paths: RunPaths, *, now_unix: float, alive: bool | None = None) -> RunView:
    """Read the state of a run, ignoring unreadable files.

    `alive` is the state that the run's site reports; without a report, the run's lock decides.
    """
    state = known_state(paths)
    config, config_errors = _config(paths)
    rows = read_metrics(paths.metrics)
    trained: dict[str, Any] = dict(next((row for row in reversed(rows) if "loss" in row), {}))
    evaluated = next((row for row in reversed(rows) if "val_loss" in row), None)
    ranks = tuple(_view_ranks(paths, now_unix=now_unix))
    status, exit_class, error = _status(paths, state, now_unix=now_unix, alive=alive)
    return RunView(
        run_id=paths.run_id,
        status=status,
        exit_class=exit_class,
        error=error,
        note=state.note if state else None,
        failed_rank=state.failed_rank if state else None,
        step=trained.get("step", 0),
        steps=config.train.steps,
        loss=trained.get("loss"),
        val_loss=evaluated["val_loss"] if evaluated else None,
        val_step=evaluated["step"] if evaluated else None,
        val_metrics=val_metrics(evaluated) if evaluated else {},
        tokens_per_s=trained.get("tokens_per_s"),
        age_s=ranks[0].age_s if ranks else None,
        store=state.store if state else None,
        started_unix=state.started_unix if state else _started_unix(paths),
        ranks=ranks,
        damaged=(*config_errors, *_damaged(paths)),
    )


def running_here(runs_dir: Path) -> list[str]:
    """Return the ids of the runs that have a living supervisor."""
    return [paths.run_id for paths in all_runs(runs_dir) if is_supervised(paths)]


def is_copy(paths: RunPaths) -> bool:
    """Return whether the local folder is only a copy of a run on a cluster."""
    with suppress(ConfigError):
        return not ClusterInventory.load(paths.inventory).access.shares_folder
    return mirror_file(paths).exists()


def _folders(runs_dir: Path) -> Iterator[RunPaths]:
    """Yield every folder that has at least one of a run's files."""
    if not runs_dir.is_dir():
        return
    for folder in runs_dir.iterdir():
        paths = RunPaths(folder)
        signs = [paths.plan, paths.ranks, paths.inventory, paths.hosts, paths.state, paths.lock]
        signs.append(paths.job)
        is_folder = RUN_ID.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink()
        if is_folder and any(map(os.path.lexists, signs)):
            yield paths


def _started_unix(paths: RunPaths) -> float:
    """Return when the plan was written; without a plan, the time of another file of the run."""
    for path in (paths.plan, paths.config, paths.root):
        with suppress(OSError):
            return path.lstat().st_mtime
    return 0.0


def _config(paths: RunPaths) -> tuple[RunConfig, list[str]]:
    """Return the run's settings, and the error of a damaged run.toml."""
    try:
        return load_run_config(paths.config), []
    except ConfigError as error:
        return known_config(paths), [str(error)]


def _damaged(paths: RunPaths) -> Iterator[str]:
    for load, path in (
        (LaunchPlan.load, paths.plan),
        (ClusterInventory.load, paths.inventory),
        (load_ranks, paths.ranks),
        (partial(read_json, RunState), paths.state),
        (partial(read_json, Summary), paths.summary),
    ):
        try:
            load(path)
        except ConfigError as error:
            yield str(error)


def _status(
    paths: RunPaths, state: RunState | None, *, now_unix: float, alive: bool | None
) -> tuple[RunStatus, str | None, str | None]:
    """Return status, exit class and error; a run without a living supervisor counts as failed."""
    has_ended = state is not None and state.status not in ("starting", "running")
    if alive:
        # The scheduler may have requeued the job of an ended run, or the run waits for the store.
        is_new = state is None or (has_ended and not is_supervised(paths))
        return ("starting" if state is None or is_new else state.status), None, None
    if state is not None and has_ended:
        return state.status, state.exit_class, state.error
    mirrored = read_mirrored(paths)
    if mirrored.alive if mirrored else is_supervised(paths):
        return (state.status if state else "starting"), None, None
    is_new = alive is None and 0 <= now_unix - _started_unix(paths) < _START_S
    if mirrored is None and state is None and is_new:
        return "starting", None, None
    return (
        "failed",
        ExitCode.RANK_LOST.label,
        "the supervisor was killed, or the machine restarted"
        if state
        else f"the supervisor never began; see {paths.supervisor_log}",
    )


def _view_ranks(paths: RunPaths, *, now_unix: float) -> Iterator[RankView]:
    ranks: tuple[Rank, ...] = ()
    with suppress(ConfigError):
        ranks = load_ranks(paths.ranks)
    for rank in ranks:
        progress = last_record(RankProgress, paths.rank_progress(rank.rank))
        ended = last_record(RankExit, paths.rank_exit(rank.rank))
        yield RankView(
            rank=rank.rank,
            node=rank.node,
            step=progress.step if progress else None,
            phase=progress.phase if progress else None,
            age_s=max(0.0, now_unix - progress.time_unix) if progress else None,
            exit_code=ended.exit_code if ended else None,
        )


_OTHER_FOLDER = "Fetch the stored run into another folder with --runs-dir DIR."


def resumable_run(
    named: str,
    *,
    runs_dir: Path,
    overrides: Sequence[str],
    settings: Callable[[], RunConfig],
    has_config: bool,
    env: Mapping[str, str],
    say: Callable[[str], None],
) -> tuple[RunPaths, Sequence[str]]:
    """Return the run that `--resume` names; if it is not local, fetch it from its store.

    Also returns `overrides` with additions: the store of a fetched run, and the path of the run's
    data. The path is not added if the command line has a config file (`has_config`), because the
    config file sets the path. `settings` is a function that returns the config of this command, not
    of the resumed run. Raises UsageError and ConfigError.
    """
    if is_address(named):
        address = run_address(named)
        overrides = [f"storage.results={address.parent()}", *overrides]
    elif named == LATEST or (runs_dir / named).exists():
        paths = find_run(runs_dir, named)
        return paths, overrides if has_config else [*_data_of(paths), *overrides]
    else:
        results = settings().storage.address()
        if results is None:
            return find_run(runs_dir, named), overrides  # raises the error
        address = results.under(named)
        # Another user with write access to the store could name another store in run.toml.
        overrides = [f"storage.results={results}", *overrides]
    paths = RunPaths(runs_dir / address.last())
    is_local = paths.root.exists()
    try:
        with watched_store(address, env=env, say=say) as store:
            if not is_local:
                fetch_run_atomically(store, paths)
            own = known_identity(paths)
            require_own_store(store, own, place=str(paths.root), fix=_OTHER_FOLDER)
    except (StoreError, StoreRefusedError) as error:
        if not is_local:
            raise
        # The machine that executes the run compares the two runs when it restores from the store.
        say(f"warning: {error} The run in {paths.root} was not compared with the run in the store.")
    if not is_local:
        say(f"run {paths.run_id} is fetched from {address}")
    return paths, overrides if has_config else [*_data_of(paths), *overrides]


def _data_of(paths: RunPaths) -> list[str]:
    """Return an override of `data.dir` if run.toml names a folder that does not exist on this
    machine.

    On a head, run.toml has the path on the head, and plan.json has the operator's local path.
    """
    with suppress(ConfigError):
        named = operators_data(paths.plan)
        if named and not can_see(Path(load_run_config(paths.config).data.dir)):
            return [f"data.dir={named}"]
    return []


def collect_from_store(
    store: StoreReader, paths: RunPaths, *, say: Callable[[str], None]
) -> Path | None:
    """Fetch a run's records and newest valid checkpoint; return the checkpoint's path, if any.

    The user has named `store`, so a later resume may write to it. Existing local files are kept,
    except records of a run that has progressed further in the store. Raises ConfigError if the
    store has no run or a different run under that id, UsageError for a run on this machine, and
    StoreError.
    """
    if not paths.root.exists():
        fetch_run_atomically(store, paths)
    elif not has_run(store):
        raise ConfigError(
            f"{store.address}: contains no run. List the runs of a store: "
            f"{command('storage', 'list', 'gs://BUCKET/PREFIX')}"
        )
    # Checked even if the folder was just created: a run with that id may have begun since.
    _require_copy(store, paths)
    own = known_identity(paths)
    require_own_store(store, own, place=str(paths.root), fix=_OTHER_FOLDER)
    with locked(paths, "copy"):
        _take_records(store, paths, say=say)
    with locked(paths, "checkpoint"):
        return _take_checkpoint(store, paths, say=say)


def _require_copy(store: StoreReader, paths: RunPaths) -> None:
    """Raise UsageError for a run that is, or was, supervised on this machine."""
    own = any(map(os.path.lexists, (paths.inventory, paths.lock, paths.job)))
    if is_supervised(paths) or (own and not is_copy(paths)):
        raise UsageError(
            f"run {paths.run_id} in {paths.root.parent} was started on this machine, so it is not "
            f"replaced. Fetch {store.address} into another folder with --runs-dir DIR."
        )


def _take_records(store: StoreReader, paths: RunPaths, *, say: Callable[[str], None]) -> None:
    """Fetch the missing records, or all records if the run has progressed further in the store."""
    gone = {path.name for path in (NAMES.identity, NAMES.inventory, NAMES.hosts, NAMES.ranks)}
    names = [each.name for each in store.entries() if each.name not in gone]
    record_approved(paths, {"storage.results": str(store.address.parent())})
    with TemporaryDirectory(prefix=".stored.", dir=paths.root) as folder:
        staged = RunPaths(Path(folder))
        fetch_records(store, staged.root, names=[paths.metrics.name, paths.state.name])
        if _reach(staged) <= _reach(paths):
            names = [name for name in names if not os.path.lexists(paths.root / name)]
        for name in fetch_records(store, staged.root, names=names, say=say) if names else ():
            (staged.root / name).replace(path_in_copy(paths, name))


def _reach(paths: RunPaths) -> tuple[int, int, bool]:
    """Return a run's recorded progress: steps, attempts, and whether it has ended."""
    state = last_record(RunState, paths.state)
    if state is None:
        return last_step(paths.metrics), 0, False
    return last_step(paths.metrics), state.attempt, state.exit_class is not None


def _take_checkpoint(
    store: StoreReader, paths: RunPaths, *, say: Callable[[str], None]
) -> Path | None:
    """Fetch the newest checkpoint if it is newer than all local checkpoints; return the newest
    local one."""
    path_in_copy(paths, paths.checkpoints.name)
    known = known_hashes(paths)
    here = newest_valid(paths.checkpoints)
    recorded = known.by_name().get(here.name) if here is not None else None
    problem = ""
    if here is not None and known.is_gap(here.name):
        problem = "but the head has not uploaded this checkpoint"
    elif here is not None and recorded not in (None, sha256_of(here / MANIFEST_FILE)):
        problem = f"but its manifest differs from the one that the head wrote (sha256 {recorded})"
    if problem:
        say(
            f"warning: {here} was already on this machine, {problem}. If this checkpoint came from "
            "a store, move it away, and collect again"
        )
    found = fetch_newest(
        store,
        paths.checkpoints,
        run=known_identity(paths),
        known=known,
        passed_over=lambda name, why: say(f"warning: {name} in the store is skipped: {why}"),
        after_step=-1 if here is None else checkpoint_step(here),
    )
    if found is not None:
        say(f"{found.name} from {store.address}: {verdict(found.name, known)}")
    return found or here
