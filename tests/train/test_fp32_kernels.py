"""The layers' kernels in fp32 against torch in double precision: results, gradients, odd sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from payload.kernels import decoder_pointwise as passes
from payload.kernels.decoder_pointwise import HeadSizes, NormScale
from payload.kernels.library import Library
from tests.train.test_decoder_kernels import (
    plain_attention,
    plainly_normed,
    plainly_rotated,
    rotation_of,
)
from tests.train.test_kernels import error, random

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

FP32 = torch.float32
# Some roundings to fp32, of 6e-8 each, in sums of up to a thousand terms.
BOUND = 2e-6


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("batch", "length", "heads", "key_heads", "width", "reach"),
    [
        *[(1, 1, 2, 1, 2, None), (2, 37, 4, 2, 16, None), (1, 129, 3, 1, 64, None)],
        *[(1, 143, 9, 3, 34, None), (2, 260, 2, 1, 128, None), (1, 131, 2, 2, 256, None)],
        *[(2, 200, 4, 2, 32, 1), (1, 200, 3, 1, 64, 50), (1, 300, 2, 1, 6, 128)],
    ],
)
def test_attention_and_its_gradient_are_those_of_torch(
    library: Library,
    threads: int,
    batch: int,
    length: int,
    heads: int,
    key_heads: int,
    width: int,
    reach: int | None,
    apart: bool,
) -> None:
    qkv = random(batch, length, heads + 2 * key_heads, width)
    grad_out = random(batch, length, heads, width, seed=1)
    starts = None
    if reach is not None:
        # A window, and a document that begins in the middle.
        starts = (torch.arange(length) - reach + 1).clamp_min(0).repeat(batch, 1)
        starts[0, length // 2 :] = starts[0, length // 2 :].clamp_min(length // 2)
    leaf = qkv.double().requires_grad_()
    true = plain_attention(leaf, key_heads=key_heads, scale=0.1, starts=starts)
    torch.autograd.backward(true, grad_out.double())
    qk = None
    if apart:
        # The queries and keys in `qkv` must not be read.
        qk, qkv = qkv[:, :, :-key_heads].contiguous(), qkv.clone()
        qkv[:, :, :-key_heads] = float("nan")

    options: dict[str, Any] = {"key_heads": key_heads, "qk": qk, "scale": 0.1, "starts": starts}
    out, log_sums = library.grouped_attention_forward(qkv, **options)
    grad = library.grouped_attention_backward(qkv, out, log_sums, grad_out, **options)

    assert out.dtype is grad.dtype is FP32
    assert error(out, true.detach()) < BOUND
    assert leaf.grad is not None
    values = slice(heads + key_heads, None)
    assert error(grad[:, :, values], leaf.grad[:, :, values]) < BOUND
    if length > 1 and reach != 1:
        assert error(grad, leaf.grad) < BOUND


def test_large_scores_neither_overflow_nor_vanish(library: Library) -> None:
    qkv = random(1, 200, 3, 2, 32) * 30
    true = plain_attention(qkv.flatten(2, 3), key_heads=2)
    out, log_sums = library.attention_forward(qkv)
    # A score of 30,000 has an error of 1e-3, which is that of its exponential.
    assert error(out, true) < 1e-3
    grad = library.attention_backward(qkv, out, log_sums, torch.ones_like(out))
    assert bool(grad.isfinite().all())


@pytest.mark.parametrize(("adds", "share"), [(True, 1.0), (True, 0.22), (False, 1.0)])
@pytest.mark.parametrize(("rows", "width"), [(63, 33), (130, 576)])
def test_the_residual_sum_and_its_rms_norm_are_those_of_torch(
    library: Library, threads: int, rows: int, width: int, adds: bool, share: float
) -> None:
    x, grad_normed = random(rows, width), random(rows, width, seed=5)
    added = random(rows, width, seed=1) if adds else None
    scale = NormScale(random(width, seed=2), eps=1e-5, offset=1.0)
    grad_total = random(rows, width, seed=4) if adds else None
    leaf = x.double() + (share * added.double() if added is not None else 0)
    leaf.requires_grad_()
    weight = scale.weight.double().requires_grad_()
    true = plainly_normed(leaf, scale, weight)
    torch.autograd.backward(true, grad_normed.double())
    assert leaf.grad is not None and weight.grad is not None
    whole = leaf.grad + (grad_total.double() if grad_total is not None else 0)

    total, normed, rstd = passes.rms_norm_forward(
        library, x, added, scale, added_scale=share, dtype=FP32
    )
    grad_x, grad_added, grad_weight = passes.rms_norm_backward(
        library, total, rstd, scale, grad_total, grad_normed, adds=adds, added_scale=share
    )

    assert error(total, leaf.detach()) < BOUND
    assert error(normed, true.detach()) < BOUND
    assert error(grad_x, whole) < BOUND
    assert grad_weight is not None and error(grad_weight, weight.grad) < BOUND
    assert (grad_added is not None) == adds
    if grad_added is not None:
        assert torch.equal(grad_added, grad_x * share)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(63, 33), (130, 768)])
def test_the_residual_sum_and_its_layer_norm_are_those_of_torch(
    library: Library, threads: int, rows: int, width: int, adds: bool, bias: bool
) -> None:
    x, grad_normed = random(rows, width), random(rows, width, seed=5)
    added = random(rows, width, seed=1) if adds else None
    weight, offset = random(width, seed=2), random(width, seed=3) if bias else None
    grad_total = random(rows, width, seed=4) if adds else None
    leaf = (x.double() + (added.double() if added is not None else 0)).requires_grad_()
    scale = weight.double().requires_grad_()
    shift = None if offset is None else offset.double()
    true = functional.layer_norm(leaf, (width,), scale, shift, eps=1e-5)
    torch.autograd.backward(true, grad_normed.double())
    assert leaf.grad is not None and scale.grad is not None
    whole = leaf.grad + (grad_total.double() if grad_total is not None else 0)

    total, normed, mean, rstd = library.add_norm_forward(
        x, added, weight, offset, eps=1e-5, dtype=FP32
    )
    grad_x, grad_added, grad_weight, grad_bias = library.add_norm_backward(
        (total, mean, rstd), weight, grad_total, grad_normed, adds=adds
    )

    assert error(total, leaf.detach()) < BOUND
    assert error(normed, true.detach()) < BOUND
    assert error(grad_x, whole) < BOUND
    assert error(grad_weight, scale.grad) < BOUND
    assert error(grad_bias, grad_normed.double().sum(0)) < BOUND
    if grad_added is not None:
        assert torch.equal(grad_added, grad_x)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(("length", "heads", "key_heads", "width"), [(5, 3, 1, 6), (70, 4, 2, 128)])
def test_normed_and_rotated_queries_and_keys_are_those_of_torch(
    library: Library,
    threads: int,
    length: int,
    heads: int,
    key_heads: int,
    width: int,
    joint: bool,
) -> None:
    sizes, rotated = HeadSizes(length, heads, key_heads, width), heads + key_heads
    rotation = rotation_of(length, width)
    shape = (rotated * width,) if joint else (2, width)
    scale = NormScale(random(*shape, seed=2), eps=1e-6)
    qkv = random(2 * length, heads + 2 * key_heads, width)
    grad = random(*qkv.shape, seed=3)
    leaf = qkv[:, :rotated].double().requires_grad_()
    weight = scale.weight.double().requires_grad_()
    if joint:
        kinds = torch.split(leaf, [heads, key_heads], dim=1)
        weights = torch.split(weight, [heads * width, key_heads * width])
        normed = [
            plainly_normed(kind.flatten(1), scale, each).view_as(kind)
            for kind, each in zip(kinds, weights, strict=True)
        ]
        true = torch.cat(normed, dim=1)
    else:
        each = torch.cat((weight[0].expand(heads, width), weight[1].expand(key_heads, width)))
        true = plainly_normed(leaf, scale, each)
    true = plainly_rotated(true, rotation, length)
    torch.autograd.backward(true, grad[:, :rotated].double())
    assert leaf.grad is not None and weight.grad is not None

    qk = passes.norm_rotate_forward(library, qkv, scale, rotation, sizes)
    grad_weight = passes.norm_rotate_backward(library, qkv, scale, rotation, grad, sizes)

    assert error(qk, true.detach()) < BOUND
    assert error(grad[:, :rotated], leaf.grad) < BOUND
    assert error(grad_weight, weight.grad) < BOUND


def test_queries_and_keys_rotate_in_place_and_back(library: Library, threads: int) -> None:
    sizes, rotation = HeadSizes(33, 9, 3, 64), rotation_of(33, 48)
    before = random(66, 15, 64)
    qkv = before.clone()
    passes.rotate(library, qkv, rotation, sizes, back=False)
    assert error(qkv[:, :12], plainly_rotated(before[:, :12].double(), rotation, 33)) < BOUND
    assert torch.equal(qkv[:, 12:], before[:, 12:])
    passes.rotate(library, qkv, rotation, sizes, back=True)
    assert error(qkv, before) < BOUND


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (7, 15), (33, 1536)])
def test_the_gate_and_its_gradient_are_those_of_torch(
    library: Library, threads: int, rows: int, width: int, gate: passes.Gate
) -> None:
    wide, grad = random(rows, 2 * width).mul(4), random(rows, width, seed=1)
    leaf = wide.double().requires_grad_()
    first, up = leaf.chunk(2, dim=1)
    is_silu = gate == "silu"
    true = (functional.silu(first) if is_silu else functional.gelu(first, approximate="tanh")) * up
    torch.autograd.backward(true, grad.double())

    found = passes.gated_forward(library, wide, gate)
    grad_wide = passes.gated_backward(library, wide, grad, gate)

    assert torch.equal(found, grad)
    assert leaf.grad is not None
    assert error(found, true.detach()) < BOUND
    assert error(grad_wide, leaf.grad) < BOUND


@pytest.mark.parametrize("count", [15, 5000])
def test_gelu_and_its_gradient_are_those_of_torch(
    library: Library, threads: int, count: int
) -> None:
    x, grad = random(count).mul(4), random(count, seed=1)
    leaf = x.double().requires_grad_()
    true = functional.gelu(leaf, approximate="tanh")
    torch.autograd.backward(true, grad.double())

    found = library.gelu_forward(x)
    again = library.gelu_backward(x, grad)

    assert torch.equal(found, again)
    assert leaf.grad is not None
    assert error(found, true.detach()) < BOUND
    assert error(grad, leaf.grad) < BOUND


def test_results_are_the_same_bits_with_any_number_of_threads(library: Library) -> None:
    sizes = HeadSizes(length=75, heads=4, key_heads=2, width=32)
    qkv, x = random(150, 8, 32), random(150, 96, seed=4)
    scale, norm = NormScale(random(2, 32, seed=1), eps=1e-6), NormScale(random(96), eps=1e-6)
    before, seen = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            seen.append([*_results(library, qkv, sizes, scale), *_normed(library, x, norm)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, three) for one, three in zip(*seen, strict=True))


def _results(
    library: Library, qkv: Tensor, sizes: HeadSizes, scale: NormScale
) -> tuple[Tensor, ...]:
    shaped = qkv.view(2, 75, 8, 32)
    out, log_sums = library.grouped_attention_forward(shaped, key_heads=2)
    grad = library.grouped_attention_backward(shaped, out, log_sums, out, key_heads=2)
    flat = grad.view_as(qkv)
    weights = passes.norm_rotate_backward(library, qkv, scale, None, flat, sizes)
    return out, flat, weights, library.sum_rows(flat.flatten(1))


def _normed(library: Library, x: Tensor, scale: NormScale) -> tuple[Tensor, ...]:
    total, normed, rstd = passes.rms_norm_forward(library, x, x, scale, dtype=FP32)
    found = passes.rms_norm_backward(library, total, rstd, scale, None, normed, adds=True)
    return tuple(each for each in (normed, *found) if each is not None)
