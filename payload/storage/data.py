"""Download a data folder from a bucket once, and verify the hashes in its meta.json."""

from __future__ import annotations

import glob
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from payload.core.errors import DataError
from payload.core.file_hash import sha256_of
from payload.core.files import make_shared
from payload.core.regular_files import read_bytes
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build
from payload.formats.data_folder import META_NAME, DataFile, load_meta
from payload.storage.objects import MissingObjectError, StoreReader, TooLargeError

_TRIES = 3
_NAME = re.compile(r"\w[\w.-]{0,199}", re.ASCII)
_REPLACED = ".replaced-"
"""Suffix of a replaced data folder, followed by random digits. The folder is removed once no
process uses it."""


def fetch_data(store: StoreReader, folder: Path, *, say: Callable[[str], None]) -> None:
    """Download the data at the store's address to `folder`, if the folder is not up to date.

    Raises DataError for data that is missing or does not match its meta.json.
    """
    try:
        meta, _ = store.read(META_NAME)
    except MissingObjectError:
        raise DataError(
            f"data.dir = {store.address}: {META_NAME} is missing. Upload a prepared folder: "
            f"gcloud storage cp -r FOLDER/* {store.address}/"
        ) from None
    if _is_up_to_date(folder, meta):
        return
    say(f"downloading data: {store.address} to {folder}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            (staging / META_NAME).write_bytes(meta)
            sizes = _file_sizes(meta, where=str(store.address.under(META_NAME)))
            _require_room(store, sum(sizes.values()), staging)
            for name, size in sizes.items():
                _fetch(store, name, staging / name, size=size)
            _verify(store, staging)
            make_shared(staging)
            if folder.is_dir():  # a run may be training on it
                folder.rename(f"{folder}{_REPLACED}{secrets.token_hex(4)}")
            try:
                staging.rename(folder)
            except OSError:
                if not _is_up_to_date(folder, meta):  # otherwise another command has downloaded it
                    raise
            for old in folder.parent.glob(f"{glob.escape(folder.name)}{_REPLACED}*"):
                if not _is_in_use(old):
                    shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be written ({error.strerror}). Free disk space, and try again."
        ) from None


def _is_in_use(folder: Path) -> bool:
    """Return True if a visible process of any user has mapped or opened a file of the folder."""
    folder = folder.resolve()
    processes = list(Path("/proc").glob("[0-9]*"))
    for process in processes:
        with suppress(OSError):  # the process has ended, or is another user's
            if f"{folder}/" in (process / "maps").read_text(errors="replace"):
                return True
            for opened in (process / "fd").iterdir():
                with suppress(OSError):  # the file was closed
                    if str(opened.readlink()).startswith(f"{folder}/"):
                        return True
    return not processes


def _is_up_to_date(folder: Path, meta: bytes) -> bool:
    """Return True if the folder has this meta.json, and all files have the right sizes."""
    try:
        if read_bytes(folder / META_NAME) != meta:
            return False
        load_meta(folder)
    except (OSError, DataError):
        return False
    return True


def _file_sizes(meta: bytes, *, where: str) -> dict[str, int]:
    """Return the size of each file in a meta.json; `load_meta` later checks the other values."""
    raw = parse_json(meta, where=where, error=DataError)
    found = [raw.get(key) for key in ("files", "tokenizer_files")] if isinstance(raw, dict) else []
    sizes: dict[str, int] = {}
    for name, entry in (item for each in found if isinstance(each, dict) for item in each.items()):
        if not _NAME.fullmatch(name):
            raise DataError(f"{where}: {name[:60]!r} is not a file of a data folder.")
        sizes[name] = build(DataFile, entry, where=f"{where}: {name}", error=DataError).bytes
    return sizes


def _require_room(store: StoreReader, size: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise DataError(
            f"data.dir = {store.address}: the data needs {size / 1e9:,.2f} GB, but "
            f"{free / 1e9:,.2f} GB are free in {folder.parent}. Free disk space."
        )


def _fetch(store: StoreReader, name: str, path: Path, *, size: int) -> None:
    try:
        with path.open("wb") as file:
            store.fetch(name, file, most_bytes=size, progressed=lambda: None)
    except TooLargeError:
        raise DataError(
            f"data.dir = {store.address}: {name} is larger than {META_NAME} lists. Upload the "
            "folder again."
        ) from None
    except MissingObjectError:
        raise DataError(
            f"data.dir = {store.address}: {name} is missing. Upload this file."
        ) from None


def _verify(store: StoreReader, folder: Path) -> None:
    """Verify sizes and hashes; damaged files are downloaded again."""
    for _ in range(_TRIES):
        meta = load_meta(folder)
        wrong = {
            name: entry.bytes
            for name, entry in meta.all_files().items()
            if sha256_of(folder / name) != entry.sha256
        }
        if not wrong:
            return
        for name, size in wrong.items():
            _fetch(store, name, folder / name, size=size)
    raise DataError(
        f"data.dir = {store.address}: the SHA-256 of {next(iter(wrong))} differs from the one in "
        f"{META_NAME}. Upload the folder again."
    )
