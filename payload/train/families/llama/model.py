"""The Llama family: Llama, SmolLM, Qwen, Mistral, Gemma 3, Phi, OLMo, Granite, with transformers'
own names.

The parameters have a checkpoint's names and shapes. A layer's computation is in `layers`, or with
kernels in `kernel_layers`.
Shapes: B batch, T tokens of the input, C width, V vocabulary, padded rows included.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from payload.models.llama.rope import Rope
from payload.models.llama.spec import DecoderSpec
from payload.models.llama.type_defaults import DEFAULTS
from payload.models.spec import ModelSpec
from payload.models.transformers.spec import OtherSpec
from payload.train.families.llama.kernel_layers import joined, refusals, run_layers
from payload.train.families.llama.layers import Layer, make_norm
from payload.train.families.llama.mixture import (
    Router,
    balancing_loss,
    has_stacks,
    mixtures,
    stored,
)
from payload.train.families.llama.rope import Table, frequencies, table
from payload.train.families.transformers.model import TransformersLM
from payload.train.families.transformers.router import balance_note
from payload.train.models.base import CausalLM, OuterModules
from payload.train.models.hf_layout import load_named, require_tied, saved_config
from payload.train.models.key_value_cache import LayerCache
from payload.train.models.quantized import loading_targets
from payload.train.models.split import Split, Splits, embed
from payload.train.models.uninitialised import Embedding, Linear

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# The head if it is the embedding, and a buffer saved by old releases.
_UNUSED = (_HEAD, ".rotary_emb.inv_freq")
_SPLIT_BY_OUTPUTS = (".q_proj", ".k_proj", ".v_proj", ".gate_proj", ".up_proj")
_SPLIT_BY_SECTIONS = (".qkv_proj", ".gate_up_proj", ".input_linear")
_SPLIT_BY_INPUTS = (".o_proj", ".down_proj", ".output_linear")
_ROUTER = ".mlp.gate.weight"
_NORMS_OF_HEADS = (".q_norm", ".k_norm")
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
}
_WITHOUT_CLASSIFIER = ("granite", "granitemoehybrid")
_CLASSIFIERS = {
    kind: name.replace("ForCausalLM", "ForSequenceClassification")
    for kind, name in _ARCHITECTURES.items()
    if kind not in _WITHOUT_CLASSIFIER
} | {"gemma3_text": "Gemma3TextForSequenceClassification"}


class Body(nn.Module):
    """The model without its output head."""

    def __init__(self, spec: DecoderSpec, *, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Layer(spec, each, dropout=dropout) for each in spec.layers)
        self.norm = make_norm(spec, size=spec.hidden_size)


class Decoder(CausalLM):
    """The decoder model. Its weights are initialised at random or set by the caller."""

    spec: DecoderSpec
    packs_documents = True
    reads_parts = True

    def __init__(self, spec: DecoderSpec, *, dropout: float = 0.0, random: bool = True) -> None:
        super().__init__(spec, dropout=dropout)
        self.model = Body(spec, dropout=dropout)
        self.lm_head: Linear | None = None
        if not spec.tie_word_embeddings:
            self.lm_head = Linear(spec.hidden_size, spec.vocab_size, bias=False)
        # Each tensor of an expert is a part of a parameter.
        self.reads_parts = spec.mixture is None
        self._balances = spec.mixture is not None and spec.mixture.balance > 0
        self._padding = _padding_row(spec)
        ropes = {layer.rope for layer in spec.layers if layer.rope is not None}
        self._angles = {
            (rope, is_long): frequencies(rope, head_dim=spec.head_dim, is_long=is_long)
            for rope in ropes
            for is_long in {False, rope.kind == "longrope"}
        }
        if random:
            self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=self.spec.initializer_range)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)

    def hidden(
        self,
        tokens: Tensor,
        caches: Sequence[LayerCache] | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Map (B, T) token ids to hidden states (B, T, C) after the final norm.

        With `caches`, one per layer, `tokens` continue the cached tokens. `CausalLM.hidden`
        describes `starts`.
        """
        if self.stage is None or self.stage.is_first():
            x = self._embedded(tokens)
        else:
            x = self.stage.receive(tokens)
        for mixture in mixtures(self.model):
            mixture.keeps_scores = self.has_router_loss() and torch.is_grad_enabled()
        start = caches[0].num_tokens() if caches else 0
        ropes = self.rope_tables(start=start, length=tokens.shape[1], starts=starts)
        if self.kernels is not None and caches is None and not self._refusals():
            context = self.kernels.layer_context()
            if context is not None:
                where = (self.model, x, self.spec, ropes, starts)
                return run_layers(*where, context, self.run_layer, self.ranks, self.stage)
        bounds = self.bounds_of(starts)
        numbers = range(len(self.spec.layers)) if self.stage is None else self.stage.layers
        for number in numbers:
            layer, what = self.model.layers[number], self.spec.layers[number]
            rope = ropes[what.rope] if what.rope is not None else None
            x = self.run_layer(layer, x, rope, caches[number] if caches else None, starts, bounds)
        if self.stage is not None and not self.stage.is_last():
            return x
        normed: Tensor = self.model.norm(x)
        divisor = self.spec.logits_divisor
        return normed / divisor if divisor != 1 else normed

    def _refusals(self) -> list[str]:
        return refusals(self.model, self.spec, dropout=self.dropout)

    def rope_tables(
        self, *, start: int, length: int, starts: Tensor | None = None
    ) -> dict[Rope, Table]:
        """Return the cosines and sines of `length` positions from `start` on, by kind of rope.

        With `starts` (B, T), a table has a row for each of the B x T tokens, by the token's
        position in its document.
        """
        device = next(self.parameters()).device
        places, end = None, start + length
        if starts is not None:
            places = (torch.arange(length, device=device) - starts).flatten()
            if self.spec.rope_switch() is not None:
                end = int(places.max()) + 1
        found = {}
        for rope, is_long in self._angles:
            if is_long == rope.is_long(end):
                # Kept on the device: a copy from the host would wait for the device.
                angles = self._angles[rope, is_long] = self._angles[rope, is_long].to(device)
                factor = rope.attention_factor
                found[rope] = table(angles, start=start, length=length, factor=factor)
        if places is None:
            return found
        return {rope: (cos[places], sin[places]) for rope, (cos, sin) in found.items()}

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Map token ids (B, T) to scaled embeddings (B, T, C)."""
        tied = self.tied_weight()
        if self.ranks is not None:
            weight = self.model.embed_tokens.weight
            x = embed(weight, tokens, self.ranks, vocab_rows=self.spec.vocab_size)
        elif self.kernels is not None and tied is not None and tied.requires_grad:
            x = self.kernels.embed(tied, tokens)
        else:
            x = self.model.embed_tokens(tokens)
        x = without_padding_gradient(x, tokens, self._padding)
        scale = self.spec.embedding_scale
        return x * scale if scale != 1 else x

    def head_weight(self) -> nn.Parameter:
        """Return the output head's weight, (V, C)."""
        weight = (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def tied_weight(self) -> nn.Parameter | None:
        """Return the token embedding if it is also the output head, or None."""
        return self.head_weight() if self.lm_head is None else None

    def drop_head(self) -> None:
        """Remove the output head. As in transformers, a classifier has no load-balancing loss.

        Raises CheckpointError if transformers has no classifier.
        """
        self.classifier_architecture()
        self.lm_head = None
        self._balances = False

    def classifier_architecture(self) -> str:
        """Return the name of transformers' classification class for this model.

        Raises CheckpointError if transformers lacks this class.
        """
        if self.spec.model_type not in _CLASSIFIERS:
            return super().classifier_architecture()
        return _CLASSIFIERS[self.spec.model_type]

    def new_caches(self) -> list[LayerCache]:
        """Return empty caches, one per layer."""
        return [LayerCache() for _ in self.spec.layers]

    def layers(self) -> Sequence[nn.Module]:
        """Return this rank's layers."""
        numbers = range(len(self.spec.layers)) if self.stage is None else self.stage.layers
        return [self.model.layers[number] for number in numbers]

    def outer_modules(self) -> OuterModules:
        """Return the modules outside the layers, by the pipeline stage that computes them."""
        last = ("model.norm",) if self.lm_head is None else ("model.norm", "lm_head")
        return OuterModules(layers="model.layers", first=("model.embed_tokens",), last=last)

    def splits(self) -> Splits:
        """Return how tensor ranks split heads, the MLP and the vocabulary."""
        parts, partial = {_EMBEDDING: Split(0), _HEAD: Split(0)}, []
        keys = self.spec.num_key_value_heads
        sections = (self.spec.num_attention_heads, keys, keys), (1, 1), (1, 1)
        fused = dict(zip(_SPLIT_BY_SECTIONS, sections, strict=True))
        for name, _ in self.named_parameters():
            linear, kind = name.rpartition(".")[::2]
            if linear.endswith(_SPLIT_BY_OUTPUTS):
                parts[name] = Split(0)
            elif linear.endswith(_SPLIT_BY_SECTIONS):
                end = next(each for each in fused if linear.endswith(each))
                parts[name] = Split(0, sections=fused[end])
            elif linear.endswith(_SPLIT_BY_INPUTS) and kind == "weight":
                parts[name] = Split(1)
            elif linear.endswith(_NORMS_OF_HEADS):
                partial.append(name)
        return Splits(parts, frozenset(partial))

    def has_router_loss(self) -> bool:
        """Return whether training adds the load-balancing loss of the routers."""
        return self._balances and not self.without_router_loss

    def router_loss(self, padding: Tensor | None = None) -> Tensor | None:
        """Return the weighted load-balancing loss of the last forward pass, or None."""
        mixture = self.spec.mixture
        return None if mixture is None else balancing_loss(self.model, mixture, padding)

    def take_expert_tokens(self) -> Tensor:
        """Return the number of tokens of each expert in training since the last call."""
        found = [each.take_num_tokens() for each in mixtures(self.model)]
        return torch.cat(found).double() if found else super().take_expert_tokens()

    def freeze_router(self) -> Collection[str]:
        """Freeze the routers. Raises ConfigError for a model without routers."""
        found = [name for name, each in self.named_modules() if isinstance(each, Router)]
        if not found:
            return super().freeze_router()
        for name in found:
            self.get_parameter(f"{name}.weight").requires_grad_(False)
        return found

    def is_hidden_matrix(self, name: str) -> bool:
        """Return whether the parameter `name` is the matrix of a layer's linear."""
        is_linear = self.get_parameter(name).dim() == 2 and not name.endswith(_ROUTER)
        return name.startswith("model.layers.") and is_linear

    def joined_linears(self) -> list[tuple[str, ...]]:
        """Return the paths of the layers' linears, grouped by equal input."""
        return [
            tuple(f"model.layers.{number}.{name}" for name in names)
            for number in range(len(self.spec.layers))
            for names in joined(self.spec)
        ]

    def hf_config(self) -> dict[str, Any]:
        """Return the contents of the config.json that was read, changed for fp32 weights."""
        return saved_config(self.spec.config, architecture=_ARCHITECTURES[self.spec.model_type])

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return the weights with transformers' names and layout."""
        return stored(super().hf_tensors())

    def load_tensors(self, tensors: Mapping[str, Tensor], *, where: str) -> None:
        """Set all weights from a checkpoint's tensors with transformers' names.

        Raises CheckpointError, naming `where`, if tensors are missing or do not have the model's
        shapes.
        """
        if self.lm_head is None:
            require_tied(tensors, head=_HEAD, embedding=_EMBEDDING, where=where)
        own: dict[str, Tensor] = {name: each.detach() for name, each in self.named_parameters()}
        load_named(
            loading_targets(self, own if has_stacks(tensors) else stored(own)),
            tensors,
            unused=_UNUSED,
            where=where,
        )

    def speed_notes(self) -> list[str]:
        """Return one line for each part that runs without the requested kernels, and why."""
        notes = [f"layers without kernels: {reason}" for reason in self._refusals()]
        if self.has_router_loss() and self.spec.mixture is not None:
            notes.append(balance_note(self.spec.mixture.balance))
        return notes


def build(spec: ModelSpec, *, dropout: float = 0.0, random: bool = True) -> CausalLM:
    """Build the model of this spec; use transformers' layers if this module lacks a feature."""
    if isinstance(spec, OtherSpec):
        return TransformersLM(spec, dropout=dropout, random=random)
    assert isinstance(spec, DecoderSpec)
    if spec.unsupported_features:
        lacks = f"our own layers do not support {', '.join(spec.unsupported_features)}"
        return TransformersLM(spec, dropout=dropout, random=random, reason=lacks)
    return Decoder(spec, dropout=dropout, random=random)


def without_padding_gradient(x: Tensor, tokens: Tensor, padding: int | None) -> Tensor:
    """Return embedded tokens without gradient for the padding token's embedding.

    transformers' models also leave out this gradient. If the embedding is also the output head, the
    padding token's row still receives the head's gradient.
    """
    if padding is None or not x.requires_grad:
        return x
    is_padding = (tokens == padding).unsqueeze(-1)
    # On other devices, the check would wait until the device is idle.
    if x.device.type == "cpu" and not bool(is_padding.any()):
        return x
    return torch.where(is_padding, x.detach(), x)


def _padding_row(spec: DecoderSpec) -> int | None:
    """Return the padding token's row in the embedding; a negative number counts from the end."""
    row = spec.config.get("pad_token_id", DEFAULTS[spec.model_type].padding)
    if row is None or not -spec.vocab_size <= row < spec.vocab_size:
        return None
    return int(row) % spec.vocab_size
