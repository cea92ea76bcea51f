"""YaRN's parameters of a rotary embedding, computed as in transformers.

Source: https://arxiv.org/abs/2309.00071, and `_compute_yarn_parameters` in transformers.
"""

from __future__ import annotations

import math

FAST, SLOW = 32.0, 1.0
"""Default numbers of turns in the original context, for the first and the last pair on the ramp."""


def attention_factor(factor: float, *, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return the factor of the cosines and sines for a context that is `factor` times longer."""
    if mscale and mscale_all_dim:
        return _growth(factor, mscale) / _growth(factor, mscale_all_dim)
    return _growth(factor, 1.0)


def ramp(
    theta: float,
    *,
    head_dim: int,
    original_context: int,
    beta_fast: float | None,
    beta_slow: float | None,
    truncate: bool,
) -> tuple[float, float]:
    """Return the indices of the last unscaled pair and the first fully scaled pair.

    The pairs in between turn `beta_slow` to `beta_fast` times over the original context.
    """

    def pair_with(turns: float) -> float:
        waves = original_context / (turns * 2 * math.pi)
        return head_dim * math.log(waves) / (2 * math.log(theta))

    first, last = pair_with(beta_fast or FAST), pair_with(beta_slow or SLOW)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    return max(first, 0), min(last, head_dim - 1)


def _growth(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
