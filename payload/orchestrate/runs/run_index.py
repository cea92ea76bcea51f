"""The runs folder: names, the newest run, and what is known of each."""

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
from payload.formats.checkpoint_listing import MANIFEST_FILE, checkpoint_step, newest_sound
from payload.launch.plan import LaunchPlan, operators_data
from payload.launch.ranks import Rank, load_ranks
from payload.machines.inventory import ClusterInventory
from payload.orchestrate.runs.mirror import alone, mirror_file, read_mirrored
from payload.run_record.approved_settings import note_named
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
    read_json,
)
from payload.run_record.run_identity import known_identity
from payload.run_record.run_lock import is_supervised
from payload.run_record.run_repair import known_config, known_state
from payload.run_record.safe_copy_paths import inside
from payload.run_record.store_state import StoreState
from payload.storage.checkpoints import fetch_newest
from payload.storage.isolated_reader import watched_store
from payload.storage.objects import StoreError, StoreReader, StoreRefusedError
from payload.storage.owner import require_own_store
from payload.storage.records import fetch_records
from payload.storage.restore import has_run, last_step
from payload.storage.store_access import fetch_whole, is_address, run_address

# A supervisor takes its lock this soon after the plan was written.
_START_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank, as far as its files tell."""

    rank: int
    node: str
    step: int | None
    phase: str | None
    age_s: float | None
    """Since its last heartbeat."""
    exit_code: int | None
    """None while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run, as far as its files and its lock tell."""

    run_id: str
    status: RunStatus
    exit_class: str | None
    error: str | None
    note: str | None
    """The latest event, while the run goes on."""
    failed_rank: int | None
    step: int
    steps: int
    """Planned."""
    loss: float | None
    val_loss: float | None
    tokens_per_s: float | None
    age_s: float | None
    """Since rank 0's last heartbeat."""
    store: StoreState | None
    """State of the run's store; None without one."""
    started_unix: float
    ranks: tuple[RankView, ...]
    damaged: tuple[str, ...]
    """Records that cannot be read, one sentence each."""


def check_new_id(run_id: str) -> None:
    """Refuse a name that could lead out of the runs folder or be lost in it. Raises ConfigError."""
    if not RUN_ID.fullmatch(run_id):
        raise ConfigError(
            f"--run-id {run_id!r}: use letters, digits, dots, dashes and underscores, a letter or "
            f"digit first, and not {LATEST!r}."
        )


def check_named_id(run_id: str) -> None:
    """Refuse what is no run's name, before it becomes part of a path. Raises UsageError."""
    if run_id != LATEST and not RUN_ID.fullmatch(run_id):
        raise UsageError(
            f"run {run_id!r}: no run has such a name. See them with: "
            + command("orchestrate", "list")
        )


def require_new(paths: RunPaths) -> None:
    """Raise ConfigError for a run that exists."""
    if paths.root.exists():
        raise _taken(paths)


def _taken(paths: RunPaths) -> ConfigError:
    return ConfigError(
        f"run {paths.run_id} exists in {paths.root.parent}. Continue it with --resume "
        f"{paths.run_id}, or choose another --run-id."
    )


def create_run(runs_dir: Path, run_id: str) -> RunPaths:
    """Make a new, empty run folder. Raises ConfigError."""
    check_new_id(run_id)
    paths = RunPaths(runs_dir / run_id)
    try:
        paths.root.mkdir(parents=True)
    except FileExistsError:
        raise _taken(paths) from None
    except OSError as error:
        raise ConfigError(
            f"{paths.root}: {error.strerror}. Name a folder you can write to with --runs-dir."
        ) from None
    return paths


