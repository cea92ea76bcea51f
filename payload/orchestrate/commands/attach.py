"""`attach`: follows a run that is not of this machine."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from payload.orchestrate.commands.run_choice import ClusterRunChoice, run_is_here, run_of
from payload.orchestrate.follow.follow import EndOptions, follow
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.terminal.console import text_console


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachOptions(ClusterRunChoice):
    """Options of `attach`."""

    json: bool


def attach(options: AttachOptions, access: LocalAccess) -> int:
    """Follow a run that is not of this machine to its end, whoever started it."""
    run = run_of(options, access, verb="attach")
    if not (run.has_job or run.is_copied):
        raise run_is_here(run.paths)
    end = EndOptions(json=options.json, inventory=options.inventory)
    with closing(run):
        return follow(run, options=end, talk=text_console(stderr=True))
