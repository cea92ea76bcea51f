"""CONTRACT: the contents of a data folder, recorded in its meta.json.

meta.json is written last, so a folder without meta.json is incomplete.
"""

from __future__ import annotations

import errno
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from payload.core.errors import ConfigError, DataError
from payload.core.printable_text import PLAIN_TEXT, shown
from payload.core.regular_files import read_bytes
from payload.core.symlink_safety import inside_folder
from payload.core.tasks import TaskKind
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import SHA256
from payload.core.validation.records import build, check_schema
from payload.formats.hf_folder import TOKENIZER_FILES
from payload.formats.prepare_hints import missing_data, prepare_again_hint

META_NAME = "meta.json"
TRAIN_NAME = "train.bin"
VAL_NAME = "val.bin"
TRAIN_MARKS_NAME = "train.marks.bin"
VAL_MARKS_NAME = "val.marks.bin"
EXAMPLES_NAMES = {TRAIN_NAME: "train.examples.bin", VAL_NAME: "val.examples.bin"}
"""For each token file of labelled texts, the file with the texts' offsets and labels."""
EXAMPLE_BYTES = 16
PAIRS_NAMES = {TRAIN_NAME: "train.pairs.bin", VAL_NAME: "val.pairs.bin"}
"""For each token file of preference pairs, the file with the conversations' offsets."""
PAIR_BYTES = 16
MOST_NAME_TOKENS = 1024
"""Limit on the tokens of one label name in meta.json."""
FOLDER_WORD = "folder"
"""Prefix in `source` for a local folder with a name that could also be a dataset on the hub."""
SCHEMA_VERSION = 1
IGNORED_TARGET = -100
"""Target of a position that the loss ignores. It is PyTorch's default for cross entropy."""

RANGE_BYTES = 256 * 1024
"""Size of the ranges of a file that are hashed separately. Hashing a range takes 0.2 ms. Training
on 1,024 tokens (2 kB) takes 200 ms."""
HASH_DIGITS = 32
"""Number of hexadecimal digits of a range's SHA-256 that meta.json stores. 128 bits are secure, and
meta.json is half as large as with whole hashes."""

_RANGE_HASH = re.compile(rf"[0-9a-f]{{{HASH_DIGITS}}}")

TokenDtype = Literal["uint16", "uint32"]
OnLong = Literal["truncate", "drop", "refuse", "split"]
Dedup = Literal["none", "exact", "near"]
"""Duplicates that are removed. By default, only training rows that are also in the validation data
are removed; with `none`, no row is removed."""
Thoughts = Literal["keep", "drop", "empty", "refuse"]
"""Treatment of the assistant's thoughts.

`keep` trains the thoughts that are in the row. `drop` removes all thoughts. `empty` and `refuse`
differ from `keep` only for a row without thoughts whose prompt opens a block of thoughts. For such
a row, `keep` and `drop` train only the answer, `empty` trains the end of the block and the answer,
and `refuse` rejects the row.
"""

