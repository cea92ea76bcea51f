"""Converts FLOPs to seconds: compute time of a step and of an evaluation, and MFU.

A test checks that no other module divides FLOPs by a rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from payload.config.run_config import RunConfig
from payload.machines.speed_cache import LayerSpeed
from payload.models.spec import ModelSpec

BACKWARD_SHARE = 2 / 3
"""Share of the backward pass in a micro-batch's time. The backward pass has two matmuls for each
matmul of the forward pass."""
_FORWARD_SHARE = 1 / 3
_WIDTHS_WRITTEN = 16
"""Elements that the linears of a layer read and write per token, as a multiple of the residual
stream's width: queries, keys and values 4, attention's output 2, the MLP 10. GPT-2 has exactly 16,
Llama models have 15 to 18."""


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
    layers: LayerSpeed | None = None,
) -> ComputeTime:
    """Predict the compute time of a step, given the peak of `cores` cores together.

    For `tokens`, see `step_flops`. With the measurement `layers`, the time has four terms: matmuls
    at the peak, elements between the matmuls, and weights and layers in each micro-batch. Without
    `layers`, the time follows from a typical MFU. On GPUs, `cores` has no effect.
    """
    flops = step_flops(config, spec, tokens=tokens)
    share = config.typical_mfu(spec, core_flops_per_s=peak_flops_per_s / cores)
    # The kernels were measured, and the width of some families is unknown.
    if layers is None or not spec.width() or not config.uses_kernels():
        rate = peak_flops_per_s * share
        return ComputeTime(
            seconds=flops / rate * config.recomputation(), mfu=share, flops_per_s=rate
        )
    ranks = max(1, cores // layers.threads)
    mesh = config.distributed.mesh(ranks)
    own_tokens = (config.tokens_per_step() if tokens is None else tokens) / ranks
    per_pass = config.batch.per_pass(mesh.data_ranks)
    passes = max(1, config.batch.global_batch_size // per_pass)
    weights = passes * spec.num_trainable_params() / (mesh.tensor * mesh.pipeline)
    repeated_s = flops / peak_flops_per_s + own_tokens * elements(spec) * layers.element_s
    repeated_s += passes * _layer_times(spec) * layers.layer_s / mesh.pipeline
    seconds = repeated_s + weights * layers.weight_s
    return ComputeTime(
        seconds=seconds + repeated_s * (config.recomputation() - 1),
        mfu=flops / seconds / peak_flops_per_s,
        flops_per_s=flops / seconds,
    )


def elements(spec: ModelSpec) -> int:
    """Return how many elements all layers and the head write between their matmuls for a token.

    An adapter reads and writes the elements of its layer a second time.
    """
    return _layer_times(spec) * _WIDTHS_WRITTEN * spec.width() + spec.head_rows()


def _layer_times(spec: ModelSpec) -> int:
    """Return the number of layers, where a layer with an adapter counts twice.

    The calls of such layers of GPT-2, Llama and Qwen3 took 2.0 to 2.3 times as long (2 AMX cores).
    """
    times = 1 if spec.num_trainable_params() == spec.num_params() else 2
    return times * spec.num_layers()


def layer_speed(
    spec: ModelSpec,
    times_s: Mapping[int, float],
    *,
    layer_s: float,
    threads: int,
    flops_per_s: float,
) -> LayerSpeed:
    """Return a rank's time for elements and for weights, from the times of two micro-batches.

    `times_s` maps the number of tokens in a sequence to the seconds of its forward and backward
    pass. `layer_s` is the time of a layer that has almost nothing to compute, and `flops_per_s` is
    the rank's GEMM peak.
    """
    fixed_s = spec.num_layers() * layer_s
    (few, few_s), (many, many_s) = (
        (tokens, took_s - fixed_s - _product_s(spec, tokens, flops_per_s=flops_per_s))
        for tokens, took_s in sorted(times_s.items())
    )
    element_s = max(0.0, many_s - few_s) / ((many - few) * elements(spec))
    weights_s = max(0.0, few_s - few * elements(spec) * element_s)
    weight_s = weights_s / spec.num_trainable_params()
    return LayerSpeed(threads=threads, element_s=element_s, weight_s=weight_s, layer_s=layer_s)


def _product_s(spec: ModelSpec, tokens: int, *, flops_per_s: float) -> float:
    """Return the time of the matmuls of one sequence at the GEMM peak."""
    return tokens * spec.with_sequence_length(tokens).flops_per_token() / flops_per_s


def evaluation_s(*, tokens: int, flops_per_token: float, flops_per_s: float) -> float:
    """Return the seconds of forward passes over `tokens`.

    `flops_per_token` includes the backward pass, as in training.
    """
    return tokens * flops_per_token * _FORWARD_SHARE / flops_per_s


def mfu(*, tokens_per_s: float, flops_per_token: int, peak_flops_per_s: float) -> float:
    """Return the share of the measured peak that training at `tokens_per_s` reaches."""
    return tokens_per_s * flops_per_token / peak_flops_per_s
