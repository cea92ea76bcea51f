"""Restore a run from the store: its records and its newest valid checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from payload.config.store_address import StoreAddress
from payload.core.errors import ConfigError, TileforgeError
from payload.core.files import write_whole
from payload.core.printable_text import shown_name
from payload.formats.checkpoint_listing import best_step, checkpoint_step, newest_valid
from payload.run_record.checkpoint_manifest_hashes import ManifestHashes, known_hashes, verdict
from payload.run_record.metrics_log import read_val_losses, stream_metrics
from payload.run_record.run_files import NAMES, RunPaths, last_record
from payload.run_record.run_identity import RunIdentity, known_identity
from payload.run_record.store_state import StoreState
from payload.storage.checkpoints import fetch_checkpoint, fetch_newest, whole_checkpoints
from payload.storage.objects import StoreError, StoreReader
from payload.storage.opening import open_store
from payload.storage.owner import OWNER, require_own_store, stored_identity
from payload.storage.records import fetch_records

_TRY_S = 15.0
TO_RESUME = tuple(
    path.name for path in (NAMES.config, NAMES.plan, NAMES.metrics, NAMES.state, NAMES.summary)
)
"""Records that a resume reads. The inventory is not one of them, because the new machine has its
own."""


def has_run(store: StoreReader) -> bool:
    """Return True if the store has a run at its address."""
    return any(entry.name in (OWNER, NAMES.config.name) for entry in store.entries())


def require_absent(address: StoreAddress) -> None:
    """Raise ConfigError if the store already has a run at the address of a new run."""
    if has_run(open_store(address, timeout_s=_TRY_S, retry_s=_TRY_S)):
        raise ConfigError(
            f"{address}: the store has a run with this id. Continue it with --resume {address}, or "
            "choose another --run-id."
        )


def fetch_run(store: StoreReader, paths: RunPaths) -> None:
    """Create the folder of a run that exists only in the store, so that it can be resumed.

    Raises ConfigError if the run is missing from the store.
    """
    if not has_run(store):
        found = ", ".join(map(shown_name, store.siblings()[:10])) or "no run"
        raise ConfigError(f"{store.address}: no run found. The store has: {found}.")
    fetch_records(store, paths.root, names=TO_RESUME)
    # The identity is read from owner.json in the store; for a run of an older release, only the
    # token exists.
    stored = stored_identity(store) or RunIdentity()
    is_older = stored.is_older or stored.identity is None
    token = stored.store_token if stored.identity is None else None
    run = RunIdentity(identity=stored.identity, store_token=token, is_older=is_older)
    write_whole(paths.identity, run.to_json())


def restore(store: StoreReader, paths: RunPaths, *, say: Callable[[str], None]) -> Path | None:
    """Download the store's newest checkpoint if it is newer than all local checkpoints.

    Also downloads the run's records to the folder `restored`. The stored metrics replace the local
    metrics if the stored metrics have a later step. Returns the path of the downloaded checkpoint;
    None if a local checkpoint is at least as new, or without any checkpoint. The last line that
    `say` receives states the result.

    Raises ConfigError if the store has a different run with this name. Raises StoreError if the
    store fails, or if the run would start from scratch although it has made progress.
    """
    run = known_identity(paths)
    require_own_store(store, run, place=str(paths.root))
    local = newest_valid(paths.checkpoints)
    local_step = checkpoint_step(local) if local else -1
    if not whole_checkpoints(store):
        _require_same_store(store, paths, local=local)
    damaged: list[str] = []

    def skip(name: str, reason: str) -> None:
        damaged.append(name)
        say(f"warning: {name} in the store is skipped: {reason}")

    known = known_hashes(paths)
    found = fetch_newest(
        store,
        paths.checkpoints,
        run=run,
        known=known,
        passed_over=skip,
        say=say,
        after_step=local_step,
    )
    if found is None and local is None and damaged:
        raise StoreError(
            f"{store.address}: all checkpoints are damaged; the newest is {damaged[0]}. See "
            "logs/storage.log for each problem."
        )
    if found is None and local is not None:
        if damaged:
            say(f"warning: the run resumes from {local.name} on the disk: {_are_damaged(damaged)}")
        return None
    fetch_records(store, paths.restored.root, say=say)
    if found is None:
        say(f"note: neither {store.address} nor the disk has a checkpoint yet")
        return None
    _take_metrics(paths)
    _fetch_best(store, paths, run, known, newest=found, say=say)
    skipped = f"; {_are_damaged(damaged)}" if damaged else ""
    how = verdict(found.name, known)
    say(f"the run resumes from {found.name}, downloaded from {store.address} ({how}){skipped}")
    return found


def _require_same_store(store: StoreReader, paths: RunPaths, *, local: Path | None) -> None:
    """Raise StoreError if the run is missing from the store, for example on a path that is not
    mounted."""
    if has_run(store):
        return
    before = last_record(StoreState, paths.store_state)
    had = before.checkpoint if before and before.address == str(store.address) else None
    if local is None or had is not None:
        raise StoreError(
            f"{store.address}: no run found{f', although {had} was stored there' if had else ''}. "
            "If the store is a folder that must be mounted, mount this folder."
        )


def _are_damaged(names: Sequence[str]) -> str:
    return f"{', '.join(names)} in the store cannot be used"


def _take_metrics(paths: RunPaths) -> None:
    """Replace the local metrics by the store's metrics if the store's metrics have a later step."""
    restored = paths.restored.metrics
    if restored.is_file() and last_step(restored) > last_step(paths.metrics):
        restored.replace(paths.metrics)


def last_step(metrics: Path) -> int:
    """Return the last step of a metrics file, or -1 without steps."""
    return max((int(row["step"]) for row in stream_metrics(metrics, newest=True)), default=-1)


def _fetch_best(
    store: StoreReader,
    paths: RunPaths,
    run: RunIdentity,
    known: ManifestHashes,
    *,
    newest: Path,
    say: Callable[[str], None],
) -> None:
    """Also download the checkpoint with the lowest validation loss, because a run keeps it."""
    last = checkpoint_step(newest)
    stored = {checkpoint_step(Path(name)): name for name in whole_checkpoints(store)}
    steps = [last, *(step for step in stored if step < last)]
    step = best_step(steps, read_val_losses(paths.metrics))
    if step is None or step == last or (paths.checkpoints / stored[step]).is_dir():
        return
    best = stored[step]
    try:
        fetch_checkpoint(store, best, paths.checkpoints, run=run, known=known)
        say(f"downloaded the best checkpoint, {best} ({verdict(best, known)})")
    except TileforgeError as error:  # the newest checkpoint is sufficient
        say(f"warning: the best checkpoint, {best}, is skipped: {error}")
