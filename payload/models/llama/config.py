"""The config.json of a decoder of the Llama family, with each model type's own defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.core.validation.fields import checked
from payload.core.validation.records import build
from payload.models.llama.config_errors import FIX, refuse
from payload.models.llama.mixture import Mixture
from payload.models.llama.rope import Rope, RopeConfig, phi_rope, scaled_rope
from payload.models.llama.type_defaults import DEFAULTS, HYBRID, PHI_CONTEXT, TypeDefaults

Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]
"""Activations as Hugging Face names them: SiLU, the exact GELU, and its tanh approximation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The settings that differ between the layers of a model."""

    window: int | None
    """Number of tokens that a token attends to, including itself; None = all up to itself."""
    rope: Rope | None
    """The rotary embedding; None = no positional encoding in this layer."""


_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
}
_EXPERTS = 128
"""Default number of experts."""
EXPERT_WIDTH = 768
"""Default width of an expert's gate."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_OLD_TYPES: Mapping[str, str] = {"attention": _FULL}
"""Names of layer types in files of older releases of transformers."""
_HYBRID_MLP = 1024
"""Default of shared_intermediate_size in Granite 4."""
_MOST_LAYERS = 1000


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
    """Factor by which Granite multiplies the outputs of attention and MLP."""
    attention_multiplier: float = checked(1.0, low=1e-9, high=1e9)
    logits_scaling: float = checked(1.0, low=1e-9, high=1e9)
    """Number by which Granite divides the logits."""
    position_embedding_type: str | None = None
    """Used only by Granite 4: "rope", or no positional encoding."""
    attention_dropout: float | None = None
    resid_pdrop: float | None = None
    """Dropout rate that Phi applies to the outputs of attention and MLP."""
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
        """Return the width of one head."""
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
            refuse(where, "layer_types", types, "has sliding attention without a sliding_window")
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
        is_phi = self.defaults().is_phi
        found = [
            f"rope type {shown(rope.kind())}"
            for rope in ropes
            if not rope.is_supported(is_phi=is_phi)
        ]
        if any(self._rotated(rope) is None for rope in ropes):
            found.append("partial_rotary_factor")
        if is_phi and self.resid_pdrop:
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
                refuse(where, "layer_types", self.layer_types, f"must have {count} entries")
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
            refuse(where, "no_rope_layers", self.no_rope_layers, f"must have {count} entries")
        return [bool(each) for each in self.no_rope_layers[:count]]

    def _rope_config(self, kind: str, *, where: str) -> RopeConfig:
        """Return the rotary embedding of one layer type, from the nested form of transformers 5."""
        raw: Any = self.rope_scaling or self.rope_parameters or {}
        is_nested = self.defaults().local_theta is not None
        flat = ("rope_scaling",) if is_nested else ("rope_scaling", "rope_parameters")
        for key in flat:
            parts = getattr(self, key) or {}
            if any(isinstance(each, Mapping) for each in parts.values()):
                # transformers would read only a part of this form, or nothing.
                refuse(where, key, parts, f"{self.model_type} has no rope per layer type")
        if is_nested:
            given = self.rope_scaling or {}
            if given.get("type") not in (None, "default") and "rope_type" not in given:
                # transformers ignores the scaling: these layers have a default rope_type.
                problem = f"model type {self.model_type} needs rope_type instead of type"
                refuse(where, "rope_scaling", given, problem)
            nested = (self.rope_parameters or {}).get(kind) or {}
            # The older form scales only the layers without a window.
            raw = {**nested, **(self.rope_scaling or {})} if kind == _FULL else nested
        return build(RopeConfig, raw, where=f"{where}: rope", fix=FIX, error=CheckpointError)

    def _rope(self, kind: str, *, where: str) -> Rope:
        found = self._rope_config(kind, where=where)
        theta = self.rope_theta or self.defaults().theta
        local = self.defaults().local_theta
        if local is not None and kind == _SLIDING:
            theta = (self.rope_local_base_freq if self.defaults().is_gemma else None) or local
        theta = found.rope_theta or theta
        context = cast(int, self.max_position_embeddings)
        original = self.original_max_position_embeddings
        width = self.width_of_head()
        if self.defaults().is_phi:
            return phi_rope(
                found,
                theta,
                rotated=self._rotated(found),
                head_dim=width,
                context=context,
                original_context=original or PHI_CONTEXT,
                where=where,
            )
        return scaled_rope(
            found,
            theta,
            head_dim=width,
            context=context,
            original_context=original or found.original_max_position_embeddings,
            # transformers reads this key only in a rope for all layers.
            is_truncated=local is not None or bool(found.truncate),
            where=where,
        )

    def _rotated(self, rope: RopeConfig) -> int | None:
        """Return how many elements of a head are rotated, or None if unsupported by our layers."""
        share = rope.partial_rotary_factor or self.partial_rotary_factor or 1.0
        count = int(self.width_of_head() * share)
        is_whole = share == 1.0
        is_pairs = self.defaults().is_phi and share < 1 and count > 0 and count % 2 == 0
        return count if is_whole or is_pairs else None


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
    config = build(DecoderConfig, {**defaults, **raw}, where=where, fix=FIX, error=CheckpointError)
    if config.num_key_value_heads is None:
        config = replace(config, num_key_value_heads=config.num_attention_heads)
    if config.layer_types is not None:
        types = tuple(_OLD_TYPES.get(kind, kind) for kind in config.layer_types)
        config = replace(config, layer_types=types)
    _require_whole_heads(config, where)
    _require_equal_layers(config, where)
    return config


def supported_activation(name: str) -> Activation:
    """Return the activation for this project's modules; for an unsupported name, return "silu"."""
    return _ACTIVATIONS.get(name, "silu")


def _require_whole_heads(config: DecoderConfig, where: str) -> None:
    heads, keys = config.num_attention_heads, cast(int, config.num_key_value_heads)
    if heads % keys:
        refuse(
            where,
            "num_attention_heads",
            heads,
            f"must be a multiple of num_key_value_heads = {keys}",
        )
    if config.head_dim is None and config.hidden_size % heads:
        refuse(
            where,
            "hidden_size",
            config.hidden_size,
            f"must be a multiple of num_attention_heads = {heads}",
        )
    if config.width_of_head() % 2:
        refuse(where, "head_dim", config.width_of_head(), "must be even for rotary embeddings")


def _require_equal_layers(config: DecoderConfig, where: str) -> None:
    """Raise CheckpointError for windows that only a part of transformers' code uses.

    In a Llama or a Mistral, all layers are equal. However, transformers' key-value cache reads
    layer_types, sliding_window and attention_chunk_size, so transformers' results would differ from
    this project's results. For a Llama, the results differ from the second generated token on.
    """
    has_windows = config.defaults().windows_everywhere
    if not config.defaults().no_windows and not has_windows:
        return
    expected = _SLIDING if has_windows and config.sliding_window else _FULL
    if config.layer_types is not None:
        if set(config.layer_types) != {expected}:
            problem = f"all layers of a {config.model_type} are {expected}"
            refuse(where, "layer_types", config.layer_types, problem)
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
            refuse(where, key, size, problem)
