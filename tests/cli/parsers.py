"""Every command's parser, built in this process."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from functools import cache

from payload.cli import completion
from payload.cli.commands import BY_NAME
from payload.core.command_line import CommandParser

MODULES = {
    **{name: module for name, module in completion._PARSERS.items()},
    "first_run": "payload.first_run.__main__",
    "train.reference": "payload.train.reference.__main__",
}
"""The module with the function `parser` of each program that users start."""


@cache
def all_parsers() -> dict[str, CommandParser]:
    """Return every parser by program and verb, such as `data prepare`."""
    found = {name: importlib.import_module(module).parser() for name, module in MODULES.items()}
    own = (name for name, row in BY_NAME.items() if row.package == "cli")
    found |= {f"cli {name}": completion.command_parser(BY_NAME[name]) for name in own}
    return dict(_with_verbs(found))


def _with_verbs(parsers: dict[str, CommandParser]) -> Iterator[tuple[str, CommandParser]]:
    for name, parser in parsers.items():
        assert isinstance(parser, CommandParser), name
        yield name, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from _with_verbs({f"{name} {verb}": p for verb, p in action.choices.items()})


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Return the flags of a parser, with hidden flags."""
    return set(parser._option_string_actions)
