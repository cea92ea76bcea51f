"""The task `text`: documents follow one after the other, and every token is a target."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from payload.core.errors import DataError
from payload.core.tasks import TaskKind
from payload.data.sources.source_flags import DEFAULT_TEXT_COLUMN
from payload.data.tasks.arguments import prepare_settings, source_request
from payload.data.tasks.base import Task

if TYPE_CHECKING:
    from payload.data.sources.documents import Source
    from payload.data.sources.source_flags import SourceRequest
    from payload.data.writing.plan import Estimate, PrepareSettings
    from payload.data.writing.prepare_text import PrepareResult


class TextTask(Task):
    """Language modelling of plain text, the default task."""

    kind: ClassVar[TaskKind] = "text"
    summary = "the next token of plain text"

    def estimate(self, args: argparse.Namespace) -> tuple[str, Estimate]:
        """Return the label of the source and the estimated sizes."""
        from payload.data.writing.plan import estimate

        source, settings = _source_and_settings(args)
        return source.label, estimate(source, settings)

    def prepare(self, args: argparse.Namespace) -> PrepareResult:
        """Make the data folder, or resume making it."""
        from payload.data.writing.prepare_text import prepare
        from payload.data.writing.progress import Reporter

        source, settings = _source_and_settings(args)
        return prepare(source, settings, Reporter(quiet=args.quiet))


def _with_text_column(
    request: SourceRequest, columns: Sequence[str], *, quiet: bool
) -> SourceRequest:
    """Return the request with the text column, chosen by the names of the first row's columns."""
    from payload.data.rows.column_choice import TEXT_COLUMNS, choice_lines, first_of
    from payload.data.writing.progress import Reporter

    column = first_of(TEXT_COLUMNS, columns)
    if column in (None, DEFAULT_TEXT_COLUMN):
        return request
    for line in choice_lines([(column, DEFAULT_TEXT_COLUMN)]):
        Reporter(quiet=quiet).log(line)
    return replace(request, text_column=column)


def _source_and_settings(args: argparse.Namespace) -> tuple[Source, PrepareSettings]:
    from payload.data.rows.column_choice import first_row_columns
    from payload.data.tasks.text_source import build_source

    request = source_request(args)
    columns: Sequence[str] = ()
    try:
        columns = first_row_columns(request)
    except DataError:
        # With --skip-bad, the source leaves out a damaged file; otherwise it reports the file.
        if request.text_column is None:
            raise
    if request.text_column is None:
        request = _with_text_column(request, columns, quiet=args.quiet)
    source = build_source(request, columns)

    from payload.data.tokenizers import load_tokenizer

    settings = prepare_settings(
        args,
        load_tokenizer(args.tokenizer, args.add_special_tokens),
        val_fraction=source.default_val_fraction,
        shaping=(args.source, request.column(), str(args.skip_bad)),
    )
    return source, settings
