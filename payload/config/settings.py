"""Typed settings from TOML: dataclass sections, overrides, and messages that name the key.

`run_config` and its sections say what the settings are; this module says how text becomes them.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from payload.core.errors import ConfigError
from payload.core.validation import printable, shown

AUTO: Literal["auto"] = "auto"
"""A setting that the run decides by itself."""

_SHOWN_PROBLEMS = 8
_SHOWN_CHARS = 200
_MAX_INTEGER = 2**53  # As many as a float can count.

_T = TypeVar("_T")
_Names = Mapping[str, Sequence[str]]
"""The keys of every section."""
_Problem = tuple[str, str]
"""A section or `section.key`, and what is wrong with it as a sentence."""


def setting(
    default: Any,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    choices: Callable[[], Sequence[str]] | None = None,
) -> Any:
    """A dataclass field with its limits: `low` and `high` are allowed values, `above` is not.

    `choices` returns the allowed texts, where a registry has them.
    """
    metadata = {"low": low, "above": above, "high": high, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def parse_sections(cls: type[_T], text: str, *, overrides: Sequence[str], where: str) -> _T:
    """Build `cls`, a dataclass of dataclasses, from TOML text and `section.key=value` overrides.

    Every problem found is in the one ConfigError that is raised, each with where it comes from:
    the text, which `where` names, or an override.
    """
    try:
        # Editors on Windows begin a file with a byte order mark.
        tables = tomllib.loads(text.removeprefix("\ufeff"))
    except RecursionError:
        raise ConfigError(f"{where}: not valid TOML: nested too deeply.") from None
    except ValueError as error:  # Also for an integer of more than 4,300 digits.
        raise ConfigError(f"{where}: not valid TOML: {printable(str(error))}.") from None
    sections = typing.get_type_hints(cls)
    known = {name: tuple(typing.get_type_hints(section)) for name, section in sections.items()}
    texts = {
        f"{name}.{field.name}"
        for name, section in sections.items()
        for hints in [typing.get_type_hints(section)]
        for field in dataclasses.fields(section)
        if str in _alternatives(hints[field.name]) and not field.metadata.get("choices")
    }
    in_text = _unknown_names(tables, known)
    in_overrides: list[str] = []
    overridden: dict[str, str] = {}
    for override in overrides:
        problem = _apply_override(tables, override, known=known, texts=texts, overridden=overridden)
        if problem:
            in_overrides.append(f"--set {_short(override)}: {problem}")
    built = {}
    for name, section in sections.items():
        built[name], problems = _build_section(section, tables.get(name, {}), name=name)
        for key, problem in problems:
            if key in overridden:
                in_overrides.append(f"--set {_short(overridden[key])}: {problem}")
            else:
                in_text.append(problem)
    if in_text:
        in_text[0] = f"{where}: {in_text[0]}"
    if in_text or in_overrides:
        raise ConfigError(_together([*in_text, *in_overrides]))
    return cls(**built)


def _together(problems: Sequence[str]) -> str:
    more = len(problems) - _SHOWN_PROBLEMS
    tail = [f"And {more} more."] if more > 0 else []
    return " ".join([*problems[:_SHOWN_PROBLEMS], *tail])


def _short(override: str) -> str:
    """Return an override as the user typed it, unless that would fill the screen or steer it."""
    text = printable(override).replace("\n", " ")
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def render_sections(config: object) -> str:
    """The TOML text that `parse_sections` turns back into an equal `config`."""
    lines: list[str] = []
    for section in dataclasses.fields(config):  # type: ignore[arg-type]  # a dataclass
        lines.append(f"[{section.name}]")
        values = getattr(config, section.name)
        for key in dataclasses.fields(values):
            lines.append(f"{key.name} = {_render_value(getattr(values, key.name))}")
        lines.append("")
    return "\n".join(lines)


def _render_value(value: str | int | float | bool | tuple[str, ...] | None) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_render_value, value))}]"
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{"".join(map(_render_character, escaped))}"'
    return repr(value)


def _render_character(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _build_section(section: type[Any], table: Any, *, name: str) -> tuple[Any, list[_Problem]]:
    """Return the section and what is wrong with it."""
    if not isinstance(table, Mapping):
        text = f"{name} = {shown(table)} is not a section; write [{name}] with keys below it."
        return None, [(name, text)]
    hints = typing.get_type_hints(section)
    values, problems = {}, []
    for field in dataclasses.fields(section):
        if field.name in table:
            value = table[field.name]
            problem = _problem_with(value, hints[field.name], field.metadata)
            key = f"{name}.{field.name}"
            if problem:
                problems.append((key, f"{key} = {shown(value)}: {problem}"))
            else:
                values[field.name] = _convert(value, hints[field.name])
    return section(**values), problems


def _unknown_names(tables: Mapping[str, Any], known: _Names) -> list[str]:
    """Name the sections and keys that do not exist."""
    problems = [
        f"unknown section: {shown(name)}.{_did_you_mean(name, known)} Known: {', '.join(known)}."
        for name in tables
        if name not in known
    ]
    for name, keys in known.items():
        table = tables.get(name)
        if isinstance(table, Mapping):
            problems += [_unknown_key(name, key, known) for key in table if key not in keys]
    return problems


def _unknown_key(section: str, key: str, known: _Names) -> str:
    meant = _did_you_mean(f"{section}.{key}", known)
    return f"unknown key in [{section}]: {shown(key)}.{meant} Known: {', '.join(known[section])}."


def _did_you_mean(name: str, known: _Names) -> str:
    """Return the question for a mistyped section or `section.key`; empty when nothing is near."""
    section, _, key = name.partition(".")
    if not key:
        near = difflib.get_close_matches(section, known, n=1)
    else:
        near = [f"{other}.{key}" for other, keys in known.items() if key in keys]
        keys = [f"{section}.{each}" for each in known.get(section, ())]
        every = [f"{other}.{each}" for other, keys in known.items() for each in keys]
        near = near or difflib.get_close_matches(name, keys, n=1, cutoff=0.75)
        near = near or difflib.get_close_matches(name, every, n=1, cutoff=0.75)
    return f" Did you mean {near[0]}?" if near else ""


def _apply_override(
    tables: dict[str, Any],
    override: str,
    *,
    known: _Names,
    texts: set[str],
    overridden: dict[str, str],
) -> str | None:
    """Put an override into `tables` and note it in `overridden`; return what is wrong with it.

    `texts` has every `section.key` that is a text, for which a number needs no quotes.
    """
    path, equals, text = override.partition("=")
    section, dot, key = (part.strip() for part in path.partition("."))
    if not equals or not dot or not key:
        meant = _did_you_mean(f".{section}", known) if equals and section not in known else ""
        return f"write it as section.key=value, as in train.steps=100.{meant}"
    if section not in known:
        meant = _did_you_mean(f"{section}.{key}", known)
        return f"unknown section {shown(section)}.{meant} Known: {', '.join(known)}."
    if key not in known[section]:
        return _unknown_key(section, key, known)
    value = _parse_scalar(text.strip())
    if f"{section}.{key}" in texts and isinstance(value, int) and not isinstance(value, bool):
        value = text.strip()
    table = tables.setdefault(section, {})
    # What is no table in the file is said when the section is built.
    if isinstance(table, dict):
        table[key] = value
        overridden[f"{section}.{key}"] = override
    return None


def _parse_scalar(text: str) -> Any:
    """A value as TOML would read it; what is no TOML value is a string, so quotes are optional.

    So is what TOML takes for a date or a time: no setting is one.
    """
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, (datetime.date, datetime.time)) else value


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of `X | None` or `X | Literal[...]`, or the type itself."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return typing.get_args(hint)
    return (hint,)


def _is_none(value: Any, hint: Any) -> bool:
    return value == "none" and type(None) in _alternatives(hint)


def _convert(value: Any, hint: Any) -> Any:
    if _is_none(value, hint):
        return None
    if typing.get_origin(hint) is tuple:
        return _words(value)
    return float(value) if float in _alternatives(hint) else value


def _words(value: str | Sequence[str]) -> tuple[str, ...]:
    """Return a list of texts; on a command line it may be one text with commas."""
    if not isinstance(value, str):
        return tuple(value)
    words = (word.strip() for word in value.split(","))
    return tuple(word for word in words if word and word != "none")


def _problem_with(value: Any, hint: Any, limits: Mapping[str, Any]) -> str | None:
    """Return a sentence that says what would be right in place of `value`, or None if it is."""
    if _is_none(value, hint):
        return None
    if limits.get("choices") is not None:
        choices = limits["choices"]()
        return None if value in choices else f"choose one of {', '.join(choices)}."
    optional = ' (or "none")' if type(None) in _alternatives(hint) else ""
    kind, *words = (member for member in _alternatives(hint) if member is not type(None))
    names = [name for each in words for name in typing.get_args(each)]
    if value in names:
        return None
    optional += "".join(f' (or "{name}")' for name in names)
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        return None if value in choices else f"choose one of {', '.join(choices)}{optional}."
    if typing.get_origin(kind) is tuple:
        is_list = isinstance(value, str | list) and all(isinstance(each, str) for each in value)
        problems = (_problem_with(each, str, {}) for each in (_words(value) if is_list else [0]))
        return next((problem for problem in problems if problem), None) and (
            'a list of texts is needed, as in ["a", "b"].'
        )
    if kind is bool:
        return None if isinstance(value, bool) else "write true or false."
    if kind is str:
        if not isinstance(value, str):
            return f"a text in quotes is needed{optional}."
        # They become paths, names and lines of files.
        is_plain = value == printable(value) and "\n" not in value
        return None if is_plain else "a text without control characters is needed."
    whole = kind is int
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        return f"a {'whole ' if whole else ''}number is needed{optional}."
    return _limit_problem(value, limits)


def _limit_problem(value: float, limits: Mapping[str, Any]) -> str | None:
    low, above, high = limits.get("low"), limits.get("above"), limits.get("high")
    # What is written without a point is a Python integer of any size.
    if not abs(value) < (float("inf") if isinstance(value, float) else 2**63):
        return "a finite number is needed."
    if isinstance(value, int) and high is None:
        high = _MAX_INTEGER
    if low is not None and value < low:
        return f"it must be at least {low}."
    if above is not None and value <= above:
        return f"it must be above {above}."
    if high is not None and value > high:
        return f"it must be at most {high}."
    return None
