"""The words at a run's end: a table, or the failure in the failing rank's own words."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from payload.errors import ExitCode
from payload.hints import run_command
from payload.orchestrate.console import text_console
from payload.orchestrate.report import failure_lines, result_lines
from payload.results import RunPaths, RunState, Summary, to_json


def say_end(
    paths: RunPaths,
    *,
    summary: Summary,
    state: RunState,
    arguments: argparse.Namespace,
    talk: Console,
) -> None:
    """Print what came of a run, and how to go on where it is not finished."""
    checkpoint = paths.newest_checkpoint()
    out = text_console(stderr=False)
    if arguments.json:
        out.print(to_json(summary), end="")
    else:
        out.print("\n".join(result_lines(summary, checkpoint=checkpoint, width=out.width)))
    if summary.status == "failed":
        log = _telling_log(paths, state)
        talk.print("\n".join(failure_lines(summary.error or "failed", log=log)))
    elif summary.error:
        talk.print(f"note: {summary.error}")
    if summary.status != "finished" and checkpoint is not None:
        given = getattr(arguments, "inventory", None)
        more = ["--inventory", str(given)] if given else []
        talk.print(f"continue with: {run_command('run --resume', paths, *more)}")


def _telling_log(paths: RunPaths, state: RunState) -> Path:
    """Return the log to read on in: what all ranks say is in each one's own."""
    if state.failed_rank is not None:
        return paths.rank_log(state.failed_rank)
    said_by_all = state.exit_class in (ExitCode.TRAINING.label, ExitCode.CONFIG.label)
    return paths.rank_log(0) if said_by_all else paths.launcher_log
