"""From an inventory and a config to a run folder that a supervisor can start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from payload.errors import PreflightError
from payload.inventory import ClusterInventory
from payload.launch.arithmetic import work_out
from payload.launch.budget import time_limit
from payload.launch.environment import Rendezvous, common_environment
from payload.launch.files import render_accelerate, render_hosts
from payload.launch.launchers.base import Job, Launcher
from payload.launch.launchers.registry import candidates
from payload.launch.plan import LaunchPlan, rank_words
from payload.launch.ranks import Placement, place_ranks, render_ranks
from payload.orchestrate.access import Access
from payload.orchestrate.checks import memory_warning, rate_warning
from payload.orchestrate.initial import initial_spec
from payload.orchestrate.inventories import Chosen
from payload.results import RunPaths, write_whole
from payload.run_config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """Everything that will be in the run folder before the start."""

    paths: RunPaths
    config: RunConfig
    inventory: ClusterInventory
    placement: Placement
    plan: LaunchPlan

    def hosts(self) -> str:
        """The hosts file's text."""
        return render_hosts(self.inventory)

    def accelerate(self, node_rank: int) -> str:
        """One node's Accelerate config."""
        return render_accelerate(
            self.inventory,
            self.placement,
            node_rank=node_rank,
            hosts=self.paths.hosts,
            master_port=self.plan.master_port,
            precision=self.config.precision,
        )

    def files(self) -> dict[str, str]:
        """Every file's text by its name; plan.json last, as a supervisor looks for it."""
        paths = self.paths
        texts = {
            paths.config: self.config.to_toml(),
            paths.inventory: self.inventory.to_json(),
            paths.hosts: self.hosts(),
            paths.ranks: render_ranks(self.placement.ranks),
        }
        for node_rank in range(len(self.inventory.nodes)):
            texts[paths.accelerate_config(node_rank)] = self.accelerate(node_rank)
        texts[paths.plan] = self.plan.to_json()
        return {path.name: text for path, text in texts.items()}

    def write(self, paths: RunPaths) -> None:
        """Put every file in its place in the run folder at `paths`."""
        for name, text in self.files().items():
            write_whole(paths.root / name, text)


def plan_run(
    paths: RunPaths,
    *,
    config: RunConfig,
    chosen: Chosen,
    access: Access,
    vocab_size: int | None,
    work_dir: Path,
    port: int,
) -> PlannedRun:
    """Decide everything about a run; nothing is written or started.

    Raises ConfigError and PreflightError.
    """
    inventory = chosen.inventory
    time_limit(config.limits, inventory)
    placement = place_ranks(inventory, config.launch, domains=chosen.domains)
    spec, guess = initial_spec(config, vocab_size=vocab_size)
    spec = config.adapted(spec)
    arithmetic = work_out(
        config,
        spec=spec,
        world_size=placement.world_size,
        link_bytes_per_s=access.link_bytes_per_s,
        peak_flops_per_s=access.peak_flops_per_s(config.precision.dtype),
    )
    choice = choose_launcher(config.launch.launcher, access)
    launcher = choice.launcher
    warning = memory_warning(arithmetic, placement, free_bytes=access.free_memory_bytes())
    rendezvous = Rendezvous(
        address=inventory.head.address,
        port=port,
        interfaces=access.interfaces(inventory),
    )
    reach = access.reach()
    environment = _environment(
        paths, config=config, placement=placement, access=access, rendezvous=rendezvous
    )
    plan = LaunchPlan(
        run_id=paths.run_id,
        launcher=launcher.name,
        argv=launcher.argv(
            Job(
                executable=choice.executable,
                python=access.python,
                words=rank_words(paths.root),
                environment=environment,
                world_size=placement.world_size,
                ranks_per_node=placement.ranks_per_node,
                nodes=len(inventory.nodes),
                hosts=paths.hosts,
                folder=paths.root,
                rendezvous=rendezvous,
                reach=reach,
            )
        ),
        launcher_environment=launcher.settings(reach),
        ssh=reach.ssh,
        environment=environment,
        interfaces=rendezvous.interfaces,
        program=access.program(paths),
        work_dir=str(work_dir),
        master_port=port,
        world_size=placement.world_size,
        ranks_per_node=placement.ranks_per_node,
        nodes=len(inventory.nodes),
        arithmetic=arithmetic,
        notes=(
            *choice.notes(),
            *placement.notes,
            *filter(None, (guess, warning, rate_warning(config))),
        ),
    )
    return PlannedRun(
        paths=paths, config=config, inventory=inventory, placement=placement, plan=plan
    )


def _environment(
    paths: RunPaths,
    *,
    config: RunConfig,
    placement: Placement,
    access: Access,
    rendezvous: Rendezvous,
) -> dict[str, str]:
    malloc = config.malloc()
    return common_environment(
        run_id=paths.run_id,
        run_dir=str(paths.root),
        rendezvous=rendezvous,
        malloc=malloc,
        tcmalloc=access.tcmalloc() if malloc == "tcmalloc" else None,
        oversubscribed=placement.oversubscribed,
        python_path=access.python_path(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The launcher that a run has."""

    launcher: Launcher
    executable: str
    """Its path on the head."""
    refused: Sequence[tuple[str, PreflightError]]
    """Those that were preferred, and why they cannot be used."""

    def notes(self) -> list[str]:
        """Return a sentence for each that was preferred."""
        chosen = self.launcher.name
        return [
            f"launcher: {chosen} instead of {name}, because {error}" for name, error in self.refused
        ]


def choose_launcher(wish: str, access: Access) -> Choice:
    """Return the launcher that `launch.launcher` means here.

    Raises ConfigError for an unknown one, and PreflightError where none can be used.
    """
    refused: list[tuple[str, PreflightError]] = []
    for launcher in candidates(wish):
        try:
            executable = access.executable(launcher)
        except PreflightError as error:
            refused.append((launcher.name, error))
            continue
        return Choice(launcher=launcher, executable=executable, refused=refused)
    raise refused[-1][1]
