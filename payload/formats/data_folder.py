"""CONTRACT: what a data folder holds, as its meta.json says.

meta.json is written last, so a folder without it is not finished.
"""

from __future__ import annotations

import errno
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from payload.core.errors import ConfigError, DataError
from payload.core.links import inside_folder
from payload.core.printable_text import PLAIN_TEXT, shown
from payload.core.regular_files import read_bytes
from payload.core.tasks import TaskKind
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import SHA256
from payload.core.validation.records import build, check_schema
from payload.formats.hf_folder import TOKENIZER_FILES
from payload.formats.prepare_hints import how_to_make_again, missing_data

META_NAME = "meta.json"
TRAIN_NAME = "train.bin"
VAL_NAME = "val.bin"
TRAIN_MARKS_NAME = "train.marks.bin"
VAL_MARKS_NAME = "val.marks.bin"
EXAMPLES_NAMES = {TRAIN_NAME: "train.examples.bin", VAL_NAME: "val.examples.bin"}
"""For each token file of labelled texts, the file of their places and labels."""
EXAMPLE_BYTES = 16
PAIRS_NAMES = {TRAIN_NAME: "train.pairs.bin", VAL_NAME: "val.pairs.bin"}
"""For each token file of preference pairs, the file of their places."""
PAIR_BYTES = 16
MOST_NAME_TOKENS = 1024
"""Most tokens of a label's name that meta.json has."""
FOLDER_WORD = "folder"
"""Stands before a folder in `source`, where that could be a dataset at the hub."""
SCHEMA_VERSION = 1
IGNORED_TARGET = -100
"""A position that the loss leaves out; PyTorch's own default for cross entropy."""

RANGE_BYTES = 256 * 1024
"""A block of 1,024 tokens is 2 kB: hashing a range takes 0.2 ms, training on one block 200 ms."""
HASH_DIGITS = 32
"""Digits of the sha256's 64: half of meta.json, and 128 bits still cannot be forged."""

_RANGE_HASH = re.compile(rf"[0-9a-f]{{{HASH_DIGITS}}}")

TokenDtype = Literal["uint16", "uint32"]

