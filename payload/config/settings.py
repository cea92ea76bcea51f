"""Parse TOML and overrides into dataclass sections, with messages that name the key.

The settings themselves are declared in `run_config` and in the modules of its sections.
"""

from __future__ import annotations

import dataclasses
import datetime
import tomllib
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from payload.core.errors import ConfigError
from payload.core.one_line import printable_line, shortened
from payload.core.printable_text import printable, shown
from payload.core.validation.readers import fields_of, members_of
from payload.core.validation.refusal import RefusedError
from payload.core.validation.suggestion import did_you_mean, nearest

AUTO: Literal["auto"] = "auto"
"""Value of a setting that the run resolves itself."""

_SHOWN_PROBLEMS = 8
_SHOWN_CHARS = 200
MAX_INTEGER = 2**53  # The largest range of integers that a float represents exactly.

_T = TypeVar("_T")
_Names = Mapping[str, Sequence[str]]
"""The keys of each section."""
_Problem = tuple[str, str]
"""The name of a section or setting, and a sentence about the problem."""


def parse_sections(cls: type[_T], text: str, *, overrides: Sequence[str], where: str) -> _T:
    """Build `cls`, a dataclass of dataclasses, from TOML text and `section.key=value` overrides.

    `where` names the text in messages. Raises one ConfigError that lists all problems, each with
    its origin: the text or an override.
    """
    try:
        # Editors on Windows begin a file with a byte order mark.
        tables = tomllib.loads(text.removeprefix("\ufeff"))
    except RecursionError:
        raise ConfigError(f"{where}: not valid TOML: nested too deeply.") from None
    except ValueError as error:  # Also for an integer of more than 4,300 digits.
        raise ConfigError(f"{where}: not valid TOML: {printable(str(error))}.") from None
    sections = {name: each.hint for name, each in fields_of(cls).items()}
    known = {name: tuple(fields_of(section)) for name, section in sections.items()}
    texts = {
        f"{name}.{key}"
        for name, section in sections.items()
        for key, each in fields_of(section).items()
        if str in members_of(each.hint) and not each.limits.get("choices")
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
    """Return an override as typed, shortened and without control characters."""
    return shortened(printable_line(override), _SHOWN_CHARS)


def render_sections(config: object) -> str:
    """Return TOML text from which `parse_sections` builds an equal `config`."""
    lines: list[str] = []
    for section in dataclasses.fields(config):  # type: ignore[arg-type]  # a dataclass
        lines.append(f"[{section.name}]")
        values = getattr(config, section.name)
        for key in dataclasses.fields(values):
            lines.append(f"{key.name} = {toml_value(getattr(values, key.name))}")
        lines.append("")
    return "\n".join(lines)


def toml_value(value: str | int | float | bool | Sequence[str] | None) -> str:
    """Return the TOML text of a setting's value, on one line."""
    import tomli_w  # reading a config, and `--help`, work without it

    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_value, value))}]"
    return tomli_w.dumps({"_": "none" if value is None else value}).removeprefix("_ = ").rstrip()


def _build_section(section: Any, table: Any, *, name: str) -> tuple[Any, list[_Problem]]:
    """Return the section and its problems."""
    if not isinstance(table, Mapping):
        text = f"{name} = {shown(table)} is not a section. Write [{name}] with keys below it."
        return None, [(name, text)]
    values, problems = {}, []
    for key, each in fields_of(section).items():
        if key in table:
            value = table[key]
            try:
                read = each.read(_from_toml(value, each.hint))
                values[key] = _in_range(read, each.limits, written=value)
            except RefusedError as refused:
                text = f"{name}.{key} = {shown(value)}: {_requirement(refused, each.hint)}"
                problems.append((f"{name}.{key}", text))
    return section(**values), problems


def _unknown_names(tables: Mapping[str, Any], known: _Names) -> list[str]:
    """Return a sentence for each unknown section and key."""
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
    hint = _did_you_mean(f"{section}.{key}", known)
    return f"unknown key in [{section}]: {shown(key)}.{hint} Known: {', '.join(known[section])}."


