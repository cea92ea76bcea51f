"""The config.json of a decoder of the Llama family, with each model type's own defaults.

transformers omits default values from config.json, so a type's defaults affect sizes. Source of
each type's defaults: transformers 5.23, models/<family>/configuration_<family>.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, cast

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.core.validation.fields import checked
from payload.core.validation.records import build
from payload.models.llama import yarn
from payload.models.llama.mixture import Mixture

Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]
"""Activations as Hugging Face names them: SiLU, the exact GELU, and its tanh approximation."""
RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """A rotary position embedding: the base, and the scaling for longer contexts."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    """Divisor of every position (kind `linear`), or of the low frequencies (kinds `llama3` and
    `yarn`)."""
    low_freq_factor: float = 1.0
    """Used only by the kind `llama3`, as are the next two fields."""
    high_freq_factor: float = 4.0
    original_context: int = 8192
    """Context in pre-training, in tokens."""
    rotated: int | None = None
    """Number of a head's elements that are rotated, from its start; None = all."""
    attention_factor: float = 1.0
    """Factor of the cosines and sines; only yarn and longrope have a factor other than 1."""
    ramp: tuple[float, float] = (0.0, 0.0)
    """Used only by yarn: numbers of the last pair with its own frequency, and of the first pair
    whose frequency is divided by `factor`."""
    short_factors: tuple[float, ...] = ()
    """Used only by longrope: divisors of the frequencies, one for each pair of elements."""
    long_factors: tuple[float, ...] = ()
    """The divisors for texts above `original_context`."""

    def is_long(self, tokens: int) -> bool:
        """Return whether a text of `tokens` tokens needs the long factors."""
        return self.kind == "longrope" and tokens > self.original_context


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The settings that differ between the layers of a model."""

    window: int | None
    """Number of tokens that a token attends to, including itself; None = all up to itself."""
    rope: Rope | None
    """The rotary embedding; None = no positional encoding in this layer."""


_FIX = "Use a folder in the Hugging Face layout, with its own config.json."
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
}
_ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")
_PHI_ROPE_KINDS: tuple[RopeKind, ...] = ("default", "longrope")
_OLD_LONGROPE = ("su", "yarn")
"""Names of LongRoPE in older config.json files of Phi-3."""
_EXPERTS = 128
"""Default number of experts."""
EXPERT_WIDTH = 768
"""Default width of an expert's gate."""
_PHI_CONTEXT = 4096
"""Default of both the context and the context in pre-training."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_OLD_TYPES: Mapping[str, str] = {"attention": _FULL}
"""Names of layer types in files of older releases of transformers."""
GEMMA_LOCAL_THETA = 10_000.0
HYBRID = "granitemoehybrid"
"""Granite 4, whose dense models without Mamba layers have the layers of a Granite 3."""
_HYBRID_MLP = 1024
"""Default of its shared_intermediate_size."""
_MOST_LAYERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeDefaults:
    """Defaults of one `model_type`, for values that config.json may omit."""

    kv_heads: int | None = None
    """Number of key and value heads; None = the number of heads."""
    head_dim: int | None = None
    """Width of a head; None = hidden_size / num_attention_heads."""
    theta: float = 10_000.0
    window: int | None = None
    context: int = 32_768
    tied: bool = False
    qk_norm: bool = False
    rms_norm_eps: float = 1e-6
    padding: int | None = None
    """The padding token, whose embedding gets no gradient."""
    windows_everywhere: bool = False
    """True if every layer has the sliding window; if False, `use_sliding_window` and `layer_types`
    decide."""
    is_gemma: bool = False
    no_windows: bool = False
    """True if all layers are equal and have no window, whatever `layer_types` says."""
    local_theta: float | None = None
    """Base of the rotary embedding of the layers with a window, which has no scaling; None = one
    rotary embedding for all layers."""
    full_layer_every: int | None = None
    """`layer_types` gives the layers with a window; by default, all except every N-th layer. None =
    other settings give them."""
    is_mixture: bool = False
    """True if the MLP of each layer is a mixture of experts."""
    is_phi: bool = False
    """True if queries, keys and values are one linear, and gate and up another one. The rotary
    embedding can be partial or LongRoPE."""
    norms_only_outputs: bool = False
    """OLMo: norms of the outputs of attention and MLP instead of their inputs, and norms over all
    heads of queries, and of keys."""
    has_multipliers: bool = False
    """Granite: embeddings, outputs of the layers and logits are scaled."""


DEFAULTS: Mapping[str, TypeDefaults] = {
    "llama": TypeDefaults(context=2048, no_windows=True),
    "smollm3": TypeDefaults(kv_heads=4, theta=2_000_000.0, tied=True, padding=128_004),
    "qwen2": TypeDefaults(kv_heads=32, window=4096),
    "qwen3": TypeDefaults(kv_heads=32, head_dim=128, window=4096, qk_norm=True),
    "mistral": TypeDefaults(kv_heads=8, window=4096, context=131_072, windows_everywhere=True),
    "gemma3_text": TypeDefaults(
        kv_heads=4,
        head_dim=256,
        theta=1_000_000.0,
        window=4096,
        context=131_072,
        tied=True,
        qk_norm=True,
        padding=0,
        is_gemma=True,
        local_theta=GEMMA_LOCAL_THETA,
        full_layer_every=6,
    ),
    "qwen3_moe": TypeDefaults(kv_heads=4, window=4096, qk_norm=True, is_mixture=True),
    "phi3": TypeDefaults(
        context=_PHI_CONTEXT,
        windows_everywhere=True,
        rms_norm_eps=1e-5,
        padding=32_000,
        is_phi=True,
    ),
    "olmo2": TypeDefaults(
        context=2048, rms_norm_eps=1e-5, padding=1, no_windows=True, norms_only_outputs=True
    ),
    "olmo3": TypeDefaults(
        theta=500_000.0,
        window=4096,
        context=2048,
        rms_norm_eps=1e-5,
        padding=1,
        local_theta=500_000.0,
        full_layer_every=4,
        norms_only_outputs=True,
    ),
    "granite": TypeDefaults(context=2048, no_windows=True, has_multipliers=True),
    HYBRID: TypeDefaults(context=2048, no_windows=True, has_multipliers=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _RopeConfig:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The fields of config.json that determine sizes and computation; None = the type's default."""

    model_type: str
    num_hidden_layers: int = checked(low=1, high=_MOST_LAYERS)
    hidden_size: int = checked(low=1, high=2**20)
    num_attention_heads: int = checked(low=1, high=2**14)
    intermediate_size: int = checked(low=1, high=2**22)
    vocab_size: int = checked(low=1, high=2**24)
    num_key_value_heads: int | None = checked(None, low=1, high=2**14)
    head_dim: int | None = checked(None, low=1, high=2**14)
    max_position_embeddings: int | None = checked(None, low=1, high=2**30)
    hidden_act: str = "silu"
    hidden_activation: str = "gelu_pytorch_tanh"
    """Gemma's name of hidden_act."""
    rms_norm_eps: float = checked(1e-6, low=0.0, high=1.0)
    initializer_range: float = checked(0.02, low=0.0, high=1.0)
    tie_word_embeddings: bool | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float | None = checked(None, low=1.0, high=1e15)
    rope_local_base_freq: float | None = checked(None, low=1.0, high=1e15)
    rope_scaling: Mapping[str, Any] | None = None
    rope_parameters: Mapping[str, Any] | None = None
    original_max_position_embeddings: int | None = checked(None, low=1, high=2**30)
    partial_rotary_factor: float | None = None
    sliding_window: int | None = checked(None, low=1, high=2**30)
    sliding_window_pattern: int = checked(6, low=1, high=_MOST_LAYERS)
    use_sliding_window: bool = False
    max_window_layers: int = checked(28, low=0, high=2**20)
    attention_chunk_size: int | None = checked(None, low=1, high=2**30)
    """No model type here uses this key, but transformers' key-value cache reads it."""
    layer_types: tuple[str, ...] | None = checked(None, max_items=_MOST_LAYERS)
    no_rope_layers: tuple[int, ...] | None = checked(None, max_items=_MOST_LAYERS)
    no_rope_layer_interval: int = checked(4, low=1, high=_MOST_LAYERS)
    query_pre_attn_scalar: float = checked(256.0, low=1e-6, high=1e9)
    embedding_multiplier: float = checked(1.0, low=1e-9, high=1e9)
    residual_multiplier: float = checked(1.0, low=1e-9, high=1e9)
    """Granite's factor of the outputs of attention and MLP."""
    attention_multiplier: float = checked(1.0, low=1e-9, high=1e9)
    logits_scaling: float = checked(1.0, low=1e-9, high=1e9)
    """Granite's divisor of the logits."""
    position_embedding_type: str | None = None
    """Used only by Granite 4: "rope", or no positional encoding."""
    attention_dropout: float | None = None
    resid_pdrop: float | None = None
    """Phi's dropout of the outputs of attention and MLP."""
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | str | None = False
    num_experts: int | None = checked(None, low=0, high=2**16)
    num_local_experts: int | None = checked(None, low=0, high=2**16)
    """Another name of num_experts."""
    num_experts_per_tok: int = checked(8, low=0, high=2**16)
    moe_intermediate_size: int = checked(EXPERT_WIDTH, low=1, high=2**22)
    norm_topk_prob: bool = False
    decoder_sparse_step: int = checked(1, low=1, high=_MOST_LAYERS)
    mlp_only_layers: tuple[int, ...] | None = checked(None, max_items=_MOST_LAYERS)
    output_router_logits: bool = False
    router_aux_loss_coef: float = checked(0.001, low=0.0, high=1e9)
    per_layer_config: Any = None
    """transformers' overrides for single layers."""
    kv_sharing_modes: Any = None
    """Layers that use the keys and values of other layers."""

    def defaults(self) -> TypeDefaults:
        """Return the model type's defaults."""
        return DEFAULTS[self.model_type]

    def width_of_head(self) -> int:
        """Return the elements of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def activation(self) -> str:
        """Return the name of the gate's activation, supported or not."""
        return self.hidden_activation if self.defaults().is_gemma else self.hidden_act

    def layers(self, *, where: str) -> tuple[Layer, ...]:
        """Return each layer's attention window and positions. Raises CheckpointError."""
        family = self.defaults()
        types = self._layer_types(where)
        ropes = {kind: self._rope(kind, where=where) for kind in {*types, _FULL}}
        with_rope = self._with_rope(where)
        window = self.sliding_window
        is_used = family.full_layer_every or family.windows_everywhere or self.use_sliding_window
        if not is_used:
            window = None
        if window is None and _SLIDING in types:
            _refuse(where, "layer_types", types, "has sliding attention without a sliding_window")
        return tuple(
            Layer(
                window=window if kind == _SLIDING or family.windows_everywhere else None,
                rope=ropes[kind] if has_rope else None,
            )
            for kind, has_rope in zip(types, with_rope, strict=True)
        )

    def unsupported(self, *, where: str) -> tuple[str, ...]:
        """Return the features that `train/families/llama` lacks. Raises CheckpointError."""
        ropes = [self._rope_config(kind, where=where) for kind in (_FULL, _SLIDING)]
        kinds = _PHI_ROPE_KINDS if self.defaults().is_phi else _ROPE_KINDS
        found = [
            f"rope type {shown(rope.kind())}"
            for rope in ropes
            if self._rope_kind(rope) not in kinds
        ]
        if any(self._rotated(rope) is None for rope in ropes):
            found.append("partial_rotary_factor")
        if self.defaults().is_phi and self.resid_pdrop:
            found.append("resid_pdrop")
        if self.defaults().is_mixture:
            found += self._unsupported_in_mixture()
        if self.activation() not in _ACTIVATIONS:
            found.append(f"activation {shown(self.activation())}")
        odd = {*self._layer_types(where)} - {_FULL, _SLIDING}
        found += [f"layer type {shown(kind)}" for kind in sorted(odd)]
        found += [
            name
            for name in (
                "attention_dropout",
                "attn_logit_softcapping",
                "final_logit_softcapping",
                "use_bidirectional_attention",
                "per_layer_config",
                "kv_sharing_modes",
            )
            if getattr(self, name)
        ]
        return tuple(dict.fromkeys(found))

    def mixture(self) -> Mixture | None:
        """Return the sizes of the experts, or None for a model without experts."""
        if not self.defaults().is_mixture:
            return None
        experts = self._num_experts()
        return Mixture(
            experts=experts,
            active=min(self.num_experts_per_tok, experts),
            inner=self.moe_intermediate_size,
            normalises=self.norm_topk_prob,
            balance=self.router_aux_loss_coef if self.output_router_logits else 0.0,
        )

    def _num_experts(self) -> int:
        given = self.num_local_experts if self.num_experts is None else self.num_experts
        return _EXPERTS if given is None else given

    def _unsupported_in_mixture(self) -> list[str]:
        found = []
        if self.decoder_sparse_step != 1 or self.mlp_only_layers:
            found.append("layers without experts")
        if not 0 < self.num_experts_per_tok <= self._num_experts():
            found.append(f"num_experts_per_tok {self.num_experts_per_tok}")
        if self.use_sliding_window and self.sliding_window is not None:
            found.append("use_sliding_window")
        return found

    def _layer_types(self, where: str) -> tuple[str, ...]:
        """Return each layer's type, by the rules of the configuration class in transformers."""
        count, family = self.num_hidden_layers, self.defaults()
        if family.windows_everywhere or family.no_windows:
            return (_FULL,) * count
        if self.layer_types is not None:
            if len(self.layer_types) != count:
                _refuse(where, "layer_types", self.layer_types, f"must have {count} entries")
            return self.layer_types
        if family.full_layer_every:
            every = self.sliding_window_pattern if family.is_gemma else family.full_layer_every
            slides = [bool((i + 1) % every) for i in range(count)]
        elif self.sliding_window is None or not self.use_sliding_window:
            slides = [False] * count
        elif self.model_type == "smollm3":
            slides = [not has_rope for has_rope in self._with_rope(where)]
        else:
            slides = [i >= self.max_window_layers for i in range(count)]
        return tuple(_SLIDING if each else _FULL for each in slides)

    def _with_rope(self, where: str) -> list[bool]:
        count = self.num_hidden_layers
        if self.model_type == HYBRID:
            return [self.position_embedding_type == "rope"] * count
        if self.model_type != "smollm3":
            return [True] * count
        if self.no_rope_layers is None:
            return [bool((i + 1) % self.no_rope_layer_interval) for i in range(count)]
        if len(self.no_rope_layers) < count:
            _refuse(where, "no_rope_layers", self.no_rope_layers, f"must have {count} entries")
        return [bool(each) for each in self.no_rope_layers[:count]]

    def _rope_config(self, kind: str, *, where: str) -> _RopeConfig:
        """Return the rotary embedding of one layer type, from the nested form of transformers 5."""
        raw: Any = self.rope_scaling or self.rope_parameters or {}
        is_nested = self.defaults().local_theta is not None
        flat = ("rope_scaling",) if is_nested else ("rope_scaling", "rope_parameters")
        for key in flat:
            parts = getattr(self, key) or {}
            if any(isinstance(each, Mapping) for each in parts.values()):
                # transformers would read only a part of this form, or nothing.
                _refuse(where, key, parts, f"{self.model_type} has no rope per layer type")
        if is_nested:
            given = self.rope_scaling or {}
            if given.get("type") not in (None, "default") and "rope_type" not in given:
                # transformers ignores the scaling: these layers have a default rope_type.
                problem = f"model type {self.model_type} needs rope_type instead of type"
                _refuse(where, "rope_scaling", given, problem)
            nested = (self.rope_parameters or {}).get(kind) or {}
            # The older form scales only the layers without a window.
            raw = {**nested, **(self.rope_scaling or {})} if kind == _FULL else nested
        return build(_RopeConfig, raw, where=f"{where}: rope", fix=_FIX, error=CheckpointError)

    def _rope(self, kind: str, *, where: str) -> Rope:
        found = self._rope_config(kind, where=where)
        theta = self.rope_theta or self.defaults().theta
        local = self.defaults().local_theta
        is_nested = local is not None
        if local is not None and kind == _SLIDING:
            theta = (self.rope_local_base_freq if self.defaults().is_gemma else None) or local
        theta = found.rope_theta or theta
        if self.defaults().is_phi:
            return self._phi_rope(found, theta, where=where)
        if found.kind() == "linear":
            _require(where, found, ("factor",))
            return Rope(theta=theta, kind="linear", factor=cast(float, found.factor))
        context = cast(int, self.max_position_embeddings)
        original = self.original_max_position_embeddings or found.original_max_position_embeddings
        if found.kind() == "yarn":
            if theta <= 1:
                _refuse(where, "rope_theta", theta, "must be above 1 for yarn")
            original = original or context
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
                    head_dim=self.width_of_head(),
                    original_context=original,
                    beta_fast=found.beta_fast,
                    beta_slow=found.beta_slow,
                    # transformers reads this key only in a rope for all layers.
                    truncate=is_nested or bool(found.truncate),
                ),
            )
        if found.kind() != "llama3":
            return Rope(theta=theta)
        _require(where, found, ("factor", "low_freq_factor", "high_freq_factor"))
        low, high = cast(float, found.low_freq_factor), cast(float, found.high_freq_factor)
        if high <= low:
            _refuse(where, "rope high_freq_factor", high, f"must be above low_freq_factor = {low}")
        return Rope(
            theta=theta,
            kind="llama3",
            factor=cast(float, found.factor),
            low_freq_factor=low,
            high_freq_factor=high,
            original_context=original or context,
        )

    def _rope_kind(self, rope: _RopeConfig) -> str:
        is_long = self.defaults().is_phi and rope.kind() in _OLD_LONGROPE
        return "longrope" if is_long else rope.kind()

    def _rotated(self, rope: _RopeConfig) -> int | None:
        """Return the rotated elements of a head, or None if our layers do not support the share."""
        share = rope.partial_rotary_factor or self.partial_rotary_factor or 1.0
        count = int(self.width_of_head() * share)
        is_whole = share == 1.0
        is_pairs = self.defaults().is_phi and share < 1 and count > 0 and count % 2 == 0
        return count if is_whole or is_pairs else None

    def _phi_rope(self, found: _RopeConfig, theta: float, *, where: str) -> Rope:
        """Return Phi's rotary embedding, as its configuration class in transformers reads it."""
        count = self._rotated(found) or self.width_of_head()
        rotated = None if count == self.width_of_head() else count
        if self._rope_kind(found) != "longrope":
            return Rope(theta=theta, rotated=rotated)
        _require(where, found, ("short_factor", "long_factor"))
        factors = (
            cast("tuple[float, ...]", found.short_factor),
            cast("tuple[float, ...]", found.long_factor),
        )
        for key, each in zip(("short_factor", "long_factor"), factors, strict=True):
            if len(each) != count // 2 or min(each) <= 0:
                problem = f"must have {count // 2} positive numbers, one for each pair of elements"
                _refuse(where, f"rope {key}", each, problem)
        original = self.original_max_position_embeddings or _PHI_CONTEXT
        growth = found.factor or cast(int, self.max_position_embeddings) / original
        scale = math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0
        return Rope(
            theta=theta,
            kind="longrope",
            original_context=original,
            rotated=rotated,
            attention_factor=found.attention_factor or scale,
            short_factors=factors[0],
            long_factors=factors[1],
        )


