"""Finds the columns that a task reads, by comparing names of columns with known names without
case."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from payload.core.printable_text import shown
from payload.data.rows.columns import (
    ANSWERS,
    OPENAI_ANSWERS,
    chat_columns,
    format_of,
    preference_columns,
)
from payload.data.rows.open_rows import open_rows
from payload.data.sources.documents import UnreachableSourceError
from payload.data.sources.recognise import file_kinds, has_rows
from payload.data.sources.source_flags import DEFAULT_TEXT_COLUMN, SourceRequest, resolve_source

LABEL_COLUMNS = (
    *("label", "labels", "class", "category", "target", "sentiment", "section", "topic"),
    *("queue", "intent"),
)
TEXT_COLUMNS = (DEFAULT_TEXT_COLUMN, "sentence", "content", "review", "body", "description")


def first_row_columns(request: SourceRequest) -> list[str]:
    """Return the columns of the first readable row, or an empty list if no row can be read.

    The list is also empty without a network connection, because a folder that is already prepared
    does not need the source. Raises DataError, UsageError.
    """
    request = resolve_source(request)
    has_columns = request.kind in ("jsonl", "parquet", "csv", "hf")
    if request.kind == "auto" and request.inputs:
        has_columns = has_rows(file_kinds(request.inputs, request.glob)[1])
    if not has_columns:
        return []
    rows = open_rows(replace(request, skip_bad=True))
    try:
        rows.identity()
        first = next(rows.stream(), None)
    except UnreachableSourceError:
        return []
    return [] if first is None else list(first.values)


def first_of(names: Sequence[str], columns: Sequence[str]) -> str | None:
    """Return the column with the first of these names, ignoring case; prefer an exact match."""
    found = {column.casefold(): column for column in reversed(columns)}
    found |= {column: column for column in columns}
    return next((found[name] for name in names if name in found), None)


def labelled_columns(
    columns: Sequence[str], *, text: str | None, label: str | None
) -> tuple[str | None, str | None]:
    """Return the names of the text column and of the label column; None for a missing column.

    `text` and `label` are the columns that the user chose.
    """
    label = label or first_of(LABEL_COLUMNS, columns)
    text = text or first_of(TEXT_COLUMNS, columns)
    others = [name for name in columns if name != label]
    if text is None and len(others) == 1:
        text = others[0]
    return text, label


def known_names(columns: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return renamings that give these columns known names, as pairs (column, known name).

    The result is empty if the names are already known, or if the columns match no format of
    conversations or preference pairs, ignoring case.
    """
    known = {*chat_columns(), *preference_columns()} - set(columns)
    found: dict[str, str] = {}
    for name in columns:
        found.setdefault(name.casefold(), name)
    renames = tuple((name, low) for low, name in found.items() if low in known)
    renamed = [dict(renames).get(name, name) for name in columns]
    return renames if _is_conversation(renamed) and not _is_conversation(columns) else ()


def choice_lines(chosen: Iterable[tuple[str, str]]) -> list[str]:
    """Return lines about columns that are read under another name."""
    pairs = [f"{shown(name)} as {shown(known)}" for name, known in chosen if name != known]
    return [f"columns read: {', '.join(pairs)}"] if pairs else []


def _is_conversation(columns: Sequence[str]) -> bool:
    """Return True if rows with these columns have conversations or pairs."""
    row = dict.fromkeys(columns, "")
    pairs = any(all(name in row for name in names) for names in (ANSWERS, OPENAI_ANSWERS))
    return pairs or format_of(row) is not None
