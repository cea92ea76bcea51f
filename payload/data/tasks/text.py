"""The task `text`: documents one after the other, in which every token is a target."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, ClassVar

from payload.core.tasks import TaskKind
from payload.data.tasks.arguments import prepare_settings, source_request
from payload.data.tasks.base import Task

if TYPE_CHECKING:
    from payload.data.sources.documents import Source
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


def _source_and_settings(args: argparse.Namespace) -> tuple[Source, PrepareSettings]:
    from payload.data.tasks.text_source import build_source

    request = source_request(args)
    source = build_source(request)

    from payload.data.tokenizers import load_tokenizer

    settings = prepare_settings(
        args,
        load_tokenizer(args.tokenizer, args.add_special_tokens),
        val_fraction=source.default_val_fraction,
        shaping=(args.source, request.column(), str(args.skip_bad)),
    )
    return source, settings
