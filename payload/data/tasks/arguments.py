"""Converts the flags of `prepare` to the request and settings that every task needs."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from payload.data.sources.documents import MIB
from payload.data.sources.input_weights import split_weights
from payload.data.sources.source_flags import SourceRequest

if TYPE_CHECKING:
    from payload.data.templates.turns import SampleOptions, TrainOn
    from payload.data.tokenizers.base import TextTokenizer
    from payload.data.writing.plan import PrepareSettings
    from payload.data.writing.tokenizer_check import TokenizerCheck
    from payload.formats.data_folder import OnLong, Thoughts


PACKINGS = ("best-fit", "none")
ON_LONG: tuple[OnLong, ...] = ("truncate", "drop", "refuse", "split")
THOUGHTS: tuple[Thoughts, ...] = ("keep", "drop", "empty", "refuse")
TRAIN_ON: tuple[TrainOn, ...] = ("all", "last")
RENDERING_FLAGS = ("--chat-template", "--template-var", "--thoughts", "--train-on")
"""Flags that all tasks with a chat template have."""
_RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
SEQUENCE_LENGTH = 1024
DEFAULT_LABEL_COLUMN = "label"


def source_request(args: argparse.Namespace) -> SourceRequest:
    """Return the source that the flags select."""
    return SourceRequest(
        kind=args.source,
        inputs=split_weights(args.input)[0],
        glob=args.glob,
        text_column=args.text_column,
        subset=args.config,
        revision=args.revision,
        split=args.split,
        skip_bad=args.skip_bad,
        columns=args.columns or (),
        ignored_keys=tuple(args.ignore_key or ()),
    )


def with_known_names(request: SourceRequest, *, quiet: bool) -> SourceRequest:
    """Return the request, with --columns set for columns that match a known name ignoring case."""
    from payload.data.rows.column_choice import choice_lines, first_row_columns, known_names
    from payload.data.writing.progress import Reporter

    if request.columns:
        return request
    columns = known_names(first_row_columns(request))
    for line in choice_lines(columns):
        Reporter(quiet=quiet).log(line)
    return replace(request, columns=columns)


def prepare_settings(
    args: argparse.Namespace,
    tokenizer: TextTokenizer,
    *,
    val_fraction: float | None,
    shaping: tuple[str, ...],
) -> PrepareSettings:
    """Return the settings. `shaping` lists further values on which the output depends."""
    from payload.data.selection.select_rows import Mixing
    from payload.data.writing.plan import PrepareSettings

    inputs, weights = split_weights(args.input)
    # Without these options the fingerprint is that of older releases.
    shaping += ("weights", *map(str, weights)) if weights else ()
    shaping += ("dedup", args.dedup) if args.dedup is not None else ()
    return PrepareSettings(
        out=args.out,
        mixing=Mixing(
            inputs=inputs or (args.source,), weights=weights, dedup=args.dedup, seed=args.seed
        ),
        tokenizer=tokenizer,
        val_fraction=val_fraction if args.val_fraction is None else args.val_fraction,
        seed=args.seed,
        max_documents=args.max_documents,
        force=args.force,
        wait=args.wait,
        shard_bytes=args.shard_mib * MIB,
        allow_odd_tokenizer=args.allow_odd_tokenizer,
        shaping=shaping,
    )


def tokenizer_check(settings: PrepareSettings, *, quiet: bool) -> TokenizerCheck:
    """Return the object that checks prepared tokens.

    Raises DataError for an unsuitable vocabulary.
    """
    from payload.data.writing.progress import Reporter
    from payload.data.writing.tokenizer_check import TokenizerCheck

    return TokenizerCheck(
        settings.tokenizer,
        allow_odd=settings.allow_odd_tokenizer,
        log=Reporter(quiet=quiet).log,
    )


def sample_options(args: argparse.Namespace) -> SampleOptions:
    """Return the options that choose the trained tokens of each conversation."""
    from payload.data.templates.turns import SampleOptions

    return SampleOptions(
        thoughts=args.thoughts or THOUGHTS[0],
        train_on=args.train_on or TRAIN_ON[0],
        variables=dict(args.template_var or ()),
        ignored_keys=frozenset(getattr(args, "ignore_key", None) or ()),
    )


def template_variable(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE. The value is JSON, or otherwise plain text."""
    name, equals, value = text.partition("=")
    if name in _RESERVED_VARIABLES:
        raise argparse.ArgumentTypeError(
            f"{text!r}: the program sets the variable {name} itself. Use another variable"
        )
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=VALUE with the name of a template's variable, such as "
            "enable_thinking=false"
        )
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def positive_int(text: str) -> int:
    """Parse a whole number above 0."""
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value