def _did_you_mean(name: str, known: _Names) -> str:
    """Return a hint for a mistyped section or `section.key`; empty if no name is similar."""
    section, _, key = name.partition(".")
    if not key:
        return did_you_mean(section, known, cutoff=0.6)
    elsewhere = [f"{other}.{key}" for other, keys in known.items() if key in keys]
    every = [f"{other}.{each}" for other, keys in known.items() for each in keys]
    own = [f"{section}.{each}" for each in known.get(section, ())]
    near = next(iter(elsewhere), None) or nearest(name, own) or nearest(name, every)
    return f" Did you mean {near}?" if near else ""


def _apply_override(
    tables: dict[str, Any],
    override: str,
    *,
    known: _Names,
    texts: set[str],
    overridden: dict[str, str],
) -> str | None:
    """Apply an override to `tables` and record it in `overridden`; return its problem, or None.

    `texts` lists each `section.key` of type text; a number given for such a key needs no quotes.
    """
    path, equals, text = override.partition("=")
    section, dot, key = (part.strip() for part in path.partition("."))
    if not equals or not dot or not key:
        hint = _did_you_mean(f".{section}", known) if equals and section not in known else ""
        return f"write the setting as section.key=value, as in train.steps=100.{hint}"
    if section not in known:
        hint = _did_you_mean(f"{section}.{key}", known)
        return f"unknown section {shown(section)}.{hint} Known: {', '.join(known)}."
    if key not in known[section]:
        return _unknown_key(section, key, known)
    value = _parse_scalar(text.strip())
    if f"{section}.{key}" in texts and isinstance(value, int) and not isinstance(value, bool):
        value = text.strip()
    table = tables.setdefault(section, {})
    # If the file has another value instead of a table, _build_section reports it.
    if isinstance(table, dict):
        table[key] = value
        overridden[f"{section}.{key}"] = override
    return None


def _parse_scalar(text: str) -> Any:
    """Return a value parsed as TOML, or the text itself if that fails, so quotes are optional.

    Dates and times stay text, as no setting has these types.
    """
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = found.pop("value")
    # With a line break, the text could have other keys, which would be ignored.
    return text if found or isinstance(value, (datetime.date, datetime.time)) else value


def _from_toml(value: Any, hint: Any) -> Any:
    """Convert a TOML value to the field's type: "none" becomes None.

    A list may be a text with commas, as on a command line. Raises RefusedError for a huge integer.
    """
    if value == "none" and type(None) in members_of(hint):
        return None
    if isinstance(value, str) and typing.get_origin(hint) is tuple:
        items = (item.strip() for item in value.split(","))
        return tuple(item for item in items if item and item != "none")
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    # TOML integers become Python integers of any size.
    is_number = not {int, float}.isdisjoint(members_of(hint))
    if is_number and is_whole and not abs(value) < 2**63:
        raise RefusedError("type", float, value=value)
    return value


def _in_range(value: Any, limits: Mapping[str, Any], *, written: Any) -> Any:
    """Return the value if it has no control characters and fits in a float.

    `written` is the value in the file. Raises RefusedError.
    """
    for each in value if isinstance(value, tuple) else (value,):
        # Texts become paths, names and lines of files.
        if isinstance(each, str) and (each != printable(each) or "\n" in each):
            raise RefusedError("pattern", "must be text without control characters.")
    is_whole = isinstance(written, int) and not isinstance(written, bool)
    if is_whole and limits.get("high") is None and written > MAX_INTEGER:
        raise RefusedError("high", MAX_INTEGER)
    return value


def _requirement(refused: RefusedError, hint: Any) -> str:
    """Return the sentence with the requirement that a refused value violates."""
    if typing.get_origin(hint) is tuple:
        return 'must be a list of texts, as in ["a", "b"].'
    kind, *others = (each for each in members_of(hint) if each is not type(None))
    names = ["none"] * (type(None) in members_of(hint))
    names += [name for each in others for name in typing.get_args(each)]
    optional = "".join(f' (or "{name}")' for name in names)
    match refused.reason:
        case "choices":
            return f"choose one of {', '.join(refused.wanted)}{optional}."
        case "pattern":
            return str(refused.wanted)
        case "type" if kind is bool:
            return "must be true or false."
        case "type" if kind is str:
            return f"must be text in quotes{optional}."
        case "type":
            number = refused.value
            is_one = isinstance(number, int if kind is int else (int, float))
            if is_one and not isinstance(number, bool):
                return "must be a finite number."
            return f"must be a {'whole ' if kind is int else ''}number{optional}."
        case _:
            return f"{refused.problem()}."
