"""CONTRACT: what a base of 4 bits saves in memory and costs in time, against bf16 below LoRA."""

from __future__ import annotations

from dataclasses import dataclass, replace

from payload.models.spec import ModelSpec, typical_mfu
from payload.run_config import RunConfig
from payload.training_sections import Quantize

TYPICAL_DEQUANTIZED_PER_S = 0.75e9
"""Weights that an AVX-512 core dequantises in a second, where no run has measured it."""

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedCost:
    """One run with its base in 4 bits, and in bf16."""

    bf16_bytes: int
    """Estimate of a rank's peak memory with one sequence a pass."""
    nf4_bytes: int
    bf16_step_s: float
    """Predicted computing of a step, with the kernels."""
    nf4_step_s: float
    """The same without them, and with the linears dequantised in every pass."""
    dequantize_s: float
    """Part of that for dequantising."""
    is_measured: bool
    """A run's calibration has measured the dequantising on this machine."""
    room_bytes: float | None
    """Memory that a rank may fill; None where that is not known."""

    def recommended(self) -> Quantize:
        """Return bf16 where memory allows it, else 4 bits."""
        is_short = self.room_bytes is not None and self.bf16_bytes > self.room_bytes
        return "nf4" if is_short else "none"

    def sentence(self) -> str:
        """Say what 4 bits save and cost, and which of the two is recommended."""
        saved, ratio = self.bf16_bytes - self.nf4_bytes, self.nf4_step_s / self.bf16_step_s
        how = "measured" if self.is_measured else "typical, not measured"
        advice = (
            "bf16 does not fit: use nf4"
            if self.recommended() == "nf4"
            else 'bf16 fits: model.quantize = "none" is recommended'
            if self.room_bytes is not None
            else "bf16 is recommended where it fits"
        )
        less = f"saves {saved / _GIB:.1f} GiB" if saved > 0 else "saves nothing"
        return (
            f"{less} a rank at one sequence a pass ({self.nf4_bytes / _GIB:.1f} GiB in place of "
            f"{self.bf16_bytes / _GIB:.1f}), takes {ratio:.1f} times as long "
            f"({self.dequantize_s:.2g} s a step of dequantising, {how}); {advice}"
        )


def quantized_cost(
    config: RunConfig,
    base: ModelSpec,
    *,
    world_size: int,
    peak_flops_per_s: float,
    dequantized_per_s: float | None,
    cores: int,
    room_bytes: float | None,
) -> QuantizedCost | None:
    """Return the comparison for a run with an adapter; None where its base cannot be of 4 bits.

    `base` is the model below the adapter. `peak_flops_per_s` is of all ranks, `dequantized_per_s`
    and `cores` are of one. Memory is compared at one sequence a pass: whether the model can be
    trained at all.
    """
    if not config.adapter.is_on() or config.distributed.shards(world_size) > 1:
        return None
    if base.why_not_quantized() is not None or not base.linears():
        return None
    one = replace(config.batch, micro_batch_size=1)
    nf4, bf16 = (
        replace(config, batch=one, model=replace(config.model, quantize=each))
        for each in ("nf4", "none")
    )
    linears = sum(each.inputs * each.outputs for each in base.linears())
    # In the forward and in the backward pass, and in the second forward pass of checkpointing.
    times = 3 if config.memory.activation_checkpointing == "on" else 2
    rate = dequantized_per_s or TYPICAL_DEQUANTIZED_PER_S * cores
    passes = config.batch.grad_accum_steps(world_size)
    dequantize_s = passes * times * linears / rate
    flops = config.tokens_per_step() * config.adapted(base).flops_per_token()
    computing = {
        each: flops / (peak_flops_per_s * typical_mfu(kernels=each)) * config.recomputation()
        for each in (True, False)
    }
    return QuantizedCost(
        bf16_bytes=bf16.memory_bytes(bf16.adapted(base), dtype="bf16", world_size=world_size),
        nf4_bytes=nf4.memory_bytes(nf4.adapted(base), dtype="bf16", world_size=world_size),
        bf16_step_s=computing[config.engine.wants_kernels()],
        nf4_step_s=computing[False] + dequantize_s,
        dequantize_s=dequantize_s,
        is_measured=dequantized_per_s is not None,
        room_bytes=room_bytes,
    )
