"""Qwen3.5's dense text models, with transformers' own names.

The parameters have a checkpoint's names and shapes.
Shapes: B batch, T tokens of the input, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from payload.models.qwen3_5.config import read_config
from payload.models.qwen3_5.spec import Qwen35Spec
from payload.models.spec import ModelSpec
from payload.models.transformers.spec import OtherSpec
from payload.train.families.llama.layers import RMSNorm
from payload.train.families.llama.model import without_padding_gradient
from payload.train.families.llama.rope import Table, frequencies, table
from payload.train.families.qwen3_5.caches import DeltaCache
from payload.train.families.qwen3_5.kernel_layers import joined, refusals, run_layers
from payload.train.families.qwen3_5.layers import AnyCache, Layer
from payload.train.families.transformers.model import TransformersLM
from payload.train.models.base import CausalLM, OuterModules
from payload.train.models.hf_layout import load_named, require_tied, saved_config
from payload.train.models.key_value_cache import LayerCache
from payload.train.models.quantized import loading_targets
from payload.train.models.uninitialised import Embedding, Linear

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DRAFT = "mtp."
"""Prefix of the layers that predict several tokens. transformers also skips these layers."""
_LARGEST_DECAY = 16.0
_SMALLEST_DECAY = 0.01


class Body(nn.Module):
    """The model without its output head."""

    def __init__(self, spec: Qwen35Spec, *, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(
            Layer(spec, is_full=is_full, dropout=dropout) for is_full in spec.are_full
        )
        self.norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps, offset=True)


class Qwen35(CausalLM):
    """The model. Its weights are initialised at random or set by the caller."""

    spec: Qwen35Spec
    packs_documents = True
    reads_parts = True

    def __init__(self, spec: Qwen35Spec, *, dropout: float = 0.0, random: bool = True) -> None:
        super().__init__(spec, dropout=dropout)
        self.model = Body(spec, dropout=dropout)
        self.lm_head: Linear | None = None
        if not spec.tie_word_embeddings:
            self.lm_head = Linear(spec.hidden_size, spec.vocab_size, bias=False)
        self._angles = frequencies(spec.rope, head_dim=spec.head_dim)
        if random:
            self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=self.spec.initializer_range)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif name.endswith(".A_log"):
                nn.init.uniform_(parameter, _SMALLEST_DECAY, _LARGEST_DECAY)
                with torch.no_grad():
                    parameter.log_()

    def hidden(
        self,
        tokens: Tensor,
        caches: Sequence[AnyCache] | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Map (B, T) token ids to hidden states (B, T, C) after the final norm.

        With `caches`, one per layer, `tokens` continue the cached tokens. `CausalLM.hidden`
        describes `starts`.
        """
        x = self._embedded(tokens)
        start = caches[0].num_tokens() if caches else 0
        rope = self._rope_table(start=start, length=tokens.shape[1], starts=starts)
        if self.kernels is not None and caches is None and not self._refusals():
            context = self.kernels.layer_context()
            if context is not None:
                where = (self.model, x, self.spec, rope, starts)
                return run_layers(*where, context, self.run_layer)
        bounds = self.bounds_of(starts)
        for number, layer in enumerate(self.model.layers):
            cache = caches[number] if caches else None
            x = self.run_layer(layer, x, rope, cache, starts, bounds)
        normed: Tensor = self.model.norm(x)
        return normed

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Map token ids (B, T) to embeddings (B, T, C)."""
        tied = self.tied_weight()
        if self.kernels is not None and tied is not None and tied.requires_grad:
            x = self.kernels.embed(tied, tokens)
        else:
            x = self.model.embed_tokens(tokens)
        padding, rows = self.spec.padding, self.spec.vocab_size
        if padding is not None:
            padding = padding % rows if -rows <= padding < rows else None
        return without_padding_gradient(x, tokens, padding)

    def _rope_table(self, *, start: int, length: int, starts: Tensor | None) -> Table:
        """Return the cosines and sines of `length` positions from `start` on.

        With `starts` (B, T), the table has a row for each of the B x T tokens, by the token's
        position in its document.
        """
        device = self.model.norm.weight.device
        # Kept on the device: a copy from the host would wait for the device.
        self._angles = self._angles.to(device)
        cos, sin = table(self._angles, start=start, length=length)
        if starts is None:
            return cos, sin
        places = (torch.arange(length, device=device) - starts).flatten()
        return cos[places], sin[places]

    def head_weight(self) -> nn.Parameter:
        """Return the output head's weight, (V, C)."""
        weight = (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def tied_weight(self) -> nn.Parameter | None:
        """Return the token embedding if it is also the output head, or None."""
        return self.head_weight() if self.spec.tie_word_embeddings else None

    def drop_head(self) -> None:
        """Remove the output head."""
        self.lm_head = None

    def classifier_architecture(self) -> str:
        """Return the name of transformers' classification class for this model."""
        return "Qwen3_5TextForSequenceClassification"

    def new_caches(self) -> list[AnyCache]:
        """Return empty caches, one per layer."""
        return [LayerCache() if is_full else DeltaCache() for is_full in self.spec.are_full]

    def layers(self) -> Sequence[nn.Module]:
        """Return the layers."""
        return list(self.model.layers)

    def outer_modules(self) -> OuterModules:
        """Return the modules outside the layers."""
        last = ("model.norm",) if self.lm_head is None else ("model.norm", "lm_head")
        return OuterModules(layers="model.layers", first=("model.embed_tokens",), last=last)

    def is_hidden_matrix(self, name: str) -> bool:
        """Return whether the parameter `name` is the matrix of a layer's linear."""
        return name.startswith("model.layers.") and self.get_parameter(name).dim() == 2

    def joined_linears(self) -> list[tuple[str, ...]]:
        """Return the paths of the layers' linears, grouped by equal input."""
        return [
            tuple(f"model.layers.{number}.{name}" for name in names)
            for number, is_full in enumerate(self.spec.are_full)
            for names in joined(is_full=is_full)
        ]

    def hf_config(self) -> dict[str, Any]:
        """Return the contents of the config.json that was read, changed for fp32 weights."""
        return saved_config(self.spec.config, architecture="Qwen3_5ForCausalLM")

    def load_tensors(self, tensors: Mapping[str, Tensor], *, where: str) -> None:
        """Set all weights from a checkpoint's tensors with transformers' names.

        Raises CheckpointError, naming `where`, if tensors are missing or do not have the model's
        shapes.
        """
        if self.lm_head is None:
            require_tied(tensors, head=_HEAD, embedding=_EMBEDDING, where=where)
        own: dict[str, Tensor] = {name: each.detach() for name, each in self.named_parameters()}
        drafts = tuple(name for name in tensors if name.startswith(_DRAFT))
        load_named(loading_targets(self, own), tensors, unused=(_HEAD, *drafts), where=where)

    def speed_notes(self) -> list[str]:
        """Return one line for each part that runs without the requested kernels, and why."""
        return [f"layers without kernels: {reason}" for reason in self._refusals()]

    def _refusals(self) -> list[str]:
        return list(refusals(self.model, self.spec, dropout=self.dropout))


def build(spec: ModelSpec, *, dropout: float = 0.0, random: bool = True) -> CausalLM:
    """Build the model of this spec; use transformers' layers if this module lacks a feature."""
    if isinstance(spec, OtherSpec):
        where = "config.json"
        lacks = ", ".join(read_config(spec.config, where=where).unsupported(where=where))
        reason = f"our own layers do not support {lacks}"
        return TransformersLM(spec, dropout=dropout, random=random, reason=reason)
    assert isinstance(spec, Qwen35Spec)
    return Qwen35(spec, dropout=dropout, random=random)
