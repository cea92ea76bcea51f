"""The commands of `tileforge`: a row for each, with the package that carries it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, zip_longest


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One row."""

    name: str
    group: str
    """The heading above it in the help."""
    package: str
    """The part of `payload` that carries it out."""
    summary: str
    """At most 26 characters: two columns have to fit on a screen."""
    words: tuple[str, ...] = ()
    """Words of the package's own command line before the user's."""


def _rows(group: str, package: str, summaries: Mapping[str, str]) -> tuple[Command, ...]:
    return tuple(
        Command(name=name, group=group, package=package, summary=summary, words=(name,))
        for name, summary in summaries.items()
    )


_DATA = "Data"
_MODEL = "Models"
COMMANDS = (
    *_rows(
        "Runs",
        "orchestrate",
        {
            "plan": "print what a run would do",
            "preflight": "check a cluster's nodes",
            "run": "start a run and follow it",
            "status": "show a run and its ranks",
            "logs": "print what a rank printed",
            "list": "show all runs",
            "attach": "follow a cluster's run",
            "dashboard": "show a run's metrics",
            "stop": "save and stop a run",
            "collect": "bring a run's results here",
            "remove": "delete old runs",
        },
    ),
    Command(
        name="report",
        group="Runs",
        package="report",
        summary="write a run's page",
    ),
    Command(
        name="compare",
        group="Runs",
        package="report",
        summary="compare several runs",
        words=("--compare",),
    ),
    Command(
        name="storage",
        group="Runs",
        package="storage",
        summary="look into a run's store",
    ),
    *_rows(
        "Google Cloud",
        "orchestrate",
        {
            "doctor": "check project and quota",
            "up": "build the cluster",
            "sweep": "look for leftovers",
            "down": "destroy the cluster",
            "rehearse": "try everything once",
        },
    ),
    *_rows(_DATA, "data", {"prepare": "turn text into tokens"}),
    Command(name="data", group=_DATA, package="data", summary="verify or show data"),
    Command(
        name="finetune",
        group=_MODEL,
        package="finetune",
        summary="from a model and a file",
    ),
    Command(
        name="train",
        group=_MODEL,
        package="train",
        summary="train as one rank",
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
        summary="write weights for others",
    ),
    Command(
        name="completion",
        group="Shell",
        package="cli",
        summary="complete these commands",
    ),
)
BY_NAME: Mapping[str, Command] = {row.name: row for row in COMMANDS}


def help_text(program: str) -> str:
    """Return the whole help, in groups in two columns; `program` is how the user called it.

    With the prompt below it, it fits on a terminal of 24 lines of 80 characters.
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
    """Return the groups' lines in two columns of about the same length, in their order."""
    splits = [
        (list(chain(*groups[:place])), list(chain(*groups[place:])))
        for place in range(len(groups) + 1)
    ]
    return min(splits, key=lambda columns: max(map(len, columns)))
