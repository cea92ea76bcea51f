"""`stop`: stops a run and collects its results."""

from __future__ import annotations

import signal
import time
from contextlib import closing

from rich.console import Console

from payload.core.errors import ExitCode
from payload.orchestrate.commands.run_choice import run_of
from payload.orchestrate.commands.run_commands_options import StopOptions
from payload.orchestrate.follow.follow import EndOptions, StopWait, print_run_result
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.site import SiteRun, how_to_attach
from payload.orchestrate.terminal.console import text_console
from payload.run_record.run_files import StopRequest
from payload.run_record.run_lock import FORCE_SIGNAL


def stop(options: StopOptions, access: LocalAccess) -> int:
    """Stop a run with a checkpoint or immediately, and verify that no process remains."""
    talk = text_console(stderr=True)
    run = run_of(options, access, verb="stop")
    with closing(run):
        return _stop(run, options, talk=talk)


def _stop(run: SiteRun, options: StopOptions, *, talk: Console) -> int:
    number = FORCE_SIGNAL if options.force else signal.SIGTERM
    request = StopRequest(grace_s=options.grace)
    run_id = run.paths.run_id
    if run.signal(number, request):
        how = "stopping immediately" if options.force else "saving and stopping"
        talk.print(f"run {run_id}: {how}")
        wait = StopWait(run.paths, request)
        while run.look().alive:
            if wait.is_over() or (options.force and wait.waited_s() > run.force_s):
                run.overdue(wait.waited_s(), force=options.force, talk=talk)
            time.sleep(run.every_s)
    else:
        talk.print(f"run {run_id} is not running{run.end_text()}")
        if not run.is_copied:
            return ExitCode.OK
    home = run.collect_results(at_once=options.force)
    if home.alive:
        talk.print(f"the run ended and was started again; {how_to_attach(run.paths)}")
        return ExitCode.OK
    line = run.result_line()
    if line is not None:
        talk.print(line)
    else:
        print_run_result(run, options=EndOptions(inventory=options.inventory), talk=talk)
    if home.left is not None:
        raise home.left
    return ExitCode.OK
