"""Probes of a transformers model with small inputs: causality, packing, and a plain head."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.train.models.quantized import QuantizedLinear

_Module = Any
"""transformers.PreTrainedModel. Most of its methods have no type hints."""

_PROBE_TOKENS = 2
_PROBE_DOCUMENT = 8
_MOST_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest change of a logit, relative to the largest logit, that counts as rounding. In fp32,
rounding changes a logit by 1e-6. The smallest leak is 1e-4: convolutions of LFM2 with random
weights."""


def why_not_plain(module: _Module) -> str | None:
    """Return why the logits are not a linear layer of the last hidden state, or None.

    The probe replaces the hidden state and the logits by known numbers, and detects any change to
    them. The result does not depend on the weights, so it is the same on all ranks.
    """
    head = module.get_output_embeddings()
    body = module.base_model
    if type(head) is not nn.Linear:
        return f"the head is {type(head).__name__}, not a plain linear layer"
    if head.bias is not None:
        return "the head has a bias"
    if body is module:
        return "the module has no body without its head"
    generator = torch.Generator().manual_seed(0)
    width, vocab_size = head.in_features, head.out_features
    hidden = torch.randn(1, _PROBE_TOKENS, width, generator=generator)
    logits = 100 * torch.randn(1, _PROBE_TOKENS, vocab_size, generator=generator)
    read: list[Tensor] = []

    def replace_hidden(_: object, __: object, made: Any) -> Any:
        made["last_hidden_state" if "last_hidden_state" in made else 0] = hidden
        return made

    def replace_logits(_: object, inputs: tuple[Tensor, ...], __: object) -> Tensor:
        read.append(inputs[0])
        return logits

    hooks: list[RemovableHandle] = [
        body.register_forward_hook(replace_hidden),
        head.register_forward_hook(replace_logits),
    ]
    try:
        made = _probed(module, torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64))
    finally:
        for hook in hooks:
            hook.remove()
    if len(read) != 1 or not torch.equal(read[0], hidden):
        return "the hidden state changes before the head"
    if not torch.equal(made, logits):
        return "the logits change after the head (a scale or a soft cap)"
    return None


def mixes_documents(module: _Module) -> bool:
    """Return whether a document's logits depend on the previous document in its row.

    A rounding difference does not count. In a mixture of experts, tokens of both documents share an
    expert's matmuls, and torch's order of summation depends on the number of rows.
    """
    dtype = module.get_output_embeddings().weight.dtype
    return not document_leak(module) <= _MOST_ROUNDING[dtype]  # Also for NaN.


def document_leak(module: _Module) -> float:
    """Return how much a document's logits depend on the previous document in its row.

    The result is the largest change of a logit, relative to the largest logit; infinity for a model
    that takes no positions.
    """
    weight = module.get_output_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(weight), (3, 1, _PROBE_DOCUMENT), generator=generator)
    first, other, second = drawn.to(weight.device).unbind()
    positions = torch.arange(_PROBE_DOCUMENT, device=weight.device).repeat(2)[None]
    made = []
    was_training = module.training
    module.eval()
    try:
        # In autocast's bf16, rounding would hide a leak.
        with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            for before in (first, other):
                tokens = torch.cat((before, second), dim=1)
                found = module(
                    input_ids=tokens, position_ids=positions, use_cache=False, return_dict=True
                )
                made.append(found.logits[:, _PROBE_DOCUMENT:])
    except TypeError:  # The model takes no positions.
        return math.inf
    finally:
        module.train(was_training)
    one, another = (each.float() for each in made)
    largest = torch.maximum(one.abs().max(), another.abs().max())
    return float((one - another).abs().max() / largest)


def draws_in_training(module: _Module) -> bool:
    """Return whether a forward pass in training draws random numbers, as a sampling router does.

    For such a model, each micro-batch is seeded, as for dropout, so that a resume is exact.
    """
    before = torch.random.get_rng_state()
    tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64)
    _probed(module, tokens, training=True)
    drawn = not torch.equal(torch.random.get_rng_state(), before)
    torch.random.set_rng_state(before)
    return drawn


def require_causal(module: _Module, *, without_head: bool = False) -> None:
    """Raise CheckpointError if a token's logits depend on later tokens.

    `without_head` skips a plain head, which cannot mix tokens. To run the head, torch would copy
    the head's whole weight into a different layout. 4-bit weights stay quantised, which also saves
    memory.
    """
    pairs = (torch.tensor([[0, other]]) for other in (1, 2))
    with _weightless(module):
        first, second = (_probed(module, each, without_head=without_head)[0, 0] for each in pairs)
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-4):
        raise CheckpointError(
            f"config.json: model_type = {shown(module.config.model_type)}: its tokens attend to "
            "later tokens, so the model cannot predict the next token. Use a causal language model."
        )


@contextmanager
def _weightless(module: _Module) -> Iterator[None]:
    """Temporarily make 4-bit linears return repeated inputs, so that no weight is dequantised.

    The attention mask does not depend on the weights.
    """
    linears = [each for each in module.modules() if isinstance(each, QuantizedLinear)]
    for each in linears:
        places = torch.arange(each.out_features) % each.in_features
        # Set on this object only; its class keeps the method.
        each.forward = partial(torch.index_select, dim=-1, index=places)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for each in linears:
            del each.forward


def _probed(
    module: _Module, tokens: Tensor, *, training: bool = False, without_head: bool = False
) -> Tensor:
    """Return the logits of a few tokens, or the hidden states before the head.

    Raises CheckpointError if transformers' code fails.
    """
    called = module.base_model if without_head else module
    was_training = module.training
    module.train(training)
    try:
        with torch.no_grad():
            made = called(input_ids=tokens, use_cache=False, return_dict=True)
            return cast(Tensor, made.last_hidden_state if without_head else made.logits)
    except Exception as error:  # As in build_module.
        raise CheckpointError(
            f"config.json: transformers cannot run the model ({first_line(error)}). Use a "
            "folder with the model's config.json and all its weight files."
        ) from None
    finally:
        module.train(was_training)


def first_line(error: Exception) -> str:
    """Return the first line of the error's text, or its class name if the text is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
