"""`explain`: the meaning, values, default and conflicts of a setting of run.toml."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from payload.config.conflict_examples import conflicts_of
from payload.config.run_config import FIXED, RunConfig, load_run_config
from payload.config.setting_reference import (
    SectionReference,
    Setting,
    all_settings,
    sections,
    sentence,
    toml_text,
)
from payload.core.command_line import CommandParser
from payload.core.errors import UsageError
from payload.core.printable_text import printable, shown
from payload.core.suggested_commands import program_name

COLUMNS = 80
_INDENT = "  "
_LABEL = 12
_NEAR = 3

Found = tuple[SectionReference, ...] | tuple[Setting, ...]
Style = Callable[[str], str]


def parser(*, prog: str) -> CommandParser:
    """Return the parser of `explain`."""
    made = CommandParser(
        prog=prog,
        description="Explain a setting of run.toml: its meaning, values, default, unit and "
        "conflicts. Without KEY, list all settings.",
        example="tileforge explain batch.micro_batch_size --config run.toml",
    )
    key = made.add_argument(
        "key",
        nargs="?",
        metavar="KEY",
        help="a setting, such as `batch.micro_batch_size` or only `micro_batch_size`, or a "
        "section, such as `batch`",
    )
    key.completer = lambda **_: (*all_settings(), *sections())  # type: ignore[attr-defined]
    made.add_argument("--config", type=Path, metavar="FILE", help="also show the values in FILE")
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    return made


def output(arguments: argparse.Namespace, *, is_styled: bool) -> str:
    """Return the explanation, as text of 80 columns or as JSON. Raises ConfigError, UsageError."""
    config = None if arguments.config is None else load_run_config(arguments.config)
    found = tuple(sections().values()) if arguments.key is None else find(arguments.key)
    if arguments.json:
        records = [_record(each, config) for each in found]
        return json.dumps(records[0] if len(records) == 1 else records, indent=2) + "\n"
    style: Style = _bold if is_styled else str
    where = "" if config is None else str(arguments.config)
    lines: list[str] = []
    for each in found:
        if isinstance(each, SectionReference):
            describe = _section_lines if len(found) == 1 else _section_summary
            lines += describe(each, config, style=style)
        elif len(found) == 1:
            lines += _setting_lines(each, config, where=where, style=style)
        else:
            lines += _setting_summary(each, config, style=style)
    return "\n".join(lines) + "\n"


def find(key: str) -> Found:
    """Return the section or setting `key`, or each setting with that name. Raises UsageError."""
    settings = all_settings()
    if key in sections():
        return (sections()[key],)
    if key in settings:
        return (settings[key],)
    same = tuple(each for each in settings.values() if each.key == key)
    if same:
        return same
    raise UsageError(f"no setting {shown(key)}. {_hint(key)}")


def _hint(key: str) -> str:
    """Return a hint: the similar names, or the command that lists all settings."""
    names: dict[str, str] = {name: name for name in (*all_settings(), *sections())}
    names |= {each.key: name for name, each in all_settings().items()}
    near = dict.fromkeys(names[each] for each in get_close_matches(key, names, n=_NEAR))
    if near:
        return f"Did you mean {' or '.join(near)}?"
    return f"{program_name()} explain lists all settings."


def _section_summary(
    section: SectionReference, config: RunConfig | None, *, style: Style
) -> list[str]:
    """Return the names of a section's settings, for the list of all sections."""
    lines = _row(section.name, ", ".join(each.key for each in section.settings))
    return [lines[0].replace(section.name, style(section.name), 1), *lines[1:]]


def _section_lines(
    section: SectionReference, config: RunConfig | None, *, style: Style
) -> list[str]:
    about = _wrapped(sentence(section.meaning)) if section.meaning else []
    lines = [style(f"[{section.name}]"), *about, f"{_INDENT}Docs: {section.page}", ""]
    for each in section.settings:
        lines += _setting_summary(each, config, style=style)
    return lines


def _setting_summary(setting: Setting, config: RunConfig | None, *, style: Style) -> list[str]:
    value = setting.default if config is None else _value_in(config, setting)
    return [
        f"{style(setting.name)} = {printable(toml_text(value))}",
        *_wrapped(setting.meaning),
    ]


def _setting_lines(
    setting: Setting, config: RunConfig | None, *, where: str, style: Style
) -> Iterator[str]:
    yield style(setting.name)
    yield from _wrapped(setting.meaning)
    yield ""
    rows = {"Default": setting.default_text(), "Values": setting.values()}
    if setting.unit:
        rows["Unit"] = setting.unit
    if config is not None:
        value = _value_in(config, setting)
        same = ", the default" if value == setting.default else ""
        rows["Value"] = f"{printable(toml_text(value))} in {printable(where)}{same}"
    if (setting.section, setting.key) in FIXED:
        rows["Resume"] = "a resumed run keeps the value of its first start"
    rows["Docs"] = sections()[setting.section].page
    for label, text in rows.items():
        yield from _row(label, text)
    conflicts = conflicts_of(setting.name)
    if conflicts:
        yield ""
        yield f"{_INDENT}Conflicts (an example of each):"
    for conflict in conflicts:
        yield from _wrapped(conflict.message, first=f"{_INDENT}- ", indent=f"{_INDENT}  ")


def _row(label: str, text: str) -> list[str]:
    """Return the lines of a label with its text in a second column."""
    first = f"{_INDENT}{label:<{_LABEL}} "
    return _wrapped(text, first=first, indent=" " * len(first))


def _wrapped(text: str, *, first: str = _INDENT, indent: str = _INDENT) -> list[str]:
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=first,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _value_in(config: RunConfig, setting: Setting) -> Any:
    return getattr(getattr(config, setting.section), setting.key)


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m"


def _record(each: SectionReference | Setting, config: RunConfig | None) -> Mapping[str, Any]:
    """Return a section or a setting as a JSON object."""
    if isinstance(each, SectionReference):
        return {
            "section": each.name,
            "meaning": each.meaning,
            "page": each.page,
            "settings": [_record(setting, config) for setting in each.settings],
        }
    limits = {name: each.limits.get(name) for name in ("low", "above", "high")}
    conflicts: Sequence[Mapping[str, Any]] = [
        {"settings": conflict.settings, "message": conflict.message}
        for conflict in conflicts_of(each.name)
    ]
    return {
        "name": each.name,
        "meaning": each.meaning,
        "default": each.default,
        "values": each.values(),
        "words": each.words(),
        **limits,
        "unit": each.unit or None,
        "is_fixed_on_resume": (each.section, each.key) in FIXED,
        "page": sections()[each.section].page,
        "conflicts": conflicts,
        **({} if config is None else {"value": _value_in(config, each)}),
    }
