"""`list`: all runs."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from payload.core.errors import ConfigError, ExitCode
from payload.orchestrate.commands.run_choice import alive_at_site
from payload.orchestrate.follow.run_text import list_lines
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.run_index import all_runs, view_run
from payload.orchestrate.terminal.console import text_console


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOptions:
    """Options of `list`."""

    runs_dir: Path
    json: bool


def list_runs(options: ListOptions, access: LocalAccess) -> int:
    """Show all runs, the newest first."""
    views = []
    for paths in all_runs(options.runs_dir):
        try:
            alive = alive_at_site(paths, access)
            views.append(view_run(paths, now_unix=time.time(), alive=alive))
        except ConfigError as error:
            text_console(stderr=True).print(f"note: run {paths.run_id} left out: {error}")
    out = text_console(stderr=False)
    if options.json:
        out.print(json.dumps([asdict(view) for view in views], indent=2))
    elif views:
        out.print("\n".join(list_lines(views, width=out.width)))
    else:
        text_console(stderr=True).print(f"no run in {options.runs_dir}")
    return ExitCode.OK
