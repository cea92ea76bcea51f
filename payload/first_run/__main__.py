"""`python -m payload.first_run`: fine-tunes a packaged chat model and compares its answers."""

from __future__ import annotations

if __name__ == "__main__":
    from payload.core.missing_packages import explain_missing_packages

    explain_missing_packages()

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from payload.config.run_config import RunConfig, load_run_config
from payload.core.command_line import CommandParser
from payload.core.elapsed_line import elapsed_line
from payload.core.error_line import print_error
from payload.core.errors import INTERRUPTED, ConfigError, ExitCode, TileforgeError
from payload.core.files import write_whole
from payload.core.interrupts import interrupt_once
from payload.core.one_line import last_line
from payload.core.printable_text import printable
from payload.core.python_processes import code_environment, module_command
from payload.core.suggested_commands import chat_command, command
from payload.first_run.comparison import Shown, answers_text, scores, scores_text
from payload.first_run.function_records import (
    EXAMPLES,
    FunctionRecord,
    question,
    split,
    standard_library,
)
from payload.first_run.packaged_model import PackageError, cache_folder, model_folder
from payload.first_run.step_budget import step_seconds, steps_within_budget
from payload.models.registry import read_spec
from payload.run_record.metrics_log import read_metrics
from payload.run_record.report_and_samples_process import write_report
from payload.run_record.run_files import (
    DEFAULT_RUNS_DIR,
    RunPaths,
    Summary,
    last_record,
    new_run_id,
)
from payload.run_record.run_samples import Sample, write_samples

CONFIG = Path(__file__).parents[1] / "configs" / "first_run.toml"
NO_PACKAGE = 3
"""Exit code if the package cannot be fetched: `make run` then runs the quickstart."""
_ANSWER_TOKENS = 64
_SOURCE = "functions"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """The prompts of the command, and the folders that it uses."""

    held_out: Sequence[FunctionRecord]
    model: Path
    data: Path
    run: RunPaths

    def prompts(self) -> list[str]:
        return [*map(question, EXAMPLES), *(each.prompt() for each in self.held_out)]


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    arguments = parser().parse_args(argv)
    try:
        return _first_run(arguments)
    except PackageError as error:
        print(f"note: {printable(str(error))}", file=sys.stderr)
        return NO_PACKAGE
    except TileforgeError as error:
        print_error(error)
        return error.exit_code
    except OSError as error:
        print_error(f"{error.filename}: {error.strerror}")
        return ExitCode.CONFIG
    except KeyboardInterrupt:
        print("interrupted; run the same command again: finished parts are kept", file=sys.stderr)
        return INTERRUPTED


@contextmanager
def _working(what: str, *, shown: Callable[[], str] | None = None) -> Iterator[None]:
    """Print the name of a stage. On a terminal, also show the elapsed time during the context.

    `shown` returns the text before the time. None means the name of the stage.
    """
    print(f"{what} ...", file=sys.stderr, flush=True)
    with elapsed_line(shown or what):
        yield


def _first_run(arguments: argparse.Namespace) -> int:
    model = model_folder(
        cache_folder(os.environ), wheelhouse=arguments.wheelhouse, working=_working
    )
    config = load_run_config(CONFIG)
    run_id = arguments.run_id or new_run_id(
        config.run.name, now=datetime.now(UTC), suffix=secrets.token_hex(2)
    )
    run = RunPaths(Path(DEFAULT_RUNS_DIR) / run_id)
    _require_own_run(run, data=config.data.folder(), model=model)
    with _working("reading the standard library's functions"):
        training, held_out = split(standard_library())
    task = _Task(
        held_out=held_out,
        model=model,
        data=config.data.folder(),
        run=run,
    )
    with _working(f"preparing {len(training):,} conversations"):
        _prepare(task, training, sequence_length=config.data.sequence_length)
    steps = arguments.steps or _steps(config, model)
    before = _answers(str(model), task.prompts(), by="the model as it is")
    settings = [f"model.init={model}", *step_settings(config, steps)]
    status = _train(task.run, [*settings, *arguments.overrides])
    if status != ExitCode.OK:
        print(f"to resume and compare: make run RUN_ID={run_id}", file=sys.stderr)
        return status
    after = _answers(str(task.run.root), task.prompts(), by="the trained model")
    _report(task, before, after)
    return ExitCode.OK