_TOKEN_FILES = frozenset({TRAIN_NAME, VAL_NAME})
_FILES: dict[TaskKind, frozenset[str]] = {
    "text": _TOKEN_FILES,
    "chat": _TOKEN_FILES | {TRAIN_MARKS_NAME, VAL_MARKS_NAME},
    "classify": _TOKEN_FILES | frozenset(EXAMPLES_NAMES.values()),
    "preference": _TOKEN_FILES
    | {TRAIN_MARKS_NAME, VAL_MARKS_NAME}
    | frozenset(PAIRS_NAMES.values()),
}
"""Files of each task's folder, the tokenizer's left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file of the folder."""

    bytes: int = checked(low=0)
    sha256: str = checked(pattern=SHA256, wanted="64 hexadecimal digits")
    range_sha256: tuple[str, ...] = checked((), pattern=_RANGE_HASH, wanted="hexadecimal digits")
    """The first digits of the sha256 of each RANGE_BYTES, which training checks as it reads; empty
    in folders that older releases made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRecord:
    """How documents were chosen for validation."""

    method: Literal["permutation", "hash", "stratified"]
    """`permutation`: the same documents as `datasets`' train_test_split; `hash`: by a keyed hash of
    the document's number, where the number of documents was not known beforehand; `stratified`: the
    same share of each label's texts."""
    val_fraction: float = checked(low=0, high=1)
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRecord:
    """Contents of a chat folder: blocks of whole conversations, and which tokens are trained."""

    sequence_length: int = checked(low=2, high=2**20)
    """Tokens of a block; training takes no other."""
    packing: Literal["best-fit", "none"]
    """`none`: one conversation a block, the rest of it padding."""
    template_sha256: str = checked(pattern=SHA256, wanted="64 hexadecimal digits")
    train_trained_tokens: int = checked(low=1)
    """Tokens that the loss covers."""
    val_trained_tokens: int = checked(low=1)
    train_padding_tokens: int = checked(low=0)
    val_padding_tokens: int = checked(low=0)
    truncated_conversations: int = checked(low=0)
    """Longer than a block: their end is left out."""
    truncated_tokens: int = checked(low=0)
    dropped_conversations: int = checked(low=0)
    """Without a trained token, some of them because their answers lie behind the cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyRecord:
    """Contents of a folder for classification besides its texts."""

    labels: tuple[str, ...]
    """By number."""
    train_counts: tuple[int, ...] = checked(low=1)
    """Texts of each label."""
    val_counts: tuple[int, ...] = checked(low=1)
    pad_token: int = checked(low=0)
    """Fills up a batch's shorter texts."""
    label_tokens: tuple[tuple[int, ...], ...] = ()
    """Tokens of each label's name behind a space.

    None in folders of older versions, and where the tokenizer gives a name no tokens.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceRecord:
    """Contents of a folder of preference pairs: two conversations each, the better one first."""

    sequence_length: int = checked(low=2, high=2**20)
    """Most tokens of a conversation; training takes no other length."""
    template_sha256: str = checked(pattern=SHA256, wanted="64 hexadecimal digits")
    train_trained_tokens: int = checked(low=2)
    """Tokens of the answers, which the loss covers."""
    val_trained_tokens: int = checked(low=2)
    truncated_answers: int = checked(low=0)
    """Answers that lost their end."""
    truncated_tokens: int = checked(low=0)
    pad_token: int = checked(low=0)
    """Fills up a batch's shorter conversations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataMeta:
    """meta.json"""

    tokenizer: str
    tokenizer_sha256: str
    """Hash of its vocabulary with the merges."""
    tokenizer_pipeline_sha256: str = ""
    """Hash of everything of the tokenizer that changes tokens (payload.formats.tokenizer_identity).

    Empty in folders of older versions, which have the vocabulary's `tokenizer_sha256` alone.
    """
    tokenizer_files: dict[str, DataFile] = field(default_factory=dict)
    """The tokenizer's own files in the folder, by name; none for GPT-2's, which is packaged."""
    vocab_size: int = checked(low=1, high=2**32)
    end_of_text: int = checked(low=0)
    """Token that ends every document."""
    dtype: TokenDtype
    """Type of the tokens in the .bin files, little endian."""
    train_tokens: int = checked(low=0)
    val_tokens: int = checked(low=0)
    train_documents: int = checked(low=0)
    val_documents: int = checked(low=0)
    skipped_documents: int = checked(low=0)
    """Left out as unreadable because --skip-bad allowed it."""
    skipped_examples: list[str] = field(default_factory=list)
    """Where the first few of them are and what was wrong."""
    text_bytes: int = checked(low=0)
    """UTF-8 bytes that were tokenized."""
    source: str = checked(pattern=PLAIN_TEXT, wanted="one line without control characters")
    """Kind and place, as in `jsonl: corpus/part-*.jsonl`."""
    revision: str | None
    """The hub's commit, the Python version for `stdlib`, else None."""
    fingerprint: str
    """sha256 over the source's files (name, size, time) and the settings that shape the output."""
    split: SplitRecord
    encoder: str
    """The program that made the tokens, as in `gigatoken 0.10.0`; checked against tiktoken."""
    files: dict[str, DataFile]
    task: TaskKind = "text"
    chat: ChatRecord | None = None
    """For the task `chat` alone."""
    classify: ClassifyRecord | None = None
    """For the task `classify` alone."""
    preference: PreferenceRecord | None = None
    """For the task `preference` alone."""
    schema_version: int = SCHEMA_VERSION

    def hashes(self) -> dict[str, str]:
        """Return the sha256 of each file that training reads, by name."""
        return {name: entry.sha256 for name, entry in self.files.items()}

    def all_files(self) -> dict[str, DataFile]:
        """Return the token files and the tokenizer's."""
        return {**self.files, **self.tokenizer_files}


def require_task(folder: Path, meta: DataMeta, *, task: TaskKind) -> None:
    """Raise ConfigError when a run's `task.kind` is another one than the data's."""
    if meta.task != task:
        raise ConfigError(
            f"task.kind = {task!r}, but {folder} was prepared with --task {meta.task}. Set "
            f"task.kind to {meta.task!r}, or prepare other data."
        )


def require_prepared_length(folder: Path, meta: DataMeta, *, sequence_length: int) -> None:
    """Raise ConfigError for another sequence length than the folder was prepared for."""
    record = meta.chat or meta.preference
    if record is not None and sequence_length != record.sequence_length:
        was = "packed into blocks" if meta.chat is not None else "prepared for conversations"
        raise ConfigError(
            f"data.sequence_length = {sequence_length}, but {folder} was {was} of "
            f"{record.sequence_length}. Set it to {record.sequence_length}, or prepare the data "
            f"again with --sequence-length {sequence_length}."
        )


def task_files() -> frozenset[str]:
    """Return the names of all tasks' files."""
    return frozenset().union(*_FILES.values())


