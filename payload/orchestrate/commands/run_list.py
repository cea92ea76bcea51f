"""`list`: shows all runs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from payload.core.errors import ConfigError, ExitCode
from payload.orchestrate.commands.run_choice import is_alive_at_site
from payload.orchestrate.commands.run_commands_options import ListOptions
from payload.orchestrate.runs.run_index import RunView, all_runs, view_run
from payload.orchestrate.terminal.console import text_console
from payload.orchestrate.terminal.tables import table_lines
from payload.run_record.suggested_run_commands import no_runs
from payload.run_record.task_metrics import named_metrics


def list_runs(options: ListOptions, env: Mapping[str, str]) -> int:
    """Show all runs, newest first."""
    views = []
    for paths in all_runs(options.runs_dir):
        try:
            alive = is_alive_at_site(paths, env)
            views.append(view_run(paths, now_unix=time.time(), alive=alive))
        except ConfigError as error:
            text_console(stderr=True).print(f"note: run {paths.run_id} is not listed: {error}")
    out = text_console(stderr=False)
    if options.json:
        out.print(json.dumps([asdict(view) for view in views], indent=2))
    elif views:
        out.print("\n".join(_list_lines(views, width=out.width)))
    else:
        text_console(stderr=True).print(no_runs(options.runs_dir))
    return ExitCode.OK


def _list_lines(views: Sequence[RunView], *, width: int) -> list[str]:
    """Return a table of runs as lines of at most `width` characters."""
    rows = [
        (
            view.run_id,
            view.status,
            f"{view.step}/{view.steps}",
            _first_metric(view),
            "-" if view.val_loss is None else f"{view.val_loss:.4f} at {view.val_step}",
            "-" if view.loss is None else f"{view.loss:.4f}",
        )
        for view in views
    ]
    names = ("run", "status", "step", "result", "val. loss", "loss")
    return table_lines(names, rows, width=width, optional=("loss", "val. loss"))


def _first_metric(view: RunView) -> str:
    """Return the task's most important metric, such as `accuracy 93.75%`."""
    named = named_metrics(view.val_metrics)
    return " ".join(named[0]) if named else "-"