@contextmanager
def room_for(paths: RunPaths) -> Iterator[None]:
    """Turn what the disk refuses into an error that says what to do about it."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise PreflightError(
            f"{paths.root} cannot be written: {error.strerror}{where}. Free disk space or name "
            "another folder with --runs-dir, and start the run again."
        ) from None


def all_runs(runs_dir: Path) -> list[RunPaths]:
    """Return every run, the newest first."""
    found = [(_begun_unix(paths), paths.run_id, paths) for paths in _folders(runs_dir)]
    return [paths for _, _, paths in sorted(found, reverse=True)]


def find_run(runs_dir: Path, run_id: str | None) -> RunPaths:
    """Return the run of that name, or the newest. Raises UsageError.

    `latest` is the newest that has finished a step, where one has.
    """
    runs = all_runs(runs_dir)
    if run_id == LATEST and (runs_dir / LATEST).is_symlink():
        run_id = (runs_dir / LATEST).readlink().name
        run_id = run_id if any(paths.run_id == run_id for paths in runs) else None
    if run_id is None or run_id == LATEST:
        if not runs:
            raise UsageError(
                f"no run in {runs_dir}. Start one with {command('orchestrate', 'run')}, or name "
                "another folder with --runs-dir."
            )
        return runs[0]
    for paths in runs:
        if paths.run_id == run_id:
            return paths
    # Its checkpoints alone are enough to go on from.
    alone = RunPaths(runs_dir / run_id)
    if RUN_ID.fullmatch(run_id) and alone.newest_checkpoint() is not None:
        return alone
    names = ", ".join(paths.run_id for paths in runs[:5]) or "none"
    raise UsageError(f"no run {run_id!r} in {runs_dir}. The newest there: {names}.")


def view_run(paths: RunPaths, *, now_unix: float, alive: bool | None = None) -> RunView:
    """Read everything about a run, as far as it can be read.

    `alive` is what its site says; None is for its lock to tell.
    """
    state = known_state(paths)
    rows = read_metrics(paths.metrics)
    trained: dict[str, Any] = dict(next((row for row in reversed(rows) if "loss" in row), {}))
    evaluated = [row["val_loss"] for row in rows if "val_loss" in row]
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
        steps=known_config(paths).train.steps,
        loss=trained.get("loss"),
        val_loss=evaluated[-1] if evaluated else None,
        tokens_per_s=trained.get("tokens_per_s"),
        age_s=ranks[0].age_s if ranks else None,
        store=state.store if state else None,
        started_unix=state.started_unix if state else _begun_unix(paths),
        ranks=ranks,
        damaged=tuple(_damaged(paths)),
    )


def running_here(runs_dir: Path) -> list[str]:
    """Return the ids of the runs that a living supervisor holds."""
    return [paths.run_id for paths in all_runs(runs_dir) if is_supervised(paths)]


def is_copy(paths: RunPaths) -> bool:
    """Tell whether a run is on a cluster, and the folder here only its copy."""
    with suppress(ConfigError):
        return not ClusterInventory.load(paths.inventory).access.shares_folder
    return mirror_file(paths).exists()


def _folders(runs_dir: Path) -> Iterator[RunPaths]:
    """Yield every folder with a run of this program; no one file of it is needed."""
    if not runs_dir.is_dir():
        return
    for folder in runs_dir.iterdir():
        paths = RunPaths(folder)
        signs = [paths.plan, paths.ranks, paths.inventory, paths.hosts, paths.state, paths.lock]
        signs.append(paths.job)
        is_folder = RUN_ID.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink()
        if is_folder and any(map(os.path.lexists, signs)):
            yield paths


def _begun_unix(paths: RunPaths) -> float:
    """Return when the plan was written, or what else there is of the run."""
    for path in (paths.plan, paths.config, paths.root):
        with suppress(OSError):
            return path.lstat().st_mtime
    return 0.0


def _damaged(paths: RunPaths) -> Iterator[str]:
    for load, path in (
        (load_run_config, paths.config),
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
    """Return status, exit class and error; a run whose supervisor is gone has failed."""
    has_ended = state is not None and state.status not in ("starting", "running")
    if alive:
        # A scheduler may have queued an ended run's job again, or the store is waited for.
        is_new = state is None or (has_ended and not is_supervised(paths))
        return ("starting" if state is None or is_new else state.status), None, None
    if state is not None and has_ended:
        return state.status, state.exit_class, state.error
    mirrored = read_mirrored(paths)
    if mirrored.alive if mirrored else is_supervised(paths):
        return (state.status if state else "starting"), None, None
    is_new = alive is None and 0 <= now_unix - _begun_unix(paths) < _START_S
    if mirrored is None and state is None and is_new:
        return "starting", None, None
    return (
        "failed",
        ExitCode.RANK_LOST.label,
        "the supervisor is gone without a word (killed, or the machine restarted)"
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


_OTHER_FOLDER = "Bring the stored run into another folder with --runs-dir DIR."


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
    """Return the run that `--resume` names, in the runs folder or brought from its store.

    Also the overrides, by which a run that comes from a store stays in that store and finds its
    data; not where a config file was given, which names its own (`has_config`).
    `settings` are what the command knows without the run. Raises UsageError and ConfigError.
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
            return find_run(runs_dir, named), overrides  # which says that there is none
        address = results.under(named)
        # Whoever may write to the store could have another one in the run's own run.toml.
        overrides = [f"storage.results={results}", *overrides]
    paths = RunPaths(runs_dir / address.last())
    is_here = paths.root.exists()
    try:
        with watched_store(address, env=env, say=say) as store:
            if not is_here:
                fetch_whole(store, paths)
            own = known_identity(paths)
            require_own_store(store, own, place=str(paths.root), fix=_OTHER_FOLDER)
    except (StoreError, StoreRefusedError) as error:
        if not is_here:
            raise
        # The place that runs it restores from the store, and compares then.
        say(f"warning: {error} The run in {paths.root} is not compared with the store's.")
    if not is_here:
        say(f"run {paths.run_id} comes from {address}")
    return paths, overrides if has_config else [*_data_of(paths), *overrides]


