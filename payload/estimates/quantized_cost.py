"""CONTRACT: memory savings and extra time of a 4-bit base under LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from payload.config.run_config import RunConfig
from payload.config.training_sections import Quantize
from payload.core.dtype import Dtype
from payload.estimates.compute_time import compute_time
from payload.models.spec import ModelSpec

TYPICAL_DEQUANTIZED_PER_S: dict[Dtype, float] = {"bf16": 0.75e9, "fp32": 2.0e9}
"""Weights that an AVX-512 core dequantises per second, used if no run has measured this rate. The
value for bf16 was measured on an EPYC. The value for fp32 was measured on a Xeon without bf16
instructions."""

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedCost:
    """Compares a run with its base in 4 bits to the same run with an unquantised base."""

    whole_dtype: Dtype
    """Dtype of the unquantised base and the base's matmuls: bf16 if only bf16 fits into memory,
    otherwise the run's dtype. Exception: the run's dtype is also used if a 4-bit base fits and is
    faster than an unquantised base in bf16."""
    whole_bytes: int
    """Estimate of a rank's peak memory with the unquantised base and one sequence per
    micro-batch."""
    nf4_dtype: Dtype
    """Dtype of the matmuls with 4-bit weights: the dtype of the run, or bf16 if only bf16 fits."""
    nf4_bytes: int
    whole_step_s: float
    """Predicted compute time of a step with the unquantised base. Includes the effect of kernels if
    the run uses kernels."""
    nf4_step_s: float
    """Predicted compute time of a step with a 4-bit base, without kernels. Includes
    dequantising."""
    dequantize_s: float
    """The part of `nf4_step_s` in which weights are dequantised."""
    is_measured: bool
    """True if a run's calibration has measured dequantising on this machine."""
    room_bytes: float | None
    """Memory available to a rank; None if unknown."""
    auto_dtype: Dtype
    """The resolved `precision.dtype` of the run."""

    def recommended(self) -> Quantize:
        """Return "none" if memory allows the unquantised base, otherwise "nf4"."""
        is_short = self.room_bytes is not None and self.whole_bytes > self.room_bytes
        return "nf4" if is_short else "none"

    def _with_dtype(self, dtype: Dtype) -> str:
        """Return the text that sets a dtype, or "" if the run already has this dtype."""
        return "" if dtype == self.auto_dtype else f' with precision.dtype = "{dtype}"'

    def sentence(self) -> str:
        """Return a sentence on the savings and costs of 4 bits, and a recommendation."""
        saved, ratio = self.whole_bytes - self.nf4_bytes, self.nf4_step_s / self.whole_step_s
        how = "measured" if self.is_measured else "typical, not measured"
        name = self.whole_dtype
        setting = f'model.quantize = "none"{self._with_dtype(name)}'
        advice = (
            f"{name} does not fit: use nf4{self._with_dtype(self.nf4_dtype)}"
            if self.recommended() == "nf4"
            else f"{name} fits: {setting} is recommended"
            if self.room_bytes is not None
            else f"{name} is recommended if it fits"
        )
        less = f"saves {saved / _GIB:.1f} GiB" if saved > 0 else "saves nothing"
        return (
            f"{less} a rank at one sequence a micro-batch "
            f"({self.nf4_bytes / _GIB:.1f} GiB instead of {self.whole_bytes / _GIB:.1f}), "
            f"takes {ratio:.1f} times as long "
            f"({self.dequantize_s:.2g} s a step of dequantising, {how}); {advice}"
        )


def quantized_weights(spec: ModelSpec) -> int:
    """Return the number of weights that are quantised: the weights of the layers' linears."""
    return sum(each.inputs * each.outputs for each in spec.linears())


def dequantized_times(config: RunConfig) -> int:
    """Return how often a micro-batch dequantises each weight of the base."""
    # Once in forward, once in backward, and with checkpointing once in the recomputed forward.
    return 3 if config.memory.activation_checkpointing == "on" else 2


def dequantize_s(
    config: RunConfig, spec: ModelSpec, *, world_size: int, weights_per_s: float
) -> float:
    """Return a rank's seconds of dequantising per step, at the rate `weights_per_s`.

    Raises ConfigError if the ranks cannot divide the batch evenly.
    """
    weights = dequantized_times(config) * quantized_weights(spec)
    return config.passes(world_size) * weights / weights_per_s


def quantized_cost(
    config: RunConfig,
    base: ModelSpec,
    *,
    world_size: int,
    dtype: Dtype,
    core_flops_per_s: Mapping[Dtype, float],
    dequantized_per_s: float | None,
    cores: int,
    room_bytes: float | None,
) -> QuantizedCost | None:
    """Return the comparison for a run with an adapter; None if its base cannot be quantised.

    `base` is the model without the adapter, and `dtype` the compute dtype of the run.
    `core_flops_per_s` is the GEMM peak of one core, `cores` the number of cores on all nodes, and
    `dequantized_per_s` the rate of one rank. Memory is compared at one sequence per micro-batch,
    the size that needs least memory.
    """
    if not config.adapter.is_on() or config.distributed.shards(world_size) > 1:
        return None
    # Most mixtures of experts are converted while they are loaded, which excludes 4 bits.
    if base.why_not_quantized() is not None or not base.linears() or base.expert_params():
        return None
    plain = replace(
        config,
        batch=replace(config.batch, micro_batch_size=1),
        model=replace(config.model, quantize="none"),
    )
    dtypes: tuple[Dtype, ...] = ("bf16",) if dtype == "bf16" else (dtype, "bf16")
    whole = [plain.computing_in(each) for each in dtypes]
    in_nf4 = [replace(each, model=replace(plain.model, quantize="nf4")) for each in whole]

    def needed(run: RunConfig) -> int:
        return run.memory_bytes(run.adapted(base), dtype=run.dtype(), world_size=world_size)

    def computing_s(run: RunConfig) -> float:
        peak = cores * core_flops_per_s[run.dtype()]
        return compute_time(run, run.adapted(base), peak_flops_per_s=peak, cores=cores).seconds

    def fits(run: RunConfig) -> bool:
        return room_bytes is None or needed(run) <= room_bytes

    # Use the dtype of the run, unless only bf16 fits.
    nf4 = next(filter(fits, in_nf4), in_nf4[0])
    rate = dequantized_per_s or TYPICAL_DEQUANTIZED_PER_S[nf4.dtype()] * cores / world_size
    dequantizing_s = dequantize_s(config, base, world_size=world_size, weights_per_s=rate)
    nf4_step_s = computing_s(nf4) + dequantizing_s
    chosen = next(filter(fits, whole), whole[0])
    # The peaks are those of CPU cores, so on a GPU only memory decides.
    if fits(nf4) and config.device.kind != "cuda" and computing_s(chosen) > nf4_step_s:
        chosen = whole[0]
    return QuantizedCost(
        whole_dtype=chosen.dtype(),
        whole_bytes=needed(chosen),
        nf4_dtype=nf4.dtype(),
        nf4_bytes=needed(nf4),
        whole_step_s=computing_s(chosen),
        nf4_step_s=nf4_step_s,
        dequantize_s=dequantizing_s,
        is_measured=dequantized_per_s is not None,
        room_bytes=room_bytes,
        auto_dtype=dtype,
    )
