"""Detects the format of a data file, its task, and the columns that the task reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

from payload.core.errors import DataError, UsageError
from payload.core.printable_text import shown
from payload.core.tasks import TaskKind
from payload.data.repeated_rows import repeated_row_lines
from payload.data.rows.column_choice import (
    LABEL_COLUMNS,
    TEXT_COLUMNS,
    first_of,
    known_names,
    labelled_columns,
)
from payload.data.rows.columns import ANSWERS, METADATA, OPENAI_ANSWERS, format_of, near_columns
from payload.data.rows.conversations import columns_of, unread_columns
from payload.data.rows.open_rows import open_rows
from payload.data.rows.preferences import COLUMNS as PREFERENCE_COLUMNS
from payload.data.rows.rows import Row, Rows
from payload.data.sources.input_weights import split_weights
from payload.data.sources.recognise import file_kinds, has_rows
from payload.data.sources.source_flags import SourceKind, SourceRequest, resolve_source
from payload.data.sources.split_columns import split_of_row

_SAMPLE = 2000
"""Number of rows that are read to detect the format."""
_COLUMNS_SHOWN = 8
_WITH_COLUMNS = "JSON Lines, JSON, CSV, parquet or Arrow"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Command-line options about the data; None means that the value is detected."""

    task: TaskKind | None = None
    text_column: str | None = None
    label_column: str | None = None
    source: SourceRequest = field(default_factory=lambda: SourceRequest(kind="auto"))
    """The options of the source, without its input."""
    forwarded: tuple[str, ...] = ()
    """Further arguments of `prepare`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectedData:
    """The detected format of the data."""

    task: TaskKind
    source: SourceKind
    inputs: tuple[str, ...]
    """Files or folders, each as PATH or PATH:WEIGHT; or the name of one dataset of the hub."""
    reason: str
    """Reason why the task was chosen, for messages."""
    text_column: str | None = None
    label_column: str | None = None
    rows: tuple[Row, ...] = ()
    """The first rows; empty for plain text."""
    recognised: tuple[str, ...] = ()
    """Lines about the format, the splits, and the columns that are read and not read."""
    forwarded: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """Return the arguments of `payload.data prepare`."""
        found = ["--task", self.task, "--source", self.source, "--input", *self.inputs]
        for flag, value in (
            ("--text-column", self.text_column),
            ("--label-column", self.label_column),
        ):
            found += [] if value is None else [flag, value]
        return [*found, *self.forwarded]


def find_inputs(
    given: Sequence[str], options: DataOptions, *, setting: str = "--data"
) -> SourceRequest:
    """Return the request that reads the given files and folders, or one dataset on the hub.

    Raises DataError for a path that does not exist, and UsageError for a bad weight. Both messages
    name `setting`.
    """
    paths, _ = split_weights(given, setting=setting)
    return resolve_source(replace(options.source, inputs=paths), setting=setting)


def detect_data(
    given: Sequence[str], options: DataOptions, *, setting: str = "--data"
) -> DetectedData:
    """Return the format of the inputs: files, folders or a dataset on the hub.

    Raises DataError, which names `setting`.
    """
    where = f"{setting} {' '.join(given)}".strip()
    try:
        request = find_inputs(given, options, setting=setting)
    except UsageError as error:
        raise DataError(str(error)) from None
    if request.kind == "auto" and not has_rows(file_kinds(request.inputs, request.glob)[1]):
        if options.task not in (None, "text"):
            raise DataError(
                f"{where}: plain text has no columns for --task {options.task}. "
                f"Use {_WITH_COLUMNS}."
            )
        plain = "plain text has no columns"
        other = f"use {_WITH_COLUMNS}"
        _require_no_column(options, "text_column", plain, other)
        _require_no_column(options, "label_column", plain, other)
        return DetectedData(
            task="text",
            source="text",
            inputs=tuple(given),
            reason="it is plain text",
            forwarded=options.forwarded,
        )
    source = open_rows(replace(request, skip_bad=True))
    source.identity()
    rows = _first_rows(source, request)
    if not rows:
        bad = f" {source.skipped[0]}" if source.skipped else ""
        raise DataError(f"{where}: no rows.{bad} Use a file with data.")
    columns = list(rows[0].values)
    is_chosen = options.label_column is not None or options.text_column is not None
    may_be_chat = options.task in (None, "chat", "preference") and not is_chosen
    may_rename = may_be_chat and (options.task is not None or not _has_labels(columns))
    renames = known_names(columns) if may_rename else ()
    if renames and not options.source.columns:
        named = ",".join(f"{column}={name}" for column, name in renames)
        again = replace(
            options,
            source=replace(options.source, columns=renames),
            forwarded=(*options.forwarded, "--columns", named),
        )
        return detect_data(given, again, setting=setting)
    task, reason = (
        (options.task, "--task selects it") if options.task else _detect_task(where, rows, options)
    )
    detected = "" if options.task else f" (chosen because {reason})"
    unused = f"--task {task}{detected} does not read this column"
    if task in ("chat", "preference"):
        _require_no_column(options, "text_column", unused, "choose another --task")
    if task != "classify":
        _require_no_column(options, "label_column", unused, "choose another --task")
    text_column = label_column = None
    if task == "classify":
        text_column, label_column = labelled_columns(
            columns, text=options.text_column, label=options.label_column
        )
    elif task == "text":
        text_column = options.text_column or first_of(TEXT_COLUMNS, columns)
    if task in ("text", "classify") and text_column is None:
        raise _column_error(where, columns, "text column", "Choose one with --text-column.")
    if task == "classify" and label_column is None:
        _, label = _likely_columns(rows, text_column)
        fix = f"Choose one with --label-column{f' {label!r}' if label else ''}."
        raise _column_error(where, columns, "label column", fix)
    for name in filter(None, (text_column, label_column)):
        if name not in columns:
            raise _column_error(where, columns, f"column {name!r}", "Choose another one.")
    read = tuple(filter(None, (text_column, label_column)))
    return DetectedData(
        task=task,
        source=request.kind,
        inputs=tuple(given),
        reason=reason,
        text_column=text_column,
        label_column=label_column,
        rows=rows,
        recognised=(
            *source.recognised(),
            *_column_lines(rows, task, read),
            *repeated_row_lines(rows, task, text_column=text_column, label_column=label_column),
        ),
        forwarded=options.forwarded,
    )


def _require_no_column(
    options: DataOptions, name: Literal["text_column", "label_column"], problem: str, other: str
) -> None:
    """Raise DataError if the user chose a column that is not read; `other` is another fix."""
    value: str | None = getattr(options, name)
    if value is not None:
        flag = f"--{name.replace('_', '-')}"
        raise DataError(f"{flag} {value}: {problem}. Leave {flag} out, or {other}.")


def _first_rows(source: Rows, request: SourceRequest) -> tuple[Row, ...]:
    """Return the first rows of `source`. With several inputs, return the first rows of each input.

    Several inputs are read by `stream`, which accepts an input that lacks the columns in --columns.
    """
    if len(request.inputs) == 1:
        return tuple(islice(source.read(), _SAMPLE))
    each_input = [
        open_rows(replace(request, inputs=(path,), skip_bad=True)) for path in request.inputs
    ]
    for each in each_input:
        each.identity()
    count = max(1, _SAMPLE // len(each_input))
    return tuple(row for each in each_input for row in islice(each.stream(), count))


def _column_lines(rows: Sequence[Row], task: TaskKind, read: tuple[str, ...]) -> list[str]:
    """Return lines that list which columns are read, and which are not."""
    used: dict[str, None] = dict.fromkeys(read)
    unread: Counter[str] = Counter()
    for row in rows:
        names: Sequence[str] = read
        if task in ("chat", "preference"):
            names = columns_of(row.values) if task == "chat" else PREFERENCE_COLUMNS
        if (split := split_of_row(row.values)) is not None:
            names = [*names, split[0]]
        unread.update(unread_columns(row.values, names))
        used |= dict.fromkeys(name for name in row.values if name in names)
    lines = [f"columns read: {', '.join(map(shown, used)) or 'none'}"]
    for kind, is_metadata in (("ignored as metadata", True), ("not read", False)):
        counts = [
            f"{shown(name)} ({count:,} of {len(rows):,} rows)"
            for name, count in unread.most_common()
            if bool(METADATA.fullmatch(name)) == is_metadata
        ]
        lines += [f"columns {kind}: {', '.join(counts[:_COLUMNS_SHOWN])}"] if counts else []
    return lines


def _detect_task(where: str, rows: Sequence[Row], options: DataOptions) -> tuple[TaskKind, str]:
    """Detect the task from the names of the columns; return it with the reason."""
    first = rows[0].values
    columns = list(first)
    if options.label_column is not None:
        return "classify", "--label-column selects it"
    for names in (ANSWERS, OPENAI_ANSWERS):
        if all(name in columns for name in names):
            return "preference", f"its rows have the columns {_listed(names)}"
    form = format_of(first)
    if form is not None:
        plural = "s" if form.answer else ""
        return "chat", f"its rows have the column{plural} {_listed(form.required())}"
    _, label = labelled_columns(columns, text=options.text_column, label=options.label_column)
    if label is not None:
        return "classify", f"its rows have a column of labels, {label!r}"
    if first_of(TEXT_COLUMNS, columns) or options.text_column:
        return "text", "its rows have a text column, but no labels or conversations"
    raise _column_error(
        where,
        columns,
        "known column",
        f"{near_columns(columns)} {_column_fix(rows)}".lstrip(),
    )


def _listed(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names))


def _column_fix(rows: Sequence[Row]) -> str:
    """Return the fix for rows without known columns, with the names of likely columns."""
    text, label = _likely_columns(rows, None)
    fix = (
        "Map the columns to known names with --columns, such as --columns "
        "QUESTION=user,ANSWER=assistant. Or choose the task with --task, and the columns with "
        "--text-column and --label-column."
    )
    if text is None or label is None:
        return fix
    return f"For labelled texts: --label-column {label!r} and --text-column {text!r}. {fix}"


def _likely_columns(rows: Sequence[Row], text: str | None) -> tuple[str | None, str | None]:
    """Return the column with the longest texts, and a column with few, repeated values."""
    values: dict[str, list[str]] = {}
    for row in rows:
        for name, value in row.values.items():
            if isinstance(value, str):
                values.setdefault(name, []).append(value)
    if text is None and values:
        text = max(values, key=lambda name: sum(map(len, values[name])))
    counts = {name: len(set(each)) for name, each in values.items() if name != text}
    repeated = {n: count for n, count in counts.items() if 2 <= count <= len(values[n]) // 2}
    return text, min(repeated, key=repeated.__getitem__, default=None)


def _has_labels(columns: Sequence[str]) -> bool:
    """Return True if the columns include a text and a label. Other columns do not matter."""
    return bool(first_of(LABEL_COLUMNS, columns) and first_of(TEXT_COLUMNS, columns))


def _column_error(where: str, columns: Sequence[str], missing: str, fix: str) -> DataError:
    listed = ", ".join(shown(name) for name in columns[:_COLUMNS_SHOWN])
    return DataError(f"{where}: no {missing} found in the columns {listed}. {fix}")
