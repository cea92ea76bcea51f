"""CONTRACT: a JSON object of another process becomes a dataclass, or an error of one line.

The object can be damaged or hostile: of another type, of another release, or with a path where a
name belongs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

from payload.core.errors import ConfigError, TileforgeError
from payload.core.printable_text import shown
from payload.core.validation.readers import Reader, read_record, reader
from payload.core.validation.refusal import RefusedError

_T = TypeVar("_T")


def check_schema(
    raw: object,
    version: int,
    *,
    where: str,
    fix: str = "",
    error: type[TileforgeError] = ConfigError,
) -> None:
    """Refuse what is no record, and a record that another release wrote. Raises `error`."""
    if not isinstance(raw, Mapping):
        what = f"expected an object, got {shown(raw)}"
        raise error(RefusedError("record", what).sentence(where, fix=fix))
    found = raw.get("schema_version")
    # True equals 1.
    if type(found) is not int or found != version:
        what = f"schema_version is {shown(found)}, this release reads {version}"
        raise error(RefusedError("record", what).sentence(where, fix=fix))


def build(
    cls: type[_T],
    raw: object,
    *,
    where: str,
    fix: str = "",
    error: type[TileforgeError] = ConfigError,
    refuse_unknown: bool = False,
) -> _T:
    """Build the dataclass `cls` from a JSON object, each field held to what it declares.

    `where` names the origin in messages, `fix` is the sentence that says what to do. Unknown keys
    are left out, so that an older release reads a newer one's file, unless `refuse_unknown`.
    Raises `error`.
    """
    try:
        built: _T = read_record(cls, raw, refuse_unknown=refuse_unknown)
    except RefusedError as refused:
        raise error(refused.sentence(where, fix=fix)) from None
    return built


def check_type(
    kind: type[_T],
    value: object,
    *,
    where: str,
    fix: str = "",
    error: type[TileforgeError] = ConfigError,
) -> _T:
    """Return `value` when it is a `kind`, which may be any type that a field may have.

    A dataclass is built from an object. Raises `error`.
    """
    checked_kind: Any = kind  # a type is hashable, which mypy does not know
    try:
        found: _T = _reader(checked_kind)(value)
    except RefusedError as refused:
        raise error(refused.sentence(where, fix=fix)) from None
    return found


@functools.cache
def _reader(kind: Any) -> Reader:
    return reader(kind, refuse_unknown=False)
