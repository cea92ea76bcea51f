"""A small random model for these tests."""

from __future__ import annotations

import torch

from payload.models.gpt2.spec import Gpt2Spec
from payload.train.families.gpt2.model import GPT


def make_model(*, sequence_length: int = 64, vocab_size: int = 50257, seed: int = 0) -> GPT:
    """Return a model with random weights, large enough that logits are well separated."""
    torch.manual_seed(seed)
    model = GPT(
        Gpt2Spec(
            n_layer=2, n_head=2, n_embd=32, sequence_length=sequence_length, vocab_size=vocab_size
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model
