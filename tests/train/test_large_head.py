"""The head of a large vocabulary: smaller chunks of tokens, the same loss and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from payload.formats.data_folder import IGNORED_TARGET
from payload.kernels import head
from payload.kernels.accumulate import TokenGradient
from payload.kernels.library import Library
from payload.models.spec import logits_tokens
from tests.train.test_kernels import error, random

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

BF16 = torch.bfloat16
WORDS = 262_144


@pytest.mark.parametrize(
    ("vocab_size", "tokens"), [(256, 2048), (50_257, 2048), (151_936, 1024), (WORDS, 512)]
)
def test_a_large_vocabulary_has_the_logits_of_fewer_tokens_at_once(
    vocab_size: int, tokens: int
) -> None:
    assert logits_tokens(vocab_size) == tokens
    assert 2 * logits_tokens(vocab_size) * vocab_size <= 320 * 10**6
    assert logits_tokens(10**10) == 1


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [pytest.param(torch.float32, 1e-5, marks=pytest.mark.slow), (BF16, 1e-2)],
)
def test_262144_words_have_the_reference_s_loss_and_gradients(
    library: Library, dtype: torch.dtype, bound: float
) -> None:
    count = 530  # A chunk of 512 tokens, and one of 18.
    hidden = (random(count, 32) / 8).to(dtype).requires_grad_()
    weight = random(WORDS, 32, seed=1).to(dtype).float().requires_grad_()
    targets = torch.randint(WORDS, (count,), generator=torch.Generator().manual_seed(2))
    targets[7] = IGNORED_TARGET
    exact_hidden = hidden.detach().float().requires_grad_()
    exact_weight = weight.detach().clone().requires_grad_()

    loss = head.mean_loss(
        hidden, weight, weight.detach().to(dtype), targets, TokenGradient(library)
    )
    torch.autograd.backward(loss)

    true = 0.0
    for start in range(0, count, 64):
        part = slice(start, start + 64)
        logits = functional.linear(exact_hidden[part], exact_weight)
        losses = functional.cross_entropy(
            logits, targets[part], ignore_index=IGNORED_TARGET, reduction="sum"
        )
        torch.autograd.backward(losses / (count - 1))
        true += losses.item() / (count - 1)
    assert loss.item() == pytest.approx(true, rel=bound / 10)
    for ours, expected in ((hidden.grad, exact_hidden.grad), (weight.grad, exact_weight.grad)):
        assert ours is not None and expected is not None
        assert error(ours, expected) < bound
