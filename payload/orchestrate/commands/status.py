"""`status`: shows one run and its ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import asdict

from payload.core.errors import ConfigError, ExitCode
from payload.machines.inventory import ClusterInventory
from payload.orchestrate.commands.run_choice import readable_mirror, site_run
from payload.orchestrate.commands.run_commands_options import StatusOptions
from payload.orchestrate.follow.run_text import ranks_lines, status_lines
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.run_index import find_run, view_run
from payload.orchestrate.terminal.console import text_console
from payload.run_record.run_files import RunPaths


def status(options: StatusOptions, access: LocalAccess) -> int:
    """Show one run and its ranks."""
    began_unix = time.time()
    paths = find_run(options.runs_dir, options.run)
    run = site_run(paths, access)
    with closing(run), run.watched() as is_alive:
        alive = is_alive()
    for line in _stopped_machines(paths, access.environment(), since_unix=began_unix):
        text_console(stderr=True).print(line)
    view = view_run(paths, now_unix=time.time(), alive=alive if run.has_job else None)
    out = text_console(stderr=False)
    if options.json:
        out.print(json.dumps(asdict(view), indent=2))
        return ExitCode.OK
    lines = [*status_lines(view, width=out.width), "", *ranks_lines(view, width=out.width)]
    out.print("\n".join(lines))
    return ExitCode.OK


def _stopped_machines(paths: RunPaths, env: Mapping[str, str], *, since_unix: float) -> list[str]:
    """Return lines about stopped machines if the local copy was not updated since `since_unix`.

    A collected run needs no machine.
    """
    mirrored = readable_mirror(paths)
    if mirrored is None or mirrored.collected is not None or mirrored.seen_unix >= since_unix:
        return []
    # Google's libraries take a second to import.
    from payload.orchestrate.clouds.gcp.stopped_machines import stopped_machine_lines

    with suppress(ConfigError):
        return stopped_machine_lines(ClusterInventory.load(paths.inventory), env)
    return []
