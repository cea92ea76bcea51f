"""The config.json of a Gemma 4 text model, with the defaults of its class in transformers.

Source: transformers 5.23, models/gemma4/configuration_gemma4.py.
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

MODEL_TYPE = "gemma4_text"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_FULL_EVERY = 6
"""By default, every 6th layer has full attention; all other layers have a sliding window."""
_ROPES: Mapping[str, Mapping[str, Any]] = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {
        "rope_type": "proportional",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.25,
    },
}
_OF_ONE_LAYER = frozenset({"head_dim", "num_key_value_heads"})
"""The keys that per_layer_config may set for our layers."""
_MOST_LAYERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """A rotary embedding that rotates the first `pairs` pairs of a head's elements."""

    theta: float
    pairs: int
    factor: float = 1.0
    """Divisor of every frequency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The sizes of one layer, and the settings of its attention."""

    head_dim: int
    key_heads: int
    window: int | None
    """Number of tokens that a token attends to, including itself; None = all up to itself."""
    rope: Rope
    keys_from: int | None
    """Index of the earlier layer that provides this layer's keys and values; None = this layer has
    its own keys and values."""
    has_values: bool
    """False if the keys, before their norm, are also the values."""
    inner: int
    """Width of the MLP's gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RopeConfig:
    rope_type: str = "default"
    rope_theta: float = checked(low=1.0, high=1e15)
    factor: float = checked(1.0, low=1e-6, high=1e9)
    partial_rotary_factor: float = checked(1.0, low=0.0, high=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config:
    """The fields of config.json that determine sizes and computation."""

    vocab_size: int = checked(262_144, low=1, high=2**24)
    hidden_size: int = checked(2304, low=1, high=2**20)
    intermediate_size: int = checked(9216, low=1, high=2**22)
    num_hidden_layers: int = checked(30, low=1, high=_MOST_LAYERS)
    num_attention_heads: int = checked(8, low=1, high=2**14)
    num_key_value_heads: int = checked(4, low=1, high=2**14)
    num_global_key_value_heads: int | None = checked(None, low=1, high=2**14)
    """Number of key heads in the layers without a window, if `attention_k_eq_v` is set."""
    head_dim: int = checked(256, low=1, high=2**14)
    global_head_dim: int = checked(512, low=1, high=2**14)
    """Width of a head in the layers without a window."""
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = checked(131_072, low=1, high=2**30)
    initializer_range: float = checked(0.02, low=0.0, high=1.0)
    rms_norm_eps: float = checked(1e-6, low=0.0, high=1.0)
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True
    rope_parameters: Mapping[str, Any] | None = None
    attention_bias: bool = False
    attention_dropout: float | None = None
    sliding_window: int = checked(512, low=1, high=2**30)
    layer_types: tuple[str, ...] | None = checked(None, max_items=_MOST_LAYERS)
    final_logit_softcapping: float | None = checked(None, above=0.0, high=1e9)
    use_bidirectional_attention: bool | str | None = None
    """With "vision", the tokens of an image attend to each other; text stays causal."""
    vocab_size_per_layer_input: int = checked(262_144, low=1, high=2**24)
    hidden_size_per_layer_input: int | None = checked(256, low=0, high=2**20)
    """Width of the embeddings that each layer adds; 0 = without these embeddings."""
    attention_k_eq_v: bool = False
    """True if the layers without a window use their keys as values."""
    num_kv_shared_layers: int = checked(0, low=0, high=_MOST_LAYERS)
    """Number of last layers that use keys and values of earlier layers."""
    enable_moe_block: bool = False
    use_double_wide_mlp: bool = False
    """True if the MLP is twice as wide in the layers that use keys and values of earlier layers."""
    per_layer_config: Mapping[str, Any] | None = None
    """Values for single layers, used instead of `global_head_dim` and `num_global_key_value_heads`.
    """

    def layers(self, *, where: str) -> tuple[Layer, ...]:
        """Return the sizes of each layer. Raises CheckpointError."""
        kinds = self._kinds(where)
        first = self.num_hidden_layers - self.num_kv_shared_layers
        return tuple(self._layer(number, kinds, first, where) for number in range(len(kinds)))

    def unsupported(self) -> tuple[str, ...]:
        """Return the features that `train/families/gemma4` lacks."""
        return tuple(dict.fromkeys(self._unsupported()))

    def _unsupported(self) -> Iterator[str]:
        if self.enable_moe_block:
            yield "a mixture of experts (enable_moe_block)"
        if self.hidden_activation != "gelu_pytorch_tanh":
            yield f"activation {shown(self.hidden_activation)}"
        if self.use_bidirectional_attention not in (None, False, "vision"):
            yield f"use_bidirectional_attention {shown(self.use_bidirectional_attention)}"
        if self.attention_dropout:
            yield "attention_dropout"
        if self.hidden_size_per_layer_input and self.vocab_size_per_layer_input < self.vocab_size:
            yield f"vocab_size_per_layer_input {self.vocab_size_per_layer_input} below vocab_size"
        for kind in self.layer_types or ():
            if kind not in (_FULL, _SLIDING):
                yield f"layer type {shown(kind)}"
        for parts in (self.rope_parameters or {}).values():
            kind = parts.get("rope_type", "default") if isinstance(parts, Mapping) else parts
            if kind not in ("default", "proportional"):
                yield f"rope type {shown(kind)}"
        numbers = {str(number) for number in range(self.num_hidden_layers)}
        for number, changed in (self.per_layer_config or {}).items():
            is_known = isinstance(changed, Mapping) and set(changed) <= _OF_ONE_LAYER
            if number not in numbers or not is_known:
                yield "per_layer_config"

    def _kinds(self, where: str) -> list[str]:
        """Return each layer's type. The last layer always has full attention, without a window."""
        count = self.num_hidden_layers
        found = [_SLIDING if (i + 1) % _FULL_EVERY else _FULL for i in range(count)]
        if self.layer_types is not None:
            found = list(self.layer_types)
            if len(found) != count:
                refuse(where, "layer_types", self.layer_types, f"must have {count} entries")
        return [*found[:-1], _FULL]

    def _layer(self, number: int, kinds: list[str], first: int, where: str) -> Layer:
        """Return a layer's sizes; layers from `first` on use other layers' keys and values."""
        kind = kinds[number]
        head_dim, key_heads = self._heads(number, kind, where)
        keys_from: int | None = None
        if number >= first:
            own = [other for other in range(max(0, first)) if kinds[other] == kind]
            if not own:
                problem = f"no layer of type {kind} has keys and values"
                refuse(where, "num_kv_shared_layers", self.num_kv_shared_layers, problem)
            keys_from = own[-1]
        is_wide = self.use_double_wide_mlp and keys_from is not None
        return Layer(
            head_dim=head_dim,
            key_heads=key_heads,
            window=self.sliding_window if kind == _SLIDING else None,
            rope=self._rope(kind, head_dim, where),
            keys_from=keys_from,
            has_values=not self.attention_k_eq_v or kind == _SLIDING,
            inner=self.intermediate_size * (2 if is_wide else 1),
        )

    def _heads(self, number: int, kind: str, where: str) -> tuple[int, int]:
        """Return a layer's head width and number of key heads."""
        head_dim, key_heads = self.head_dim, self.num_key_value_heads
        if self.per_layer_config is not None:
            changed: Any = self.per_layer_config.get(str(number)) or {}
            head_dim = changed.get("head_dim", head_dim)
            key_heads = changed.get("num_key_value_heads", key_heads)
        elif kind == _FULL:
            head_dim = self.global_head_dim
            if self.attention_k_eq_v:
                key_heads = self.num_global_key_value_heads or key_heads
        for key, size in (("head_dim", head_dim), ("num_key_value_heads", key_heads)):
            if type(size) is not int or not 1 <= size <= 2**14:
                refuse(where, f"per_layer_config: {key}", size, "must be a positive integer")
        if head_dim % 2:
            refuse(where, "head_dim", head_dim, "must be even for rotary embeddings")
        heads = self.num_attention_heads
        if heads % key_heads:
            problem = f"must be a multiple of num_key_value_heads = {key_heads}"
            refuse(where, "num_attention_heads", heads, problem)
        return head_dim, key_heads

    def _rope(self, kind: str, head_dim: int, where: str) -> Rope:
        raw = (_ROPES if self.rope_parameters is None else self.rope_parameters).get(kind)
        place = f"{where}: rope_parameters: {kind}"
        found = build(_RopeConfig, raw, where=place, fix=FIX, error=CheckpointError)
        if found.rope_type != "proportional":
            return Rope(theta=found.rope_theta, pairs=head_dim // 2)
        pairs = int(found.partial_rotary_factor * head_dim // 2)
        return Rope(theta=found.rope_theta, pairs=pairs, factor=found.factor)


def read_config(raw: Mapping[str, Any], *, where: str) -> Gemma4Config:
    """Return the typed config. Raises CheckpointError."""
    return build(Gemma4Config, raw, where=where, fix=FIX, error=CheckpointError)
