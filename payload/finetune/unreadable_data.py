"""Output of `finetune` if the data cannot be read, or the model's template cannot render it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from payload.core.command_line import CommandParser
from payload.core.errors import DataError
from payload.core.suggested_commands import command
from payload.data.detect import detect_data
from payload.finetune.decide import FinetuneRequest
from payload.run_record.run_files import NAMES

_OPTION = re.compile(r"(--[a-z][a-z-]+)(?: ([A-Za-z_]+=[^\s.]+|trl:\w+))?")
_VALUE = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"")
"""Matches a quoted value in a message. Values come from the data. The data's author must not be
able to choose an option of the suggested command."""
_NOT_REPEATED = ("--dry-run", "--prepare-only", "--force")


def lines_without_plan(
    request: FinetuneRequest, error: DataError, *, argv: Sequence[str], parser: CommandParser
) -> list[str]:
    """Return lines with the facts about the data, and with commands to inspect it and to continue.

    `argv` and `parser` are the arguments and the command line of `finetune`.
    """
    found, task = [], request.data_options.task or "TASK"
    source = ["--task", task, "--source", "auto", "--input", *request.data]
    try:
        detected = detect_data(request.data, request.data_options)
    except DataError:
        pass
    else:
        found = [f"data    {request.data_words()}: task {detected.task}, because {detected.reason}"]
        found += [f"        {line}" for line in detected.recognised]
        source = detected.arguments()
    out = ["--out", str(request.out / "data")]
    run = ["run", "--config", str(request.out / NAMES.config.name), *request.run_arguments]
    return [
        *found,
        "",
        "the rows as they are read:",
        *(
            f"  {command('data', 'show', path, '--model', request.model)}"
            for path in request.paths()
        ),
        *_fix(str(error), argv, parser),
        "without finetune, prepare the data, write a run.toml and start it:",
        f"  {command('data', 'prepare', *source, '--model', request.model, *out)}",
        f"  {command('orchestrate', *run)}",
        "",
    ]


def _fix(error: str, argv: Sequence[str], parser: CommandParser) -> list[str]:
    """Return the user's command with one more option: the first option that the error names."""
    given = [word for word in argv if word not in _NOT_REPEATED]
    named = _OPTION.findall(_VALUE.sub("", error))
    values = {option: value for option, value in named if value}
    for option, _ in named:
        action = parser._option_string_actions.get(option)
        if action is None or option in argv or option == "--data":
            continue
        example = values.get(option) or action.metavar or action.dest.upper()
        added = [option] if action.nargs == 0 else [option, str(example)]
        return ["to fix the error, for example:", f"  {command('finetune', *given, *added)}"]
    return []