def is_dense_hybrid(raw: Mapping[str, Any]) -> bool:
    """Return whether this is a Granite 4 without experts and without Mamba layers."""
    types = raw.get("layer_types")
    return (
        raw.get("model_type") == HYBRID
        and raw.get("num_local_experts") == 0
        and isinstance(types, list)
        and all(each in (_FULL, *_OLD_TYPES) for each in types)
    )


def read_decoder_config(raw: Mapping[str, Any], *, where: str) -> DecoderConfig:
    """Return the typed config with every default filled in. Raises CheckpointError."""
    family = DEFAULTS[raw["model_type"]]
    heads = raw.get("num_attention_heads")
    defaults = {
        "num_key_value_heads": family.kv_heads or heads,
        "head_dim": family.head_dim,
        "max_position_embeddings": family.context,
        "sliding_window": family.window,
        "tie_word_embeddings": family.tied,
        "rms_norm_eps": family.rms_norm_eps,
    }
    if raw["model_type"] == HYBRID:
        raw = {**raw, "intermediate_size": raw.get("shared_intermediate_size", _HYBRID_MLP)}
    config = build(DecoderConfig, {**defaults, **raw}, where=where, fix=_FIX, error=CheckpointError)
    if config.num_key_value_heads is None:
        config = replace(config, num_key_value_heads=config.num_attention_heads)
    if config.layer_types is not None:
        types = tuple(_OLD_TYPES.get(kind, kind) for kind in config.layer_types)
        config = replace(config, layer_types=types)
    _require_whole_heads(config, where)
    _require_equal_layers(config, where)
    return config


