"""Resolves a run request into a complete plan for the given machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from payload.config.run_config import RunConfig
from payload.core.errors import ConfigError
from payload.estimates.batch_size import with_auto_size
from payload.estimates.run_estimate import RunEstimate, estimate_run
from payload.estimates.strategy_comparison import StrategyPrediction, compare_strategies
from payload.launch.budget import time_limit
from payload.launch.launchers.registry import candidates
from payload.launch.plan_record import LaunchPlan, rank_arguments
from payload.launch.ranks import Placement
from payload.machines.inventory import ClusterInventory, Node
from payload.machines.rank_mesh import require_tensor_ranks_on_a_node
from payload.machines.speed_cache import RankSpeed
from payload.orchestrate.hardware.nvidia import GPU_GUESS
from payload.orchestrate.inventories.chosen import ResolvedInventory
from payload.orchestrate.runs.compute_settings import (
    ResolvedDtypes,
    SettledRun,
    resolve_dtypes,
    settle_run,
    slow_bf16,
)
from payload.orchestrate.runs.launcher_choice import (
    LauncherChoice,
    choose_launcher,
    require_launcher_of_jobs,
)
from payload.orchestrate.runs.launcher_command import launch_command
from payload.orchestrate.runs.machine_profile import MachineProfile
from payload.orchestrate.runs.resolved_plan import NodeCopies, ResolvedPlacement, ResolvedPlan
from payload.orchestrate.runs.run_input_checks import (
    memory_warning,
    rate_warning,
    require_fp8_on,
    tokens_of_data,
)
from payload.orchestrate.runs.run_request import PlanRequest
from payload.run_record.run_files import RunPaths


def require_launcher(config: RunConfig, inventory: ClusterInventory) -> None:
    """Raise ConfigError if the launcher is unknown or cannot start ranks on all nodes."""
    if inventory.source == "slurm":
        require_launcher_of_jobs(config, nodes=len(inventory.nodes))
    launcher = candidates(config.launch.launcher)[0]
    if launcher.scheduler not in (None, inventory.source):
        raise ConfigError(
            f"launch.launcher = {launcher.name!r} starts ranks in a Slurm job, but "
            f"{inventory.cluster} is not a Slurm job. Use 'auto', or submit a job with --site "
            "slurm."
        )
    if len(inventory.nodes) > 1 and not launcher.spans_nodes:
        raise ConfigError(
            f"launch.launcher = {launcher.name!r} is for one machine, but {inventory.cluster} has "
            f"{len(inventory.nodes)}. Use 'mpirun'."
        )


def require_placeable(config: RunConfig, chosen: ResolvedInventory) -> Placement:
    """Return the placement of the ranks.

    Raises ConfigError if the launcher is unknown, if the ranks cannot be placed, or if the batch
    cannot be split evenly among them.
    """
    require_launcher(config, chosen.inventory)
    placement = chosen.place(config.launch, config.device)
    require_tensor_ranks_on_a_node(
        config.distributed.tensor_parallel, ranks_per_node=placement.ranks_per_node
    )
    config.require_even(placement.world_size)
    return placement


def resolve_placement(config: RunConfig, chosen: ResolvedInventory) -> ResolvedPlacement:
    """Return the placement of the ranks, the launcher and the time limit.

    Raises ConfigError like `require_placeable`, and if a cost limit needs a price that is unknown.
    """
    return ResolvedPlacement(
        placement=require_placeable(config, chosen),
        launcher=candidates(config.launch.launcher)[0],
        time_limit=time_limit(config.limits, chosen.inventory.nodes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTarget:
    """The machines that a run is planned for, and its folder and port on them."""

    chosen: ResolvedInventory
    profile: MachineProfile
    paths: RunPaths
    """The run's folder on the machines."""
    port: int
    """The port on the head for the ranks' rendezvous."""
    work_dir: Path = field(default_factory=Path.cwd)
    """The folder that relative paths in the config refer to."""
    copies: NodeCopies | None = None
    """Paths of the uploaded data and weights; None if the run reads the local files directly."""

    @property
    def nodes(self) -> Sequence[Node]:
        """Return the machines, the head first."""
        return self.chosen.inventory.nodes


