"""Builds a launcher's command line and environment, for a run or for the trial of preflight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from payload.launch.environment import Malloc, Rendezvous, common_environment
from payload.launch.launcher import Job, Reach
from payload.launch.ranks import Placement
from payload.machines.inventory import Node
from payload.orchestrate.runs.launcher_choice import LauncherChoice
from payload.orchestrate.runs.machine_profile import MachineProfile
from payload.run_record.run_files import RunPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """A launcher's command line and environment on the head."""

    argv: tuple[str, ...]
    settings: Mapping[str, str]
    """Environment variables of the launcher process only."""
    environment: Mapping[str, str]
    """Environment variables of every rank."""
    rendezvous: Rendezvous
    reach: Reach


def launch_command(
    choice: LauncherChoice,
    profile: MachineProfile,
    nodes: Sequence[Node],
    placement: Placement,
    *,
    paths: RunPaths,
    rank_arguments: tuple[str, ...],
    port: int,
    malloc: Malloc,
) -> LaunchCommand:
    """Return the command that starts a program on every rank.

    `paths` is the run's folder on every node; on the head, it contains the hosts file.
    `rank_arguments` are passed to the Python interpreter of each rank. `port` is the rendezvous
    port on the head. Raises PreflightError.
    """
    rendezvous = Rendezvous(
        address=nodes[0].address, port=port, interfaces=profile.interfaces(nodes)
    )
    reach = profile.reach()
    environment = common_environment(
        run_id=paths.run_id,
        run_dir=str(paths.root),
        rendezvous=rendezvous,
        malloc=malloc,
        tcmalloc=profile.tcmalloc() if malloc == "tcmalloc" else None,
        oversubscribed=placement.oversubscribed,
        python_path=profile.python_path(),
    )
    job = Job(
        executable=choice.executable,
        python=profile.python,
        rank_arguments=rank_arguments,
        environment=environment,
        world_size=placement.world_size,
        ranks_per_node=placement.ranks_per_node,
        nodes=len(nodes),
        hosts=paths.hosts,
        folder=paths.root,
        rendezvous=rendezvous,
        reach=reach,
    )
    return LaunchCommand(
        argv=choice.launcher.argv(job),
        settings=choice.launcher.settings(reach),
        environment=environment,
        rendezvous=rendezvous,
        reach=reach,
    )
