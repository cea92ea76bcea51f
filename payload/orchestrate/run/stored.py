"""Runs that a store has: found by name or address when no machine has them any more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from payload.checkpoint_files import checkpoint_step, newest_sound
from payload.errors import ConfigError, ExitCode, PreflightError, UsageError
from payload.hints import command
from payload.orchestrate.run.mirror import alone, inside
from payload.orchestrate.run.store import find_run, is_copy
from payload.results import LATEST, RunPaths, RunState, last_record
from payload.run_config import RunConfig, load_run_config
from payload.run_lock import is_supervised
from payload.storage.checkpoints import fetch_newest, whole_checkpoints
from payload.storage.data import fetch_data
from payload.storage.objects import ObjectStore, open_store
from payload.storage.records import fetch_records
from payload.storage.restore import fetch_run, has_run, last_step
from payload.store_address import (
    StoreAddress,
    is_bucket_address,
    parse_store_address,
    settled_results,
)
from payload.untrusted import RUN_ID, one_line, shown

TRY_STORE_S = 60.0
"""Longest that an attempt at a store takes."""
_END_S = 0.2
_WITHOUT = 'Or run without it: --set storage.results="none".'


def is_address(text: str | None) -> bool:
    """Say whether a run is named by its address in a store: no run's id has a slash."""
    return text is not None and "/" in text


def run_address(text: str) -> StoreAddress:
    """Read the address of one run. Raises UsageError and ConfigError."""
    address = parse_store_address(text, setting="RUN")
    if not RUN_ID.fullmatch(address.last()):
        raise UsageError(
            f"run {shown(text)}: its last part is no run's id. See what a store has: "
            + command("storage", "list", "gs://BUCKET/PREFIX")
        )
    return address


def settle_results(config: RunConfig, *, bucket: str | None) -> RunConfig:
    """Return the config with what `storage.results = "auto"` stands for with this bucket."""
    results = settled_results(config.storage.results, bucket=bucket)
    return replace(config, storage=replace(config.storage, results=results))


def resumable_run(
    named: str,
    *,
    runs_dir: Path,
    overrides: Sequence[str],
    settings: Callable[[], RunConfig],
    say: Callable[[str], None],
) -> tuple[RunPaths, Sequence[str]]:
    """Return the run that `--resume` names, in the runs folder or brought from its store.

    Also the overrides, by which a run that is named by its address stays in that store.
    `settings` are what the command knows without the run. Raises UsageError and ConfigError.
    """
    if is_address(named):
        address = run_address(named)
        overrides = [f"storage.results={address.parent()}", *overrides]
    elif named == LATEST or (runs_dir / named).exists():
        return find_run(runs_dir, named), overrides
    else:
        results = settings().storage.address()
        if results is None:
            return find_run(runs_dir, named), overrides  # which says that there is none
        address = results.under(named)
    paths = RunPaths(runs_dir / address.last())
    if not paths.root.exists():
        _fetch_whole(open_store(address), paths)
        say(f"run {paths.run_id} comes from {address}")
    return paths, overrides


def require_new_in_store(config: RunConfig, run_id: str, *, env: Mapping[str, str]) -> None:
    """Try the run's store from this machine, as `try_store_here`, where it has one."""
    results = config.storage.address()
    if results is not None:
        try_store_here(results, env=env, new_run=run_id)


