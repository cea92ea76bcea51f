"""Compares the strategies that a run could use on its ranks, by predicted memory and time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from payload.config.launch_sections import DistributedSection
from payload.config.model_checks import require_split
from payload.config.run_config import RunConfig
from payload.core.errors import ConfigError
from payload.estimates.network import Link
from payload.estimates.run_estimate import estimate_run
from payload.machines.core_speed import typical_core_flops_per_s
from payload.machines.rank_mesh import divisors
from payload.machines.speed_cache import RankSpeed
from payload.models.spec import ModelSpec

_ASSUMED_GPU_FLOPS_PER_S = 1.2e14
"""The assumed peak of a GPU, used only to order strategies if no preflight has measured the peak.
The value is the L4's bf16 peak by specification: 242 TFLOP/s with sparsity, half of it without
sparsity (https://www.nvidia.com/en-us/data-center/l4). Faster GPUs wait for the network more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyPrediction:
    """The prediction for one strategy on the run's ranks."""

    strategy: str
    shard_size: int
    """Number of ranks that shard one model."""
    mesh: str
    """Description of the mesh of ranks."""
    memory_bytes: int
    """Estimate of a rank's peak memory."""
    sent_bytes: int
    """Bytes that each rank sends in a step."""
    sync_s: float
    """Predicted time of a step's exchange without overlap."""
    step_s: float | None
    """Predicted time of a step; None if the nodes' peak FLOP/s were not measured."""
    splits_model: bool = False
    """True if several ranks compute each micro-batch together."""
    fits: bool | None
    """True if the ranks of a node fit into the node's free memory; None if unknown."""

    def name(self) -> str:
        """Return the strategy's name with its mesh."""
        if self.splits_model:
            return self.mesh
        return "replicate" if self.shard_size == 1 else f"{self.strategy}, {self.shard_size} ranks"


def compare_strategies(
    config: RunConfig,
    *,
    spec: ModelSpec,
    world_size: int,
    ranks_per_node: int,
    link: Link,
    peak_flops_per_s: float | None,
    free_bytes: int | None,
    threads: int = 1,
    speed: RankSpeed | None = None,
    tokens: int | None = None,
) -> tuple[StrategyPrediction, ...]:
    """Return the possible strategies: first the strategies that fit into memory, then all others.

    The strategies of both groups are sorted by predicted time.

    `free_bytes` is the free memory of a node. The node's ranks share this memory. If the peak was
    not measured, an assumed peak determines the order. The peak is needed because the pipeline
    bubble and a tensor rank's head depend on the compute time.
    """
    on_gpus = config.device.kind == "cuda"
    core = typical_core_flops_per_s(config.dtype(), emulates_bf16=False)
    assumed = world_size * (_ASSUMED_GPU_FLOPS_PER_S if on_gpus else core * threads)
    found: list[tuple[float, StrategyPrediction]] = []
    for distributed in _candidates(
        config.distributed, world_size=world_size, ranks_per_node=ranks_per_node
    ):
        changed = replace(config, distributed=distributed)
        if changed.strategy_conflicts() or not _is_possible(changed, spec, world_size):
            continue
        numbers = estimate_run(
            changed,
            spec=spec,
            world_size=world_size,
            link=link,
            peak_flops_per_s=peak_flops_per_s or assumed,
            threads=threads,
            speed=speed,
            tokens=tokens,
        )
        assert numbers.step_s is not None
        need = numbers.memory_bytes_per_rank * ranks_per_node
        each = StrategyPrediction(
            strategy=distributed.strategy,
            shard_size=numbers.shards,
            mesh=distributed.mesh(world_size).describe(),
            splits_model=distributed.splits_model(),
            memory_bytes=numbers.memory_bytes_per_rank,
            sent_bytes=numbers.replicate_bytes
            + numbers.shard_bytes
            + numbers.tensor_bytes
            + numbers.pipeline_bytes,
            sync_s=numbers.sync_s,
            step_s=numbers.step_s if peak_flops_per_s else None,
            fits=None if free_bytes is None else need <= free_bytes,
        )
        found.append((numbers.step_s, each))
    return tuple(each for _, each in sorted(found, key=_rank))


def _candidates(
    now: DistributedSection, *, world_size: int, ranks_per_node: int
) -> Iterator[DistributedSection]:
    plain = replace(
        now, strategy="replicate", shard_size=None, tensor_parallel=1, pipeline_parallel=1
    )
    yield plain
    for size in divisors(world_size)[1:]:
        yield replace(plain, strategy="shard", shard_size=size)
    if world_size > 1:
        yield replace(plain, strategy="zero3")
    for tensor in divisors(ranks_per_node):
        for stages in divisors(world_size // tensor if world_size % tensor == 0 else 1):
            if tensor * stages > 1 and world_size % (tensor * stages) == 0:
                parts = replace(plain, tensor_parallel=tensor, pipeline_parallel=stages)
                yield parts
                for size in divisors(world_size // (tensor * stages))[1:]:
                    yield replace(parts, strategy="shard", shard_size=size)


def _is_possible(config: RunConfig, spec: ModelSpec, world_size: int) -> bool:
    """Return whether the ranks can divide the model and the batch as `config` requires."""
    try:
        require_split(spec, config)
        config.passes(world_size)
    except ConfigError:
        return False
    return True


def _rank(found: tuple[float, StrategyPrediction]) -> tuple[bool, float, int]:
    step_s, each = found
    return each.fits is False, step_s, each.memory_bytes
