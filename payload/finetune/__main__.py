"""`python -m payload.finetune`: chooses and prints every setting, prepares the data, and runs."""

from __future__ import annotations

if __name__ == "__main__":
    from payload.core.missing_packages import explain_missing_packages

    explain_missing_packages()

import argparse
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from payload.config.engine_packages import has_nvidia_device
from payload.core.command_line import CommandParser
from payload.core.error_line import print_error
from payload.core.errors import (
    INTERRUPTED,
    ConfigError,
    DataError,
    ExitCode,
    TileforgeError,
    UsageError,
)
from payload.core.files import write_whole
from payload.core.interrupts import interrupt_once
from payload.core.printable_text import printable
from payload.core.python_processes import code_environment, module_command
from payload.core.regular_files import home_path
from payload.core.suggested_commands import command
from payload.core.symlink_safety import inside_folder
from payload.core.tasks import TASK_KINDS
from payload.core.wrapped_lines import wrapped
from payload.data.shared_flags import (
    add_dedup_flag,
    add_hub_flags,
    add_reading_flags,
    add_special_tokens_flag,
    add_task_flags,
    add_tokenizer_check_flag,
    add_val_fraction_flag,
    forwarded_words,
)
from payload.machines.speed_process import measured_speed
from payload.run_record.run_files import DEFAULT_RUNS_DIR, NAMES
from payload.weights.model_option import MODEL_HELP
from payload.weights.run_names import path_of_run

_ANY_WIDTH = 1_000_000
"""Width of lines that go to a pipe. It is so large that each decision is on one line."""
_HEADLINE_COLUMN = 8
"""Width of the column with the names of the decisions."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code of its last step."""
    arguments = parser().parse_args(argv)
    arguments.argv = argv
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _finetune(arguments)
    except UsageError as error:
        # The flags were chosen from the data, so a usage error of `prepare` is reported as a config
        # error.
        return _print_error(error, ExitCode.CONFIG)
    except TileforgeError as error:
        return _print_error(error, error.exit_code)
    except OSError as error:
        what = f"{error.filename or 'input'}: {error.strerror or error}. Correct it."
        return _print_error(ConfigError(what), ExitCode.CONFIG)
    except KeyboardInterrupt:
        print("interrupted; nothing was started", file=sys.stderr)
        return INTERRUPTED


def _print_error(error: TileforgeError, code: ExitCode) -> int:
    print_error(error)
    return code


def _finetune(arguments: argparse.Namespace) -> int:
    # The data's libraries take a second to import, which --help does not need.
    from payload.data.detect import DataOptions, find_inputs
    from payload.data.show import has_colours
    from payload.data.sources.input_weights import split_weights
    from payload.data.sources.source_flags import SourceRequest
    from payload.finetune.decide import FinetuneRequest, decide
    from payload.finetune.unreadable_data import lines_without_plan

    paths, _ = split_weights(arguments.data, setting="--data")
    _require_unprepared(paths, model=arguments.model)
    out = _out_folder(arguments.out, paths)
    if not arguments.skip_bad and _skipped_rows(out / "data"):
        arguments.skip_bad = True
        print(
            f"note: {out / 'data'} was prepared with --skip-bad, so bad rows are skipped again",
            file=sys.stderr,
        )
    request = FinetuneRequest(
        model=path_of_run(arguments.model, setting="--model", error=ConfigError),
        data=tuple(arguments.data),
        data_options=DataOptions(
            task=arguments.task,
            text_column=arguments.text_column,
            label_column=arguments.label_column,
            source=SourceRequest(
                kind="auto",
                glob=arguments.glob,
                subset=arguments.config,
                revision=arguments.revision,
                split=arguments.split,
                columns=arguments.columns or (),
                ignored_keys=tuple(arguments.ignore_key or ()),
            ),
            forwarded=forwarded_words(arguments),
        ),
        rendering=arguments,
        out=out,
        steps=arguments.steps,
        overrides=_overrides(arguments),
        run_arguments=_run_arguments(arguments),
        wants_samples=not arguments.no_samples,
    )
    find_inputs(request.data, request.data_options)  # a missing file has no further lines
    on_these_cores = arguments.inventory in (None, "local") and not has_nvidia_device()
    try:
        decided = decide(request, _run_on_measured_cores if on_these_cores else _run_for_json)
    except DataError as error:
        lines = lines_without_plan(request, error, argv=arguments.argv, parser=parser())
        print(printable("\n".join(lines)), flush=True)
        raise
    try:
        _require_unedited(decided.config, decided.run_toml, force=arguments.force)
    except ConfigError as error:
        if not arguments.dry_run:
            raise
        print(f"note: {printable(str(error))}", file=sys.stderr)
    prepare, run = decided.commands()
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _ANY_WIDTH
    for line in decided.headlines:
        print("\n".join(wrapped(printable(line), width=width, indent=_HEADLINE_COLUMN)))
    for sample in decided.example:
        print(f"\n{sample.name}: {sample.num_tokens:,} tokens, {sample.num_trained:,} trained")
        print(sample.render(colour=has_colours(os.environ)))
    print(f"\n{prepare}\n\n{decided.config}:\n")
    print("\n".join(f"  {line}".rstrip() for line in decided.run_toml.splitlines()))
    print(f"\n{run}", flush=True)
    if arguments.dry_run:
        print("dry run: nothing was written or started", file=sys.stderr)
        return ExitCode.OK
    status = _run_to_end(
        (
            *("payload.data", *decided.prepare, *decided.unprinted, "--no-next"),
            *(["--force"] if arguments.force else []),
        )
    )
    if status != ExitCode.OK:
        return status
    write_whole(decided.config, decided.run_toml)
    if arguments.prepare_only:
        print("\n".join(_next_commands(arguments, decided.config, run)))
        return ExitCode.OK
    more = ["--next", *(["--detach"] if arguments.detach else [])]
    more += ["--yes"] if arguments.yes else []
    more += ["--samples"] if decided.is_sampled else []
    # The run replaces this process, so that it receives the signals and sets the exit code.
    program = module_command("payload.orchestrate", *decided.run, *more)
    os.execve(program[0], program, code_environment(os.environ))