def try_store_here(
    address: StoreAddress,
    *,
    env: Mapping[str, str],
    new_run: str | None = None,
    timeout_s: float = TRY_STORE_S,
) -> None:
    """Raise ConfigError or PreflightError where this machine cannot write to a store.

    The same holds for `new_run`, a run's id, that the store has already. The attempt is a process
    of its own: one that touches a dead mount hangs, and cannot even be killed.
    """
    words = [sys.executable, *check_words(address, new_run=new_run)]
    process = subprocess.Popen(
        words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        _, said = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise PreflightError(
            f"{address} did not answer within {timeout_s:.0f} s. Is it mounted, and does its "
            f"server run? {_WITHOUT}"
        ) from None
    finally:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    require_stored(process.returncode, said)


def check_words(address: StoreAddress, *, new_run: str | None) -> list[str]:
    """Return Python's arguments that try a store."""
    run = [] if new_run is None else ["--new", new_run]
    return ["-m", "payload.storage", "check", *run, str(address)]


def require_stored(status: int, said: bytes, *, where: str = "") -> None:
    """Raise ConfigError or PreflightError for the end of an attempt at a store, but for success."""
    if status == ExitCode.OK:
        return
    lines = said.decode(errors="replace").strip().splitlines() or ["no reason given"]
    words = where + one_line(lines[-1].removeprefix("error: "))
    if status == ExitCode.CONFIG:
        raise ConfigError(words)
    raise PreflightError(f"{words} {_WITHOUT}")


def bring_data_here(config: RunConfig, *, say: Callable[[str], None]) -> None:
    """Bring data that is in a bucket to this machine's cache. Raises DataError and StoreError."""
    if is_bucket_address(config.data.dir):
        address = parse_store_address(config.data.dir, setting="data.dir")
        fetch_data(open_store(address), config.data.folder(), say=say)


def collect_from_store(
    store: ObjectStore, paths: RunPaths, *, say: Callable[[str], None]
) -> Path | None:
    """Bring a run's records and newest sound checkpoint here; return where that is, if any.

    What is here stays, but for records of a run that has gone further in the store. Raises
    ConfigError where the store has no such run, UsageError for a run of this machine, and
    StoreError.
    """
    if not paths.root.exists():
        _fetch_whole(store, paths)
    else:
        _require_copy(store, paths)
        if not has_run(store):
            raise ConfigError(f"{store.address}: there is no run.")
    with alone(paths, "copy"):
        _take_records(store, paths)
    with alone(paths, "checkpoint"):
        return _take_checkpoint(store, paths, say=say)


def _require_copy(store: ObjectStore, paths: RunPaths) -> None:
    """Raise UsageError for a run that is, or was, supervised on this machine."""
    own = any(map(os.path.lexists, (paths.inventory, paths.lock, paths.job)))
    if is_supervised(paths) or (own and not is_copy(paths)):
        raise UsageError(
            f"run {paths.run_id} in {paths.root.parent} is of this machine, so nothing of it is "
            f"replaced. Bring {store.address} into another folder with --runs-dir DIR."
        )


def _take_records(store: ObjectStore, paths: RunPaths) -> None:
    """Bring the records that are not here; all of them where the store's run is further."""
    gone = ("inventory.json", "hosts", "ranks.json")
    names = [each.name for each in store.entries() if each.name not in gone]
    with TemporaryDirectory(prefix=".stored.", dir=paths.root) as folder:
        staged = RunPaths(Path(folder))
        fetch_records(store, staged.root, names=[paths.metrics.name, paths.state.name])
        if _reach(staged) <= _reach(paths):
            names = [name for name in names if not os.path.lexists(paths.root / name)]
        for name in fetch_records(store, staged.root, names=names) if names else ():
            (staged.root / name).replace(inside(paths, name))


def _reach(paths: RunPaths) -> tuple[int, int, bool]:
    """Return how far a run has got by its records: steps, attempts, and whether it has ended."""
    state = last_record(RunState, paths.state)
    if state is None:
        return last_step(paths.metrics), 0, False
    return last_step(paths.metrics), state.attempt, state.exit_class is not None


def _take_checkpoint(
    store: ObjectStore, paths: RunPaths, *, say: Callable[[str], None]
) -> Path | None:
    """Bring the newest checkpoint where it is newer; return the newest that is here then."""
    stored = whole_checkpoints(store)
    here = newest_sound(paths.checkpoints)
    if here is not None and (
        not stored or checkpoint_step(Path(stored[-1])) <= checkpoint_step(here)
    ):
        return here
    found = fetch_newest(
        store,
        paths.checkpoints,
        passed_over=lambda name, why: say(f"warning: {name} in the store is passed over: {why}"),
    )
    return max(filter(None, (here, found)), key=checkpoint_step, default=None)


def store_of(paths: RunPaths) -> ObjectStore | None:
    """Return the store that a run's settings name; None where they name none."""
    with suppress(ConfigError):
        address = load_run_config(paths.config).storage.address()
        return None if address is None else open_store(address.under(paths.run_id))
    return None


def _fetch_whole(store: ObjectStore, paths: RunPaths) -> None:
    """Make the run's folder with the records that a resume reads: whole, or absent."""
    runs_dir = paths.root.parent
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{paths.run_id}.", dir=runs_dir))
    except OSError as error:
        raise ConfigError(
            f"{runs_dir}: {error.strerror}. Name a folder you can write to with --runs-dir."
        ) from None
    try:
        fetch_run(store, RunPaths(staging))
        staging.chmod(0o755)
        staging.rename(paths.root)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
