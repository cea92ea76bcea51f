"""Detects the format of a data file, its task, and the lengths of its texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from payload.core.errors import DataError
from payload.core.printable_text import shown
from payload.core.regular_files import home_path
from payload.core.tasks import TASK_KINDS, TaskKind
from payload.data.rows.conversation import Message
from payload.data.rows.conversations import BadConversationError, conversation_of
from payload.data.rows.preferences import preference_of
from payload.data.rows.rows import open_rows
from payload.data.sources.source_flags import DEFAULT_TEXT_COLUMN, SourceKind, SourceRequest
from payload.formats.hub_names import HubName, require_one_meaning

_SAMPLE = 2000
"""Number of rows that are measured."""
_SUFFIXES: Mapping[str, SourceKind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".gz": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
}
_FOLDER_KINDS: Mapping[str, SourceKind] = {
    "*.jsonl*": "jsonl",
    "*.parquet": "parquet",
    "*.csv": "csv",
}
_NO_TEXT = {".json", ".tsv", ".xlsx", ".zip", ".arrow", ".pdf", ".docx"}
_CHAT_COLUMNS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
)
_PREFERENCE_COLUMNS = ("chosen", "rejected")
_LABEL_COLUMNS = ("label", "labels", "class", "category", "target", "sentiment", "section", "topic")
_TEXT_COLUMNS = (DEFAULT_TEXT_COLUMN, "sentence", "content", "review", "body", "description")
_COLUMNS_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Command-line options about the data; None means that the value is detected."""

    task: TaskKind | None = None
    text_column: str | None = None
    label_column: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectedData:
    """The detected format of the data."""

    task: TaskKind
    source: SourceKind
    input: str
    reason: str
    """Reason why the task was chosen, for messages."""
    text_column: str | None = None
    label_column: str | None = None
    rows: tuple[Mapping[str, Any], ...] = ()
    """The first rows; empty for plain text."""

    def arguments(self) -> list[str]:
        """Return the arguments of `payload.data prepare`."""
        found = ["--task", self.task, "--source", self.source, "--input", self.input]
        for flag, value in (
            ("--text-column", self.text_column),
            ("--label-column", self.label_column),
        ):
            found += [] if value is None else [flag, value]
        return found


def detect_data(given: str, options: DataOptions) -> DetectedData:
    """Return the format of `given`: a file, a folder or a dataset on the hub. Raises DataError."""
    source = _source_kind(given)
    if source == "text":
        if options.task not in (None, "text"):
            raise DataError(
                f"--data {given}: plain text has no columns for --task {options.task}. Use jsonl, "
                "parquet or csv."
            )
        return DetectedData(task="text", source="text", input=given, reason="it is plain text")
    rows = _first_rows(given, source)
    columns = list(rows[0])
    task, reason = (
        (options.task, "--task selects it") if options.task else _detect_task(given, rows, options)
    )
    text_column = label_column = None
    if task == "classify":
        text_column, label_column = _find_columns(columns, options)
    elif task == "text":
        text_column = options.text_column or _first_of(_TEXT_COLUMNS, columns)
    if task in ("text", "classify") and text_column is None:
        raise _column_error(given, columns, "text column", "Choose one with --text-column.")
    if task == "classify" and label_column is None:
        raise _column_error(given, columns, "label column", "Choose one with --label-column.")
    for name in filter(None, (text_column, label_column)):
        if name not in columns:
            raise _column_error(given, columns, f"column {name!r}", "Choose another one.")
    return DetectedData(
        task=task,
        source=source,
        input=given,
        reason=reason,
        text_column=text_column,
        label_column=label_column,
        rows=tuple(rows),
    )


def _source_kind(given: str) -> SourceKind:
    if "/" in given:
        require_one_meaning(given, setting="--data", kind="dataset", error=DataError)
    path = home_path(given)
    if path.is_dir():
        found = [kind for glob, kind in _FOLDER_KINDS.items() if any(path.rglob(glob))]
        return found[0] if found else "text"
    if path.exists():
        suffix = path.suffix.lower()
        if suffix in _NO_TEXT:
            raise DataError(
                f"--data {given}: {suffix} is not supported. Convert it to jsonl (a JSON object a "
                "line), csv, parquet or plain text."
            )
        return _SUFFIXES.get(suffix, "text")
    is_path = given.startswith(("/", "./", "../", "~")) or path.suffix.lower() in _SUFFIXES
    if is_path or HubName.parse(given) is None or "/" not in given:
        raise DataError(
            f"--data {given}: file or folder not found. Correct the path, or use a dataset of the "
            "hub, OWNER/NAME."
        )
    return "hf"


