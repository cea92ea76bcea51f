"""Builds the source that the command line selects."""

from __future__ import annotations

from pathlib import Path

from payload.core.errors import UsageError
from payload.data.sources.documents import Source
from payload.data.sources.source_flags import SourceRequest, check_flags


def build_source(request: SourceRequest) -> Source:
    """Return the source without reading it.

    Raises UsageError for flags that do not fit together.
    """
    check_flags(request)
    if request.kind == "csv":
        raise UsageError(
            "--source csv cannot be used with --task text. Convert the file to JSON Lines and use "
            "--source jsonl, or choose another --task."
        )
    if request.kind == "stdlib":
        from payload.data.sources.text_files import stdlib_source

        return stdlib_source(skip_bad=request.skip_bad)
    if request.kind in ("openwebtext", "hf"):
        from payload.data.sources.hub import HubSource

        return HubSource(request)
    paths = [Path(given) for given in request.inputs]
    if request.kind == "text":
        from payload.data.sources.text_files import TextSource

        return TextSource(paths, glob=request.glob, skip_bad=request.skip_bad)
    if request.kind == "jsonl":
        from payload.data.sources.jsonl import JsonlSource

        return JsonlSource(paths, request)
    from payload.data.sources.parquet import ParquetSource

    return ParquetSource(paths, request)
