"""The help of every command: one screen with `--help`, every option with `--help-all`."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

import pytest

from payload.core.command_line import CommandParser, from_arguments, option
from payload.core.suggested_commands import CONSOLE
from tests.cli.parsers import all_parsers

COLUMNS, LINES = 80, 40


@pytest.fixture(autouse=True)
def terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let argparse format for 80 columns, and examples start with `tileforge`."""
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv(CONSOLE, "/bin/tileforge")
    monkeypatch.setenv("PATH", "/bin")
    all_parsers.cache_clear()


def test_every_help_fits_80_columns_and_the_common_options_one_screen() -> None:
    too_wide, too_long = [], []
    for name, parser in all_parsers().items():
        common, full = parser.format_help(), parser.format_full_help()
        lines = common.splitlines()
        too_wide += [(name, line) for line in [*lines, *full.splitlines()] if len(line) > COLUMNS]
        too_long += [(name, len(lines))] if len(lines) > LINES else []
    assert (too_wide, too_long) == ([], [])


def test_every_help_begins_with_usage_purpose_and_an_example() -> None:
    for name, parser in all_parsers().items():
        usage, purpose, example = parser.format_help().split("\n\n")[:3]
        assert usage.startswith("usage: "), name
        assert purpose[0].isupper() and purpose.endswith("."), name
        assert example.startswith("Example: ") or name == "cli completion", name


def test_the_full_help_has_every_option_with_its_purpose() -> None:
    for name, parser in all_parsers().items():
        full, common = parser.format_full_help(), parser.format_help()
        for action in parser._actions:
            if action.help == argparse.SUPPRESS:
                continue
            if isinstance(action, argparse._SubParsersAction):
                assert all(re.search(rf"\n +{verb}\b", common) for verb in action.choices), name
                continue
            assert action.help, (name, action.dest)
            for flag in action.option_strings:
                assert f" {flag}" in full, (name, flag)
        hidden = {
            flag
            for action in parser._actions
            for flag in action.option_strings
            if action.help != argparse.SUPPRESS and f" {flag}" not in common
        }
        assert not hidden or "--help-all shows" in common, name


def test_a_required_option_is_a_common_one() -> None:
    for name, parser in all_parsers().items():
        common = parser.format_help()
        for action in parser._actions:
            if action.required and action.option_strings:
                assert f"  {action.option_strings[0]}" in common, (name, action.dest)


@dataclass(frozen=True, kw_only=True)
class _Options:
    steps: int = option("number of steps", default=3, metavar="N")
    names: list[str] = option("a name", "--name", metavar="NAME")  # noqa: RUF009
    trace: bool = option("write a trace", advanced=True)


def test_a_dataclass_describes_the_whole_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = CommandParser(prog="x", description="Do x.", example="x --steps 1")
    parser.add_options(_Options)
    parsed = parser.parse_args(["--name", "a", "--name", "b", "--trace"])
    assert from_arguments(_Options, parsed) == _Options(steps=3, names=["a", "b"], trace=True)
    assert parser.parse_args([]).names == []
    for argument, shows_all in (("--help", False), ("--he", False), ("--help-all", True)):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args([argument])
        assert ended.value.code == 0
        assert ("--trace" in capsys.readouterr().out) == shows_all
