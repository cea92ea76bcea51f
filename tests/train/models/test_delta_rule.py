"""The gated delta rule in chunks, against the rule token by token in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from payload.train.families.qwen3_5.delta_rule import gated_delta_rule, one_token
from payload.train.families.qwen3_5.short_convolution import short_convolution

BATCH, LENGTH, GROUPS, HEADS, KEYS, VALUES = 2, 150, 2, 4, 16, 24
DECAYS = (0.01, 0.5, 4.0, 15.0)
"""The least decay of each head, from one that keeps its state to one that loses it in a token."""


def inputs(*, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(BATCH, LENGTH, *shape, generator=generator)

    decay = -torch.rand(BATCH, LENGTH, HEADS, generator=generator) - torch.tensor(DECAYS)
    found = [drawn(GROUPS, KEYS), drawn(GROUPS, KEYS), drawn(HEADS, VALUES), drawn(HEADS), decay]
    return [each.to(dtype).requires_grad_() for each in found]


def token_by_token(q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor) -> Tensor:
    """Return the outputs for inputs of any length."""
    q, k = (each.repeat_interleave(HEADS // GROUPS, dim=2) for each in (q, k))
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    state = q.new_zeros(len(q), HEADS, KEYS, VALUES)
    found = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        missing = v[:, t] - (k[:, t].unsqueeze(-2) @ state).squeeze(-2)
        new = w[:, t].sigmoid().unsqueeze(-1) * missing
        state = state + k[:, t].unsqueeze(-1) * new.unsqueeze(-2)
        found.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2) * KEYS**-0.5)
    return torch.stack(found, dim=1)


def gradients(found: Tensor, given: list[Tensor]) -> tuple[Tensor, ...]:
    factors = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    return torch.autograd.grad((found * factors).sum(), given)


def by_head(x: Tensor) -> Tensor:
    """Return the norm of each of x's last heads."""
    rows = x.flatten(0, 1).flatten(2) if x.dim() > 3 else x.unsqueeze(-1).flatten(0, 1)
    found: Tensor = torch.linalg.vector_norm(rows, dim=(0, 2))
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_chunks_give_the_outputs_and_gradients_of_single_tokens(packed: bool) -> None:
    """Each head's error is relative to its own gradient, however small that is."""
    given, exact = inputs(), inputs(dtype=torch.float64)
    starts = documents() if packed else None
    found = gated_delta_rule(*given, starts=starts)[0]
    spans = [(0, 0, 150), (1, 0, 150)] if starts is None else SPANS
    wanted = torch.zeros(found.shape, dtype=torch.float64)
    for row, first, end in spans:
        some = (slice(row, row + 1), slice(first, end))
        wanted[some] = token_by_token(*(each[some] for each in exact))
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)
    for ours, true in zip(gradients(found, given), gradients(wanted, exact), strict=True):
        assert bool((by_head(ours - true) < 1e-4 * by_head(true)).all())


SPANS = [(0, 0, 37), (0, 37, 38), (0, 38, 150), (1, 0, 64), (1, 64, 70), (1, 70, 150)]


def documents() -> Tensor:
    starts = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    for row, first, end in SPANS:
        starts[row, first:end] = first
    return starts


def test_a_leak_between_documents_would_be_seen() -> None:
    """Without `starts`, the outputs change; with them, other documents do not change a bit."""
    given, other = inputs(), inputs()
    apart = gated_delta_rule(*given, starts=documents())[0]
    assert float((gated_delta_rule(*given)[0] - apart).detach().abs().max()) > 0.05
    with torch.no_grad():
        for each in other:
            each[0, :38] = each[0, 60:98]
    again = gated_delta_rule(*other, starts=documents())[0]
    assert torch.equal(again[0, 38:], apart[0, 38:]) and torch.equal(again[1], apart[1])
    assert not torch.equal(again[0, :38], apart[0, :38])


def test_a_state_continues_earlier_tokens_in_chunks_or_one_at_a_time() -> None:
    given = [each.detach() for each in inputs()]
    wanted, last = gated_delta_rule(*given)
    found, state = [], None
    for first, end in ((0, 1), (1, 71), (71, 72), (72, 150)):
        rule = one_token if end == first + 1 else gated_delta_rule
        made, state = rule(*(each[:, first:end] for each in given), state=state)
        found.append(made)
    torch.testing.assert_close(torch.cat(found, dim=1), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-5)


@pytest.mark.parametrize("taps", [1, 4])
def test_the_convolution_equals_that_of_torch_in_each_document(taps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, LENGTH, 6, generator=generator, requires_grad=True)
    weight = torch.randn(6, 1, taps, generator=generator, requires_grad=True)
    found = short_convolution(x, weight, starts=documents())
    wanted = torch.zeros_like(found)
    for row, first, end in SPANS:
        text = torch.nn.functional.pad(x[row, first:end].t(), (taps - 1, 0))
        made = torch.nn.functional.conv1d(text, weight, groups=6)
        wanted[row, first:end] = torch.nn.functional.silu(made).t()
    torch.testing.assert_close(found, wanted)
    ours, theirs = (gradients(each, [x, weight]) for each in (found, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
