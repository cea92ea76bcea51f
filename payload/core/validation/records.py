"""CONTRACT: build dataclasses from JSON objects of other processes, or raise a one-line error.

The object can be damaged or hostile: of the wrong type, of another release, or with a path instead
of a name.
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
    """Raise `error` if `raw` is not an object of this schema version."""
    if not isinstance(raw, Mapping):
        what = f"expected an object, got {shown(raw)}"
        raise error(RefusedError("record", what).sentence(where, fix=fix))
    found = raw.get("schema_version")
    # True equals 1.
    if type(found) is not int or found != version:
        what = f"schema_version is {shown(found)}, but this release reads {version}"
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
    """Build the dataclass `cls` from a JSON object, and check each field's declared limits.

    `where` names the origin in messages, `fix` is the sentence with the remedy. Unknown keys are
    ignored, so that an older release can read the file of a newer release. With `refuse_unknown`,
    unknown keys are errors. Raises `error`.
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
    """Return `value` if it is a `kind`, which can be any type that a field supports.

    A dataclass is built from an object. Raises `error`.
    """
    checked_kind: Any = kind  # types are hashable; mypy assumes that they may not be
    try:
        found: _T = _reader(checked_kind)(value)
    except RefusedError as refused:
        raise error(refused.sentence(where, fix=fix)) from None
    return found


@functools.cache
def _reader(kind: Any) -> Reader:
    return reader(kind, refuse_unknown=False)