def token_dtype(vocab_size: int) -> TokenDtype:
    """The narrowest type that holds every token: nanoGPT's uint16 up to 65,536."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def load_meta(folder: Path) -> DataMeta:
    """Read a prepared folder's meta.json and compare the files' sizes with it.

    Raises DataError, which says how to make the folder, when it is missing or damaged. A link out
    of the folder is refused: whoever made it could have any file of that size trained on.
    """
    path = folder / META_NAME
    remedy = how_to_make_again(folder, source=None)
    try:
        content = read_bytes(inside_folder(path))
        raw = parse_json(content, where=str(path), fix=remedy, error=DataError)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(missing_data(folder)) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). {remedy}") from None
    check_schema(raw, SCHEMA_VERSION, where=str(path), fix=remedy, error=DataError)
    meta = build(DataMeta, raw, where=str(path), fix=remedy, error=DataError)
    _require_consistent(meta, path, remedy)
    for name, expected in meta.all_files().items():
        _check_size(folder, name, expected, source=meta.source)
    return meta


def _require_consistent(meta: DataMeta, path: Path, remedy: str) -> None:
    """Refuse numbers that contradict each other: sizes of what is read follow from them."""
    wanted = _FILES[meta.task]
    if set(meta.files) != wanted:
        raise DataError(f"{path}: files has not just {' and '.join(sorted(wanted))}. {remedy}")
    records = {"chat": meta.chat, "classify": meta.classify, "preference": meta.preference}
    for name, found in records.items():
        if (meta.task == name) != (found is not None):
            raise DataError(
                f"{path}: task = {meta.task!r} and {name} contradict each other. {remedy}"
            )
    pairs = meta.preference
    if pairs is not None and pairs.pad_token >= meta.vocab_size:
        raise DataError(f"{path}: preference has a pad_token that is no token. {remedy}")
    record = meta.classify
    if record is not None:
        counts = (
            (record.train_counts, meta.train_documents),
            (record.val_counts, meta.val_documents),
        )
        is_whole = all(len(each) == len(record.labels) and sum(each) == of for each, of in counts)
        is_known = len(set(record.labels)) == len(record.labels) >= 2
        names = record.label_tokens
        tokens = (record.pad_token, *(token for each in names for token in each))
        is_named = not names or (
            len(names) == len(record.labels)
            and all(0 < len(each) <= MOST_NAME_TOKENS for each in names)
        )
        is_whole = is_whole and is_named and all(0 <= each < meta.vocab_size for each in tokens)
        if not is_whole or not is_known:
            raise DataError(f"{path}: classify has counts or labels that do not fit. {remedy}")
    strange = sorted(set(meta.tokenizer_files) - set(TOKENIZER_FILES))
    if strange:
        raise DataError(f"{path}: {shown(strange[0])} is no tokenizer's file. {remedy}")
    token_bytes = 2 if meta.dtype == "uint16" else 4
    sizes = {
        TRAIN_NAME: (meta.train_tokens, token_bytes),
        VAL_NAME: (meta.val_tokens, token_bytes),
        TRAIN_MARKS_NAME: (meta.train_tokens, 1),
        VAL_MARKS_NAME: (meta.val_tokens, 1),
        EXAMPLES_NAMES[TRAIN_NAME]: (meta.train_documents, EXAMPLE_BYTES),
        EXAMPLES_NAMES[VAL_NAME]: (meta.val_documents, EXAMPLE_BYTES),
        PAIRS_NAMES[TRAIN_NAME]: (meta.train_documents, PAIR_BYTES),
        PAIRS_NAMES[VAL_NAME]: (meta.val_documents, PAIR_BYTES),
    }
    for name, file in meta.files.items():
        count, size = sizes[name]
        if file.bytes != count * size:
            raise DataError(
                f"{path}: {name} has {file.bytes:,} bytes, but {count:,} tokens of "
                f"{size} bytes. {remedy}"
            )
        if file.range_sha256 and len(file.range_sha256) != -(-file.bytes // RANGE_BYTES):
            raise DataError(
                f"{path}: {name} has {len(file.range_sha256):,} hashes of ranges of "
                f"{RANGE_BYTES:,} bytes for {file.bytes:,} bytes. {remedy}"
            )


def _check_size(folder: Path, name: str, expected: DataFile, *, source: str) -> None:
    try:
        status = inside_folder(folder / name).stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file")
    except OSError as error:
        raise DataError(
            f"{folder / name}, which meta.json lists: {error.strerror}. "
            f"{how_to_make_again(folder, source=source)}"
        ) from None
    if status.st_size != expected.bytes:
        raise DataError(
            f"{folder / name}: {status.st_size:,} bytes, meta.json says {expected.bytes:,}. "
            f"{how_to_make_again(folder, source=source)}"
        )
