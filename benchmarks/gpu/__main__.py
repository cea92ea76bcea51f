"""Compare training on one GPU with the CPU and with a peer, in one visit of ten minutes.

    python -m benchmarks.gpu --page benchmarks/results/DATE_gpu_NAME.md
    python -m benchmarks.gpu --rehearse --page FILE
    python -m benchmarks.gpu --only "packed chat" "sync check" --page FILE

Three models are trained with this project and with the first available peer: TRL's SFTTrainer,
transformers' Trainer, or an FSDP2 loop. The page has tokens/s, MFU and peak memory of both.

The page is written after each stage, so an interrupted visit keeps its results. The most valuable
stages come first. A stage that needs more than the rest of `--budget-s` is skipped. A stage that
hangs is killed at three times its estimate (in a rehearsal ten times) or at the end of the budget.
If a stage fails, the page has the cause, a folder beside the page has the failed program's log, and
the next stage starts. Each run of the trainer is a separate process on generated data. Nothing is
downloaded.

Only torch 2.11 or newer, accelerate, numpy, psutil and safetensors are required. transformers,
peft, trl and datasets (peers), tokenizers (packed chat), bitsandbytes (nf4) and torchao (fp8) are
used if they are installed. `--rehearse` makes the same runs on the CPU with small sizes, to try the
program; its speeds mean nothing.

Stages and results go to stderr. If stdout is a pipe or a file, one JSON object goes there. The exit
status is 1 if a stage failed, and 10 if a package is missing or torch finds no CUDA device.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.facts import missing_packages
from benchmarks.harness import argument_parser, commit_of_checkout, print_json
from payload.core.errors import ExitCode

if TYPE_CHECKING:
    from benchmarks.gpu.visit import Stage

_BUDGET_S, _REHEARSAL_BUDGET_S = 540.0, 1800.0


def main(argv: Sequence[str], *, stages: Sequence[Stage] | None = None) -> int:
    """Make the visit; return the exit status. Tests replace the `stages`."""
    arguments = parser().parse_args(argv)
    if missing := missing_packages():
        packages = " ".join(missing)
        return _refuse(f"not installed: {packages}. Install with: pip install {packages}")
    # These modules import numpy.
    from benchmarks.gpu.stages import STAGES
    from benchmarks.gpu.visit import NoGpuError

    stages = STAGES if stages is None else stages
    names = [stage.name for stage in stages]
    if unknown := [name for name in arguments.only or () if name not in names]:
        return _refuse(
            f"--only {unknown[0]!r}: this stage does not exist. Use one of: {', '.join(names)}"
        )
    try:
        # The first stage reads the device's facts.
        return _visit([s for s in stages if _runs(s, stages[0], arguments.only)], arguments)
    except NoGpuError as error:
        return _refuse(
            f"{error}. Run this on a machine with an NVIDIA GPU and torch's CUDA build (make "
            "setup TORCH_CUDA=1), or try the program with --rehearse."
        )


def _runs(stage: Stage, first: Stage, only: Sequence[str] | None) -> bool:
    return not only or stage is first or stage.name in only


def _visit(stages: Sequence[Stage], arguments: argparse.Namespace) -> int:
    from benchmarks.gpu.programs import Programs
    from benchmarks.gpu.report import Report
    from benchmarks.gpu.runs import Runs
    from benchmarks.gpu.visit import run_stage

    began_s, page, budget_s = time.monotonic(), arguments.page, arguments.budget_s
    if budget_s is None:
        budget_s = _REHEARSAL_BUDGET_S if arguments.rehearse else _BUDGET_S
    options = " --rehearse" if arguments.rehearse else ""
    if arguments.only:
        options += f" --only {shlex.join(arguments.only)}"
    report = Report(
        page,
        stages=[stage.name for stage in stages],
        budget_s=budget_s,
        facts={
            "Date": f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d %H:%M} UTC",
            "Commit": arguments.commit or commit_of_checkout(),
            "Command": f"`python -m benchmarks.gpu{options} --page FILE`",
        },
    )
    with tempfile.TemporaryDirectory() as folder:
        programs = Programs(page.with_suffix(".logs") if page else Path(folder, "logs"))
        programs.remove_logs()
        runs = Runs(Path(folder), programs, rehearsal=arguments.rehearse)
        for stage in stages:
            report.begin(stage.name)
            result = run_stage(stage, runs, ends_s=began_s + budget_s)
            report.add(result, device=runs.facts, used_s=time.monotonic() - began_s)
    print_json(report.as_json())
    report.say_verdict(took_s=time.monotonic() - began_s)
    return int(report.has_failures())


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argument_parser("gpu", __doc__)
    made.add_argument(
        "--page",
        type=Path,
        metavar="FILE",
        help="write the results as Markdown, and the logs of failures in a folder beside it",
    )
    made.add_argument(
        "--rehearse",
        action="store_true",
        help="run on the CPU, with small sizes; takes about seven minutes",
    )
    made.add_argument(
        "--only",
        nargs="+",
        metavar="STAGE",
        help="run only these stages, and the first one, which describes the device",
    )
    made.add_argument(
        "--budget-s",
        type=float,
        metavar="SECONDS",
        help=f"duration of the whole visit (default: {_BUDGET_S:g}; with --rehearse "
        f"{_REHEARSAL_BUDGET_S:g})",
    )
    made.add_argument(
        "--commit",
        metavar="SHA",
        help="commit on the page if the files are not a git checkout",
    )
    return made


def _refuse(problem: str) -> int:
    print(f"error: {problem}", file=sys.stderr)
    return ExitCode.CONFIG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