def _require_own_run(run: RunPaths, *, data: Path, model: Path) -> None:
    """Raise ConfigError if the run exists and is not a run of this command.

    Without this check, the command would resume a run of another command, or replace that run's
    samples and report.
    """
    if not os.path.lexists(run.root):
        return
    fix = "Choose another id: make run RUN_ID=NEW_ID"
    if not run.config.is_file():
        raise ConfigError(f"{run.root} exists, but is not a run of this command. {fix}")
    found = load_run_config(run.config)
    pairs = ((found.data.dir, data), (found.model.init, model))
    if any(os.path.realpath(one) != os.path.realpath(other) for one, other in pairs):
        raise ConfigError(f"{run.root} is a run with another model or other data. {fix}")


def _prepare(task: _Task, training: Sequence[FunctionRecord], *, sequence_length: int) -> None:
    """Write the conversations. Tokenize them unless an earlier command has done so."""
    source = task.data.with_name(f"{task.data.name}_{_SOURCE}")
    texts = {
        source / f"{name}.jsonl": "".join(json.dumps(each.row()) + "\n" for each in rows)
        for name, rows in (("train", training), ("valid", task.held_out))
    }
    is_new = any(_text_of(path) != text for path, text in texts.items())
    if not is_new and (task.data / "meta.json").is_file():
        return
    # The data folder is removed first: an interrupted command must not leave old data beside new
    # texts.
    shutil.rmtree(task.data, ignore_errors=True)
    for path, text in texts.items():
        write_whole(path, text)
    words = ["prepare", "--task", "chat", "--source", "jsonl", "--input", str(source)]
    words += ["--tokenizer", str(task.model), "--sequence-length", str(sequence_length)]
    for _ in _lines_of("payload.data", *words, "--out", str(task.data)):
        pass


