"""The reference of commands, made from the parsers of `tileforge`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable

from payload.cli.commands import COMMANDS, Command
from tests.cli.parsers import all_parsers

_LITERAL = re.compile(
    r"""(?<![\w`/'-])(?:
    --[a-z][a-z-]*(?:\ hf\b)?  # an option, and a value
    | [A-Z]{2,}(?:_[A-Z]+)+  # a variable of the environment
    | (?<=default:\ )(?!prompt|\d)[\w./-]+(?=[);])  # a default of one word
    | gs://[\w/]+
    | '[*<][^']*'
    | trl:NAME
    | RUN/[\w/]+
    | runs/<\S+>
    | \.?\w[\w/-]*\.(?:bin|json|jsonl|toml|html|md)(?::\d)?\b
    | (?:batch|data|precision|slurm|storage|track|train)\.[a-z_]+[a-z]  # a setting
    | \w+(?:,\w+)*=(?:\w[\w-]*(?:,\w+=\w+)*)?
    )""",
    re.VERBOSE,
)
"""Literals in a help text."""


def commands() -> str:
    """Return the table of all commands."""
    rows = [f"| `tileforge {row.name}` | {row.group} | {_purpose(row)} |" for row in COMMANDS]
    return "\n".join(["| Command | Group | What the command does |", "|---|---|---|", *rows])


def options(*groups: str) -> str:
    """Return a section with a table of options for each command of these groups."""
    return _sections(row.name for row in COMMANDS if row.group in groups)


def _parser_name(command: str) -> str:
    """Return the name of a command's parser in `all_parsers`."""
    (row,) = (row for row in COMMANDS if row.name == command)
    verb = f"{row.package} {row.name}"
    return verb if verb in all_parsers() else row.package


def _purpose(row: Command) -> str:
    """Return the first sentence of the command's description."""
    if row.arguments and row.arguments[0].startswith("-"):
        return f"{row.summary.capitalize()}."  # the description is that of the whole program
    text = _cell(_marked(all_parsers()[_parser_name(row.name)].description or ""))
    return re.split(r"(?<=\.)\s", text)[0]


def _sections(names: Iterable[str]) -> str:
    """Return one section for each parser; commands of the same parser share a section."""
    shared: dict[str, list[str]] = {}
    for name in names:
        parser = _parser_name(name)
        verbs = [each for each in all_parsers() if each.startswith(f"{parser} ")]
        for each in verbs or [parser]:
            label = f"{name} {each.rpartition(' ')[2]}" if verbs else name
            # `data prepare` is also the command `prepare`.
            if tuple(label.split()) not in [(row.package, row.name) for row in COMMANDS]:
                shared.setdefault(each, []).append(label)
    return "\n\n".join(_section(parser, labels) for parser, labels in shared.items())


def _section(parser: str, labels: list[str]) -> str:
    title = ", ".join(f"tileforge {label}" for label in labels)
    made = all_parsers()[parser]
    expand = made._get_formatter()._expand_help
    actions = [each for each in made._actions if _is_shown(each)]
    rows = [f"| {_names(each)} | {_cell(_meaning(each, expand(each)))} |" for each in actions]
    head = ["| Option | Meaning |", "|---|---|"] if rows else ["No options."]
    return "\n".join([f"## {title}", "", *head, *rows])


def _is_shown(action: argparse.Action) -> bool:
    is_verb = isinstance(action, argparse._SubParsersAction)
    is_help = action.dest == "help" or "--help-all" in action.option_strings
    return not (is_verb or is_help or action.help == argparse.SUPPRESS)


def _names(action: argparse.Action) -> str:
    metavar = action.metavar or ("|".join(map(str, action.choices)) if action.choices else None)
    value = metavar if isinstance(metavar, str) else action.dest.upper()
    value = "" if action.nargs == 0 else value
    shown = ", ".join(action.option_strings)
    return f"`{_cell(f'{shown} {value}'.strip())}`"


def _meaning(action: argparse.Action, text: str) -> str:
    """Return the help of an option; the values that it explains are in code marks."""
    for value in action.choices or ():
        text = re.sub(rf"(?<![\w`(]){re.escape(str(value))}:(?= )", f"`{value}`:", text)
    return _marked(text)


def _marked(text: str) -> str:
    """Return the text with options, files, addresses and settings in code marks.

    A terminal shows the same help without these marks, because they would need space.
    """
    parts = text.split("`")
    return "`".join(
        part if number % 2 else _LITERAL.sub(r"`\g<0>`", part) for number, part in enumerate(parts)
    )


def _cell(text: str) -> str:
    """Return text that fits into a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
