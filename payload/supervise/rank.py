"""`python -m payload.supervise.rank`: starts one rank with its cores, environment and log.

The program also records how the rank ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from payload.core.errors import ConfigError, PreflightError, TileforgeError
from payload.core.files import discard
from payload.core.suggested_commands import command
from payload.launch.environment import rank_environment
from payload.launch.launchers.registry import find
from payload.launch.plan_record import LaunchPlan
from payload.launch.ranks import Rank, load_ranks
from payload.machines.rank_variables import BY_PRECEDENCE, NODE_RANK, RankVariables, identify
from payload.run_record.checkpoint_grace import GracePeriod
from payload.run_record.reserved_space import (
    preallocate_spare_file,
    remove_spare_file,
    write_record,
)
from payload.run_record.run_files import DEFAULT_GRACE_S, RankExit, RunPaths
from payload.run_record.run_lock import is_supervised
from payload.run_record.run_repair import known_config, known_state
from payload.supervise.processes import die_with_parent
from payload.supervise.stop_requests import Wakeups

_WATCH_EVERY_S = 1.0
_FORWARDED = (signal.SIGTERM, signal.SIGINT)


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run one rank until it ends, and return its exit status."""
    parser = argparse.ArgumentParser(prog=command("supervise.rank"))
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR")
    paths = RunPaths(parser.parse_args(argv).run_dir)
    try:
        plan = LaunchPlan.load(paths.plan)
        launcher = find(plan.launcher)
        rank = find_rank(load_ranks(paths.ranks), env, (launcher.variables,))
    except TileforgeError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    try:
        bind_to_cores(rank)
        settings = launcher.rank_settings(nodes=plan.nodes)
        return _run(rank, plan=plan, paths=paths, env={**env, **settings})
    except TileforgeError as error:
        _record(paths, rank, exit_code=error.exit_code, error=str(error))
        return error.exit_code


def find_rank(
    ranks: Sequence[Rank],
    env: Mapping[str, str],
    rows: tuple[RankVariables, ...] = BY_PRECEDENCE,
) -> Rank:
    """Return the rank that the launcher assigned to this process. Raises ConfigError."""
    found = identify(env, rows)
    if found is None:
        by_name = sorted(rows, key=lambda row: row.only_with is not None)
        listed = ", ".join(dict.fromkeys(row.rank for row in by_name))
        raise ConfigError(
            f"the environment sets none of {listed}, so no launcher started this program. Start it "
            f"through a launcher: {command('orchestrate', 'run')}."
        )
    if NODE_RANK in env:
        position = (env[NODE_RANK], env.get(found.local_rank, "0"))
        here = [rank for rank in ranks if (str(rank.node_rank), str(rank.local_rank)) == position]
        variables = f"{NODE_RANK}, {found.local_rank} = {', '.join(position)}"
    else:
        here = [rank for rank in ranks if str(rank.rank) == env[found.rank]]
        variables = f"{found.rank} = {env[found.rank]!r}"
    if not here:
        raise ConfigError(
            f"{variables}, but the rank file has ranks 0 to {len(ranks) - 1}. Start the run again."
        )
    return here[0]


def bind_to_cores(rank: Rank) -> None:
    """Restrict this process and its children to the rank's cores (Linux)."""
    if sys.platform != "linux":
        return
    try:
        os.sched_setaffinity(0, rank.cores)
    except OSError as error:
        raise PreflightError(
            f"cores {list(rank.cores)} of node {rank.node} cannot be used: {error.strerror}. The "
            "inventory does not match this machine. Write a new inventory."
        ) from None


def rank_command(
    program: Sequence[str], rank: Rank, *, several_domains: bool, numactl: str | None
) -> list[str]:
    """Return the rank's command line.

    On a node with several NUMA domains, numactl binds the rank's memory to the rank's domain.
    """
    if several_domains and rank.numa_domain is not None and numactl is not None:
        return [numactl, f"--membind={rank.numa_domain}", *program]
    return list(program)


