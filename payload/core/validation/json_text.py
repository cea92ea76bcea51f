"""Strict parsing of JSON that another program wrote."""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Callable
from typing import Any

from payload.core.errors import ConfigError, TileforgeError
from payload.core.printable_text import shown
from payload.core.validation.refusal import RefusedError

_MAX_INTEGER_DIGITS = 19  # 64-bit.


def parse_json(
    text: str | bytes,
    *,
    where: str,
    fix: str = "",
    error: type[TileforgeError] = ConfigError,
    huge_integers: bool = False,
    constants: Callable[[str], Any] | None = None,
) -> Any:
    """Return the JSON value in `text`.

    `where` names the origin in messages, `fix` is the sentence with the remedy. An integer beyond
    64 bits is an error. With `huge_integers`, such an integer becomes a float, because transformers
    writes 1e30 as an integer. `constants` maps NaN, Infinity and -Infinity to values; with None,
    these constants are errors.

    Raises `error` if the text is not JSON. Numbers that overflow, deep nesting and lone surrogates
    are also errors. Python's parser would accept such texts or raise other exceptions.
    """
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(
            decoded,
            parse_constant=constants or _refuse_constant,
            parse_int=_any_int if huge_integers else _bounded_int,
            parse_float=_finite_float,
        )
        if "\\u" in decoded:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as problem:
        raise error(RefusedError("record", _described(problem)).sentence(where, fix=fix)) from None
    return value


def _described(problem: ValueError | RecursionError) -> str:
    match problem:
        case UnicodeDecodeError():
            return f"byte {problem.start} is not UTF-8"
        case UnicodeEncodeError():
            return "a string contains a lone surrogate"
        case RecursionError():
            return "nested too deeply"
        case json.JSONDecodeError():
            return f"not JSON (line {problem.lineno}: {problem.msg})"
        case _:
            return f"not JSON ({problem})"


def _refuse_constant(name: str) -> typing.NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _any_int(text: str) -> int | float:
    return int(text) if len(text.lstrip("-")) <= _MAX_INTEGER_DIGITS else _finite_float(text)


def _bounded_int(digits: str) -> int:
    if len(digits.lstrip("-")) > _MAX_INTEGER_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {shown(digits)} is too large")
    return value
