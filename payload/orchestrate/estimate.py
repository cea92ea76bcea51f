"""How much disk and time a planned run will take, and what that is concluded from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from payload.checkpoint_files import free_bytes, most_checkpoints
from payload.data_folder import load_meta
from payload.errors import ConfigError, DataError
from payload.launch.plan import LaunchPlan
from payload.models.spec import typical_mfu
from payload.orchestrate.live import duration, evaluations_left
from payload.orchestrate.planning import PlannedRun
from payload.results import RunPaths, Summary, read_json
from payload.run_config import RunConfig, load_run_config

# One core's GEMM in bf16 with AVX-512 and no matrix tiles; benchmarks/results, step_epyc-2-cores.
_TYPICAL_CORE_FLOPS_PER_S = 0.27e12
# A forward pass is a third of the forward and backward pass.
_EVALUATION_SHARE = 1 / 3
_LOOKED_AT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a run will take, before it has begun."""

    checkpoints: int
    """The most that are on disk at once."""
    checkpoint_bytes: int
    """Of one."""
    data_bytes: int
    """Of the data folder, which is there already."""
    free_bytes: int | None
    """On the disk of the run's folder; None for nodes that were not asked."""
    seconds: float
    """Of training and evaluating."""
    basis: str
    """What the time is concluded from."""
    usd: float | None
    """What the nodes cost in that time; None without prices."""

    def lines(self) -> list[str]:
        """Return disk and duration in words."""
        disk = self.checkpoints * self.checkpoint_bytes
        free = "" if self.free_bytes is None else f"; {self.free_bytes / 1e9:,.1f} GB are free"
        cost = "" if self.usd is None else f", ${self.usd:,.2f}"
        return [
            f"disk             about {disk / 1e9:,.2f} GB: up to {self.checkpoints} checkpoints of "
            f"{self.checkpoint_bytes / 1e9:,.2f} GB{free}",
            f"data             {self.data_bytes / 1e9:,.2f} GB, there already"
            if self.data_bytes
            else "data             not there yet",
            f"duration         about {duration(self.seconds)}{cost}, {self.basis}",
        ]


def estimate(
    planned: PlannedRun, *, data: Path, earlier: Sequence[RunPaths], is_local: bool
) -> Estimate:
    """Estimate a run from its nodes' measured speed, else that of earlier runs, else a typical one.

    `earlier` are the runs of this machine, the newest first.
    """
    numbers, train = planned.plan.arithmetic, planned.config.train
    flops_per_token = numbers.flops_per_step / numbers.tokens_per_step
    cores = sum(node.physical_cores for node in planned.inventory.nodes)
    measured = _measured_tokens_per_s(planned, earlier) if is_local else None
    if numbers.step_s is not None:
        flops_per_s = numbers.flops_per_step / numbers.step_s
        basis = "from what was measured on these nodes"
    elif measured is not None:
        tokens_per_s, run_id = measured
        flops_per_s = tokens_per_s * flops_per_token
        basis = f"at the {tokens_per_s:,.0f} tokens/s of run {run_id}"
    else:
        share = typical_mfu(kernels=planned.config.uses_kernels())
        flops_per_s = cores * _TYPICAL_CORE_FLOPS_PER_S * share
        speed = flops_per_s / flops_per_token
        basis = f"at {speed:,.0f} tokens/s, typical of {cores} AVX-512 core(s), not measured"
    sizes = {path.name: path.stat().st_size for path in data.glob("*.bin")}
    val_tokens = _val_tokens(data)
    evaluated = min(val_tokens, train.eval_tokens or val_tokens)
    evaluations = 1 + evaluations_left(train, 0)
    flops = numbers.tokens_total * flops_per_token
    flops += evaluations * evaluated * flops_per_token * _EVALUATION_SHARE
    seconds = flops / flops_per_s
    hourly_usd = planned.inventory.hourly_usd()
    return Estimate(
        checkpoints=most_checkpoints(train),
        checkpoint_bytes=numbers.checkpoint_bytes,
        data_bytes=sum(sizes.values()),
        free_bytes=free_bytes(planned.paths.root) if is_local else None,
        seconds=seconds,
        basis=basis,
        usd=None if not hourly_usd else hourly_usd * seconds / 3600,
    )


def _val_tokens(data: Path) -> int:
    """Return the tokens that an evaluation of the whole set reads; 0 where there is no data yet."""
    try:
        return load_meta(data).val_tokens
    except DataError:
        return 0


def _measured_tokens_per_s(
    planned: PlannedRun, earlier: Sequence[RunPaths]
) -> tuple[float, str] | None:
    """Return the speed and id of the newest run whose steps cost the same here."""
    for paths in earlier[:_LOOKED_AT]:
        try:
            summary = read_json(Summary, paths.summary)
            if summary is None or not summary.tokens_per_s:
                continue
            plan, config = LaunchPlan.load(paths.plan), load_run_config(paths.config)
        except ConfigError:
            continue
        if _speed_key(plan, config) == _speed_key(planned.plan, planned.config):
            return summary.tokens_per_s, paths.run_id
    return None


def _speed_key(plan: LaunchPlan, config: RunConfig) -> tuple[object, ...]:
    """Return what decides how fast a run goes on one machine."""
    return (
        plan.arithmetic.params,
        plan.world_size,
        plan.nodes,
        config.data.sequence_length,
        config.batch,
        config.engine,
        config.precision,
    )
