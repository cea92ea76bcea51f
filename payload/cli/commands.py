"""The commands of `tileforge`: a row for each, with the package that carries it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One row."""

    name: str
    group: str
    """The heading above it in the help."""
    package: str
    """The part of `payload` that carries it out."""
    summary: str
    words: tuple[str, ...] = ()
    """What the package's own command line has before the user's words."""


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
            "plan": "print what a run would do, and start nothing",
            "preflight": "check every node of a cluster",
            "run": "start a run and follow it",
            "status": "show a run and its ranks",
            "logs": "print what a rank or the launcher printed",
            "list": "show all runs, the newest first",
            "attach": "follow a run on a cluster to its end",
            "stop": "stop a run with a checkpoint",
            "collect": "bring a cluster run's logs, metrics and newest checkpoint here",
            "remove": "remove old runs with their checkpoints from this disk",
        },
    ),
    *_rows(
        "Clusters on Google Cloud",
        "orchestrate",
        {
            "doctor": "check whether the project can hold the cluster",
            "up": "build the cluster",
            "sweep": "look whether anything is left in the cloud",
            "down": "bring results home, destroy the cluster, look that nothing is left",
            "rehearse": "take the smallest cluster through everything once",
        },
    ),
    *_rows(_DATA, "data", {"prepare": "turn text into tokens"}),
    Command(name="data", group=_DATA, package="data", summary="prepare, verify or show data"),
    Command(
        name="finetune",
        group=_MODEL,
        package="finetune",
        summary="choose every setting for a model and a file of data, and run",
    ),
    Command(
        name="train",
        group=_MODEL,
        package="train",
        summary="train in this process, or as a rank of another launcher",
    ),
    Command(
        name="generate",
        group=_MODEL,
        package="generate",
        summary="continue prompts, chat, or classify with a checkpoint",
    ),
    Command(
        name="evaluate",
        group=_MODEL,
        package="evaluate",
        summary="measure a checkpoint's loss or accuracy",
    ),
    Command(
        name="export",
        group=_MODEL,
        package="export",
        summary="write a checkpoint's weights for other programs",
    ),
    Command(
        name="completion",
        group="Shell",
        package="cli",
        summary="print what makes bash, zsh or fish complete these commands",
    ),
)
BY_NAME: Mapping[str, Command] = {row.name: row for row in COMMANDS}


def help_text(program: str) -> str:
    """Return the whole help, in groups; `program` is how the user called it."""
    width = max(map(len, BY_NAME)) + 2
    lines = [f"usage: {program} COMMAND [OPTION ...]", ""]
    for group, rows in groupby(COMMANDS, key=lambda row: row.group):
        lines.append(f"{group}:")
        lines += [f"  {row.name:<{width}}{row.summary}" for row in rows]
    lines += [
        "",
        f"{program} COMMAND --help shows a command's options and an example.",
        f"Example: {program} run payload/configs/quickstart.toml",
    ]
    return "\n".join(lines) + "\n"
