"""CONTRACT: what a dataclass's field declares of its value, and the readers that hold values to it.

A reader returns a value as its field has it, or raises RefusedError. Readers are compiled once: a
row of metrics.jsonl is read in microseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from payload.core.printable_text import shown
from payload.core.validation.suggestion import did_you_mean

MAX_SECONDS = 1e11
"""Over three thousand years: no time that a record has is longer, nor so long after 1970."""
MAX_TEXT_CHARS = 2**16
"""Longest string in a record: an error message or a path is far shorter."""

Reader = Callable[[Any], Any]
Reason = Literal["type", "choices", "low", "above", "high", "pattern", "size", "record"]

_TYPES: dict[type, str] = {
    **{str: "a string", int: "an integer", float: "a finite number", bool: "a boolean"},
    **{list: "a list", dict: "an object"},
}
_LIMITS = {"low": "at least", "above": "above", "high": "at most"}


def checked(
    default: Any = dataclasses.MISSING,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    pattern: re.Pattern[str] | None = None,
    wanted: str = "",
    choices: tuple[Any, ...] | None = None,
    max_items: int | None = None,
    max_chars: int = MAX_TEXT_CHARS,
    default_factory: Callable[[], Any] | None = None,
    key: str | None = None,
    refusal: str = "",
    fix: str = "",
) -> Any:
    """Declare a dataclass field with the limits of its value.

    `low` and `high` are the smallest and largest number; `above` is not allowed itself. `pattern`
    must match a string whole, and every string in a container; `wanted` describes what matches.
    `choices` are the values that there are, as those of a Literal. `key` is the field's name in
    the JSON object, where it differs. In a message `refusal` follows the value in place of what
    the limits say, and `fix` replaces the record's.
    """
    metadata = {
        **{"low": low, "above": above, "high": high, "pattern": pattern, "wanted": wanted},
        **{"choices": choices, "max_items": max_items, "max_chars": max_chars},
        **{"key": key, "refusal": refusal, "fix": fix},
    }
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class RefusedError(Exception):
    """A value that its declaration does not take."""

    def __init__(self, reason: Reason, wanted: Any, *, value: object = None) -> None:
        """`wanted` is the type, the limit, the choices, or for the other reasons a text."""
        super().__init__(reason, wanted)
        self.reason, self.wanted, self.value = reason, wanted, value
        self.path = ""
        """Leads from the value that was read to the part that is refused: `: nodes[0]: name`."""
        self.refusal = self.fix = ""
        """As the innermost field declares them."""

    def within(self, part: str, *, refusal: str = "", fix: str = "") -> RefusedError:
        """Return the error of the value that `part` belongs to."""
        self.path = part + self.path
        self.refusal, self.fix = self.refusal or refusal, self.fix or fix
        return self

    def sentence(self, where: str, *, fix: str = "") -> str:
        """Return the message: the place below `where`, the value, the problem and the fix."""
        place, fix = f"{where}{self.path}".removeprefix(": "), self.fix or fix
        if self.reason != "record":
            place = f"{place} = {shown(self.value)}"
        problem = self.refusal or f": {self.problem()}."
        return f"{place}{problem}{' ' if fix else ''}{fix}"

    def problem(self) -> str:
        """Return what the value must be; of a record, what is wrong with it."""
        if self.reason == "type":
            return f"must be {_TYPES[self.wanted]}"
        if self.reason == "choices":
            return f"must be one of {', '.join(map(str, self.wanted))}"
        if self.reason in _LIMITS:
            return f"must be {_LIMITS[self.reason]} {self.wanted}"
        return str(self.wanted)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredField:
    """One field of a record."""

    name: str
    hint: Any
    read: Reader
    default: Any
    """MISSING where there is none, or a function makes it."""
    is_required: bool
    limits: Mapping[str, Any]

    def read_value(self, key: str, value: Any) -> Any:
        """Return the value as the field has it. Raises RefusedError with the field's key."""
        try:
            return self.read(value)
        except RefusedError as refused:
            limits = self.limits
            raise refused.within(
                f": {key}", refusal=limits.get("refusal", ""), fix=limits.get("fix", "")
            ) from None