def _first_rows(given: str, source: SourceKind) -> list[Mapping[str, Any]]:
    rows = open_rows(SourceRequest(kind=source, inputs=(given,)))
    rows.identity()
    found = [row.values for row in islice(rows.read(), _SAMPLE)]
    if not found:
        raise DataError(f"--data {given}: no rows. Use a file with data.")
    return found


def _detect_task(
    given: str, rows: Sequence[Mapping[str, Any]], options: DataOptions
) -> tuple[TaskKind, str]:
    """Detect the task from the names of the columns; return it with the reason."""
    columns = list(rows[0])
    if all(name in columns for name in _PREFERENCE_COLUMNS):
        for kind in TASK_KINDS:
            if str(kind) == "preference":
                return kind, "its rows have the columns 'chosen' and 'rejected'"
        raise DataError(
            f"--data {given}: the columns 'chosen' and 'rejected' need preference training, which "
            "this release does not have. Use --task chat with columns prompt and completion."
        )
    for names in _CHAT_COLUMNS:
        if all(name in columns for name in names):
            which = " and ".join(map(repr, names))
            plural = "s" if len(names) > 1 else ""
            return "chat", f"its rows have the column{plural} {which}"
    _, label = _find_columns(columns, options)
    if label is not None:
        return "classify", f"its rows have a column of labels, {label!r}"
    if _first_of(_TEXT_COLUMNS, columns) or options.text_column:
        return "text", "its rows have a text column, but no labels or conversations"
    raise _column_error(
        given,
        columns,
        "known column",
        "Choose the task with --task, and columns with --text-column and --label-column.",
    )


def _find_columns(columns: Sequence[str], options: DataOptions) -> tuple[str | None, str | None]:
    """Return the text and label columns, or None for a column that is not found."""
    label = options.label_column or _first_of(_LABEL_COLUMNS, columns)
    text = options.text_column or _first_of(_TEXT_COLUMNS, columns)
    others = [name for name in columns if name != label]
    if text is None and len(others) == 1:
        text = others[0]
    return text, label


def _first_of(names: Sequence[str], columns: Sequence[str]) -> str | None:
    return next((name for name in names if name in columns), None)


def _column_error(given: str, columns: Sequence[str], missing: str, fix: str) -> DataError:
    listed = ", ".join(shown(name) for name in columns[:_COLUMNS_SHOWN])
    return DataError(f"--data {given}: no {missing} found in the columns {listed}. {fix}")


def measure(found: DetectedData, *, tokenizer: str) -> tuple[int, ...]:
    """Return the token counts of the first rows; empty for plain text.

    Raises DataError for a missing tokenizer or template, and for a damaged row.
    """
    if found.task == "classify":
        return _text_lengths(found, tokenizer=tokenizer)
    if found.task == "text":
        return ()
    return _conversation_lengths(found, tokenizer=tokenizer)


def _messages(row: Mapping[str, Any]) -> Sequence[Message]:
    """Return the messages of a conversation. Raises BadConversationError."""
    return conversation_of(row).messages


def _longer_answer(row: Mapping[str, Any]) -> Sequence[Message]:
    """Return the longer conversation of a preference pair. Raises BadConversationError."""
    pair = preference_of(row)
    longer = max(pair.chosen, pair.rejected, key=lambda each: len(str(each)))
    return [*pair.prompt, *longer]


def _text_lengths(found: DetectedData, *, tokenizer: str) -> tuple[int, ...]:
    from payload.data.tasks.classify_job import tokenize
    from payload.data.tokenizers import load_tokenizer

    assert found.text_column is not None
    texts = [row.get(found.text_column) for row in found.rows]
    content = [each.encode("utf-8", "replace") for each in texts if isinstance(each, str)]
    return tuple(len(tokens) for tokens in tokenize(load_tokenizer(tokenizer), content))


def _conversation_lengths(found: DetectedData, *, tokenizer: str) -> tuple[int, ...]:
    from payload.data.templates.chat_template import read_chat_template
    from payload.data.tokenizers import load_hf_tokenizer

    loaded, folder = load_hf_tokenizer(tokenizer)
    template = read_chat_template(folder)
    messages_of_row = _longer_answer if found.task == "preference" else _messages
    texts = []
    for number, row in enumerate(found.rows, 1):
        try:
            messages = messages_of_row(row)
        except BadConversationError as error:
            raise DataError(f"--data {found.input}: row {number}: {error}") from None
        texts.append(template.render(messages, add_generation_prompt=False))
    encoded = loaded.encodings(texts)
    return tuple(len(each.ids) for each in encoded)