def _next_commands(arguments: argparse.Namespace, config: Path, run: str) -> list[str]:
    """Return the commands that start the prepared run, here and as a Slurm job."""
    lines = [f"nothing was started. To start the run: {run}"]
    if arguments.inventory in (None, "local"):
        folder = [] if arguments.runs_dir is None else ["--runs-dir", arguments.runs_dir]
        words = ["run", "--config", str(config), "--site", "slurm", *folder]
        lines.append(f"as a Slurm job: {command('orchestrate', *words)}")
        lines.append(
            "note: the method is chosen for the memory of this machine. If the job's nodes have "
            "more memory, use --set adapter.kind=none; if less, --set adapter.kind=lora"
        )
    return lines


def _out_folder(chosen: Path | None, inputs: Sequence[str]) -> Path:
    """Return the folder for data and run.toml.

    Raises ConfigError if a link leads out of --out, or out of the current folder without --out.
    With such a link, the author of the folder could make the command write to any folder.
    """
    from payload.finetune.decide import data_name

    home = chosen or Path()
    out = chosen or Path("finetuned", data_name(inputs) or "data")
    for path in (out, out / "data", out / NAMES.config.name):
        try:
            inside_folder(path, home=home)
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror}, or choose another folder with --out."
            ) from None
    return out


def _require_unprepared(inputs: Sequence[str], *, model: str) -> None:
    """Raise ConfigError if an input is a folder that `prepare` wrote.

    The message has the command that trains on this folder.
    """
    from payload.data.training_command import training_command
    from payload.formats.data_folder import META_NAME, load_meta

    for given in inputs:
        folder = home_path(given)
        if (folder / META_NAME).is_file():
            train = training_command(folder, load_meta(folder), model=model)
            raise ConfigError(
                f"--data {given}: already prepared, but finetune reads raw data. Train on the "
                f"folder with: {train}"
            )


def _skipped_rows(folder: Path) -> bool:
    """Return True if `prepare` left out bad rows when it made the data in the folder."""
    from payload.formats.data_folder import load_meta

    try:
        return load_meta(folder).skipped_documents > 0
    except DataError:
        return False