def resolve(
    request: PlanRequest, target: PlanTarget, *, placed: ResolvedPlacement | None = None
) -> ResolvedPlan:
    """Return the complete plan of a run; write and start nothing.

    `placed` is the result of `resolve_placement`, if it was called before. Raises ConfigError and
    PreflightError.
    """
    opened = with_auto_size(request.config, auto_size=request.auto_size)
    placed = placed or resolve_placement(opened, target.chosen)
    dtypes = resolve_dtypes(
        request, target.nodes, target.profile, threads=placed.placement.all_threads()
    )
    settled = settle_run(request, opened, target.nodes, target.profile, placed.placement, dtypes)
    arithmetic = estimate_run(
        settled.predicted,
        spec=settled.spec,
        world_size=placed.placement.world_size,
        link=target.profile.link,
        peak_flops_per_s=dtypes.peak_flops_per_s,
        threads=placed.placement.threads(),
        speed=_rank_speed(target, placed.placement, dtypes),
        tokens=tokens_of_data(settled.config, expected_mean=request.mean_tokens),
    )
    require_fp8_on(settled.config.precision, target.nodes)
    choice = choose_launcher(settled.config.launch.launcher, target.profile)
    notes = _notes(request, target, placed.placement, choice, dtypes, settled, arithmetic)
    return ResolvedPlan(
        paths=target.paths,
        config=settled.config,
        copies=target.copies,
        inventory=target.chosen.inventory,
        placement=placed.placement,
        plan=_launch_plan(request, target, placed.placement, choice, settled, arithmetic, notes),
        predicted=settled.predicted,
        auto_dtype=dtypes.auto,
        core_flops_per_s=dtypes.core_flops_per_s,
        link=target.profile.link,
        speed_source=target.profile.speed_source(),
        strategies=_strategies(request, target, placed.placement, dtypes, settled),
        free_memory_bytes=settled.free_bytes,
        base=settled.base,
    )


def _rank_speed(
    target: PlanTarget, placement: Placement, dtypes: ResolvedDtypes
) -> RankSpeed | None:
    """Return the measured speed of a rank; None on GPUs and if it was not measured."""
    if dtypes.on_gpus:
        return None
    return target.profile.rank_speed(dtypes.compute, threads=placement.threads())


def _notes(
    request: PlanRequest,
    target: PlanTarget,
    placement: Placement,
    choice: LauncherChoice,
    dtypes: ResolvedDtypes,
    settled: SettledRun,
    arithmetic: RunEstimate,
) -> tuple[str, ...]:
    """Return the notes for the user about the decisions."""
    config, chosen = settled.config, target.chosen
    warning = memory_warning(arithmetic, placement, free_bytes=settled.free_bytes)
    slow = slow_bf16(config, dtypes.core_flops_per_s, kept_dtype=request.kept_dtype)
    return (
        *choice.notes(),
        *placement.notes,
        *(chosen.gpu_notes if config.device.kind != "cpu" else ()),
        *(chosen.cuda_notes if config.device.kind == "cuda" else ()),
        *filter(None, (*settled.notes, warning, rate_warning(config))),
        *([] if dtypes.on_gpus else slow),
        *([GPU_GUESS] if dtypes.on_gpus and arithmetic.step_s is not None else []),
    )


def _launch_plan(
    request: PlanRequest,
    target: PlanTarget,
    placement: Placement,
    choice: LauncherChoice,
    settled: SettledRun,
    arithmetic: RunEstimate,
    notes: tuple[str, ...],
) -> LaunchPlan:
    """Return the content of plan.json. Raises PreflightError."""
    command = launch_command(
        choice,
        target.profile,
        target.nodes,
        placement,
        paths=target.paths,
        rank_arguments=rank_arguments(target.paths.root),
        port=target.port,
        malloc=settled.config.malloc(),
    )
    return LaunchPlan(
        run_id=target.paths.run_id,
        launcher=choice.launcher.name,
        argv=command.argv,
        launcher_environment=command.settings,
        ssh=command.reach.ssh,
        node_command=command.reach.node_command,
        off_head=command.reach.off_head,
        environment=command.environment,
        interfaces=command.rendezvous.interfaces,
        program=target.profile.program(target.paths),
        work_dir=str(target.work_dir),
        master_port=target.port,
        data_dir=settled.config.data.dir,
        world_size=placement.world_size,
        ranks_per_node=placement.ranks_per_node,
        nodes=len(target.nodes),
        arithmetic=arithmetic,
        auto_batch_size=settled.config.batch.micro_batch() if settled.is_auto else None,
        resumes=request.resumes,
        notes=notes,
    )


def _strategies(
    request: PlanRequest,
    target: PlanTarget,
    placement: Placement,
    dtypes: ResolvedDtypes,
    settled: SettledRun,
) -> tuple[StrategyPrediction, ...]:
    """Return predictions for the alternative strategies on the run's ranks, the best first."""
    return compare_strategies(
        settled.predicted,
        spec=settled.spec,
        world_size=placement.world_size,
        ranks_per_node=placement.ranks_per_node,
        link=target.profile.link,
        peak_flops_per_s=dtypes.peak_flops_per_s,
        free_bytes=settled.free_bytes,
        threads=placement.threads(),
        speed=_rank_speed(target, placement, dtypes),
        tokens=tokens_of_data(settled.config, expected_mean=request.mean_tokens),
    )