def _data_of(paths: RunPaths) -> list[str]:
    """Return the setting of `data.dir` for a run whose run.toml names a folder that is not here.

    A head's run.toml has the folder of that node. What the operator had named is in plan.json.
    """
    with suppress(ConfigError):
        named = operators_data(paths.plan)
        if named and not can_see(Path(load_run_config(paths.config).data.dir)):
            return [f"data.dir={named}"]
    return []


def collect_from_store(
    store: StoreReader, paths: RunPaths, *, say: Callable[[str], None]
) -> Path | None:
    """Bring a run's records and newest sound checkpoint here; return where that is, if any.

    `store` is one that a person has named, and a resume may write to it from then on.
    What is here stays, but for records of a run that has gone further in the store. Raises
    ConfigError where the store has no such run, or another one of its name, UsageError for a run of
    this machine, and StoreError.
    """
    if not paths.root.exists():
        fetch_whole(store, paths)
    elif not has_run(store):
        raise ConfigError(f"{store.address}: there is no run.")
    # Also of a folder that was not there a moment ago: a run of that name may have begun.
    _require_copy(store, paths)
    own = known_identity(paths)
    require_own_store(store, own, place=str(paths.root), fix=_OTHER_FOLDER)
    with alone(paths, "copy"):
        _take_records(store, paths, say=say)
    with alone(paths, "checkpoint"):
        return _take_checkpoint(store, paths, say=say)


def _require_copy(store: StoreReader, paths: RunPaths) -> None:
    """Raise UsageError for a run that is, or was, supervised on this machine."""
    own = any(map(os.path.lexists, (paths.inventory, paths.lock, paths.job)))
    if is_supervised(paths) or (own and not is_copy(paths)):
        raise UsageError(
            f"run {paths.run_id} in {paths.root.parent} is of this machine, so nothing of it is "
            f"replaced. Bring {store.address} into another folder with --runs-dir DIR."
        )


def _take_records(store: StoreReader, paths: RunPaths, *, say: Callable[[str], None]) -> None:
    """Bring the records that are not here; all of them where the store's run is further."""
    gone = {path.name for path in (NAMES.identity, NAMES.inventory, NAMES.hosts, NAMES.ranks)}
    names = [each.name for each in store.entries() if each.name not in gone]
    note_named(paths, {"storage.results": str(store.address.parent())})
    with TemporaryDirectory(prefix=".stored.", dir=paths.root) as folder:
        staged = RunPaths(Path(folder))
        fetch_records(store, staged.root, names=[paths.metrics.name, paths.state.name])
        if _reach(staged) <= _reach(paths):
            names = [name for name in names if not os.path.lexists(paths.root / name)]
        for name in fetch_records(store, staged.root, names=names, say=say) if names else ():
            (staged.root / name).replace(inside(paths, name))


def _reach(paths: RunPaths) -> tuple[int, int, bool]:
    """Return how far a run has got by its records: steps, attempts, and whether it has ended."""
    state = last_record(RunState, paths.state)
    if state is None:
        return last_step(paths.metrics), 0, False
    return last_step(paths.metrics), state.attempt, state.exit_class is not None


def _take_checkpoint(
    store: StoreReader, paths: RunPaths, *, say: Callable[[str], None]
) -> Path | None:
    """Bring the newest checkpoint where it is newer; return the newest that is here then."""
    inside(paths, paths.checkpoints.name)
    known = known_hashes(paths)
    here = newest_sound(paths.checkpoints)
    wrote = known.by_name().get(here.name) if here is not None else None
    if here is not None and wrote not in (None, sha256_of(here / MANIFEST_FILE)):
        say(
            f"warning: {here} was here already, and its manifest is not the one that the head "
            f"wrote (sha256 {wrote}). Where it came from a store, move it away, and collect again"
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
