"""Attention by document, as on GPUs: torch's own operator, computed here in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from payload.formats.data_folder import IGNORED_TARGET
from payload.train.models import attention
from payload.train.models.attention import attend, document_bounds, load_varlen_attention
from tests.train.models.test_documents import make, packed

BOUNDS = (0, 37, 38, 168, 200, 328, 400)
"""The documents of `packed`: 37, 1, 130 and 32 tokens, then 128 and 72."""


def probabilities(query: Tensor, key: Tensor, scale: float, window: int) -> Tensor:
    """Return the attention probabilities (H, N, N) of one document's heads (H, N, D)."""
    scores = scale * query @ key.transpose(1, 2)
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).tril().logical_not()
    if window >= 0:
        hidden |= torch.ones(scores.shape[1:], dtype=torch.bool).tril(-window - 1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def attended(heads: list[Tensor], scale: float, window: int) -> list[Tensor]:
    """Return one document's output (H, N, D) from its queries, keys and values."""
    query, key, value = heads
    return [probabilities(query, key, scale, window) @ value]


def gradients(heads: list[Tensor], scale: float, window: int) -> list[Tensor]:
    """Return the gradients of queries, keys and values; the last of `heads` is the output's."""
    query, key, value, outer = heads
    weights = probabilities(query, key, scale, window)
    of_weights = outer @ value.transpose(1, 2)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
    turned = of_scores.transpose(1, 2)
    return [scale * of_scores @ key, scale * turned @ query, weights.transpose(1, 2) @ outer]


def by_document(
    function: Any, heads: list[Tensor], bounds: Tensor, scale: float | None, window: int
) -> list[Tensor]:
    """Apply `function` to each document of rows (N, heads, D); sum over shared key heads."""
    groups = heads[0].shape[1] // heads[1].shape[1]
    wide = [
        each.float().repeat_interleave(groups if number in (1, 2) else 1, dim=1).transpose(0, 1)
        for number, each in enumerate(heads)
    ]
    ends = bounds.tolist()
    found = [
        function([each[:, first:end] for each in wide], scale or wide[0].shape[-1] ** -0.5, window)
        for first, end in itertools.pairwise(ends)
    ]
    joined = [torch.cat(parts, dim=1).transpose(0, 1) for parts in zip(*found, strict=True)]
    for number in range(1, len(joined)):
        rows = joined[number]
        joined[number] = rows.view(len(rows), -1, groups, rows.shape[-1]).sum(2)
    return [each.to(heads[0].dtype).contiguous() for each in joined]


@pytest.fixture(autouse=True, scope="module")
def operator_on_cpus() -> Iterator[None]:
    """Give torch's operator, which is for GPUs, an implementation on the CPU."""

    def forward(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        key, value, bounds, _, _, _, _, scale, window, *_ = rest
        (found,) = by_document(attended, [query, key, value], bounds, scale, window[0])
        unused = torch.zeros(query.shape[1], len(query))
        return found, unused, torch.zeros(2, dtype=torch.uint64)

    def backward(outer: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        query, key, value, _, _, bounds, _, _, _, _, _, scale, window = rest
        heads = [query, key, value, outer]
        return tuple(by_document(gradients, heads, bounds, scale, window[0]))

    assert load_varlen_attention()
    operators: Any = varlen
    operators._varlen_attn.register_kernel("cpu")(forward)
    operators._varlen_attn_backward.register_kernel("cpu")(backward)
    yield
    operators._varlen_attn._backend_fns.pop("cpu")
    operators._varlen_attn_backward._backend_fns.pop("cpu")


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_by_document_is_attention_with_a_mask(key_heads: int, window: int | None) -> None:
    torch.manual_seed(0)
    _, _, starts = packed(50)
    heads = [torch.randn(2, count, 200, 16) for count in (4, key_heads, key_heads)]
    outer = torch.randn(2, 4, 200, 16)

    def graded(bounds: Tensor | None) -> list[Tensor]:
        leaves = [each.to(torch.bfloat16).requires_grad_() for each in heads]
        options: Any = {"starts": starts, "bounds": bounds, "window": window, "scale": 0.3}
        found = attend(*leaves, **options)
        return [found, *torch.autograd.grad(found, leaves, outer.to(found.dtype))]

    for ours, masked in zip(graded(document_bounds(starts)), graded(None), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, masked, atol=0.03, rtol=0.02)


def test_a_mask_serves_what_flash_attention_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_attend_by_document", None)
    _, _, starts = packed(50)
    bounds = document_bounds(starts)
    for width, dtype in ((16, torch.float32), (12, torch.bfloat16), (264, torch.bfloat16)):
        heads = torch.randn(2, 2, 200, width, dtype=dtype)
        assert attend(heads, heads, heads, starts=starts, bounds=bounds).shape == heads.shape
    dropped = torch.randn(2, 2, 200, 16, dtype=torch.bfloat16)
    attend(dropped, dropped, dropped, starts=starts, bounds=bounds, dropout=0.1)


def places_of(starts: Tensor, *, joins_padding: bool = False) -> list[int]:
    found = document_bounds(starts, joins_padding=joins_padding)
    assert found is not None
    return [int(each) for each in found]


def test_bounds_are_the_first_tokens_and_padding_is_one_document() -> None:
    _, _, starts = packed(50)
    assert tuple(places_of(starts)) == BOUNDS
    assert tuple(places_of(starts, joins_padding=True)) == BOUNDS
    padded = torch.tensor([[0, 0, 2, 2, 4, 5], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 5]])
    assert places_of(padded) == [0, 2, 4, 5, 6, 12, 17, 18]
    assert places_of(padded, joins_padding=True) == [0, 2, 4, 6, 12, 17, 18]


def test_more_documents_than_cuda_counts_are_separated_by_a_mask() -> None:
    single = torch.arange(65_536).unsqueeze(0)
    assert document_bounds(single) is None
    assert document_bounds(single, joins_padding=True) is not None
    model = make("gpt2")
    model.attends_by_document = model.has_single_tokens = True
    assert model.bounds_of(single) is None
    model.has_single_tokens = False
    assert model.bounds_of(single) is not None


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "qwen2, windows", "gemma4_text, small", "qwen3_5_text"]
)
def test_a_model_attends_by_document_as_with_a_mask(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # The operator above computes in fp32, too. In bf16, rounding would hide errors.
    monkeypatch.setattr(attention, "_HALF", (torch.float32,))
    model = make(name).train()
    batch = packed(model.spec.vocab_size)

    def graded(*, by_document: bool, known: bool = True) -> list[Tensor]:
        model.attends_by_document = by_document
        model.zero_grad()
        inputs = model.sent(batch, lambda values: values) if known else batch
        loss = model(*inputs)
        loss.backward()
        return [loss.detach()] + [p.grad for p in model.parameters() if p.grad is not None]

    masked = graded(by_document=False)
    ours, unknown = graded(by_document=True), graded(by_document=True, known=False)
    assert all(map(torch.equal, ours, unknown))
    for one, other in zip(ours, masked, strict=True):
        assert float((one - other).norm()) <= 1e-4 * float(other.norm()) + 1e-7


def test_a_batch_without_documents_has_no_layout() -> None:
    model = make("gpt2")
    model.attends_by_document = True
    tokens, targets, starts = packed(model.spec.vocab_size)
    model.sent((tokens, targets, starts), lambda values: values)
    assert model.layout is not None
    assert model.layout.chosen.tolist() == [
        place for place, target in enumerate(targets.flatten()) if target != IGNORED_TARGET
    ]
    assert len(model.sent((tokens, targets), lambda values: values)) == 2
    assert model.layout is None