def _run(rank: Rank, *, plan: LaunchPlan, paths: RunPaths, env: Mapping[str, str]) -> int:
    """Start the program, forward signals to it, and record how it ended."""
    wakeups = Wakeups([*_FORWARDED, signal.SIGCHLD])
    variables = rank_environment(
        rank,
        world_size=plan.world_size,
        ranks_per_node=plan.ranks_per_node,
        interfaces=plan.interfaces,
    )
    # A launcher may have set a different address, but the supervisor reserved the port of the plan.
    rendezvous = ("MASTER_ADDR", "MASTER_PORT")
    variables |= {name: plan.environment[name] for name in rendezvous if name in plan.environment}
    domains = {other.numa_domain for other in load_ranks(paths.ranks) if other.node == rank.node}
    command = rank_command(
        plan.program, rank, several_domains=len(domains) > 1, numactl=shutil.which("numactl")
    )
    # On a worker, records of an earlier attempt still exist.
    for record in (paths.rank_exit(rank.rank), paths.rank_progress(rank.rank)):
        discard(record)
    preallocate_spare_file(paths.rank_exit(rank.rank))
    log = paths.rank_log(rank.rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        try:
            child = subprocess.Popen(
                command,
                env=dict(env) | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )
        except OSError as error:
            raise PreflightError(f"{command[0]} cannot be started: {error.strerror}.") from None
    _wait(child, wakeups, rank=rank, paths=paths)
    return _record_child(child.returncode, rank=rank, paths=paths)


def _wait(child: subprocess.Popen[bytes], wakeups: Wakeups, *, rank: Rank, paths: RunPaths) -> None:
    """Wait until the child ends; if the supervisor is gone, make the child save and end."""
    forwarded = dict.fromkeys(_FORWARDED, 0)
    grace_period: GracePeriod | None = None
    while child.poll() is None:
        wakeups.sleep(_WATCH_EVERY_S)
        for number in _FORWARDED:
            if wakeups.counts[number] > forwarded[number] and child.poll() is None:
                forwarded[number] = wakeups.counts[number]
                child.send_signal(number)
        if not paths.root.is_dir():
            child.kill()  # the run's folder was removed: the rank cannot save
            continue
        # The lock of the run folder is reliably visible only on the head, on a local disk or a file
        # system that the supervisor shares. On other nodes, ranks end with the launcher.
        if rank.node_rank == 0 and grace_period is None and not is_supervised(paths):
            grace_period = _grace_period(paths)
            child.terminate()
        # Even if a new supervisor has started: it waits for the ranks of the old supervisor.
        if grace_period is not None and grace_period.is_over():
            child.kill()


def _grace_period(paths: RunPaths) -> GracePeriod:
    state = known_state(paths)
    return GracePeriod(
        paths,
        grace_s=state.grace_s if state else DEFAULT_GRACE_S,
        stall_timeout_s=known_config(paths).limits.hang_timeout_s,
    )


def _record_child(status: int, *, rank: Rank, paths: RunPaths) -> int:
    """Write an exit record if the program did not write one; return the program's exit code."""
    ended_by = -status if status < 0 else None
    exit_code = 128 + ended_by if ended_by else status
    if not paths.rank_exit(rank.rank).exists():
        _record(paths, rank, exit_code=exit_code, ended_by=ended_by)
    remove_spare_file(paths.rank_exit(rank.rank))
    return exit_code


def _record(
    paths: RunPaths,
    rank: Rank,
    *,
    exit_code: int,
    ended_by: int | None = None,
    error: str | None = None,
) -> None:
    record = RankExit(
        rank=rank.rank,
        node=rank.node,
        exit_code=int(exit_code),
        signal=ended_by,
        error=error,
        time_unix=time.time(),
    )
    # If the record cannot be written, the exit status still shows the main cause.
    with contextlib.suppress(OSError):
        write_record(paths.rank_exit(rank.rank), record)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