def supported_activation(name: str) -> Activation:
    """Return the activation for our modules; for an unsupported name, return "silu"."""
    return _ACTIVATIONS.get(name, "silu")


def _require_whole_heads(config: DecoderConfig, where: str) -> None:
    heads, keys = config.num_attention_heads, cast(int, config.num_key_value_heads)
    if heads % keys:
        _refuse(
            where,
            "num_attention_heads",
            heads,
            f"must be a multiple of num_key_value_heads = {keys}",
        )
    if config.head_dim is None and config.hidden_size % heads:
        _refuse(
            where,
            "hidden_size",
            config.hidden_size,
            f"must be a multiple of num_attention_heads = {heads}",
        )
    if config.width_of_head() % 2:
        _refuse(where, "head_dim", config.width_of_head(), "must be even for rotary embeddings")


def _require_equal_layers(config: DecoderConfig, where: str) -> None:
    """Raise CheckpointError for windows that only a part of transformers' code uses.

    In a Llama or a Mistral, all layers are equal. transformers' key-value cache nevertheless reads
    layer_types, sliding_window and attention_chunk_size, so transformers' results would differ from
    ours. For a Llama, they differ from the second generated token on.
    """
    has_windows = config.defaults().windows_everywhere
    if not config.defaults().no_windows and not has_windows:
        return
    expected = _SLIDING if has_windows and config.sliding_window else _FULL
    if config.layer_types is not None:
        if set(config.layer_types) != {expected}:
            problem = f"all layers of a {config.model_type} are {expected}"
            _refuse(where, "layer_types", config.layer_types, problem)
        return
    for key in (
        ("attention_chunk_size",) if has_windows else ("sliding_window", "attention_chunk_size")
    ):
        size = getattr(config, key)
        if size is not None and size < cast(int, config.max_position_embeddings):
            problem = (
                f"models of type {config.model_type} are not trained with this key. Set the key "
                "to null"
            )
            _refuse(where, key, size, problem)


def _require(where: str, rope: _RopeConfig, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(rope, name) is None:
            raise CheckpointError(f"{where}: rope type {rope.kind()} needs {name}. {_FIX}")


def _refuse(where: str, key: str, value: object, problem: str) -> NoReturn:
    raise CheckpointError(f"{where}: {key} = {shown(value)}: {problem}. {_FIX}")
