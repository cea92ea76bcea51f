"""CONTRACT: readers check values against the declarations of dataclass fields.

A reader returns a value of the field's type, or raises RefusedError. Readers are compiled once, so
that reading a row of metrics.jsonl takes microseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from payload.core.printable_text import shown
from payload.core.validation.fields import MAX_TEXT_CHARS
from payload.core.validation.refusal import RefusedError
from payload.core.validation.suggestion import did_you_mean

Reader = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredField:
    """One field of a record."""

    name: str
    hint: Any
    read: Reader
    default: Any
    """The field's default; MISSING if the field is required or has a default_factory."""
    is_required: bool
    limits: Mapping[str, Any]

    def read_value(self, key: str, value: Any) -> Any:
        """Return the value as the field's type. Raises RefusedError with the field's key."""
        try:
            return self.read(value)
        except RefusedError as refused:
            limits = self.limits
            raise refused.within(
                f": {key}", refusal=limits.get("refusal", ""), fix=limits.get("fix", "")
            ) from None


def fields_of(cls: Any, *, refuse_unknown: bool = False) -> Mapping[str, DeclaredField]:
    """Return the fields of a dataclass by key, compiled once."""
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
    """Build the dataclass `cls` from a JSON object. Raises RefusedError."""
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

    Supported types are str, int, float, bool, None, Literal, Any, a dataclass, and containers of
    these: tuple (of any or of a fixed length), list, Sequence, dict and Mapping. For a union, the
    first member that fits the value is used.
    """
    if hint is Any:
        return lambda value: value
    members = members_of(hint)
    kinds = [each for each in members if each is not types.NoneType]
    readers = [_member_reader(each, limits, refuse_unknown=refuse_unknown) for each in kinds]
    read = readers[0] if len(readers) == 1 else _first_that_fits(kinds, readers)
    if len(kinds) == len(members):
        return read
    return lambda value: None if value is None else read(value)


def _member_reader(kind: Any, limits: Mapping[str, Any], *, refuse_unknown: bool) -> Reader:
    origin = typing.get_origin(kind) or kind
    if origin is Literal or limits.get("choices"):
        return _choice(typing.get_args(kind) or limits["choices"])
    if dataclasses.is_dataclass(kind):
        # Compiled when first read, as records can be nested in records of the same class.
        return functools.partial(read_record, kind, refuse_unknown=refuse_unknown)
    if origin in (list, tuple, typing.get_origin(Sequence[int])):
        return _items(kind, limits, refuse_unknown=refuse_unknown)
    if origin in (dict, typing.get_origin(Mapping[str, int])):
        return _mapping(kind, limits, refuse_unknown=refuse_unknown)
    return _text(limits) if kind is str else _boolean if kind is bool else _number(kind, limits)


def _first_that_fits(kinds: Sequence[Any], readers: Sequence[Reader]) -> Reader:
    """Return a union's reader.

    If no member fits, the reader uses the last member that is not a Literal.
    """
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


def _is_one_of(value: Any, choices: Sequence[Any]) -> bool:
    return any(type(value) is type(each) and value == each for each in choices)


def _choice(choices: Sequence[Any] | Callable[[], Sequence[Any]]) -> Reader:
    def read(value: Any) -> Any:
        allowed = choices() if callable(choices) else choices
        if not _is_one_of(value, allowed):
            raise RefusedError("choices", allowed, value=value)
        return value

    return read


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise RefusedError("type", bool, value=value)
    return value


def _number(kind: type, limits: Mapping[str, Any]) -> Reader:
    low, above, high = limits.get("low"), limits.get("above"), limits.get("high")
    kinds = (float, int) if kind is float else int
    # NaN and infinity are outside of this range.
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
            description = limits.get("wanted") or f"like {pattern.pattern}"
            raise RefusedError("pattern", f"must be {description}", value=value)
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
