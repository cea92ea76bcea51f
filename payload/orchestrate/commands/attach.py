"""`attach`: follow a run on a cluster."""

from __future__ import annotations

from contextlib import closing

from payload.orchestrate.commands.run_choice import local_run_error, run_of
from payload.orchestrate.commands.run_commands_options import AttachOptions
from payload.orchestrate.follow.follow import EndOptions, follow
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.terminal.console import text_console


def attach(options: AttachOptions, access: LocalAccess) -> int:
    """Follow a run on a cluster until the run ends, from any machine."""
    run = run_of(options, access, verb="attach")
    if not (run.has_job or run.is_copied):
        raise local_run_error(run.paths)
    end = EndOptions(json=options.json, inventory=options.inventory)
    with closing(run):
        return follow(run, options=end, talk=text_console(stderr=True))
