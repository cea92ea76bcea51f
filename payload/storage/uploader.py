"""The process that uploads a run's results to the store during the run.

Training never waits for this process. It reads the files that ranks write to the head's disk. If
the store fails, uploads are retried with exponential backoff, and one warning is logged.
"""

from __future__ import annotations

import random
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from payload.core.errors import CheckpointError, ConfigError
from payload.core.file_hash import sha256_of
from payload.formats.checkpoint_listing import (
    MANIFEST_FILE,
    best_checkpoints,
    best_step,
    checkpoint_folders,
    checkpoint_step,
)
from payload.run_record.checkpoint_manifest_hashes import note_hash
from payload.run_record.metrics_log import read_val_losses
from payload.run_record.run_files import RunPaths, last_record, write_json
from payload.run_record.run_identity import RunIdentity, ensure_identity, known_identity
from payload.run_record.store_state import StoreState
from payload.storage.checkpoints import Upload, remove_checkpoints, stored_manifests
from payload.storage.objects import ConflictError, ObjectStore, StoreError, StoreRefusedError
from payload.storage.owner import LostOwnershipError, claim, new_token, require_owner
from payload.storage.records import Records

_LOOK_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_OWNER_EVERY_S = 20.0
"""Time between two checks of whether this machine still owns the run."""


