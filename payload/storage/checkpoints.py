"""Checkpoints in a store. As on a disk, each checkpoint is complete or absent.

The manifest is written last and removed first, and is never overwritten. Readers accept only
checkpoints with a manifest and with files that match its sizes and hashes.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from payload.core.errors import CheckpointError, PreflightError
from payload.core.file_hash import sha256_of
from payload.core.regular_files import open_regular
from payload.formats.checkpoint_download import complete_copy, load_foreign_manifest
from payload.formats.checkpoint_listing import (
    CHECKPOINTS_NAME,
    FOLDER_NAME,
    MANIFEST_FILE,
    PARTIAL_SUFFIX,
    TRAINER_FILE,
    Manifest,
    ManifestEntry,
    checkpoint_step,
    listing_problem,
    load_manifest,
    manifest_problems,
)
from payload.run_record.checkpoint_manifest_hashes import ManifestHashes
from payload.run_record.run_identity import RunIdentity, checkpoint_identity
from payload.storage.objects import (
    ABSENT,
    SMALL_BYTES,
    ConflictError,
    MissingObjectError,
    ObjectStore,
    StoredObject,
    StoreReader,
    TooLargeError,
)

_NO_HASHES = ManifestHashes()
_FETCHES = 3
"""Number of attempts to download a file with a wrong hash. The network may have changed the
file."""


class Upload:
    """The upload of one checkpoint; `send` can be called again after an error.

    The files are kept open, so that the upload can finish after the trainer has removed the folder.
    """

    def __init__(self, folder: Path) -> None:
        """Open the files. Raises CheckpointError for a damaged or missing checkpoint."""
        self.name = folder.name
        self.sent_bytes = 0
        self._sent: dict[str, int] = {}
        """Generations of the objects that this upload has written, by name."""
        self._open = ExitStack()
        try:
            with ExitStack() as opened:
                self._manifest = load_manifest(folder)
                self._files = {
                    name: opened.enter_context(open_regular(folder / name, follows=False))
                    for name in (*self._manifest.files, MANIFEST_FILE)
                }
                self._open = opened.pop_all()
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be read ({error.strerror})") from None
        self.manifest_sha256 = hashlib.sha256(_whole(self._files[MANIFEST_FILE])).hexdigest()

    def close(self) -> None:
        """Close the files."""
        self._open.close()

    def send(
        self,
        store: ObjectStore,
        *,
        may_write: Callable[[], None],
        note_hash: Callable[[str, str], None] = lambda name, sha256: None,
    ) -> None:
        """Write the missing files, then the manifest.

        `may_write` is called before each write or removal, and raises to prevent it. `note_hash` is
        called with the checkpoint's name and the manifest's hash, while the store has no other
        manifest of that name. Raises StoreError, and CheckpointError if the local files do not
        match the manifest.
        """
        prefix = f"{CHECKPOINTS_NAME}/{self.name}/"
        stored = {entry.name: entry for entry in store.entries(prefix)}
        manifest = f"{prefix}{MANIFEST_FILE}"
        content = _whole(self._files[MANIFEST_FILE])
        if manifest in stored:
            text, generation = store.read(manifest)
            if text == content and self._is_complete(stored, prefix):
                note_hash(self.name, self.manifest_sha256)
                return
            may_write()
            store.remove(manifest, generation=generation)
        note_hash(self.name, self.manifest_sha256)
        for name, entry in self._manifest.files.items():
            existing = stored.get(f"{prefix}{name}")
            if existing is not None and self._sent.get(name) == existing.generation:
                continue
            file = self._files[name]
            self._require_unchanged(name)
            may_write()
            put = store.put(
                f"{prefix}{name}",
                file,
                size=entry.bytes,
                generation=existing.generation if existing else ABSENT,
            )
            self._sent[name] = put.generation
            self.sent_bytes += entry.bytes
        for name in stored.keys() - {f"{prefix}{name}" for name in self._manifest.files}:
            if name != manifest:
                store.remove(name, generation=stored[name].generation)
        may_write()
        self._put_manifest(store, manifest, content)
        self.sent_bytes += len(content)

    def _put_manifest(self, store: ObjectStore, name: str, content: bytes) -> None:
        """Write the manifest.

        Skip the write if an earlier attempt succeeded but its response was lost.
        """
        try:
            store.put(name, io.BytesIO(content), size=len(content), generation=ABSENT)
        except ConflictError:
            if store.read(name)[0] != content:
                raise

    def _is_complete(self, stored: Mapping[str, StoredObject], prefix: str) -> bool:
        return all(
            (found := stored.get(f"{prefix}{name}")) is not None and found.bytes == entry.bytes
            for name, entry in self._manifest.files.items()
        )

    def _require_unchanged(self, name: str) -> None:
        """Raise CheckpointError for a damaged file. Damaged files must not be uploaded."""
        file = self._files[name]
        # The open file is read, because the folder may have been removed.
        if sha256_of(Path(f"/dev/fd/{file.fileno()}")) != self._manifest.files[name].sha256:
            raise CheckpointError(
                f"{self.name}/{name}: its SHA-256 differs from the one in the manifest"
            )


def whole_checkpoints(store: StoreReader) -> list[str]:
    """List the names of the checkpoints that have a manifest, oldest first."""
    names = [
        name
        for name, objects in _checkpoint_objects(store).items()
        if any(each.name == f"{CHECKPOINTS_NAME}/{name}/{MANIFEST_FILE}" for each in objects)
    ]
    return sorted(names, key=lambda name: checkpoint_step(PurePosixPath(name)))


def _checkpoint_objects(store: StoreReader) -> dict[str, list[StoredObject]]:
    """Return the objects directly in each checkpoint's folder, by the checkpoint's name."""
    found: dict[str, list[StoredObject]] = {}
    for entry in store.entries(f"{CHECKPOINTS_NAME}/"):
        _, name, *rest = entry.name.split("/")
        if len(rest) == 1 and FOLDER_NAME.fullmatch(name):
            found.setdefault(name, []).append(entry)
    return found


def stored_manifests(store: ObjectStore) -> dict[str, str]:
    """Return the SHA-256 of each checkpoint's manifest, by the checkpoint's name."""
    found = {}
    for name in whole_checkpoints(store):
        with suppress(MissingObjectError, TooLargeError):
            content, _ = store.read(f"{CHECKPOINTS_NAME}/{name}/{MANIFEST_FILE}")
            found[name] = hashlib.sha256(content).hexdigest()
    return found


def remove_checkpoints(
    store: ObjectStore, *, keep: Collection[str], may_write: Callable[[], None]
) -> None:
    """Remove all complete and incomplete checkpoints except `keep`; manifests are removed first."""
    for name, objects in _checkpoint_objects(store).items():
        if name in keep:
            continue
        # False sorts before True: the manifest is first.
        for each in sorted(objects, key=lambda each: not each.name.endswith(f"/{MANIFEST_FILE}")):
            may_write()
            store.remove(each.name, generation=each.generation)


def fetch_newest(
    store: StoreReader,
    checkpoints: Path,
    *,
    run: RunIdentity | None = None,
    known: ManifestHashes = _NO_HASHES,
    passed_over: Callable[[str, str], None],
    say: Callable[[str], None] = lambda line: None,
    after_step: int = -1,
) -> Path | None:
    """Download the newest valid checkpoint to the folder `checkpoints`; return its path.

    Checkpoints must belong to `run`, and their manifests must match the hashes that the head
    recorded (`known`). `passed_over` is called with each rejected checkpoint and the reason; `say`
    receives a line before each download. Returns None if the store has no valid checkpoint after
    `after_step`.
    """
    for name in reversed(whole_checkpoints(store)):
        if checkpoint_step(PurePosixPath(name)) <= after_step:
            return None
        try:
            return fetch_checkpoint(store, name, checkpoints, run=run, known=known, say=say)
        except (CheckpointError, MissingObjectError, TooLargeError) as error:
            passed_over(name, str(error))
    return None


def fetch_checkpoint(
    store: StoreReader,
    name: str,
    checkpoints: Path,
    *,
    run: RunIdentity | None = None,
    known: ManifestHashes = _NO_HASHES,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Download one checkpoint, verify it, then rename it into the folder `checkpoints`.

    Valid local checkpoints, and a checkpoint that the trainer is writing, are kept. Raises
    PreflightError if the disk is full. Raises CheckpointError if the checkpoint is damaged, belongs
    to a different run, or does not match the hash in `known`.
    """
    target, partial = checkpoints / name, checkpoints / f"{name}.fetch{PARTIAL_SUFFIX}"
    prefix = f"{CHECKPOINTS_NAME}/{name}/"
    if target.is_dir() and not manifest_problems(target):
        return target
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            content, _ = store.read(f"{prefix}{MANIFEST_FILE}")
            _require_heads(name, content, known)
            (partial / MANIFEST_FILE).write_bytes(content)
            manifest = load_foreign_manifest(
                partial, where=f"{store.address}/{prefix}{MANIFEST_FILE}"
            )
            if (gap := listing_problem(manifest)) is not None:
                raise CheckpointError(f"{store.address.under(prefix + name)}: {gap}")
            _require_sizes(store, manifest, prefix)
            size = sum(entry.bytes for entry in manifest.files.values())
            _require_room(store, name, size, checkpoints)
            say(f"downloading {name} ({size / 1e9:.2f} GB) from {store.address}")

            def bring(path: Path, entry: ManifestEntry) -> None:
                _fetch_file(store, f"{prefix}{path.name}", path, entry)
                if path.name == TRAINER_FILE and run is not None:
                    _require_own(partial, run)

            return complete_copy(partial, target, manifest, bring=bring)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise PreflightError(
            f"{checkpoints}: cannot be written ({error.strerror}). Free disk space, and try again."
        ) from None