def _overrides(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the user's settings. Raises ConfigError for a setting with two values."""
    length = arguments.sequence_length
    for flag, key, value in (
        ("--steps", "train.steps", arguments.steps),
        ("--sequence-length", "data.sequence_length", length),
    ):
        for override in arguments.overrides:
            name = ".".join(part.strip() for part in override.partition("=")[0].split("."))
            if value is not None and name == key:
                raise ConfigError(
                    f"{flag} {value} and --set {override}: both set {key}. Leave one out."
                )
    return (
        *arguments.overrides,
        *(() if length is None else (f"data.sequence_length={length}",)),
    )


def _run_arguments(arguments: argparse.Namespace) -> tuple[str, ...]:
    forwarded = [] if arguments.inventory is None else ["--inventory", arguments.inventory]
    if arguments.runs_dir is not None:
        forwarded += ["--runs-dir", arguments.runs_dir]
    return tuple(forwarded)


def _require_unedited(config: Path, text: str, *, force: bool) -> None:
    """Raise ConfigError if `text` would replace a run.toml with different contents."""
    if force or not config.exists():
        return
    if _without_schema(config.read_text(encoding="utf-8")) == _without_schema(text):
        return
    raise ConfigError(
        f"{config}: exists with other settings, and may have been edited. Run this file with: "
        f"{command('orchestrate', 'run', '--config', str(config))}; or choose another --out, or "
        "replace the file with --force."
    )


def _without_schema(text: str) -> str:
    """Return run.toml without the path of its schema, which depends on where the code is."""
    return re.sub(r"\A#:schema .*\n", "", text)


def _run_on_measured_cores(arguments: Sequence[str]) -> Any:
    """Call `_run_for_json`. Before a plan, first measure this machine's speed if it is unknown.

    A plan would also measure an unknown speed, which takes seconds. The plan's messages are hidden,
    so the user would not see the reason for the wait.
    """
    if "plan" in arguments[:2]:
        _measure_once()
    return _run_for_json(arguments)


@cache
def _measure_once() -> None:
    def say(line: str) -> None:
        print(printable(line), file=sys.stderr, flush=True)

    measured_speed(os.environ, now_unix=time.time(), say=say)


def _run_for_json(arguments: Sequence[str]) -> Any:
    """Run a program of the project and return its JSON; raise its error line as an exception."""
    done = subprocess.run(
        module_command(*arguments),
        env=code_environment(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == ExitCode.OK:
        return json.loads(done.stdout)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")] or lines or ["no message"]
    error = ConfigError(errors[-1].removeprefix("error: "))
    known = [code for code in ExitCode if code == done.returncode and code != ExitCode.USAGE]
    error.exit_code = known[0] if known else ExitCode.CONFIG
    raise error


def _run_to_end(arguments: Sequence[str]) -> int:
    """Run a program of the project, forward signals to it, and return the program's exit code."""
    process = subprocess.Popen(module_command(*arguments), env=code_environment(os.environ))

    def forward(number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {each: signal.signal(each, forward) for each in (signal.SIGTERM, signal.SIGHUP)}
    # The terminal also sends Ctrl-C to the program, which then prints how to resume.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        status = process.wait()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    return 128 - status if status < 0 else status


def parser() -> CommandParser:
    """Return the parser of the command-line options."""
    made = CommandParser(
        prog=command("finetune"),
        description="Fine-tune a model on a file. The command detects the data's format. It "
        "chooses and explains the sequence length, a method that fits into memory, the batch size, "
        "the steps and the learning rate. It also prints the commands that prepare the data and "
        "start the run, for use after you edit run.toml.",
        example=command("finetune", "--model", "HuggingFaceTB/SmolLM2-135M-Instruct", "--data")
        + " chats.jsonl --steps 60",
    )
    add = made.add_argument
    more = made.add_advanced_group().add_argument
    add("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    add(
        "--data",
        nargs="+",
        action="extend",
        required=True,
        metavar="FILE[:WEIGHT]",
        help="training data: files or folders (JSON, CSV, parquet, text, ...), or a dataset on "
        "the hub. Files named train, valid and test are the splits. With a.jsonl:3, an epoch "
        "has each row of a.jsonl three times",
    )
    add(
        "--task",
        choices=TASK_KINDS,
        help="training task (default: detected from the data)",
    )
    more("--text-column", metavar="NAME", help="column with the text (default: detected by name)")
    more("--label-column", metavar="NAME", help="column with the label (default: detected by name)")
    more(
        "--sequence-length",
        type=_positive,
        metavar="TOKENS",
        help="block length; sets data.sequence_length of the run (default: chosen from the data)",
    )
    add_reading_flags(more)
    add_hub_flags(more)
    add_val_fraction_flag(add)
    add_dedup_flag(more)
    add_tokenizer_check_flag(more)
    add_special_tokens_flag(more)
    add_task_flags(more)
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for data and run.toml (default: finetuned/NAME)",
    )
    add(
        "--steps",
        type=_positive,
        metavar="COUNT",
        help="steps (default: 1 to 3 epochs; for classify 2 or 3)",
    )
    add(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one setting; can be repeated",
    )
    add(
        "--inventory",
        metavar="stack[:NAME]|local|FILE",
        help="a Pulumi stack, this machine (local), or an inventory FILE (default: selected "
        "stack if up, otherwise local)",
    )
    add("--runs-dir", metavar="DIR", help=f"folder of all runs (default: {DEFAULT_RUNS_DIR})")
    add(
        "--detach",
        action="store_true",
        help="return when the run has started; the run continues",
    )
    more(
        "--no-samples",
        action="store_true",
        help="do not generate answers to two validation prompts for the report, before and "
        "after the run",
    )
    add(
        "--yes",
        action="store_true",
        help="start a run of over a day without confirmation",
    )
    add("--force", action="store_true", help="replace the data and run.toml of an earlier command")
    alone = made.add_mutually_exclusive_group().add_argument
    alone(
        "--dry-run", action="store_true", help="print the chosen settings; write and start nothing"
    )
    alone(
        "--prepare-only",
        action="store_true",
        help="prepare data and run.toml, but do not start the run",
    )
    return made


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


if __name__ == "__main__":
    interrupt_once()
    sys.exit(main(sys.argv[1:]))