_TOKEN_FILES = frozenset({TRAIN_NAME, VAL_NAME})
_FILES: dict[TaskKind, frozenset[str]] = {
    "text": _TOKEN_FILES,
    "chat": _TOKEN_FILES | {TRAIN_MARKS_NAME, VAL_MARKS_NAME},
    "classify": _TOKEN_FILES | frozenset(EXAMPLES_NAMES.values()),
    "preference": _TOKEN_FILES
    | {TRAIN_MARKS_NAME, VAL_MARKS_NAME}
    | frozenset(PAIRS_NAMES.values()),
}
"""For each task, the files of a data folder except the tokenizer files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file of the folder."""

    bytes: int = checked(low=0)
    sha256: str = checked(pattern=SHA256, wanted="64 hexadecimal digits")
    range_sha256: tuple[str, ...] = checked((), pattern=_RANGE_HASH, wanted="hexadecimal digits")
    """For each range of RANGE_BYTES, the first digits of its SHA-256. Training verifies a range
    when it reads the range. Empty in folders of older releases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRecord:
    """The selection of the documents for validation."""

    method: Literal["permutation", "hash", "stratified", "files"]
    """`permutation`: the documents that train_test_split of the library `datasets` selects. `hash`:
    by a keyed hash of the document's number, if the total was not known in advance. `stratified`:
    the same fraction of each label's texts. `files`: the documents of the validation files, and the
    rows that a column `split` declares for validation."""
    val_fraction: float = checked(low=0, high=1)
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRecord:
    """Contents of a chat folder: the counts of its blocks, conversations and trained tokens."""

    sequence_length: int = checked(low=2, high=2**20)
    """Tokens of a block; training must use the same length."""
    packing: Literal["best-fit", "none"]
    """`best-fit` puts several conversations into a block. `none` puts one conversation into each
    block, with padding."""
    template_sha256: str = checked(pattern=SHA256, wanted="64 hexadecimal digits")
    train_trained_tokens: int = checked(low=1)
    """Number of tokens that the loss covers."""
    val_trained_tokens: int = checked(low=1)
    train_padding_tokens: int = checked(low=0)
    val_padding_tokens: int = checked(low=0)
    truncated_conversations: int = checked(low=0)
    """Number of conversations that were longer than a block and were truncated."""
    truncated_tokens: int = checked(low=0)
    dropped_conversations: int = checked(low=0)
    """Number of conversations that were dropped because they had no trained token, before or after
    truncation."""
    on_long: OnLong = "truncate"
    """The value of --on-long: what happens to conversations that are longer than a block."""
    long_dropped_conversations: int = checked(0, low=0)
    """Number of conversations that were longer than a block and were left out."""
    split_conversations: int = checked(0, low=0)
    """Number of conversations that were longer than a block and were split into several blocks."""
    thoughts: Thoughts = "keep"
    """Treatment of the assistant's thoughts, as in --thoughts."""
    added_samples: int = checked(0, low=0)
    """Number of samples beyond one per conversation. A conversation needs several samples if its
    template renders a turn differently when other turns follow."""
    added_tokens: int = checked(0, low=0)
    """Number of tokens in the added samples."""
    literal_samples: int = checked(0, low=0)
    """Number of samples in which a special token in the row's text is encoded as plain text."""
    unescaped_samples: int = checked(0, low=0)
    """Number of samples in which a special token in the row's text is encoded as a special
    token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyRecord:
    """Labels and counts of a folder for classification."""

    labels: tuple[str, ...]
    """Names of the labels. A label's number is the index of its name."""
    train_counts: tuple[int, ...] = checked(low=1)
    """Number of training texts with each label."""
    val_counts: tuple[int, ...] = checked(low=1)
    pad_token: int = checked(low=0)
    """Token that pads the shorter texts of a batch."""
    label_tokens: tuple[tuple[int, ...], ...] = ()
    """For each label, the tokens of a space and its name. Empty in folders of older releases, and
    if the tokenizer returns no tokens for a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceRecord:
    """Contents of a folder of preference pairs.

    Each pair has two conversations, the preferred one first.
    """

    sequence_length: int = checked(low=2, high=2**20)
    """Highest number of tokens of a conversation; training must use the same length."""
    template_sha256: str = checked(pattern=SHA256, wanted="64 hexadecimal digits")
    train_trained_tokens: int = checked(low=2)
    """Number of answer tokens. The loss covers these tokens."""
    val_trained_tokens: int = checked(low=2)
    truncated_answers: int = checked(low=0)
    """Number of truncated answers."""
    truncated_tokens: int = checked(low=0)
    pad_token: int = checked(low=0)
    """Token that pads the shorter conversations of a batch."""
    thoughts: Thoughts = "keep"
    """Treatment of the assistant's thoughts, as in --thoughts."""
    literal_samples: int = checked(0, low=0)
    """Number of conversations in which a special token in the row's text is encoded as plain
    text."""
    unescaped_samples: int = checked(0, low=0)
    """Number of conversations in which a special token in the row's text is encoded as a special
    token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRecord:
    """Counts of the rows of one input."""

    input: str = checked(pattern=PLAIN_TEXT, wanted="one line without control characters")
    """Path, as in --input."""
    weight: float = checked(low=0)
    """Number of times that each training row is in an epoch."""
    rows: int = checked(low=0)
    """Number of rows with trained content, before duplicates were removed."""
    duplicates: int = checked(low=0)
    """Number of rows that --dedup removed."""
    also_in_validation: int = checked(low=0)
    """Number of training rows that were removed because they are also in the validation data."""
    val_rows: int = checked(low=0)
    train_rows: int = checked(low=0)
    """Number of training rows after all removals. Each row counts once."""
    rows_an_epoch: int = checked(low=0)
    """Number of rows in an epoch: `train_rows` times `weight`, rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionRecord:
    """The treatment of duplicates, and the weights of the inputs."""

    dedup: Dedup | None
    inputs: tuple[InputRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedTokens:
    """Special tokens that `prepare` added to the tokenizer of the model, as the last tokens."""

    tokens: list[str]
    model_pipeline_sha256: str = checked(pattern=SHA256, wanted="64 hexadecimal digits")
    """Hash of the model's own tokenizer (payload.formats.tokenizer_identity)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataMeta:
    """Contents of meta.json."""

    tokenizer: str
    tokenizer_sha256: str
    """Hash of the vocabulary and merges."""
    tokenizer_pipeline_sha256: str = ""
    """Hash of all settings that affect the tokens (payload.formats.tokenizer_identity).

    Empty in folders of older releases, which have only `tokenizer_sha256`.
    """
    tokenizer_files: dict[str, DataFile] = field(default_factory=dict)
    """Tokenizer files in the folder, by name; empty for GPT-2's tokenizer, which is packaged."""
    vocab_size: int = checked(low=1, high=2**32)
    added_tokens: AddedTokens | None = None
    """None if the tokenizer is the model's own."""
    end_of_text: int = checked(low=0)
    """Token that ends every document."""
    dtype: TokenDtype
    """Type of the tokens in the .bin files, little endian."""
    train_tokens: int = checked(low=0)
    val_tokens: int = checked(low=0)
    train_documents: int = checked(low=0)
    val_documents: int = checked(low=0)
    skipped_documents: int = checked(low=0)
    """Number of unreadable documents that --skip-bad left out."""
    skipped_examples: list[str] = field(default_factory=list)
    """Messages about the first skipped documents, with the location and the problem."""
    text_bytes: int = checked(low=0)
    """Size of the tokenized text in bytes of UTF-8."""
    source: str = checked(pattern=PLAIN_TEXT, wanted="one line without control characters")
    """Kind and location of the source, as in `jsonl: corpus/part-*.jsonl`."""
    revision: str | None
    """The commit of a dataset on the hub, or the Python version for `stdlib`; None for other
    sources."""
    fingerprint: str
    """SHA-256 over the names, sizes and times of the source's files, and over the settings that
    affect the output."""
    split: SplitRecord
    encoder: str
    """The program that produced the tokens, as in `gigatoken 0.10.0`."""
    files: dict[str, DataFile]
    task: TaskKind = "text"
    chat: ChatRecord | None = None
    """Record of the task `chat`; None for other tasks."""
    classify: ClassifyRecord | None = None
    """Record of the task `classify`; None for other tasks."""
    preference: PreferenceRecord | None = None
    """Record of the task `preference`; None for other tasks."""
    selection: SelectionRecord | None = None
    """Record of duplicates and weights; None if every row is in its file exactly once."""
    schema_version: int = SCHEMA_VERSION

    def hashes(self) -> dict[str, str]:
        """Return the SHA-256 of each file that training reads, by name."""
        return {name: entry.sha256 for name, entry in self.files.items()}

    def added_ids(self) -> range:
        """Return the ids of the special tokens that `prepare` added."""
        count = len(self.added_tokens.tokens) if self.added_tokens else 0
        return range(self.vocab_size - count, self.vocab_size)

    def mean_sample_tokens(self) -> float | None:
        """Return the mean number of tokens of a training text or pair, without padding.

        Return None for tasks with samples of exactly `data.sequence_length` tokens (blocks).
        """
        samples = {
            "classify": (EXAMPLES_NAMES, EXAMPLE_BYTES),
            "preference": (PAIRS_NAMES, PAIR_BYTES),
        }
        if self.task not in samples:
            return None
        names, each_bytes = samples[self.task]
        count = self.files[names[TRAIN_NAME]].bytes // each_bytes
        return self.train_tokens / count if count else None

    def all_files(self) -> dict[str, DataFile]:
        """Return the token files and the tokenizer files, by name."""
        return {**self.files, **self.tokenizer_files}


def require_task(folder: Path, meta: DataMeta, *, task: TaskKind) -> None:
    """Raise ConfigError if a run's `task.kind` differs from the data's task."""
    if meta.task != task:
        raise ConfigError(
            f"task.kind = {task!r}, but {folder} was prepared with --task {meta.task}. Set "
            f"task.kind to {meta.task!r}, or prepare other data."
        )


def require_prepared_length(folder: Path, meta: DataMeta, *, sequence_length: int) -> None:
    """Raise ConfigError if the data was prepared for a different sequence length."""
    record = meta.chat or meta.preference
    if record is not None and sequence_length != record.sequence_length:
        was = "packed into blocks" if meta.chat is not None else "prepared for conversations"
        raise ConfigError(
            f"data.sequence_length = {sequence_length}, but {folder} was {was} of "
            f"{record.sequence_length}. Set sequence_length to {record.sequence_length}, or "
            f"prepare the data again with --sequence-length {sequence_length}."
        )


def describe_new_rows(meta: DataMeta, rows: int) -> str:
    """Return text about the new special tokens, and about the rows that a model of `rows` rows
    gains."""
    ids = meta.added_ids()
    span = f"id {ids[0]}" if len(ids) == 1 else f"ids {ids[0]} to {ids[-1]}"
    grown = max(0, meta.vocab_size - rows)
    free = f", {len(ids) - grown} rows were free" if grown < len(ids) else ""
    return (
        f"{len(ids)} new special tokens, {span}: {grown} rows added to {rows:,}{free}. Each new "
        f"row starts as the mean of rows 0 to {ids[0] - 1}"
    )


def task_files() -> frozenset[str]:
    """Return the names of all tasks' files."""
    return frozenset().union(*_FILES.values())


def token_dtype(vocab_size: int) -> TokenDtype:
    """Return the narrowest dtype for the vocabulary: uint16 up to 65,536 tokens, as in nanoGPT."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def load_meta(folder: Path) -> DataMeta:
    """Read a prepared folder's meta.json, and check the sizes of the files.

    If the folder is missing or damaged, raises DataError with the command that prepares it. Links
    out of the folder are refused, because training could then read any file of the right size.
    """
    path = folder / META_NAME
    remedy = prepare_again_hint(folder, source=None)
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
    """Raise DataError for contradictory values. The values determine how many bytes are read."""
    expected = _FILES[meta.task]
    if set(meta.files) != expected:
        raise DataError(f"{path}: files must be {' and '.join(sorted(expected))}. {remedy}")
    records = {"chat": meta.chat, "classify": meta.classify, "preference": meta.preference}
    for name, found in records.items():
        if (meta.task == name) != (found is not None):
            raise DataError(
                f"{path}: task = {meta.task!r} and {name} contradict each other. {remedy}"
            )
    if meta.added_tokens and not 0 < len(meta.added_tokens.tokens) < meta.vocab_size:
        raise DataError(f"{path}: added_tokens does not fit vocab_size. {remedy}")
    pairs = meta.preference
    if pairs is not None and pairs.pad_token >= meta.vocab_size:
        raise DataError(f"{path}: preference.pad_token is not in the vocabulary. {remedy}")
    record = meta.classify
    if record is not None:
        counts = (
            (record.train_counts, meta.train_documents),
            (record.val_counts, meta.val_documents),
        )
        is_whole = all(
            len(each) == len(record.labels) and sum(each) == total for each, total in counts
        )
        is_known = len(set(record.labels)) == len(record.labels) >= 2
        names = record.label_tokens
        tokens = (record.pad_token, *(token for each in names for token in each))
        is_named = not names or (
            len(names) == len(record.labels)
            and all(0 < len(each) <= MOST_NAME_TOKENS for each in names)
        )
        is_whole = is_whole and is_named and all(0 <= each < meta.vocab_size for each in tokens)
        if not is_whole or not is_known:
            raise DataError(f"{path}: classify has inconsistent counts or labels. {remedy}")
    unknown = sorted(set(meta.tokenizer_files) - set(TOKENIZER_FILES))
    if unknown:
        raise DataError(f"{path}: {shown(unknown[0])} is not a tokenizer's file. {remedy}")
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
                f"{path}: {name} has {file.bytes:,} bytes, but should have {count:,} entries of "
                f"{size} bytes each. {remedy}"
            )
        if file.range_sha256 and len(file.range_sha256) != -(-file.bytes // RANGE_BYTES):
            raise DataError(
                f"{path}: {name} has {file.bytes:,} bytes and {len(file.range_sha256):,} hashes, "
                f"but should have one hash for every {RANGE_BYTES:,} bytes. {remedy}"
            )


def _check_size(folder: Path, name: str, expected: DataFile, *, source: str) -> None:
    try:
        status = inside_folder(folder / name).stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file")
    except OSError as error:
        raise DataError(
            f"{folder / name}: {error.strerror}, but meta.json lists it. "
            f"{prepare_again_hint(folder, source=source)}"
        ) from None
    if status.st_size != expected.bytes:
        raise DataError(
            f"{folder / name}: the file has {status.st_size:,} bytes, but meta.json lists "
            f"{expected.bytes:,}. {prepare_again_hint(folder, source=source)}"
        )