_IF_RESUMED = (
    "If the run was resumed on another machine, fetch the run into another folder with "
    "--runs-dir DIR"
)


def _require_heads(name: str, manifest: bytes, known: ManifestHashes) -> None:
    """Raise CheckpointError if `manifest` is not from the head, according to the recorded
    hashes."""
    wrote, found = known.by_name().get(name), hashlib.sha256(manifest).hexdigest()
    if wrote not in (None, found):
        raise CheckpointError(
            f"its manifest in the store has the SHA-256 {found}, but the head wrote {wrote}: "
            f"another machine has replaced the manifest. {_IF_RESUMED}"
        )
    if known.is_gap(name):
        raise CheckpointError(
            f"the head wrote earlier and later checkpoints, up to {known.hashes[-1].checkpoint}, "
            f"but not this checkpoint: another machine has added it. {_IF_RESUMED}"
        )


def _require_sizes(store: StoreReader, manifest: Manifest, prefix: str) -> None:
    """Raise CheckpointError if a stored file's size differs from the manifest."""
    stored = {entry.name: entry.bytes for entry in store.entries(prefix)}
    for name, entry in manifest.files.items():
        if name == TRAINER_FILE and entry.bytes > SMALL_BYTES:
            raise CheckpointError(f"{name}: the file is too large ({entry.bytes} bytes)")
        size = stored.get(f"{prefix}{name}")
        if size != entry.bytes:
            found = "missing" if size is None else f"{size} bytes"
            raise CheckpointError(f"{name}: {found}, but the manifest lists {entry.bytes} bytes")


