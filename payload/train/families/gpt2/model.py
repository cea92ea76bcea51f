"""GPT-2, with the original parameter names, so that published weights load unchanged.

Shapes: B batch, T tokens of the input, C n_embd, H n_head, V vocabulary.
Source: https://github.com/openai/gpt-2/blob/master/src/model.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from payload.core.errors import CheckpointError
from payload.data.tokenizers.gpt2 import END_OF_TEXT
from payload.kernels.layers import add_norm, attention, mlp
from payload.kernels.linears import LayerContext
from payload.models.gpt2.spec import Gpt2Spec
from payload.models.spec import ModelSpec
from payload.train.families.gpt2.layers import MLP, NORM_EPS, Attention, Block
from payload.train.models.base import CausalLM, OuterModules
from payload.train.models.hf_layout import require_tensors
from payload.train.models.kernel_support import layer_refusals, projection
from payload.train.models.key_value_cache import LayerCache
from payload.train.models.split import (
    Split,
    Splits,
    copy_to_ranks,
    embed,
    sum_with_bias,
)
from payload.train.models.stage import OtherStageModule
from payload.train.models.uninitialised import Embedding, Linear
from payload.train.tensors.lazy_tensors import copy_in

_PREFIX = "transformer."
# GPT-2's matrices are stored as (in, out), torch's Linear keeps (out, in).
# Source: transformers, models/gpt2/modeling_gpt2.py (Conv1D).
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# Buffers saved by old releases, and the head, which is the token embedding.
_NOT_PARAMETERS = (".attn.bias", ".attn.masked_bias", "lm_head.weight")

_INIT_STD = 0.02
_INIT_STD_POSITIONS = 0.01


_KNOWN = (Attention, Block, OtherStageModule, Embedding, Linear, MLP, nn.LayerNorm, nn.ModuleList)
_SPLITS = {
    "attn.c_attn.weight": Split(0, sections=(1, 1, 1)),
    "attn.c_attn.bias": Split(0, sections=(1, 1, 1)),
    "attn.c_proj.weight": Split(1),
    "mlp.c_fc.weight": Split(0),
    "mlp.c_fc.bias": Split(0),
    "mlp.c_proj.weight": Split(1),
}
_LINEARS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


class GPT(CausalLM):
    """The GPT-2 model. Its weights are initialised as in GPT-2's training, or set by the caller."""

    spec: Gpt2Spec
    packs_documents = True
    reads_parts = True

    def __init__(self, spec: Gpt2Spec, *, dropout: float = 0.0, random: bool = True) -> None:
        super().__init__(spec, dropout=dropout)
        self.activation = spec.activation
        self.wte = Embedding(spec.vocab_size, spec.n_embd)
        self.wpe = Embedding(spec.context(), spec.n_embd)
        self.h = nn.ModuleList(
            Block(spec, dropout=dropout, activation=spec.activation) for _ in range(spec.n_layer)
        )
        self.ln_f = nn.LayerNorm(spec.n_embd, eps=NORM_EPS, bias=spec.bias)
        self._has_bias, self._positions = spec.bias, spec.context()
        self._head_width = spec.n_embd // spec.n_head
        if random:
            self._initialise()

    def _initialise(self) -> None:
        # The paper scales the projections into the residual stream by one over the square root of
        # the number of residual layers; the other standard deviations are from OpenAI's code.
        residual_std = _INIT_STD / math.sqrt(2 * len(self.h))
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.constant_(parameter, 1.0 if is_norm_weight(name) else 0.0)
            elif name == "wpe.weight":
                nn.init.normal_(parameter, std=_INIT_STD_POSITIONS)
            else:
                nn.init.normal_(parameter, std=residual_std if "c_proj" in name else _INIT_STD)

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
        is_first = self.stage is None or self.stage.is_first()
        if self.stage is None or is_first:
            start = caches[0].num_tokens() if caches else 0
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
            if starts is not None:
                positions = positions - starts
            x: Tensor = self._embedded(tokens) + self.wpe(positions)
        else:
            x = self.stage.receive(tokens)
        if self.kernels is not None and caches is None and not self._without_kernels():
            context = self.kernels.layer_context()
            if context is not None:
                return self._fast_layers(x, starts, context)
        if is_first:
            x = functional.dropout(x, self.dropout, self.training)
        bounds = self.bounds_of(starts)
        for i, block in enumerate(self.layers()):
            x = self.run_layer(block, x, caches[i] if caches else None, starts, bounds)
        if self.stage is not None and not self.stage.is_last():
            return x
        normed: Tensor = self.ln_f(x)
        return normed

    def _embedded(self, tokens: Tensor) -> Tensor:
        if self.ranks is not None:
            return embed(self.wte.weight, tokens, self.ranks, vocab_rows=self.spec.vocab_size)
        if self.kernels is not None and self.wte.weight.requires_grad:
            return self.kernels.embed(self.wte.weight, tokens)
        embedded: Tensor = self.wte(tokens)
        return embedded

    def _fast_layers(self, x: Tensor, starts: Tensor | None, context: LayerContext) -> Tensor:
        """Map the sum of the embeddings (B, T, C), fp32, to the final norm's output."""
        with torch.autocast("cpu", enabled=False):
            sizes = (x.shape[0], x.shape[1])
            total: Tensor = x.flatten(0, 1)
            added: Tensor | None = None
            for block in cast("Iterable[Block]", self.layers()):
                total, added = self.run_layer(
                    block.computed_by, self._fast_layer, total, added, sizes, starts, context
                )
            if self.stage is not None and not self.stage.is_last():
                return (total if added is None else total + added).view(x.shape)
            _, normed = add_norm(total, added, self.ln_f, context)
            return normed.view(x.shape)

    def _fast_layer(
        self,
        block: Block,
        total: Tensor,
        added: Tensor | None,
        sizes: tuple[int, int],
        starts: Tensor | None,
        context: LayerContext,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream (B x T, C), and an output not yet added to the stream."""
        total, normed = add_norm(total, added, block.ln_1, context)
        module, ranks = block.attn, self.ranks
        heads = (*sizes, len(module.c_attn.weight) // (3 * module.head_width))
        qkv, out = projection(module.c_attn), projection(module.c_proj, is_part=ranks is not None)
        mixed = attention(copy_to_ranks(normed, ranks), qkv, out, heads, starts, context)
        if ranks is not None:
            mixed = sum_with_bias(mixed, module.c_proj.bias, ranks)
        total, normed = add_norm(total, mixed, block.ln_2, context)
        last = block.mlp.c_proj
        up, down = projection(block.mlp.c_fc), projection(last, is_part=ranks is not None)
        result = mlp(copy_to_ranks(normed, ranks), up, down, context)
        return total, result if ranks is None else sum_with_bias(result, last.bias, ranks)

    def _without_kernels(self) -> list[str]:
        """Return the reasons why the layers run without kernels, one line each."""
        found = []
        if self.dropout:
            found.append(f"dropout = {self.dropout}: the kernels have no dropout")
        if self.activation != "gelu_new":
            found.append(f"activation {self.activation}: the kernel computes only gelu_new")
        if self._head_width % 2:
            found.append(f"heads of odd width {self._head_width}")
        return [*found, *layer_refusals(self, known=_KNOWN)]

    def speed_notes(self) -> list[str]:
        """Return one line for each part that runs without the requested kernels, and why."""
        return [f"layers without kernels: {reason}" for reason in self._without_kernels()]

    def head_weight(self) -> nn.Parameter:
        """Return the output head's weight, which is the token embedding."""
        weight = self.wte.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def tied_weight(self) -> nn.Parameter:
        """Return the token embedding, which is also the output head."""
        return self.head_weight()

    def new_caches(self) -> list[LayerCache]:
        """Return empty caches, one per layer."""
        return [LayerCache() for _ in self.h]

    def layers(self) -> Sequence[nn.Module]:
        """Return this rank's layers."""
        numbers = range(len(self.h)) if self.stage is None else self.stage.layers
        return [self.h[number] for number in numbers]

    def outer_modules(self) -> OuterModules:
        """Return the modules outside the layers, by the pipeline stage that computes them."""
        return OuterModules(layers="h", first=("wte", "wpe"), last=("ln_f",))

    def splits(self) -> Splits:
        """Return how tensor ranks split heads, the MLP and the vocabulary."""
        parts = {"wte.weight": Split(0)}
        for number in range(len(self.h)):
            for name, split in _SPLITS.items():
                parts[f"h.{number}.{name}"] = split
        return Splits(parts)

    def is_hidden_matrix(self, name: str) -> bool:
        """Return whether the parameter `name` is a layer's matrix."""
        return name.startswith("h.") and self.get_parameter(name).dim() == 2

    def joined_linears(self) -> list[tuple[str, ...]]:
        """Return the paths of the layers' linears, one per group. Each has its own input."""
        return [(f"h.{number}.{name}",) for number in range(len(self.h)) for name in _LINEARS]

    def classifier_architecture(self) -> str:
        """Return the name of transformers' classification class for this model."""
        return "GPT2ForSequenceClassification"

    def hf_name(self, module: str) -> str:
        """Return transformers' path of a module."""
        return _PREFIX + module

    def transposes_linears(self) -> bool:
        """Return True: transformers' Conv1D stores weights as (in, out)."""
        return True

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return the weights with transformers' names and layout."""
        tensors = {
            _PREFIX + name: value.t() if name.endswith(_TRANSPOSED) else value
            for name, value in self.state_dict().items()
        }
        # GPT2LMHeadModel always has biases; zeros are equivalent to no bias.
        return tensors | {
            _PREFIX + name: torch.zeros(size) for name, size in self._absent_biases().items()
        }

    def hf_config(self) -> dict[str, Any]:
        """Return the contents of a config.json from which transformers builds the same model."""
        # Not read from the tensors: a rank may hold only a part of them.
        rows, width = self.spec.vocab_size, self.spec.n_embd
        # The vocabulary of a different tokenizer may lack this token.
        end_of_text = END_OF_TEXT if rows > END_OF_TEXT else None
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": self.activation,
            "n_layer": self.spec.n_layer,
            "n_head": self.spec.n_head,
            "n_embd": width,
            "n_positions": self._positions,
            "n_ctx": self._positions,
            "vocab_size": rows,
            "layer_norm_epsilon": NORM_EPS,
            "initializer_range": _INIT_STD,
            "attn_pdrop": self.dropout,
            "embd_pdrop": self.dropout,
            "resid_pdrop": self.dropout,
            "bos_token_id": end_of_text,
            "eos_token_id": end_of_text,
            "tie_word_embeddings": True,
            "dtype": "float32",
            "tileforge_bias": self._has_bias,
        }

    def load_tensors(self, tensors: Mapping[str, Tensor], *, where: str) -> None:
        """Set all weights from a checkpoint's tensors with transformers' names.

        Raises CheckpointError, naming `where`, if tensors are missing or do not have the model's
        shapes.
        """
        places: dict[str, str] = {}
        for name in tensors:
            other = places.setdefault(name.removeprefix(_PREFIX), name)
            if other != name:
                raise CheckpointError(
                    f"{where}: {other} and {name} are one tensor under two names. Use a folder "
                    "with all weights of a GPT-2."
                )
        head = places.get("lm_head.weight")
        embedding = places.get("wte.weight", head)
        if head and embedding and not torch.equal(tensors[head], tensors[embedding]):
            raise CheckpointError(
                f"{where}: its output head differs from its token embedding; only tied embeddings "
                "are supported. Use a GPT-2 with tied embeddings."
            )
        expected = {
            places.get(name, name): target.t() if name.endswith(_TRANSPOSED) else target
            for name, target in self.state_dict().items()
        }
        # transformers' files always have biases; for a model without biases they are zero.
        absent = {
            places[name]: torch.empty(size)
            for name, size in self._absent_biases().items()
            if name in places
        }
        require_tensors({**expected, **absent}, tensors, where=where, unused=_NOT_PARAMETERS)
        for name in absent:
            if bool(tensors[name].any()):
                raise CheckpointError(
                    f"{where}: {name} is not zero, but tileforge_bias = false in config.json. Set "
                    "tileforge_bias to true to use the biases."
                )
        for name, target in {**expected, **absent}.items():
            copy_in(tensors, name, target)

    def _absent_biases(self) -> dict[str, int]:
        """Return name and size of each bias that only transformers' model has."""
        if self._has_bias:
            return {}
        width = self.spec.n_embd
        sizes = {"ln_f.bias": width}
        for layer in range(len(self.h)):
            sizes |= {
                f"h.{layer}.ln_1.bias": width,
                f"h.{layer}.ln_2.bias": width,
                f"h.{layer}.attn.c_attn.bias": 3 * width,
                f"h.{layer}.attn.c_proj.bias": width,
                f"h.{layer}.mlp.c_fc.bias": 4 * width,
                f"h.{layer}.mlp.c_proj.bias": width,
            }
        return sizes


def build(spec: ModelSpec, *, dropout: float = 0.0, random: bool = True) -> GPT:
    """Build the model of this spec."""
    assert isinstance(spec, Gpt2Spec)
    return GPT(spec, dropout=dropout, random=random)


def is_norm_weight(name: str) -> bool:
    """Return whether a parameter is the scale of a layer norm, by its name."""
    return name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight"))
