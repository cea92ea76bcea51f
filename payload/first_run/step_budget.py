"""Chooses the number of training steps from the measured speed of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from payload.config.run_config import RunConfig
from payload.core.dtype import BF16_MIN_GAIN, Dtype
from payload.core.errors import ConfigError
from payload.estimates.network import LOCAL_LINK
from payload.estimates.step_time import predict_step
from payload.models.spec import ModelSpec

TRAINING_S = 120.0
"""Longest training time, at the predicted speed."""
MIN_STEPS = 12
"""Minimum number of steps. In one run, the training loss was 2.33 before the first step, and 1.16
after 10 steps."""
_SHORT_SEQUENCES = 2.0
"""Factor on the predicted time. The prediction is fitted to long sequences, which have larger
matmuls. Short sequences are slower per token."""


def step_seconds(config: RunConfig, spec: ModelSpec, preflight: Mapping[str, Any]) -> float:
    """Return the expected time of a step, from the JSON that `preflight` prints for one machine.

    Raises ConfigError for JSON without measurements.
    """
    try:
        (node,) = preflight["measured"]["nodes"].values()
        (facts,) = preflight["nodes"].values()
        bf16, fp32 = float(node["bf16_flops_per_s"]), float(node["fp32_flops_per_s"])
        cores = int(facts["facts"]["physical_cores"])
    except (KeyError, TypeError, ValueError):
        raise ConfigError("preflight measured no speed. Run the command again.") from None
    dtype: Dtype = "bf16" if bf16 >= BF16_MIN_GAIN * fp32 else "fp32"
    ranks = config.launch.ranks_per_node or 1
    predicted = predict_step(
        config.computing_in(dtype),
        config.adapted(spec.with_sequence_length(config.data.sequence_length)),
        peak_flops_per_s=bf16 if dtype == "bf16" else fp32,
        network=LOCAL_LINK.network(ranks),
        threads=max(1, cores // ranks),
    )
    return _SHORT_SEQUENCES * predicted.parts.total_s()


def steps_within_budget(step_s: float, *, most: int) -> int:
    """Return how many steps of `step_s` seconds fit into two minutes.

    The result is at least `MIN_STEPS` and at most `most`.
    """
    return max(MIN_STEPS, min(most, int(TRAINING_S / step_s)))
