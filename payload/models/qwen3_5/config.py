"""The config.json of a Qwen3.5 text model, with the defaults of its class in transformers.

Source: transformers 5.23, models/qwen3_5/configuration_qwen3_5.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.core.validation.fields import checked
from payload.core.validation.records import build
from payload.models.llama.config_errors import FIX, refuse
from payload.models.llama.rope import Rope

MODEL_TYPE = "qwen3_5_text"
FULL, LINEAR = "full_attention", "linear_attention"
_THETA = 10_000.0
_PARTIAL = 0.25
"""Default share of a head's elements that are rotated."""
_MOST_LAYERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """The sizes of the gated delta rule in the layers with linear attention."""

    key_heads: int
    value_heads: int
    key_dim: int
    """Width of a head of queries and keys."""
    value_dim: int
    taps: int
    """Number of tokens that the convolution reads, including the token itself."""

    def keys(self) -> int:
        """Return the width of all keys together, which is also the width of all queries."""
        return self.key_heads * self.key_dim

    def values(self) -> int:
        """Return the width of all values."""
        return self.value_heads * self.value_dim

    def mixed(self) -> int:
        """Return the number of channels of the convolution: queries, keys and values."""
        return 2 * self.keys() + self.values()


@dataclass(frozen=True, slots=True, kw_only=True)
class _RopeConfig:
    rope_type: str = "default"
    rope_theta: float = checked(_THETA, low=1.0, high=1e15)
    partial_rotary_factor: float = checked(1.0, low=0.0, high=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Config:
    """The fields of config.json that determine sizes and computation."""

    vocab_size: int = checked(248_320, low=1, high=2**24)
    hidden_size: int = checked(4096, low=1, high=2**20)
    intermediate_size: int = checked(12_288, low=1, high=2**22)
    num_hidden_layers: int = checked(32, low=1, high=_MOST_LAYERS)
    num_attention_heads: int = checked(16, low=1, high=2**14)
    num_key_value_heads: int = checked(4, low=1, high=2**14)
    head_dim: int = checked(256, low=1, high=2**14)
    hidden_act: str = "silu"
    max_position_embeddings: int = checked(32_768, low=1, high=2**30)
    initializer_range: float = checked(0.02, low=0.0, high=1.0)
    rms_norm_eps: float = checked(1e-6, low=0.0, high=1.0)
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False
    rope_parameters: Mapping[str, Any] | None = None
    rope_scaling: Mapping[str, Any] | None = None
    rope_theta: float | None = checked(None, low=1.0, high=1e15)
    partial_rotary_factor: float | None = checked(None, low=0.0, high=1.0)
    attention_bias: bool = False
    attention_dropout: float | None = None
    linear_conv_kernel_dim: int = checked(4, low=1, high=64)
    linear_key_head_dim: int = checked(128, low=1, high=2**14)
    linear_value_head_dim: int = checked(128, low=1, high=2**14)
    linear_num_key_heads: int = checked(16, low=1, high=2**14)
    linear_num_value_heads: int = checked(32, low=1, high=2**14)
    layer_types: tuple[str, ...] | None = checked(None, max_items=_MOST_LAYERS)
    full_attention_interval: int = checked(4, low=1, high=_MOST_LAYERS)
    """N: every N-th layer has full attention, if config.json has no `layer_types`."""
    per_layer_config: Any = None
    """transformers' overrides for single layers."""

    def are_full(self, *, where: str) -> tuple[bool, ...]:
        """Return which layers have full attention. Raises CheckpointError."""
        count = self.num_hidden_layers
        if self.layer_types is None:
            return tuple((i + 1) % self.full_attention_interval == 0 for i in range(count))
        if len(self.layer_types) != count:
            refuse(where, "layer_types", self.layer_types, f"must have {count} entries")
        return tuple(kind == FULL for kind in self.layer_types)

    def linear_attention(self, *, where: str) -> LinearAttention:
        """Return the sizes of the gated delta rule. Raises CheckpointError."""
        heads, keys = self.linear_num_value_heads, self.linear_num_key_heads
        if heads % keys:
            problem = f"must be a multiple of linear_num_key_heads = {keys}"
            refuse(where, "linear_num_value_heads", heads, problem)
        return LinearAttention(
            key_heads=keys,
            value_heads=heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            taps=self.linear_conv_kernel_dim,
        )

    def rope(self, *, where: str) -> Rope:
        """Return the rotary embedding of the layers with full attention. Raises CheckpointError."""
        heads, keys = self.num_attention_heads, self.num_key_value_heads
        if heads % keys:
            problem = f"must be a multiple of num_key_value_heads = {keys}"
            refuse(where, "num_attention_heads", heads, problem)
        found = self._rope_config(where)
        rotated = int(self.head_dim * found.partial_rotary_factor)
        if rotated < 2 or rotated % 2:
            problem = f"must rotate an even number of a head's {self.head_dim} elements"
            refuse(where, "partial_rotary_factor", found.partial_rotary_factor, problem)
        return Rope(theta=found.rope_theta, rotated=rotated)

    def unsupported(self, *, where: str) -> tuple[str, ...]:
        """Return the features that `train/families/qwen3_5` lacks. Raises CheckpointError."""
        return tuple(dict.fromkeys(self._unsupported(where)))

    def _unsupported(self, where: str) -> Iterator[str]:
        if self.hidden_act != "silu":
            yield f"activation {shown(self.hidden_act)}"
        if self.attention_dropout:
            yield "attention_dropout"
        if self.per_layer_config:
            yield "per_layer_config"
        kind = self._rope_config(where).rope_type
        if kind != "default":
            yield f"rope type {shown(kind)}"
        for each in self.layer_types or ():
            if each not in (FULL, LINEAR):
                yield f"layer type {shown(each)}"

    def _rope_config(self, where: str) -> _RopeConfig:
        """Return the rope, whose keys can also be at the top of config.json."""
        share = _PARTIAL if self.partial_rotary_factor is None else self.partial_rotary_factor
        outer = {"rope_theta": self.rope_theta or _THETA, "partial_rotary_factor": share}
        given = self.rope_scaling or self.rope_parameters or {}
        kind = given.get("rope_type", given.get("type", "default"))
        raw = {**outer, **given, "rope_type": kind}
        place = f"{where}: rope_parameters"
        return build(_RopeConfig, raw, where=place, fix=FIX, error=CheckpointError)


def read_config(raw: Mapping[str, Any], *, where: str) -> Qwen35Config:
    """Return the typed config. Raises CheckpointError."""
    return build(Qwen35Config, raw, where=where, fix=FIX, error=CheckpointError)