def _text_of(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def step_settings(config: RunConfig, steps: int) -> list[str]:
    """Return the overrides for a run of `steps` steps.

    There is no warm-up if the run would end during the warm-up.
    """
    found = [f"train.steps={steps}"]
    if steps <= config.schedule.warmup_steps:
        found.append("schedule.warmup_steps=0")
    return found


def _steps(config: RunConfig, model: Path) -> int:
    with _working("measuring this machine"):
        words = ("preflight", "--inventory", "local", "--json")
        found = json.loads("".join(_lines_of("payload.orchestrate", *words)))
    step_s = step_seconds(config, read_spec(model), found)
    steps = steps_within_budget(step_s, most=config.train.steps)
    print(
        f"a step takes up to {step_s:.1f} s here: {steps} steps, in about two minutes at most",
        file=sys.stderr,
    )
    return steps


def _train(run: RunPaths, settings: Sequence[str]) -> int:
    """Start or resume the run, or skip a finished run. Return the exit code of the command."""
    words = ["run", "--inventory", "local"]
    if not run.root.exists():
        words += ["--run-id", run.run_id, "--config", os.path.relpath(CONFIG)]
        words += [word for each in settings for word in ("--set", each)]
    elif _is_finished(run):
        return ExitCode.OK
    else:
        words += ["--resume", run.run_id]
    shown = command("orchestrate", *words).replace(" --", " \\\n    --")
    print(f"\n{shown}\n", file=sys.stderr, flush=True)
    process = subprocess.Popen(
        module_command("payload.orchestrate", *words), env=code_environment(os.environ)
    )
    # The terminal also sends Ctrl-C to the command, which then saves a checkpoint and ends.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        status = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return INTERRUPTED if status < 0 else status


def _is_finished(run: RunPaths) -> bool:
    summary = last_record(Summary, run.summary)
    return summary is not None and summary.status == "finished"


def _answers(checkpoint: str, prompts: Sequence[str], *, by: str) -> list[str]:
    what, lines = f"answering {len(prompts)} prompts with {by}", list[str]()
    words = ["--chat", "--model", checkpoint, "--json", "--temperature", "0"]
    words += ["--max-new-tokens", str(_ANSWER_TOKENS), "--prompts-file"]
    with (
        tempfile.TemporaryDirectory(prefix="tileforge-prompts-") as folder,
        _working(what, shown=lambda: f"{what}: {len(lines)} done"),
    ):
        file = Path(folder, "prompts.jsonl")
        file.write_text("".join(json.dumps(each) + "\n" for each in prompts), encoding="utf-8")
        lines.extend(_lines_of("payload.generate", *words, str(file)))
    return [json.loads(line)["samples"][0]["text"] for line in lines]


def _lines_of(program: str, *arguments: str) -> Iterator[str]:
    """Run a program of the project and yield its output; raise its error line as an exception."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as messages,
        subprocess.Popen(
            module_command(program, *arguments),
            env=code_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        try:
            yield from process.stdout
        except BaseException:
            process.kill()  # as subprocess.run does
            raise
        if process.wait() == ExitCode.OK:
            return
        messages.seek(0)
        said = messages.read()
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    raise ConfigError(last_line("\n".join(errors), otherwise=f"{program} failed: {said}"))


def _report(task: _Task, before: Sequence[str], after: Sequence[str]) -> None:
    shown = [
        Shown(code=code, before=one, after=other)
        for code, one, other in zip(EXAMPLES, before, after, strict=False)
    ]
    samples = [
        Sample(prompt=question(each.code), before=each.before, after=each.after) for each in shown
    ]
    write_samples(task.run.samples, samples)
    write_report(task.run)
    losses = _validation_losses(task.run.metrics)
    number = len(EXAMPLES)
    found = [
        scores(task.held_out, answers[number:], loss=loss)
        for answers, loss in ((before, losses[0]), (after, losses[-1]))
    ]
    columns = shutil.get_terminal_size().columns
    print(f"\n{answers_text(shown, columns=columns)}\n\n{scores_text(*found)}")
    print(_next_commands(task))


def _validation_losses(metrics: Path) -> list[float]:
    """Return the loss of each evaluation. Raises ConfigError if there is no evaluation."""
    losses = [row["val_loss"] for row in read_metrics(metrics) if "val_loss" in row]
    if not losses:
        raise ConfigError(f"{metrics} has no evaluation to compare. Start a new run: make run")
    return losses


def _next_commands(task: _Task) -> str:
    """Return three commands for the user to run next."""
    run = os.path.relpath(task.run.root)
    model, home = str(task.model), str(Path.home())
    model = f"~{model.removeprefix(home)}" if model.startswith(f"{home}/") else model
    return "\n".join(
        [
            "\nNext:",
            f"  {chat_command(run)}",
            f"  {command('evaluate')} --data {task.data} \\",
            f"    --model {run}",
            f"  {command('finetune')} --data YOUR_FILE.jsonl \\",
            f"    --model {model}",
        ]
    )


def parser() -> CommandParser:
    """Return the parser of the command-line options."""
    made = CommandParser(
        prog=command("first_run"),
        description="Fine-tune a small packaged chat model on this machine, on two ranks, until it "
        "describes Python functions as JSON. Then compare its answers before and after. The same "
        "run id resumes an interrupted command.",
        example=command("first_run", "--run-id", "first"),
    )
    add = made.add_argument
    add("--run-id", metavar="ID", help="id of the run (default: first-run with time and suffix)")
    add(
        "--wheelhouse",
        type=Path,
        metavar="DIR",
        help="folder with the wheel of the model's package (default: pip's index)",
    )
    add("--steps", type=int, metavar="COUNT", help="training steps (default: for two minutes)")
    add(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one setting of the run; can be repeated",
    )
    return made


if __name__ == "__main__":
    interrupt_once()
    sys.exit(main(sys.argv[1:]))
