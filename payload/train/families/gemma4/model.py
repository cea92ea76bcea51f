"""Gemma 4's dense text models, with transformers' own names.

The parameters have a checkpoint's names and shapes.
Shapes: B batch, T tokens of the input, C width, V vocabulary, L layers, P width of a layer's part
of the second token embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from payload.models.gemma4.config import Rope, read_config
from payload.models.gemma4.spec import Gemma4Spec
from payload.models.spec import ModelSpec
from payload.models.transformers.spec import OtherSpec
from payload.train.families.gemma4.capped_head import CappedHead
from payload.train.families.gemma4.kernel_layers import joined, refusals, run_layers
from payload.train.families.gemma4.layers import Keys, Layer, frequencies
from payload.train.families.llama.layers import RMSNorm
from payload.train.families.llama.model import without_padding_gradient
from payload.train.families.llama.rope import Table, table
from payload.train.families.transformers.model import TransformersLM
from payload.train.models.base import CausalLM, OuterModules
from payload.train.models.head_loss import HeadLoss
from payload.train.models.hf_layout import load_named, require_tied, saved_config
from payload.train.models.key_value_cache import LayerCache
from payload.train.models.quantized import loading_targets
from payload.train.models.uninitialised import Embedding, Linear

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OF_KEYS = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias", "k_norm.weight")
_ARCHITECTURE = "Gemma4ForCausalLM"


class Body(nn.Module):
    """The model without its output head."""

    def __init__(self, spec: Gemma4Spec, *, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size)
        if spec.ple_width:
            columns = len(spec.layers) * spec.ple_width
            self.embed_tokens_per_layer = Embedding(spec.ple_rows, columns)
            self.per_layer_model_projection = Linear(spec.hidden_size, columns, bias=False)
            self.per_layer_projection_norm = RMSNorm(
                spec.ple_width, eps=spec.rms_norm_eps, offset=False
            )
        self.layers = nn.ModuleList(Layer(spec, each, dropout=dropout) for each in spec.layers)
        self.norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps, offset=False)


class Gemma4(CausalLM):
    """The model. Its weights are initialised at random or set by the caller."""

    spec: Gemma4Spec
    reads_parts = True

    def __init__(self, spec: Gemma4Spec, *, dropout: float = 0.0, random: bool = True) -> None:
        super().__init__(spec, dropout=dropout)
        self.model = Body(spec, dropout=dropout)
        self.lm_head: Linear | None = None
        if not spec.tie_word_embeddings:
            self.lm_head = Linear(spec.hidden_size, spec.vocab_size, bias=False)
        self._angles = {
            (each.rope, each.head_dim): frequencies(each.rope, head_dim=each.head_dim)
            for each in spec.layers
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
        x = self._embedded(tokens, self.model.embed_tokens, self.spec.hidden_size)
        parts = self._parts(tokens, x)
        start = caches[0].num_tokens() if caches else 0
        ropes = self._rope_tables(start=start, length=tokens.shape[1], starts=starts)
        if self.kernels is not None and caches is None and not self._refusals():
            context = self.kernels.layer_context()
            if context is not None:
                where = (self.model, x, parts, self.spec, ropes, starts)
                return run_layers(*where, context, self.run_layer)
        bounds = self.bounds_of(starts)
        shared = {each.keys_from for each in self.spec.layers}
        made: dict[int, Keys] = {}
        for number, what in enumerate(self.spec.layers):
            x, keys = self.run_layer(
                self.model.layers[number],
                x,
                None if parts is None else parts[:, :, number],
                ropes[what.rope, what.head_dim],
                None if what.keys_from is None else made[what.keys_from],
                caches[number] if caches and what.keys_from is None else None,
                starts,
                bounds,
            )
            if number in shared:
                made[number] = keys
        normed: Tensor = self.model.norm(x)
        return normed

    def _embedded(self, tokens: Tensor, module: Embedding, width: int) -> Tensor:
        """Map token ids (B, T) to embeddings, scaled by the root of `width`."""
        padding = self.spec.padding
        if padding is not None:
            rows = len(module.weight)
            padding = padding % rows if -rows <= padding < rows else None
        found = without_padding_gradient(module(tokens), tokens, padding)
        return found * math.sqrt(width)

    def _parts(self, tokens: Tensor, x: Tensor) -> Tensor | None:
        """Return each layer's part of the second embedding, (B, T, L, P), or None without it.

        A part is the sum of the token's second embedding and a projection of its first embedding.
        The sum is divided by the root of 2.
        """
        width = self.spec.ple_width
        if not width:
            return None
        shape = (*tokens.shape, len(self.spec.layers), width)
        looked_up = self._embedded(tokens, self.model.embed_tokens_per_layer, width)
        projected = self.model.per_layer_model_projection(x) * self.spec.hidden_size**-0.5
        normed = self.model.per_layer_projection_norm(projected.view(shape))
        parts: Tensor = (normed + looked_up.view(shape)) * 2.0**-0.5
        return parts

    def _rope_tables(
        self, *, start: int, length: int, starts: Tensor | None
    ) -> dict[tuple[Rope, int], Table]:
        """Return the cosines and sines of `length` positions from `start` on, by kind of layer.

        With `starts` (B, T), a table has a row for each of the B x T tokens, by the token's
        position in its document.
        """
        device = self.model.norm.weight.device
        # Kept on the device: a copy from the host would wait for the device.
        self._angles = {kind: angles.to(device) for kind, angles in self._angles.items()}
        found = {
            kind: table(angles, start=start, length=length) for kind, angles in self._angles.items()
        }
        if starts is None:
            return found
        places = (torch.arange(length, device=device) - starts).flatten()
        return {kind: (cos[places], sin[places]) for kind, (cos, sin) in found.items()}

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (..., C) to logits (..., V), capped if the spec has a cap."""
        found = nn.functional.linear(hidden, self._head())
        if self.trained_tokens is not None:
            found = self.trained_tokens.replace(found, hidden)
        cap = self.spec.logits_cap
        return found if cap is None else torch.tanh(found / cap) * cap

    def _head_loss(self) -> HeadLoss:
        if self.spec.logits_cap is None:
            return super()._head_loss()
        return CappedHead(self.logits, rows=self.spec.vocab_size)

    def _head(self) -> nn.Parameter:
        weight = (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def head_weight(self) -> nn.Parameter | None:
        """Return the output head's weight (V, C), or None if the logits are capped."""
        return self._head() if self.spec.logits_cap is None else None

    def new_caches(self) -> list[LayerCache]:
        """Return empty caches, one per layer."""
        return [LayerCache() for _ in self.spec.layers]

    def layers(self) -> Sequence[nn.Module]:
        """Return the layers."""
        return list(self.model.layers)

    def outer_modules(self) -> OuterModules:
        """Return the modules outside the layers, by the pipeline stage that computes them."""
        last = ("model.norm",) if self.lm_head is None else ("model.norm", "lm_head")
        return OuterModules(layers="model.layers", first=("model.embed_tokens",), last=last)

    def is_hidden_matrix(self, name: str) -> bool:
        """Return whether the parameter `name` is the matrix of a layer's linear."""
        return name.startswith("model.layers.") and self.get_parameter(name).dim() == 2

    def _resize_vocabulary(self, rows: int) -> None:
        """Also resize the second embedding. Each new row is the mean of the old rows."""
        super()._resize_vocabulary(rows)
        if not self.spec.ple_width:
            return
        module = self.model.embed_tokens_per_layer
        old = module.weight.detach()
        mean = old.float().mean(0).to(old.dtype)
        new = torch.cat((old[:rows], mean.expand(max(0, rows - len(old)), -1)))
        module.weight = nn.Parameter(new, requires_grad=module.weight.requires_grad)
        module.num_embeddings = rows

    def joined_linears(self) -> list[tuple[str, ...]]:
        """Return the paths of the layers' linears, grouped by equal input."""
        return [
            tuple(f"model.layers.{number}.{name}" for name in names)
            for number, each in enumerate(self.spec.layers)
            for names in joined(each, has_part=bool(self.spec.ple_width))
        ]

    def hf_config(self) -> dict[str, Any]:
        """Return the contents of the config.json that was read, changed for fp32 weights."""
        return saved_config(self.spec.config, architecture=_ARCHITECTURE)

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return the weights and the layers' scalars with transformers' names and layout."""
        return super().hf_tensors() | dict(self.named_buffers())

    def load_tensors(self, tensors: Mapping[str, Tensor], *, where: str) -> None:
        """Set all weights from a checkpoint's tensors with transformers' names.

        Released files also have key and value weights for layers that use the keys and values of an
        earlier layer. As in transformers, these weights are not read. Raises CheckpointError,
        naming `where`, if tensors are missing or do not have the model's shapes.
        """
        if self.lm_head is None:
            require_tied(tensors, head=_HEAD, embedding=_EMBEDDING, where=where)
        own = {name: each.detach() for name, each in self.named_parameters()}
        own |= dict(self.named_buffers())
        unused = [
            f"layers.{number}.self_attn.{name}"
            for number, each in enumerate(self.spec.layers)
            if each.keys_from is not None
            for name in _OF_KEYS
        ]
        load_named(loading_targets(self, own), tensors, unused=(_HEAD, *unused), where=where)

    def speed_notes(self) -> list[str]:
        """Return one line for each part that runs without the requested kernels, and why."""
        return [f"layers without kernels: {reason}" for reason in self._refusals()]

    def _refusals(self) -> list[str]:
        return list(refusals(self.model, dropout=self.dropout))


def build(spec: ModelSpec, *, dropout: float = 0.0, random: bool = True) -> CausalLM:
    """Build the model of this spec; use transformers' layers if this module lacks a feature."""
    if isinstance(spec, OtherSpec):
        lacks = ", ".join(read_config(spec.config, where="config.json").unsupported())
        reason = f"our own layers do not support {lacks}"
        return TransformersLM(spec, dropout=dropout, random=random, reason=reason)
    assert isinstance(spec, Gemma4Spec)
    return Gemma4(spec, dropout=dropout, random=random)