class Uploader:
    """Uploads the results of one run; call `run` once."""

    def __init__(
        self,
        paths: RunPaths,
        store: ObjectStore,
        *,
        keep: int,
        final_wait_s: float,
        is_new: bool,
        say: Callable[[str], None],
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        """Prepare uploads of the run at `paths` to `store`.

        The newest `keep` checkpoints and the best checkpoint stay in the store; `say` receives log
        lines.
        """
        self._paths = paths
        self._store = store
        self._keep = keep
        self._final_wait_s = final_wait_s
        self._say = say
        self._first_pause_s = first_pause_s
        before = last_record(StoreState, paths.store_state)
        if before is None or before.address != str(store.address):
            before = StoreState(address=str(store.address))
        self._is_new = is_new
        # An earlier process of a new run may have written its token to owner.json. A resume gets a
        # new token, so that a leftover process of the earlier attempt loses the ownership.
        token = before.token if is_new else None
        # The supervisor resets the counts each time that it starts or resumes a run.
        self._state = StoreState(
            address=before.address,
            checkpoint=before.checkpoint,
            token=token or new_token(),
            sent_bytes=before.sent_bytes,
            sent_unix=before.sent_unix,
            failures=before.failures,
        )
        self._has_claimed = False
        self._records = Records(paths, say=say)
        self._upload: Upload | None = None
        self._refused: set[tuple[str, str | None]] = set()
        """Names and manifest hashes of damaged local checkpoints."""
        self._in_store: dict[str, str] = {}
        """Known SHA-256 of each manifest in the store. A step that is trained again has a different
        checkpoint with the same name."""
        self._owner_checked_s = float("-inf")
        self._has_old = False
        """True if the store may have checkpoints to remove."""

    def run(self, commands: TextIO) -> None:
        """Upload files as the run writes them; after a line in `commands`, finish all uploads.

        At the end of a run, the supervisor sends a line, waits until all files are uploaded,
        completes the summary, and closes `commands`. This process then uploads the last records.
        """
        self._update_state()
        pause_s, next_s, ends_s = 0.0, 0.0, float("inf")
        draining = closed = False
        while not (self._state.lost or time.monotonic() > ends_s):
            if time.monotonic() >= next_s:
                done = self._upload_changes(all_of_them=draining)
                if done and draining:
                    self._update_state(is_idle=True, is_drained=not self._is_any_left_out())
                    if closed:
                        break
                # After the supervisor's line, pauses are short, to allow many attempts.
                most_s = self._final_wait_s / 20 if draining else _LONGEST_PAUSE_S
                pause_s = 0.0 if done else self._longer(pause_s, most_s=most_s)
                next_s = time.monotonic() + pause_s
            if not closed and select.select([commands], [], [], _LOOK_S)[0]:
                line = commands.readline()
                closed = not line
                if not draining:
                    ends_s = time.monotonic() + self._final_wait_s
                draining, next_s = True, 0.0
            elif closed:
                time.sleep(min(_LOOK_S, max(0.0, next_s - time.monotonic())))
        self._close_upload()

    def _longer(self, pause_s: float, *, most_s: float) -> float:
        """Return the next pause: twice as long, up to a limit, with jitter."""
        doubled = min(_LONGEST_PAUSE_S, most_s, max(self._first_pause_s, 2 * pause_s))
        return doubled * random.uniform(0.75, 1.0)

    def _upload_changes(self, *, all_of_them: bool) -> bool:
        """Upload all changes; return True on success."""
        try:
            self._claim()
            self._send_checkpoints()
            sent = self._records.send(self._store, all_of_them=all_of_them)
            self._add(sent)
        except LostOwnershipError as error:
            self._say(f"warning: {error}")
            self._update_state(lost=True, problem=str(error))
            return False
        except (StoreError, StoreRefusedError, ConfigError) as error:
            if isinstance(error, ConflictError):
                self._owner_checked_s = float(
                    "-inf"
                )  # check the owner: another process may be writing
            self._failed(str(error))
            return False
        if self._state.problem is not None:
            self._say(f"note: uploads to {self._store.address} work again")
            self._update_state(problem=None, failing_since_unix=None)
        return True

    def _claim(self) -> None:
        assert self._state.token is not None
        if not self._has_claimed:
            claim(
                self._store,
                token=self._state.token,
                is_new=self._is_new,
                host=socket.gethostname(),
                run=self._identity(),
                place=str(self._paths.root),
            )
            self._store.tidy()
            self._in_store = stored_manifests(self._store)
            self._owner_checked_s, self._has_claimed = time.monotonic(), True
            self._update_state(checkpoint=max(self._in_store, key=_step, default=None))
        elif time.monotonic() - self._owner_checked_s > _OWNER_EVERY_S:
            self._require_owner()

    def _identity(self) -> RunIdentity:
        """Return the run's identity; record a new identity if the run has no identity."""
        with suppress(OSError):
            if self._paths.root.is_dir():
                return ensure_identity(self._paths, is_new=self._is_new, say=self._say)
        return known_identity(self._paths)

    def _require_owner(self) -> None:
        assert self._state.token is not None
        require_owner(self._store, self._state.token)
        self._owner_checked_s = time.monotonic()

    def _send_checkpoints(self) -> None:
        """Upload the checkpoints, newest first.

        Older checkpoints are uploaded if they still exist locally.
        """
        while (folder := self._next()) is not None:
            if self._upload is None or self._upload.name != folder.name:
                self._close_upload()
                try:
                    self._upload = Upload(folder)
                except CheckpointError as error:
                    if folder.is_dir():
                        self._refuse(folder, error)
                    continue  # otherwise the trainer has removed it
            upload = self._upload
            before = upload.sent_bytes
            # The metrics up to a checkpoint's step are uploaded before it.
            self._add(self._records.send_for_checkpoint(self._store))
            try:
                upload.send(
                    self._store,
                    may_write=self._require_owner_sometimes,
                    note_hash=self._note_hash,
                )
            except CheckpointError as error:
                self._close_upload()
                self._refuse(folder, error)
                continue
            finally:
                self._add(upload.sent_bytes - before)
            self._close_upload()
            self._in_store[folder.name] = upload.manifest_sha256
            newest = max(self._current(folder.name), key=_step)
            self._update_state(checkpoint=newest)
            self._say(f"checkpoint {folder.name} is in {self._store.address}")
            self._has_old = True
        if self._has_old and self._state.checkpoint is not None:
            self._remove_old(self._state.checkpoint)
            self._has_old = False

    def _note_hash(self, name: str, sha256: str) -> None:
        """Record the hash of an uploaded manifest, to detect a replacement by another writer."""
        try:
            if self._paths.root.is_dir():  # do not recreate the folder of a removed run
                note_hash(self._paths, name, sha256)
        except OSError as error:  # a full disk must not prevent the upload
            self._say(f"warning: {self._paths.manifest_hashes}: {error.strerror}")

    def _refuse(self, folder: Path, error: CheckpointError) -> None:
        self._refused.add((folder.name, manifest_sha256(folder)))
        self._say(f"warning: {folder.name} is not uploaded: {error}")

    def _is_any_left_out(self) -> bool:
        """Return True if a local file or checkpoint cannot be uploaded."""
        local = {(each.name, manifest_sha256(each)) for each in self._local_checkpoints()}
        return bool(self._records.too_large or local & self._refused)

    def _require_owner_sometimes(self) -> None:
        if time.monotonic() - self._owner_checked_s > _OWNER_EVERY_S / 4:
            self._require_owner()

    def _current(self, name: str) -> set[str]:
        """Return the stored checkpoints up to `name`, and later checkpoints that also exist
        locally.

        Other later checkpoints are outdated: they were saved before a resume at an earlier step.
        """
        local = {folder.name for folder in self._local_checkpoints()}
        return {each for each in self._in_store if _step(each) <= _step(name) or each in local}

    def _next(self) -> Path | None:
        """Return the newest local checkpoint that is not in the store, or None."""
        waiting = []
        for folder in self._local_checkpoints():
            sha256 = manifest_sha256(folder)
            is_stored = self._in_store.get(folder.name) == sha256
            if not is_stored and (folder.name, sha256) not in self._refused:
                waiting.append(folder)
        sizes = [_bytes_of(folder) for folder in waiting]
        if (len(waiting), sum(sizes)) != (
            self._state.waiting_checkpoints,
            self._state.waiting_bytes,
        ):
            self._update_state(waiting_checkpoints=len(waiting), waiting_bytes=sum(sizes))
        return waiting[-1] if waiting else None

    def _local_checkpoints(self) -> list[Path]:
        folders = checkpoint_folders(self._paths.checkpoints)
        return [folder for folder in folders if (folder / MANIFEST_FILE).is_file()]

    def _remove_old(self, newest: str) -> None:
        """Remove the stored checkpoints except the newest, the best and all that also exist
        locally."""
        local = {folder.name for folder in self._local_checkpoints()}
        current = sorted(self._current(newest), key=_step)
        keep = {*current[-self._keep :], *(local & self._in_store.keys()), *self._best(current)}
        remove_checkpoints(self._store, keep=keep, may_write=self._require_owner_sometimes)
        self._in_store = {name: sha for name, sha in self._in_store.items() if name in keep}

    def _best(self, names: list[str]) -> set[str]:
        """Return the stored checkpoints that may have the lowest validation loss."""
        losses = read_val_losses(self._paths.metrics)
        lowest = best_step(map(_step, names), losses)
        best = {name for name in names if _step(name) == lowest}
        return best | {each.name for each in best_checkpoints(self._paths.checkpoints, losses)}

    def _failed(self, problem: str) -> None:
        if self._state.problem is None:
            self._say(
                f"warning: results are not in {self._store.address} yet: {problem}. Training "
                "continues; the upload is retried"
            )
        since = self._state.failing_since_unix or time.time()
        self._update_state(
            problem=problem, failing_since_unix=since, failures=self._state.failures + 1
        )

    def _add(self, sent_bytes: int) -> None:
        if sent_bytes:
            self._update_state(
                sent_bytes=self._state.sent_bytes + sent_bytes, sent_unix=time.time()
            )

    def _close_upload(self) -> None:
        if self._upload is not None:
            self._upload.close()
            self._upload = None

    def _update_state(self, **changes: Any) -> None:
        """Write the changed state to storage.json, if the run's folder still exists."""
        changed = replace(self._state, **changes)
        self._state = replace(changed, updated_unix=time.time())
        with suppress(OSError):
            if self._paths.root.is_dir():
                write_json(self._paths.store_state, self._state, durable=False)


def manifest_sha256(folder: Path) -> str | None:
    """Return the hash of a checkpoint's manifest, or None if the manifest is missing."""
    with suppress(OSError):
        return sha256_of(folder / MANIFEST_FILE)
    return None


def _step(name: str) -> int:
    return checkpoint_step(Path(name))


def _bytes_of(folder: Path) -> int:
    with suppress(OSError):
        return sum(path.stat().st_size for path in folder.iterdir())
    return 0
