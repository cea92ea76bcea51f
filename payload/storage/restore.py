"""The way back: a run's records and its newest sound checkpoint, from the store to a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from payload.config.store_address import StoreAddress
from payload.core.errors import ConfigError
from payload.core.files import write_whole
from payload.core.printable_text import shown_name
from payload.formats.checkpoint_listing import best_step, checkpoint_step, newest_sound
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
"""Records that a resume reads. The inventory is that of the new place."""


def has_run(store: StoreReader) -> bool:
    """Say whether the store has a run at its address."""
    return any(entry.name in (OWNER, NAMES.config.name) for entry in store.entries())


def require_absent(address: StoreAddress) -> None:
    """Raise ConfigError for the address of a new run that the store has already."""
    if has_run(open_store(address, timeout_s=_TRY_S, retry_s=_TRY_S)):
        raise ConfigError(
            f"{address}: the store has a run of this id. Continue it with --resume {address}, or "
            "choose another --run-id."
        )


def fetch_run(store: StoreReader, paths: RunPaths) -> None:
    """Make the folder of a run that is known to the store alone, for a resume to read.

    Raises ConfigError where the store has no such run.
    """
    if not has_run(store):
        found = ", ".join(map(shown_name, store.siblings()[:10])) or "no run"
        raise ConfigError(f"{store.address}: there is no run. The store has: {found}.")
    fetch_records(store, paths.root, names=TO_RESUME)
    # What the store's owner says is the identity; the token counts for an older version's run.
    there = stored_identity(store) or RunIdentity()
    is_older = there.is_older or there.identity is None
    token = there.store_token if there.identity is None else None
    run = RunIdentity(identity=there.identity, store_token=token, is_older=is_older)
    write_whole(paths.identity, run.to_json())


def restore(store: StoreReader, paths: RunPaths, *, say: Callable[[str], None]) -> Path | None:
    """Bring the newest checkpoint here, if the store has a newer one; return where it is.

    Also metrics up to it, and the records of before in the folder `restored`. None where the
    checkpoints here are as new, and where neither has one yet. The last line for `say` is how it
    ended. Raises StoreError, also where the run would start from scratch although it had got
    further, and ConfigError where the store has another run of this name.
    """
    run = known_identity(paths)
    require_own_store(store, run, place=str(paths.root))
    here = newest_sound(paths.checkpoints)
    step_here = checkpoint_step(here) if here else -1
    if not whole_checkpoints(store):
        _require_same_store(store, paths, here=here)
    damaged: list[str] = []

    def pass_over(name: str, why: str) -> None:
        damaged.append(name)
        say(f"warning: {name} in the store is passed over: {why}")

    known = known_hashes(paths)
    found = fetch_newest(
        store,
        paths.checkpoints,
        run=run,
        known=known,
        passed_over=pass_over,
        say=say,
        after_step=step_here,
    )
    if found is None and here is None and damaged:
        raise StoreError(
            f"{store.address}: every checkpoint is damaged, {damaged[0]} the newest. See "
            "logs/storage.log for what is wrong with each."
        )
    if found is None and here is not None:
        if damaged:
            say(f"warning: the run goes on from {here.name} of the disk: {_are_damaged(damaged)}")
        return None
    fetch_records(store, paths.restored.root, say=say)
    if found is None:
        say(f"note: {store.address} has no checkpoint yet, and neither has the disk")
        return None
    _take_metrics(paths)
    _fetch_best(store, paths, run, known, newest=found, say=say)
    words = f"; {_are_damaged(damaged)}" if damaged else ""
    how = verdict(found.name, known)
    say(f"the run goes on from {found.name}, which came from {store.address} ({how}){words}")
    return found


def _require_same_store(store: StoreReader, paths: RunPaths, *, here: Path | None) -> None:
    """Refuse a store without the run where it should have it: its folder may not be mounted."""
    if has_run(store):
        return
    before = last_record(StoreState, paths.store_state)
    had = before.checkpoint if before and before.address == str(store.address) else None
    if here is None or had is not None:
        raise StoreError(
            f"{store.address}: there is no run{f', and it had {had}' if had else ''}. If it is in "
            "a mounted folder, mount it."
        )


def _are_damaged(names: Sequence[str]) -> str:
    return f"{', '.join(names)} in the store cannot be used"


def _take_metrics(paths: RunPaths) -> None:
    """Take the store's rows where they go further than those here."""
    there = paths.restored.metrics
    if there.is_file() and last_step(there) > last_step(paths.metrics):
        there.replace(paths.metrics)


def last_step(metrics: Path) -> int:
    """Return the last step of a metrics file; -1 where it has none."""
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
    """Bring the checkpoint with the lowest validation loss, too: it is kept to the end."""
    last = checkpoint_step(newest)
    stored = {checkpoint_step(Path(name)): name for name in whole_checkpoints(store)}
    steps = [last, *(step for step in stored if step < last)]
    step = best_step(steps, read_val_losses(paths.metrics))
    if step is None or step == last or (paths.checkpoints / stored[step]).is_dir():
        return
    best = stored[step]
    try:
        fetch_checkpoint(store, best, paths.checkpoints, run=run, known=known)
        say(f"the best checkpoint, {best}, came too ({verdict(best, known)})")
    except ConfigError as error:
        say(f"warning: the best checkpoint, {best}, is passed over: {error}")
