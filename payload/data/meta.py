"""meta.json: what a data folder holds. Written last, so a folder without it is not finished."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from payload.errors import DataError
from payload.remake import how_to_make_again, missing_data
from payload.results import write_whole

META_NAME = "meta.json"
TRAIN_NAME = "train.bin"
VAL_NAME = "val.bin"
SCHEMA_VERSION = 1

TokenDtype = Literal["uint16", "uint32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file of the folder."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRecord:
    """How documents were chosen for validation."""

    method: Literal["permutation", "hash"]
    """`permutation`: the same documents as `datasets`' train_test_split; `hash`: by a keyed hash of
    the document's number, where the number of documents was not known beforehand."""
    val_fraction: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataMeta:
    """meta.json"""

    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    end_of_text: int
    """Token that ends every document."""
    dtype: TokenDtype
    """Of the .bin files, little endian."""
    train_tokens: int
    val_tokens: int
    train_documents: int
    val_documents: int
    skipped_documents: int
    """Left out as unreadable because --skip-bad allowed it."""
    skipped_examples: list[str] = field(default_factory=list)
    """Where the first few of them are and what was wrong."""
    text_bytes: int
    """UTF-8 bytes that were tokenized."""
    source: str
    """Kind and place, as in `jsonl: corpus/part-*.jsonl`."""
    revision: str | None
    """The hub's commit, the Python version for `stdlib`, else None."""
    fingerprint: str
    """sha256 over the source's files (name, size, time) and the settings that shape the output."""
    split: SplitRecord
    encoder: str
    """What made the tokens, as in `gigatoken 0.10.0`; checked against tiktoken."""
    files: dict[str, DataFile]
    schema_version: int = SCHEMA_VERSION


def token_dtype(vocab_size: int) -> TokenDtype:
    """The narrowest type that holds every token: nanoGPT's uint16 up to 65,536."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def write_meta(folder: Path, meta: DataMeta) -> None:
    """Write meta.json whole or not at all."""
    write_whole(folder / META_NAME, json.dumps(asdict(meta), indent=2) + "\n")


def load_meta(folder: Path) -> DataMeta:
    """Read a prepared folder's meta.json and compare the files' sizes with it.

    Raises DataError, which says how to make the folder, when it is missing or damaged.
    """
    path = folder / META_NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(missing_data(folder)) from None
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read: {error}. {how_to_make_again(folder, source=None)}"
        ) from None
    meta = _from_json(raw, path)
    for name, expected in meta.files.items():
        _check_size(folder, name, expected, source=meta.source)
    return meta


def verify_files(folder: Path, meta: DataMeta) -> None:
    """Compare each file's sha256 with meta.json. Raises DataError naming the first that differs."""
    for name, expected in meta.files.items():
        with (folder / name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected.sha256:
            raise DataError(
                f"{folder / name}: sha256 is {found}, meta.json says {expected.sha256}. "
                f"{how_to_make_again(folder, source=meta.source)}"
            )


def _from_json(raw: Any, path: Path) -> DataMeta:
    source = raw.get("source") if isinstance(raw, dict) else None
    remedy = how_to_make_again(path.parent, source=source)
    if not isinstance(raw, dict) or raw.get("schema_version") != SCHEMA_VERSION:
        raise DataError(
            f"{path}: schema_version is not {SCHEMA_VERSION}; another release or tool wrote it. "
            f"{remedy}"
        )
    known = {entry.name for entry in fields(DataMeta)}
    try:
        values = {key: value for key, value in raw.items() if key in known}
        values["split"] = SplitRecord(**values["split"])
        values["files"] = {name: DataFile(**entry) for name, entry in values["files"].items()}
        return DataMeta(**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: an entry is missing or malformed ({error}). {remedy}") from None


def _check_size(folder: Path, name: str, expected: DataFile, *, source: str) -> None:
    try:
        found = (folder / name).stat().st_size
    except OSError as error:
        raise DataError(
            f"{folder / name}: {error.strerror}, though meta.json lists it. "
            f"{how_to_make_again(folder, source=source)}"
        ) from None
    if found != expected.bytes:
        raise DataError(
            f"{folder / name}: {found:,} bytes, meta.json says {expected.bytes:,}. "
            f"{how_to_make_again(folder, source=source)}"
        )
