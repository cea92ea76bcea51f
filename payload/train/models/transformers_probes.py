"""Tests of a transformers model by small passes: whether it is causal, and what its head does."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from payload.errors import CheckpointError
from payload.untrusted import shown

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


def require_causal(module: _Module) -> None:
    """Raise CheckpointError when a token's logits depend on the tokens behind it."""
    pairs = (torch.tensor([[0, other]]) for other in (1, 2))
    first, second = (_probed(module, each)[0, 0] for each in pairs)
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-4):
        raise CheckpointError(
            f"config.json: model_type = {shown(module.config.model_type)}: each token sees those "
            "behind it, so it cannot learn to predict the next one. Use a causal language model."
        )


def _probed(module: _Module, tokens: Tensor, *, training: bool = False) -> Tensor:
    """Return the logits of a few tokens. Raises CheckpointError when transformers' code fails."""
    was_training = module.training
    module.train(training)
    try:
        with torch.no_grad():
            return cast(Tensor, module(input_ids=tokens, use_cache=False, return_dict=True).logits)
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
