"""The options that `data prepare`, `data show FILE` and `finetune` share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any, get_args

from payload.core.errors import UsageError
from payload.data.rows.named_columns import parse_columns
from payload.data.sources.source_flags import DEFAULT_SPLIT
from payload.data.tasks import all_tasks
from payload.data.tasks.arguments import RENDERING_FLAGS
from payload.formats.data_folder import Dedup

AddFlag = Callable[..., Any]
"""The method `add_argument` of an argument group."""
_FORWARDED = (
    *("--glob", "--skip-bad", "--columns", "--ignore-key", "--config", "--revision", "--split"),
    *("--val-fraction", "--dedup", "--allow-odd-tokenizer", "--add-special-tokens"),
)
_NOT_FORWARDED = ("--sequence-length", "--label-column")
"""Task options that `finetune` sets itself."""


def add_reading_flags(more: AddFlag) -> None:
    """Declare the options that decide which rows and keys are read."""
    more(
        "--glob",
        metavar="PATTERN",
        help="read only the files of a folder that match this pattern, such as '*.md'",
    )
    more(
        "--skip-bad",
        action="store_true",
        help="skip bad documents and count them, instead of stopping at the first bad document",
    )
    more(
        "--columns",
        type=_columns,
        metavar="COLUMN=NAME,...",
        help="rename columns of the data. NAME is a role, as in "
        "question=user,answer=assistant, or another known column name, as in dialog=messages. "
        "If several columns get the same NAME, their texts are joined",
    )
    more(
        "--ignore-key",
        action="append",
        metavar="NAME",
        help="ignore this column of the rows, or this key of the messages; can be repeated",
    )


def add_hub_flags(more: AddFlag) -> None:
    """Declare the options for a dataset of the hub."""
    more("--config", metavar="NAME", help="configuration (subset) of a dataset on the hub")
    more(
        "--revision",
        metavar="REV",
        help="branch, tag or commit of a dataset on the hub (default: the newest commit)",
    )
    more(
        "--split",
        metavar="NAME",
        help=f"split of a dataset on the hub (default: {DEFAULT_SPLIT}). Without this option, "
        "all tasks except text use the dataset's validation split as validation data",
    )


def add_tokenizer_check_flag(more: AddFlag) -> None:
    """Declare the option to continue although the tokens do not seem to represent the text."""
    more(
        "--allow-odd-tokenizer",
        action="store_true",
        help="continue even if a check of the tokenizer fails. The checks find texts without "
        "tokens, texts with too many tokens, over 1 %% unknown tokens, text that is lost in "
        "decoding, and a vocabulary that does not fit the model",
    )


def add_special_tokens_flag(more: AddFlag) -> None:
    """Declare the option that adds special tokens to the tokenizer."""
    more(
        "--add-special-tokens",
        nargs="+",
        default=(),
        metavar="TOKEN",
        help="add special tokens to the tokenizer, such as '<|tool|>'. For each token, "
        "training adds one row to the embedding and one row to the output head. The new rows "
        "start as the mean of the old rows",
    )


def add_val_fraction_flag(more: AddFlag) -> None:
    """Declare the option for the fraction of the rows that is used for validation."""
    more(
        "--val-fraction",
        type=fraction,
        metavar="SHARE",
        help="fraction of rows for validation (default: for classify 0.1; for other tasks "
        "about 100 rows, at least 0.0005 and at most 0.1)",
    )


def add_dedup_flag(more: AddFlag) -> None:
    """Declare the option that removes duplicates."""
    more(
        "--dedup",
        choices=get_args(Dedup),
        metavar="HOW",
        help="remove repeated rows. `exact` removes rows with the same trained text as an "
        "earlier row. `near` also removes rows that are about 80 %% equal to an earlier row "
        "and have the same order of words. `none` removes no rows. Default: for the task text, "
        "remove no rows; for other tasks, remove only training rows that are also validation "
        "rows",
    )


def add_rendering_flags(add: AddFlag) -> None:
    """Declare the options that decide how a template renders a row."""

    def add_rendering(flag: str, **options: Any) -> None:
        if flag in RENDERING_FLAGS:
            add(flag, **options)

    for task in all_tasks():
        task.add_flags(add_rendering)


def add_task_flags(add: AddFlag) -> None:
    """Declare the options of all tasks, except the options that `finetune` sets itself."""

    def add_others(flag: str, **options: Any) -> None:
        if flag not in _NOT_FORWARDED:
            add(flag, **options)

    for task in all_tasks():
        task.add_flags(add_others)


def forwarded_words(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the arguments that pass the options of this command line to `prepare`."""
    flags = dict.fromkeys((*_FORWARDED, *(flag for task in all_tasks() for flag in task.flags)))
    return tuple(
        word
        for flag in flags
        if flag not in _NOT_FORWARDED
        for word in _words(flag, getattr(args, flag.removeprefix("--").replace("-", "_"), None))
    )


def _words(flag: str, value: Any) -> Iterator[str]:
    if value is None or value is False or value == ():
        return
    yield flag
    if value is True:
        return
    if flag == "--columns":
        yield ",".join("=".join(pair) for pair in value)
    elif flag == "--template-var":
        yield from _repeated(flag, [f"{name}={json.dumps(each)}" for name, each in value])
    elif flag == "--ignore-key":
        yield from _repeated(flag, value)
    elif isinstance(value, list):
        yield from map(str, value)
    else:
        yield str(value)


def _repeated(flag: str, values: list[str]) -> Iterator[str]:
    for number, value in enumerate(values):
        if number:
            yield flag
        yield value


def _columns(text: str) -> tuple[tuple[str, str], ...]:
    try:
        return parse_columns(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def fraction(text: str) -> float:
    """Parse a number between 0 and 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number between 0 and 1, such as 0.0005"
        )
    return value