def fields_of(cls: Any, *, refuse_unknown: bool = False) -> Mapping[str, DeclaredField]:
    """Return the fields of a dataclass by their keys; they are compiled once."""
    return _compiled(cls, refuse_unknown=refuse_unknown)


@functools.cache
def _compiled(cls: Any, *, refuse_unknown: bool) -> Mapping[str, DeclaredField]:
    hints = typing.get_type_hints(cls)
    return {
        each.metadata.get("key") or each.name: DeclaredField(
            name=each.name,
            hint=hints[each.name],
            read=reader(hints[each.name], each.metadata, refuse_unknown=refuse_unknown),
            default=each.default,
            is_required=each.default is each.default_factory is dataclasses.MISSING,
            limits=each.metadata,
        )
        for each in dataclasses.fields(cls)
        if each.init
    }


def read_record(cls: Any, raw: object, *, refuse_unknown: bool = False) -> Any:
    """Return the dataclass `cls` with the values of a JSON object. Raises RefusedError."""
    if not isinstance(raw, Mapping):
        raise RefusedError("record", f"expected an object, got {shown(raw)}")
    known = fields_of(cls, refuse_unknown=refuse_unknown)
    if refuse_unknown and (unknown := sorted(shown(key) for key in raw if key not in known)):
        meant = did_you_mean(unknown[0].strip("'"), known)
        listed = ", ".join(sorted(known))
        raise RefusedError("record", f"unknown key {unknown[0]}.{meant} Known: {listed}")
    values: dict[str, Any] = {}
    missing: list[str] = []
    for key, each in known.items():
        if key in raw:
            values[each.name] = each.read_value(key, raw[key])
        elif each.is_required:
            missing.append(key)
    if missing:
        raise RefusedError("record", f"missing: {', '.join(missing)}")
    return cls(**values)


def members_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return typing.get_args(hint)
    return (hint,)


def reader(
    hint: Any, limits: Mapping[str, Any] = types.MappingProxyType({}), *, refuse_unknown: bool
) -> Reader:
    """Return the reader of a type.

    Types are str, int, float, bool, None, Literal, Any, a dataclass, and tuple (of any or of a
    fixed length), list, Sequence, dict and Mapping of these. Of a union, the first member counts
    that the value fits.
    """
    if hint is Any:
        return lambda value: value
    members = members_of(hint)
    kinds = [each for each in members if each is not types.NoneType]
    readers = [_reader_of_one(each, limits, refuse_unknown=refuse_unknown) for each in kinds]
    read = readers[0] if len(readers) == 1 else _first_that_fits(kinds, readers)
    if len(kinds) == len(members):
        return read
    return lambda value: None if value is None else read(value)


def _reader_of_one(kind: Any, limits: Mapping[str, Any], *, refuse_unknown: bool) -> Reader:
    origin = typing.get_origin(kind) or kind
    if origin is Literal or limits.get("choices"):
        return _choice(typing.get_args(kind) or limits["choices"])
    if dataclasses.is_dataclass(kind):
        # Compiled when it is first read: a record may have records of its own class.
        return functools.partial(read_record, kind, refuse_unknown=refuse_unknown)
    if origin in (list, tuple, typing.get_origin(Sequence[int])):
        return _items(kind, limits, refuse_unknown=refuse_unknown)
    if origin in (dict, typing.get_origin(Mapping[str, int])):
        return _mapping(kind, limits, refuse_unknown=refuse_unknown)
    return _text(limits) if kind is str else _boolean if kind is bool else _number(kind, limits)


def _first_that_fits(kinds: Sequence[Any], readers: Sequence[Reader]) -> Reader:
    """Return a reader of a union; what fits no member is refused as the last plain type does."""
    plain = [each for kind, each in zip(kinds, readers, strict=True) if not _choices(kind)]

    def read(value: Any) -> Any:
        fitting = (each for kind, each in zip(kinds, readers, strict=True) if _fits(value, kind))
        return next(fitting, plain[-1])(value)

    return read


