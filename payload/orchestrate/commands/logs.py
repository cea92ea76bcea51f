"""`logs`: print the log of a rank or the launcher."""

from __future__ import annotations

from contextlib import closing

from payload.core.errors import (
    ConfigError,
    ExitCode,
    UsageError,
)
from payload.core.symlink_safety import refuse_links
from payload.launch.ranks import load_ranks
from payload.orchestrate.commands.run_choice import site_run
from payload.orchestrate.commands.run_commands_options import LogsOptions
from payload.orchestrate.follow.follow import Tail, follow_log
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.run_index import find_run
from payload.orchestrate.terminal.console import text_console
from payload.run_record.run_files import RunPaths


def logs(options: LogsOptions, access: LocalAccess) -> int:
    """Print the log of a rank or of the launcher."""
    paths = find_run(options.runs_dir, options.run)
    rank = 0 if options.launcher else options.rank
    node = _node_of(paths, rank)
    path = paths.launcher_log if options.launcher else paths.rank_log(rank)
    try:
        refuse_links(path, below=paths.root)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}.") from None
    out, run = text_console(stderr=False), site_run(paths, access)
    with closing(run), run.watched(node) as alive:
        if not alive() and not path.exists():
            raise UsageError(f"{path} not found: the run ended before it wrote this log.")
        follow_log(
            Tail(path),
            show=out.print,
            alive=lambda: options.follow and not out.is_closed and alive(),
        )
    return ExitCode.OK


def _node_of(paths: RunPaths, rank: int) -> str | None:
    """Return the name of a rank's node, or None if the rank file cannot be read."""
    try:
        ranks = load_ranks(paths.ranks)
    except ConfigError:
        return None
    if not 0 <= rank < len(ranks):
        raise UsageError(f"--rank {rank}: run {paths.run_id} has ranks 0 to {len(ranks) - 1}.")
    return ranks[rank].node
