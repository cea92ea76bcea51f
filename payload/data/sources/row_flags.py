"""The options for columns and keys of rows, which `data` and `finetune` share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from payload.core.errors import UsageError
from payload.data.rows.named_columns import parse_columns


def add_row_flags(add: Callable[..., Any]) -> None:
    """Declare the options by `add`, which is `add_argument` of a group."""
    add(
        "--columns",
        type=_columns,
        metavar="COLUMN=NAME,...",
        help="read columns under other names: roles, as in question=user,answer=assistant, or "
        "known columns, as in dialog=messages; texts with one name are joined",
    )
    add(
        "--ignore-key",
        action="append",
        metavar="NAME",
        help="leave out a column or a key of messages that nothing reads; can be repeated",
    )


def _columns(text: str) -> tuple[tuple[str, str], ...]:
    try:
        return parse_columns(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