def _fits(value: Any, kind: Any) -> bool:
    if choices := _choices(kind):
        return _is_one_of(value, choices)
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind in (str, int, float):
        return isinstance(value, (int, float) if kind is float else kind)
    return isinstance(value, (dict, list))


def _choices(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def _is_one_of(value: Any, choices: tuple[Any, ...]) -> bool:
    return any(type(value) is type(each) and value == each for each in choices)


def _choice(choices: tuple[Any, ...]) -> Reader:
    def read(value: Any) -> Any:
        if not _is_one_of(value, choices):
            raise RefusedError("choices", choices, value=value)
        return value

    return read


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise RefusedError("type", bool, value=value)
    return value


def _number(kind: type, limits: Mapping[str, Any]) -> Reader:
    low, above, high = limits.get("low"), limits.get("above"), limits.get("high")
    kinds = (float, int) if kind is float else int
    # Neither a NaN nor infinity is between these.
    end = sys.float_info.max if kind is float else float("inf")
    least, most = -end if low is None else low, end if high is None else high

    def read(value: Any) -> Any:
        if not isinstance(value, kinds) or isinstance(value, bool) or not -end <= value <= end:
            raise RefusedError("type", kind, value=value)
        if value < least:
            raise RefusedError("low", low, value=value)
        if value > most:
            raise RefusedError("high", high, value=value)
        if above is not None and value <= above:
            raise RefusedError("above", above, value=value)
        return float(value) if kind is float else value

    return read


def _text(limits: Mapping[str, Any]) -> Reader:
    pattern, most = limits.get("pattern"), limits.get("max_chars", MAX_TEXT_CHARS)

    def read(value: Any) -> str:
        if not isinstance(value, str):
            raise RefusedError("type", str, value=value)
        if pattern is not None and not pattern.fullmatch(value):
            words = limits.get("wanted") or f"like {pattern.pattern}"
            raise RefusedError("pattern", f"must be {words}", value=value)
        if len(value) > most:
            raise RefusedError("size", f"must have at most {most:,} characters", value=value)
        return value

    return read


def _items(kind: Any, limits: Mapping[str, Any], *, refuse_unknown: bool) -> Reader:
    inner = typing.get_args(kind)
    has_length = typing.get_origin(kind) is tuple and inner[-1] is not Ellipsis
    readers = [
        reader(each, limits, refuse_unknown=refuse_unknown)
        for each in (inner if has_length else inner[:1])
    ]
    makes_list = typing.get_origin(kind) is list

    def read(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise RefusedError("type", list, value=value)
        _check_count(value, limits)
        if has_length and len(value) != len(readers):
            raise RefusedError("size", f"must have {len(readers)} entries", value=value)
        each_reader = readers if has_length else readers * len(value)
        found: list[Any] = []
        for item, each in zip(value, each_reader, strict=True):
            try:
                found.append(each(item))
            except RefusedError as refused:
                raise refused.within(f"[{len(found)}]") from None
        return found if makes_list else tuple(found)

    return read


def _mapping(kind: Any, limits: Mapping[str, Any], *, refuse_unknown: bool) -> Reader:
    each = reader(typing.get_args(kind)[1], limits, refuse_unknown=refuse_unknown)

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise RefusedError("type", dict, value=value)
        _check_count(value, limits)
        found: dict[str, Any] = {}
        for key, item in value.items():
            try:
                found[key] = each(item)
            except RefusedError as refused:
                raise refused.within(f"[{shown(key)}]") from None
        return found

    return read


def _check_count(value: Any, limits: Mapping[str, Any]) -> None:
    most = limits.get("max_items")
    if most is not None and len(value) > most:
        raise RefusedError("size", f"must have at most {most} entries", value=value)
