"""Builds the source that the command line selects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from payload.core.errors import UsageError
from payload.data.sources.documents import Source
from payload.data.sources.source_flags import SourceKind, SourceRequest, check_flags, resolve_source
from payload.data.sources.split_columns import SPLIT_COLUMNS, split_column
from payload.data.sources.text_files import inputs_of


def _build_by_content(request: SourceRequest) -> Source:
    """Return a source that fits the content of the files. Raises DataError."""
    from payload.data.sources.recognise import file_kinds, has_rows

    files, kinds = file_kinds(request.inputs, request.glob)
    if not has_rows(kinds):
        return build_source(replace(request, kind="text"))
    if kinds == {"jsonl"} or kinds == {"parquet"}:
        (kind,) = kinds
        named: SourceKind = "jsonl" if kind == "jsonl" else "parquet"
        given = [Path(each) for each in request.inputs]
        number_of = dict(inputs_of(given, glob=request.glob or "*"))
        return build_source(
            replace(
                request,
                kind=named,
                inputs=tuple(map(str, files)),
                input_numbers=tuple(number_of[path] for path in files),
                glob=None,
            )
        )
    from payload.data.rows.text_rows import TextRows

    return TextRows(request)


def build_source(request: SourceRequest, columns: Sequence[str] = ()) -> Source:
    """Return the source without reading it; `columns` are the columns of its first row.

    Raises UsageError for flags that cannot be combined.
    """
    request = resolve_source(request)
    check_flags(request)
    others = [name for name in request.ignored_keys if name.casefold() not in SPLIT_COLUMNS]
    if request.columns or others:
        raise UsageError(
            "--columns and --ignore-key cannot be used with --task text, which reads one column. "
            "Choose the column with --text-column."
        )
    # Only this source reads the column that declares the rows' splits.
    if request.kind == "csv" or request.ignored_keys or split_column(columns) is not None:
        from payload.data.rows.text_rows import TextRows

        return TextRows(request)
    if request.kind == "stdlib":
        from payload.data.sources.text_files import stdlib_source

        return stdlib_source(skip_bad=request.skip_bad)
    if request.kind in ("openwebtext", "hf"):
        from payload.data.sources.hub import HubSource

        return HubSource(request)
    paths = [Path(given) for given in request.inputs]
    if request.kind == "auto":
        return _build_by_content(request)
    if request.kind == "text":
        from payload.data.sources.text_files import TextSource

        return TextSource(paths, glob=request.glob, skip_bad=request.skip_bad)
    if request.kind == "jsonl":
        from payload.data.sources.jsonl import JsonlSource

        return JsonlSource(paths, request)
    from payload.data.sources.parquet import ParquetSource

    return ParquetSource(paths, request)