def _require_room(store: StoreReader, name: str, size: int, checkpoints: Path) -> None:
    """Raise PreflightError if `size` bytes do not fit on the disk.

    Raises CheckpointError instead if the run's other checkpoints are much smaller. All checkpoints
    of a run have the same tensors, so a much larger checkpoint is invalid.
    """
    free = shutil.disk_usage(checkpoints).free
    if size <= free:
        return
    objects = _checkpoint_objects(store)
    others = [each for each in whole_checkpoints(store) if each != name]
    least = min((sum(each.bytes for each in objects[other]) for other in others), default=size)
    needs = f"the checkpoint needs {size / 1e9:,.2f} GB, but {free / 1e9:,.2f} GB are free"
    if size > 2 * least:
        raise CheckpointError(
            f"{needs}; another checkpoint of the run needs only {least / 1e9:,.2f} GB"
        )
    raise PreflightError(
        f"{store.address.under(f'{CHECKPOINTS_NAME}/{name}')}: {needs}. Free disk space."
    )


def _require_own(folder: Path, run: RunIdentity) -> None:
    """Raise CheckpointError for a checkpoint of a different run.

    Older releases recorded no identity in a checkpoint.
    """
    identity = checkpoint_identity(folder)
    if identity is None and (run.is_older or run.identity is None):
        return
    if identity != run.identity:
        raise CheckpointError(
            f"its run identity is {identity or 'none'}, but this run has {run.words()}"
        )


def _fetch_file(store: StoreReader, name: str, path: Path, entry: ManifestEntry) -> None:
    for _ in range(_FETCHES):
        with path.open("wb") as file:
            try:
                store.fetch(name, file, most_bytes=entry.bytes, progressed=lambda: None)
            except TooLargeError:
                raise CheckpointError(
                    f"{path.name}: the file is larger than the {entry.bytes} bytes in the manifest"
                ) from None
            file.flush()
            os.fsync(file.fileno())
        if sha256_of(path) == entry.sha256:
            return
    raise CheckpointError(f"{path.name}: its SHA-256 differs from the one in the manifest")


def _whole(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read()
