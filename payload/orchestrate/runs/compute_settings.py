"""Resolves the dtype and the micro-batch of a run on its machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from payload.config.run_config import RunConfig
from payload.config.settings import AUTO as AUTO_SIZE
from payload.config.training_sections import DtypeChoice
from payload.core.dtype import Dtype
from payload.estimates.batch_size import resolve_batch, with_recorded_size
from payload.launch.ranks import Placement
from payload.machines.inventory import Node
from payload.models.spec import ModelSpec
from payload.orchestrate.hardware.nvidia import for_prediction
from payload.orchestrate.runs.machine_profile import MachineProfile
from payload.orchestrate.runs.run_input_checks import initial_spec, rank_memory
from payload.orchestrate.runs.run_request import PlanRequest

_DTYPES: tuple[Dtype, ...] = ("bf16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedDtypes:
    """The dtype of a run, and the speed of its nodes in each dtype."""

    on_gpus: bool
    auto: Dtype
    """The resolved dtype without fp8."""
    core_flops_per_s: Mapping[Dtype, float]
    peak_flops_per_s: float | None
    """Matmul speed of all ranks together; None if it was not measured."""
    compute: Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledRun:
    """A run's settings with a resolved batch size, and the sizes of its model."""

    config: RunConfig
    predicted: RunConfig
    """The config with the expected device and dtype."""
    base: ModelSpec
    spec: ModelSpec
    is_auto: bool
    """True if the planner chose the micro-batch."""
    free_bytes: int | None
    notes: Sequence[str | None]


def resolve_dtypes(
    request: PlanRequest, nodes: Sequence[Node], profile: MachineProfile, *, threads: int
) -> ResolvedDtypes:
    """Return the dtype that a run is expected to compute in, and the speed of its nodes.

    `threads` is the number of threads of all ranks together.
    """
    config = request.config
    on_gpus = for_prediction(config, nodes).device.kind == "cuda"
    choice: DtypeChoice = config.precision.dtype
    if choice == "auto":
        choice = request.kept_dtype or choice
    auto = _dtype_on_gpus(choice) if on_gpus else profile.dtype(choice)
    compute: Dtype = "bf16" if config.wants_bf16() else auto
    return ResolvedDtypes(
        on_gpus=on_gpus,
        auto=auto,
        core_flops_per_s={each: _core_flops_per_s(nodes, profile, each) for each in _DTYPES},
        # On GPUs, the trial of preflight measured which dtype is faster.
        peak_flops_per_s=profile.peak_flops_per_s(choice if on_gpus else compute, threads=threads),
        compute=compute,
    )


def _dtype_on_gpus(choice: DtypeChoice) -> Dtype:
    return "fp32" if choice == "fp32" else "bf16"


def _core_flops_per_s(nodes: Sequence[Node], profile: MachineProfile, dtype: Dtype) -> float:
    """Return the measured peak of a core, or the typical peak if it was not measured."""
    cores = sum(node.physical_cores for node in nodes)
    measured = profile.peak_flops_per_s(dtype, threads=cores)
    return measured / cores if measured else profile.core_flops_per_s(dtype)


def settle_run(
    request: PlanRequest,
    open_settings: RunConfig,
    nodes: Sequence[Node],
    profile: MachineProfile,
    placement: Placement,
    dtypes: ResolvedDtypes,
) -> SettledRun:
    """Return the settings with a micro-batch that fits. Raises ConfigError.

    In `open_settings`, the micro-batch size is `auto`, or the size that an earlier plan fixed.
    """
    config = request.config
    free_bytes = (
        rank_memory(config.device, nodes, ranks=placement.ranks_per_node)
        or profile.free_memory_bytes()
    )
    base, guess = initial_spec(config, vocab_size=request.vocab_size)
    spec = config.adapted(base)
    settled, reason = resolve_batch(
        for_prediction(
            with_recorded_size(open_settings, config, world_size=placement.world_size), nodes
        ),
        spec,
        dtype=dtypes.compute,
        world_size=placement.world_size,
        ranks_per_node=placement.ranks_per_node,
        free_bytes=free_bytes,
    )
    settled = settled.on_device(config.device.kind)
    return SettledRun(
        config=settled,
        predicted=for_prediction(settled, nodes).computing_in(dtypes.compute),
        base=base,
        spec=spec,
        is_auto=open_settings.batch.micro_batch_size == AUTO_SIZE,
        free_bytes=free_bytes,
        notes=(reason, guess),
    )


def slow_bf16(
    config: RunConfig, core_flops_per_s: Mapping[Dtype, float], *, kept_dtype: Dtype | None = None
) -> list[str]:
    """Return a note if a run computes in bf16 although its CPUs are faster in fp32.

    `kept_dtype` is the dtype of the checkpoint that the run resumes from, if any.
    """
    if core_flops_per_s["bf16"] >= core_flops_per_s["fp32"]:
        return []
    slow = "computes in bf16, which is slower than fp32 on CPUs like these"
    setting = config.bf16_setting()
    if setting is not None:
        return [f"{setting} {slow}"]
    if config.precision.dtype == "auto" and kept_dtype == "bf16":
        fix = "--set precision.dtype=fp32 is faster, but needs more memory"
        return [f"the resumed run {slow}, as before; {fix}"]
    return []
