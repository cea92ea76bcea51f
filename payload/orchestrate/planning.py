"""From an inventory and a config to a run folder that a supervisor can start from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from payload.errors import PreflightError
from payload.inventory import ClusterInventory
from payload.launch.arithmetic import work_out
from payload.launch.budget import time_limit
from payload.launch.environment import Rendezvous, common_environment
from payload.launch.files import render_accelerate, render_hosts
from payload.launch.plan import LaunchPlan, mpirun_argv, torchrun_argv
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
    mpirun, notes = _choose_launcher(config, access)
    warning = memory_warning(arithmetic, placement, free_bytes=access.free_memory_bytes())
    rendezvous = Rendezvous(
        address=inventory.head.address,
        port=port,
        interfaces=access.interfaces(inventory),
    )
    environment = _environment(
        paths, config=config, placement=placement, access=access, rendezvous=rendezvous
    )
    plan = LaunchPlan(
        run_id=paths.run_id,
        launcher="mpirun" if mpirun else "torchrun",
        argv=_argv(
            mpirun,
            paths=paths,
            placement=placement,
            environment=environment,
            access=access,
            rendezvous=rendezvous,
        ),
        launcher_environment=access.mpirun_environment() if mpirun else {},
        environment=environment,
        interfaces=rendezvous.interfaces,
        program=access.program(paths),
        work_dir=str(work_dir),
        master_port=port,
        world_size=placement.world_size,
        ranks_per_node=placement.ranks_per_node,
        nodes=len(inventory.nodes),
        arithmetic=arithmetic,
        notes=(*notes, *placement.notes, *filter(None, (guess, warning, rate_warning(config)))),
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
    malloc = config.launch.malloc
    return common_environment(
        run_id=paths.run_id,
        run_dir=str(paths.root),
        rendezvous=rendezvous,
        malloc=malloc,
        tcmalloc=access.tcmalloc() if malloc == "tcmalloc" else None,
        oversubscribed=placement.oversubscribed,
        python_path=access.python_path(),
    )


def _choose_launcher(config: RunConfig, access: Access) -> tuple[str | None, list[str]]:
    """mpirun's path, or None for torchrun, and what to say about the choice."""
    wish = config.launch.launcher
    if wish == "torchrun":
        return None, []
    try:
        return access.mpirun(), []
    except PreflightError as error:
        if wish == "mpirun":
            raise
        return None, [f"launcher: torchrun instead of mpirun, because {error}"]


def _argv(
    mpirun: str | None,
    *,
    paths: RunPaths,
    placement: Placement,
    environment: dict[str, str],
    access: Access,
    rendezvous: Rendezvous,
) -> tuple[str, ...]:
    if mpirun is None:
        return torchrun_argv(
            python=access.python,
            world_size=placement.world_size,
            master_address=rendezvous.address,
            master_port=rendezvous.port,
            run_dir=paths.root,
        )
    return mpirun_argv(
        mpirun=mpirun,
        hosts=paths.hosts,
        world_size=placement.world_size,
        ranks_per_node=placement.ranks_per_node,
        environment=environment,
        python=access.python,
        run_dir=paths.root,
    )
