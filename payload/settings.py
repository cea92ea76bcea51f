"""Typed settings from TOML: dataclass sections, overrides, and messages that name the key.

`run_config` says what the settings are; this module says how text becomes them.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from payload.errors import ConfigError

_T = TypeVar("_T")


def setting(
    default: Any, *, low: float | None = None, above: float | None = None, high: float | None = None
) -> Any:
    """A dataclass field with its limits: `low` and `high` are allowed values, `above` is not."""
    return dataclasses.field(default=default, metadata={"low": low, "above": above, "high": high})


def parse_sections(cls: type[_T], text: str, *, overrides: Sequence[str], where: str) -> _T:
    """Build `cls`, a dataclass of dataclasses, from TOML text and `section.key=value` overrides.

    Every problem found is in the one ConfigError that is raised.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}.") from None
    problems: list[str] = []
    sections = typing.get_type_hints(cls)
    _refuse_unknown(tables, sections, what="section", problems=problems)
    for override in overrides:
        _apply_override(tables, override, sections=sections, problems=problems)
    built = {
        name: _build_section(section, tables.get(name, {}), name=name, problems=problems)
        for name, section in sections.items()
    }
    if problems:
        raise ConfigError(f"{where}: " + " ".join(problems))
    return cls(**built)


def render_sections(config: object) -> str:
    """The TOML text that `parse_sections` turns back into an equal `config`."""
    lines: list[str] = []
    for section in dataclasses.fields(config):  # type: ignore[arg-type]
        lines.append(f"[{section.name}]")
        values = getattr(config, section.name)
        for key in dataclasses.fields(values):
            lines.append(f"{key.name} = {_render_value(getattr(values, key.name))}")
        lines.append("")
    return "\n".join(lines)


def _render_value(value: str | int | float | bool | None) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
    return repr(value)


def _build_section(section: type[Any], table: Any, *, name: str, problems: list[str]) -> Any:
    if not isinstance(table, Mapping):
        problems.append(f"{name} = {table!r} is not a section; write [{name}] with keys below it.")
        return None
    hints = typing.get_type_hints(section)
    _refuse_unknown(table, hints, what=f"key in [{name}]", problems=problems)
    values = {}
    for field in dataclasses.fields(section):
        if field.name in table:
            value = table[field.name]
            problem = _problem_with(value, hints[field.name], field.metadata)
            if problem:
                problems.append(f"{name}.{field.name} = {value!r}: {problem}")
            else:
                values[field.name] = _convert(value, hints[field.name])
    return section(**values)


def _refuse_unknown(
    given: Mapping[str, Any], known: Mapping[str, Any], *, what: str, problems: list[str]
) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        named = ", ".join(repr(name) for name in unknown)
        problems.append(f"unknown {what}: {named}. Known: {', '.join(known)}.")


def _apply_override(
    tables: dict[str, Any], override: str, *, sections: Mapping[str, Any], problems: list[str]
) -> None:
    path, equals, text = override.partition("=")
    section, dot, key = path.strip().partition(".")
    if not equals or not dot or not key:
        problems.append(
            f"--set {override!r}: write it as section.key=value, as in train.steps=100."
        )
        return
    if section not in sections:
        problems.append(
            f"--set {override!r}: unknown section {section!r}. Known: {', '.join(sections)}."
        )
        return
    table = tables.setdefault(section, {})
    # What is no table in the file is said when the section is built.
    if isinstance(table, dict):
        table[key] = _parse_scalar(text.strip())


def _parse_scalar(text: str) -> Any:
    """A value as TOML would read it; what is no TOML value is a string, so quotes are optional."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of `X | None`, or the type itself."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return typing.get_args(hint)
    return (hint,)


def _is_none(value: Any, hint: Any) -> bool:
    return value == "none" and type(None) in _alternatives(hint)


def _convert(value: Any, hint: Any) -> Any:
    if _is_none(value, hint):
        return None
    return float(value) if float in _alternatives(hint) else value


def _problem_with(value: Any, hint: Any, limits: Mapping[str, Any]) -> str | None:
    """What is wrong with `value` as a sentence that says what would be right, or None."""
    if _is_none(value, hint):
        return None
    optional = ' (or "none")' if type(None) in _alternatives(hint) else ""
    kind = next(member for member in _alternatives(hint) if member is not type(None))
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        return None if value in choices else f"choose one of {', '.join(choices)}{optional}."
    if kind is bool:
        return None if isinstance(value, bool) else "write true or false."
    if kind is str:
        return None if isinstance(value, str) else f"a text in quotes is needed{optional}."
    whole = kind is int
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        return f"a {'whole ' if whole else ''}number is needed{optional}."
    return _limit_problem(value, limits)


def _limit_problem(value: float, limits: Mapping[str, Any]) -> str | None:
    low, above, high = limits.get("low"), limits.get("above"), limits.get("high")
    if not abs(value) < float("inf"):
        return "a finite number is needed."
    if low is not None and value < low:
        return f"it must be at least {low}."
    if above is not None and value <= above:
        return f"it must be above {above}."
    if high is not None and value > high:
        return f"it must be at most {high}."
    return None
