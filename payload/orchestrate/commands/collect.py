"""`collect`: fetch a run's results from its cluster or its store."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, suppress

from rich.console import Console

from payload.config.store_address import StoreAddress
from payload.core.errors import ExitCode, SshUnreachableError
from payload.core.suggested_commands import command
from payload.orchestrate.commands.run_choice import local_run_error, site_run
from payload.orchestrate.commands.run_commands_options import RunChoice
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.run_index import collect_from_store, find_run
from payload.orchestrate.terminal.console import text_console
from payload.orchestrate.terminal.narrow import print_message
from payload.run_record.approved_settings import unapproved_settings
from payload.run_record.report_and_samples_process import write_report
from payload.run_record.run_files import RunPaths, point_latest_at
from payload.storage.isolated_reader import watched_store
from payload.storage.store_access import is_address, run_address, stored_at


def collect(options: RunChoice, access: LocalAccess) -> int:
    """Fetch logs, metrics, summary and the newest checkpoint of a run.

    The source is the run's store if the store's address is given or no machine answers.
    """
    talk = text_console(stderr=True)
    if options.run is not None and is_address(options.run):
        address = run_address(options.run)
        paths = RunPaths(options.runs_dir / address.last())
        return _collect_stored(address, paths, env=access.code_environment(), talk=talk)
    run = site_run(find_run(options.runs_dir, options.run), access)
    if not run.is_copied:
        raise local_run_error(run.paths)
    try:
        with closing(run):
            collected = run.collect_results()
    except SshUnreachableError as error:
        kept = stored_at(run.paths)
        if kept is None:
            raise
        if unapproved_settings(run.paths, {"storage.results": str(kept.parent())}):
            # A node, or the author of the folder, can have written this address.
            raise SshUnreachableError(
                f"{error} The run's settings contain the store {kept}, which was not confirmed on "
                "this machine. If this is the right store, fetch the results with: "
                f"{command('orchestrate', 'collect', str(kept))}"
            ) from None
        talk.print(f"warning: {error} Fetching the results from {kept} instead.")
        return _collect_stored(kept, run.paths, env=access.code_environment(), talk=talk)
    if collected.checkpoint is not None:
        with suppress(OSError):  # the link is a convenience
            point_latest_at(run.paths)
    talk.print(f"checkpoint: {collected.checkpoint or 'none yet'}")
    talk.print(
        f"files: {run.paths.root}" + ("; the run is still active" if collected.alive else "")
    )
    return ExitCode.OK


def _collect_stored(
    address: StoreAddress, paths: RunPaths, *, env: Mapping[str, str], talk: Console
) -> int:
    with watched_store(address, env=env, say=talk.print) as store:
        found = collect_from_store(store, paths, say=talk.print)
    problem = write_report(paths)
    if problem is not None:
        print_message(talk, f"note: no report was written: {problem}")
    with suppress(OSError):  # the link is a convenience
        point_latest_at(paths)
    talk.print(f"checkpoint: {found or 'none yet'}")
    talk.print(f"files: {paths.root}, fetched from {address}")
    return ExitCode.OK
