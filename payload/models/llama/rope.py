"""The rotary embedding that the config.json of a decoder of the Llama family describes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

from payload.core.errors import CheckpointError
from payload.core.validation.fields import checked
from payload.models.llama import yarn
from payload.models.llama.config_errors import FIX, refuse

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")
"""The kinds of scaling that this project's layers support, except in Phi."""
_OLD_LONGROPE = ("su", "yarn")
"""Names of LongRoPE in older config.json files of Phi-3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """A rotary position embedding: the base, and the scaling for longer contexts."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    """Divisor of every position (kind `linear`), or of the low frequencies (kinds `llama3` and
    `yarn`)."""
    low_freq_factor: float = 1.0
    """Used only by the kind `llama3`, like the next two fields."""
    high_freq_factor: float = 4.0
    original_context: int = 8192
    """Context in pre-training, in tokens."""
    rotated: int | None = None
    """Number of a head's elements that are rotated, from its start; None = all."""
    attention_factor: float = 1.0
    """Factor of the cosines and sines; only yarn and longrope have a factor other than 1."""
    ramp: tuple[float, float] = (0.0, 0.0)
    """Used only by yarn: indices of the last pair with an unscaled frequency, and of the first pair
    with a frequency that is divided by `factor`."""
    short_factors: tuple[float, ...] = ()
    """Used only by longrope: divisors of the frequencies, one for each pair of elements."""
    long_factors: tuple[float, ...] = ()
    """The divisors for texts longer than `original_context`."""

    def is_long(self, tokens: int) -> bool:
        """Return whether a text of `tokens` tokens needs the long factors."""
        return self.kind == "longrope" and tokens > self.original_context


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The contents of rope_parameters, or of the older rope_scaling."""

    rope_type: str | None = None
    type: str | None = None
    """Older name of rope_type."""
    rope_theta: float | None = checked(None, low=1.0, high=1e15)
    factor: float | None = checked(None, low=1e-6, high=1e9)
    low_freq_factor: float | None = checked(None, low=1e-6, high=1e9)
    high_freq_factor: float | None = checked(None, low=1e-6, high=1e9)
    attention_factor: float | None = checked(None, low=1e-6, high=1e9)
    beta_fast: float | None = checked(None, low=1e-6, high=1e9)
    beta_slow: float | None = checked(None, low=1e-6, high=1e9)
    mscale: float | None = checked(None, low=0.0, high=1e9)
    mscale_all_dim: float | None = checked(None, low=0.0, high=1e9)
    truncate: bool | None = True
    original_max_position_embeddings: int | None = checked(None, low=1, high=2**30)
    partial_rotary_factor: float | None = None
    short_factor: tuple[float, ...] | None = checked(None, max_items=2**13)
    long_factor: tuple[float, ...] | None = checked(None, max_items=2**13)

    def kind(self) -> str:
        """Return the name of the scaling in transformers."""
        return self.rope_type or self.type or "default"

    def is_longrope(self) -> bool:
        """Return whether this is LongRoPE, in a model whose type supports it (Phi)."""
        return self.kind() in ("longrope", *_OLD_LONGROPE)

    def is_supported(self, *, is_phi: bool) -> bool:
        """Return whether this project's layers support this kind of scaling."""
        if is_phi:
            return self.kind() == "default" or self.is_longrope()
        return self.kind() in _KINDS


def scaled_rope(
    found: RopeConfig,
    theta: float,
    *,
    head_dim: int,
    context: int,
    original_context: int | None,
    is_truncated: bool,
    where: str,
) -> Rope:
    """Return the rotary embedding with the base `theta` and the scaling of `found`.

    `context` is the context in tokens. `original_context` is the context in pre-training, or None
    if config.json does not give it. `is_truncated` rounds the ramp of YaRN to whole pairs. Raises
    CheckpointError.
    """
    if found.kind() == "linear":
        _require(where, found, ("factor",))
        return Rope(theta=theta, kind="linear", factor=cast(float, found.factor))
    if found.kind() == "yarn":
        if theta <= 1:
            refuse(where, "rope_theta", theta, "must be above 1 for yarn")
        original = original_context or context
        factor = found.factor or context / original
        return Rope(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_context=original,
            attention_factor=found.attention_factor
            or yarn.attention_factor(
                factor, mscale=found.mscale, mscale_all_dim=found.mscale_all_dim
            ),
            ramp=yarn.ramp(
                theta,
                head_dim=head_dim,
                original_context=original,
                beta_fast=found.beta_fast,
                beta_slow=found.beta_slow,
                truncate=is_truncated,
            ),
        )
    if found.kind() != "llama3":
        return Rope(theta=theta)
    _require(where, found, ("factor", "low_freq_factor", "high_freq_factor"))
    low, high = cast(float, found.low_freq_factor), cast(float, found.high_freq_factor)
    if high <= low:
        refuse(where, "rope high_freq_factor", high, f"must be above low_freq_factor = {low}")
    return Rope(
        theta=theta,
        kind="llama3",
        factor=cast(float, found.factor),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=original_context or context,
    )


def phi_rope(
    found: RopeConfig,
    theta: float,
    *,
    rotated: int | None,
    head_dim: int,
    context: int,
    original_context: int,
    where: str,
) -> Rope:
    """Return Phi's rotary embedding, as its configuration class in transformers reads it.

    Raises CheckpointError.
    """
    count = rotated or head_dim
    rotated = None if count == head_dim else count
    if not found.is_longrope():
        return Rope(theta=theta, rotated=rotated)
    _require(where, found, ("short_factor", "long_factor"))
    factors = (
        cast("tuple[float, ...]", found.short_factor),
        cast("tuple[float, ...]", found.long_factor),
    )
    for key, each in zip(("short_factor", "long_factor"), factors, strict=True):
        if len(each) != count // 2 or min(each) <= 0:
            problem = f"must have {count // 2} positive numbers, one for each pair of elements"
            refuse(where, f"rope {key}", each, problem)
    growth = found.factor or context / original_context
    scale = math.sqrt(1 + math.log(growth) / math.log(original_context)) if growth > 1 else 1.0
    return Rope(
        theta=theta,
        kind="longrope",
        original_context=original_context,
        rotated=rotated,
        attention_factor=found.attention_factor or scale,
        short_factors=factors[0],
        long_factors=factors[1],
    )


def _require(where: str, rope: RopeConfig, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(rope, name) is None:
            raise CheckpointError(f"{where}: rope type {rope.kind()} needs {name}. {FIX}")
