"""Tests of a transformers model by small passes: whether it is causal, and what its head does."""

from __future__ import annotations

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
"""transformers.PreTrainedModel, most of whose methods have no types."""

_PROBE_TOKENS = 2
_PROBE_DOCUMENT = 8


def why_not_plain(module: _Module) -> str | None:
    """Return None when the logits are a linear layer of the last hidden state, else the reason.

    A pass whose hidden state and logits are replaced by numbers of ours shows whether anything
    happens to either on its way. It does not depend on the weights, so all ranks agree.
    """
    head = module.get_output_embeddings()
    body = module.base_model
    if type(head) is not nn.Linear:
        return f"the head is {type(head).__name__}, not a plain linear layer"
    if head.bias is not None:
        return "the head has a bias"
    if body is module:
        return "the module without its head is not to be had"
    generator = torch.Generator().manual_seed(0)
    width, words = head.in_features, head.out_features
    hidden = torch.randn(1, _PROBE_TOKENS, width, generator=generator)
    logits = 100 * torch.randn(1, _PROBE_TOKENS, words, generator=generator)
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
        return "the hidden state changes on its way to the head"
    if not torch.equal(made, logits):
        return "the logits change behind the head (a scale or a soft cap)"
    return None


def mixes_documents(module: _Module) -> bool:
    """Say whether a document's logits depend on the one before it in the same row."""
    width = int(module.get_output_embeddings().weight.shape[0])
    generator = torch.Generator().manual_seed(0)
    first, other, second = torch.randint(
        width, (3, 1, _PROBE_DOCUMENT), generator=generator
    ).unbind()
    positions = torch.arange(_PROBE_DOCUMENT).repeat(2)[None]
    made = []
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            for before in (first, other):
                tokens = torch.cat((before, second), dim=1)
                found = module(
                    input_ids=tokens, position_ids=positions, use_cache=False, return_dict=True
                )
                made.append(found.logits[:, _PROBE_DOCUMENT:])
    except TypeError:  # It takes no positions.
        return True
    finally:
        module.train(was_training)
    return not torch.equal(*made)


def draws_in_training(module: _Module) -> bool:
    """Say whether a pass in training differs from the next one, as where a router samples.

    The seed of a pass then makes it the same at a resume, as it does with dropout.
    """
    before = torch.random.get_rng_state()
    tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64)
    _probed(module, tokens, training=True)
    drawn = not torch.equal(torch.random.get_rng_state(), before)
    torch.random.set_rng_state(before)
    return drawn


def require_causal(module: _Module, *, without_head: bool = False) -> None:
    """Raise CheckpointError when a token's logits depend on the tokens behind it.

    A plain head reads one token at a time, so `without_head` leaves it out: torch would reorder
    its whole weight into a copy. Weights of 4 bits stay as they are for the same reason.
    """
    pairs = (torch.tensor([[0, other]]) for other in (1, 2))
    with _weightless(module):
        first, second = (_probed(module, each, without_head=without_head)[0, 0] for each in pairs)
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-4):
        raise CheckpointError(
            f"config.json: model_type = {shown(module.config.model_type)}: each token sees those "
            "behind it, so it cannot learn to predict the next one. Use a causal language model."
        )


@contextmanager
def _weightless(module: _Module) -> Iterator[None]:
    """Let linears of 4 bits pass their inputs on, over and over until all outputs have one.

    Which tokens a token sees does not depend on weights, and none is dequantised.
    """
    linears = [each for each in module.modules() if isinstance(each, QuantizedLinear)]
    for each in linears:
        places = torch.arange(each.out_features) % each.in_features
        # Of this object alone; its class keeps the method.
        each.forward = partial(torch.index_select, dim=-1, index=places)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for each in linears:
            del each.forward


def _probed(
    module: _Module, tokens: Tensor, *, training: bool = False, without_head: bool = False
) -> Tensor:
    """Return the logits of a few tokens, or the hidden states that the head would read.

    Raises CheckpointError when transformers' code fails.
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
            f"config.json: transformers cannot run it ({first_line(error)}). Name the folder of a "
            "whole model."
        ) from None
    finally:
        module.train(was_training)


def first_line(error: Exception) -> str:
    """Return the first line of the error's text, or its class without one."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
