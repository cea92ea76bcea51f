"""The commands of `tileforge`, each with the package that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, zip_longest


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command."""

    name: str
    group: str
    """Heading under which the help lists the command."""
    package: str
    """The subpackage of `payload` that runs the command."""
    summary: str
    """Summary of at most 26 characters, because the help has two columns."""
    arguments: tuple[str, ...] = ()
    """Arguments that precede the user's arguments on the package's command line."""


def _rows(group: str, package: str, summaries: Mapping[str, str]) -> tuple[Command, ...]:
    return tuple(
        Command(name=name, group=group, package=package, summary=summary, arguments=(name,))
        for name, summary in summaries.items()
    )


def _own(group: str, summaries: Mapping[str, str]) -> tuple[Command, ...]:
    """Return the commands that `payload.cli` runs, each in the module of the same name."""
    return tuple(
        Command(name=name, group=group, package="cli", summary=summary)
        for name, summary in summaries.items()
    )


_DATA = "Data"
_MODEL = "Models"
COMMANDS = (
    *_rows(
        "Runs",
        "orchestrate",
        {
            "plan": "dry run: memory and time",
            "preflight": "check a cluster's nodes",
            "run": "start a run and follow it",
            "status": "show a run and its ranks",
            "logs": "print a rank's log",
            "list": "show all runs",
            "attach": "follow a cluster's run",
            "dashboard": "show a run's metrics",
            "stop": "save and stop a run",
            "collect": "fetch a run's results",
            "remove": "delete old runs",
        },
    ),
    Command(
        name="report",
        group="Runs",
        package="report",
        summary="write a run's report",
    ),
    Command(
        name="compare",
        group="Runs",
        package="report",
        summary="compare several runs",
        arguments=("--compare",),
    ),
    *_own(
        "Runs",
        {"explain": "explain a setting", "schema": "JSON Schema of run.toml"},
    ),
    Command(
        name="storage",
        group="Runs",
        package="storage",
        summary="check and list a store",
    ),
    *_rows(
        "Google Cloud",
        "orchestrate",
        {
            "doctor": "check project and quota",
            "up": "build the cluster",
            "sweep": "find leftover resources",
            "down": "destroy the cluster",
            "rehearse": "test a full life cycle",
        },
    ),
    *_rows(_DATA, "data", {"prepare": "tokenize text"}),
    Command(name="data", group=_DATA, package="data", summary="verify or show data"),
    Command(
        name="finetune",
        group=_MODEL,
        package="finetune",
        summary="fine-tune on a file",
    ),
    Command(
        name="train",
        group=_MODEL,
        package="train",
        summary="train as one rank",
    ),
    Command(
        name="chat",
        group=_MODEL,
        package="generate",
        summary="chat with a model",
        arguments=("--chat",),
    ),
    Command(
        name="generate",
        group=_MODEL,
        package="generate",
        summary="continue prompts, or chat",
    ),
    Command(
        name="evaluate",
        group=_MODEL,
        package="evaluate",
        summary="measure a checkpoint",
    ),
    Command(
        name="export",
        group=_MODEL,
        package="export",
        summary="export weights",
    ),
    *_own("Shell", {"completion": "set up shell completion"}),
)
BY_NAME: Mapping[str, Command] = {row.name: row for row in COMMANDS}


def help_text(program: str) -> str:
    """Return the help, with groups in two columns; `program` is the name that the user typed.

    The help fits on a terminal of 24 lines of 80 characters, and leaves a line for the prompt.
    """
    groups = [_group_lines(name, tuple(rows)) for name, rows in groupby(COMMANDS, key=_group_of)]
    left, right = _balanced(groups)
    lines = [f"usage: {program} COMMAND [OPTION ...]", ""]
    lines += [
        f"{first:<{_COLUMN}}{second}".rstrip()
        for first, second in zip_longest(left, right, fillvalue="")
    ]
    lines += [
        "",
        f"{program} COMMAND --help shows a command's options and an example.",
        f"Example: {program} run payload/configs/quickstart.toml",
    ]
    return "\n".join(lines) + "\n"


_COLUMN = 40


def _group_of(row: Command) -> str:
    return row.group


def _group_lines(name: str, rows: Sequence[Command]) -> list[str]:
    width = max(map(len, BY_NAME)) + 1
    return [f"{name}:", *(f"  {row.name:<{width}}{row.summary}" for row in rows)]


def _balanced(groups: Sequence[list[str]]) -> tuple[list[str], list[str]]:
    """Return the lines of the groups, in order, in two columns of similar length."""
    splits = [
        (list(chain(*groups[:count])), list(chain(*groups[count:])))
        for count in range(len(groups) + 1)
    ]
    return min(splits, key=lambda columns: max(map(len, columns)))
