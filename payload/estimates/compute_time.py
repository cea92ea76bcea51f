"""Converts FLOPs to seconds: compute time of a step and of an evaluation, and MFU.

A test checks that no other module divides FLOPs by a rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from payload.config.run_config import RunConfig
from payload.models.spec import ModelSpec

BACKWARD_SHARE = 2 / 3
"""Share of the backward pass in a micro-batch's time. It has two matmuls for each matmul of the
forward pass."""
_FORWARD_SHARE = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTime:
    """The predicted compute time of a step, without exchange and update."""

    seconds: float
    """Time of the forward and backward passes, including recomputed layers."""
    mfu: float
    """Expected share of the GEMM peak."""
    flops_per_s: float
    """FLOP/s of all ranks together at `mfu` of the peak."""


def step_flops(config: RunConfig, spec: ModelSpec, *, tokens: int | None = None) -> int:
    """Return the model's FLOPs in a step's forward and backward passes, summed over all ranks.

    `tokens` is the number of tokens in a step; None = all sequences are full.
    """
    return (config.tokens_per_step() if tokens is None else tokens) * spec.flops_per_token()


def compute_time(
    config: RunConfig,
    spec: ModelSpec,
    *,
    peak_flops_per_s: float,
    cores: int,
    tokens: int | None = None,
) -> ComputeTime:
    """Predict the compute time of a step, given the peak of `cores` cores together.

    `tokens` is as in `step_flops`. On GPUs, `cores` has no effect.
    """
    share = config.typical_mfu(spec, core_flops_per_s=peak_flops_per_s / cores)
    rate = peak_flops_per_s * share
    seconds = step_flops(config, spec, tokens=tokens) / rate * config.recomputation()
    return ComputeTime(seconds=seconds, mfu=share, flops_per_s=rate)


def evaluation_s(*, tokens: int, flops_per_token: float, flops_per_s: float) -> float:
    """Return the seconds of forward passes over `tokens`.

    `flops_per_token` is for training, with the backward pass.
    """
    return tokens * flops_per_token * _FORWARD_SHARE / flops_per_s


def mfu(*, tokens_per_s: float, flops_per_token: int, peak_flops_per_s: float) -> float:
    """Return the share of the measured peak that training at `tokens_per_s` reaches."""
    return tokens_per_s * flops_per_token / peak_flops_per_s
