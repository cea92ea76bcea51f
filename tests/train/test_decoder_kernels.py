"""The decoder's kernels against torch's own operations: results and gradients, odd sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from payload.kernels import decoder_pointwise as passes
from payload.kernels.decoder_pointwise import HeadSizes, NormScale, Rotation
from payload.kernels.library import Library
from tests.train.test_kernels import BF16, ONE_ROUNDING, error, random

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


def plain_attention(
    qkv: Tensor, *, key_heads: int, scale: float | None = None, starts: Tensor | None = None
) -> Tensor:
    """Return torch's attention of qkv (B, T, H + 2 K, D) in double precision."""
    heads = qkv.shape[2] - 2 * key_heads
    parts = torch.split(qkv.double(), [heads, key_heads, key_heads], dim=2)
    query, key, value = (part.transpose(1, 2) for part in parts)
    length = qkv.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).tril().expand(len(qkv), 1, -1, -1)
    if starts is not None:
        mask = mask & (torch.arange(length) >= starts[:, None, :, None])
    mixed = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return mixed.transpose(1, 2)


def rotation_of(length: int, width: int) -> Rotation:
    angles = random(length, width // 2, seed=9)
    return Rotation(angles.cos(), angles.sin())


def plainly_rotated(x: Tensor, rotation: Rotation, length: int) -> Tensor:
    """Return x (N, heads, D) rotated by each token's angles; a rest of the elements stays."""
    width = 2 * rotation.pairs()
    turned, rest = x[..., :width], x[..., width:]
    cos, sin = (
        torch.cat((each, each), -1).double().repeat(len(x) // length, 1)[:, None]
        for each in (rotation.cos, rotation.sin)
    )
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-second, first), -1) * sin, rest), -1)


def plainly_normed(x: Tensor, scale: NormScale, weight: Tensor) -> Tensor:
    factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + scale.eps)
    return x * factor * (weight + scale.offset)


@pytest.mark.bf16
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("batch", "length", "heads", "key_heads", "width"),
    [
        *[(1, 1, 2, 1, 2), (2, 37, 4, 2, 16), (1, 129, 3, 1, 64), (1, 143, 9, 3, 34)],
        *[(2, 260, 2, 1, 128), (1, 131, 2, 2, 256)],
    ],
)
def test_query_heads_that_share_keys_attend_as_in_torch(
    library: Library,
    threads: int,
    batch: int,
    length: int,
    heads: int,
    key_heads: int,
    width: int,
    apart: bool,
) -> None:
    qkv = random(batch, length, heads + 2 * key_heads, width).to(BF16)
    grad_out = random(batch, length, heads, width, seed=1).to(BF16)
    leaf = qkv.double().requires_grad_()
    true = plain_attention(leaf, key_heads=key_heads, scale=0.1)
    torch.autograd.backward(true, grad_out.double())
    qk = None
    if apart:
        # The queries and keys in `qkv` must not be read.
        qk, qkv = qkv[:, :, :-key_heads].contiguous(), qkv.clone()
        qkv[:, :, :-key_heads] = float("nan")

    out, log_sums = library.grouped_attention_forward(qkv, key_heads=key_heads, qk=qk, scale=0.1)
    grad = library.grouped_attention_backward(
        qkv, out, log_sums, grad_out, key_heads=key_heads, qk=qk, scale=0.1
    )

    assert error(out, true.detach()) < ONE_ROUNDING
    assert leaf.grad is not None
    values = slice(heads + key_heads, None)
    assert error(grad[:, :, values], leaf.grad[:, :, values]) < 2 * ONE_ROUNDING
    if length > 1:
        assert error(grad, leaf.grad) < 2 * ONE_ROUNDING


@pytest.mark.bf16
@pytest.mark.parametrize("window", [1, 5, 128, 200])
@pytest.mark.parametrize("documents", [False, True])
def test_a_token_attends_within_its_window_and_document_alone(
    library: Library, window: int, documents: bool
) -> None:
    batch, length, key_heads = 2, 420, 2
    starts = (torch.arange(length) - window + 1).clamp_min(0).repeat(batch, 1)
    if documents:
        starts[0, 300:] = starts[0, 300:].clamp_min(300)
        starts[1, 7:] = starts[1, 7:].clamp_min(7)
    qkv = random(batch, length, 4 + 2 * key_heads, 32).to(BF16)
    grad_out = random(batch, length, 4, 32, seed=1).to(BF16)
    leaf = qkv.double().requires_grad_()
    true = plain_attention(leaf, key_heads=key_heads, starts=starts)
    torch.autograd.backward(true, grad_out.double())

    out, log_sums = library.grouped_attention_forward(qkv, key_heads=key_heads, starts=starts)
    grad = library.grouped_attention_backward(
        qkv, out, log_sums, grad_out, key_heads=key_heads, starts=starts
    )

    assert error(out, true.detach()) < ONE_ROUNDING
    assert leaf.grad is not None
    assert error(grad[:, :, 6:], leaf.grad[:, :, 6:]) < 2 * ONE_ROUNDING
    if window > 1:
        assert error(grad, leaf.grad) < 2 * ONE_ROUNDING


def test_attention_refuses_starts_behind_the_token_or_falling(library: Library) -> None:
    qkv = random(1, 4, 3, 2).to(BF16)
    for starts in ([0, 2, 2, 2], [0, 1, 0, 0], [-1, 0, 0, 0]):
        with pytest.raises(ValueError, match="kernel's arguments"):
            library.grouped_attention_forward(qkv, key_heads=1, starts=torch.tensor([starts]))
    with pytest.raises(ValueError, match="not a multiple of the key heads"):
        library.grouped_attention_forward(random(1, 4, 7, 2).to(BF16), key_heads=2)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("adds", "share"), [(True, 1.0), (True, 0.22), (False, 1.0)])
@pytest.mark.parametrize(("rows", "width"), [(1, 2), (63, 33), (130, 576)])
def test_the_residual_sum_and_its_rms_norm_are_those_of_torch(
    library: Library, threads: int, rows: int, width: int, adds: bool, share: float, offset: float
) -> None:
    x = random(rows, width)
    added = random(rows, width, seed=1).to(BF16) if adds else None
    scale = NormScale(random(width, seed=2), eps=1e-5, offset=offset)
    grad_total = random(rows, width, seed=4) if adds else None
    grad_normed = random(rows, width, seed=5).to(BF16)
    leaf = x.double() + (share * added.double() if added is not None else 0)
    leaf.requires_grad_()
    weight = scale.weight.double().requires_grad_()
    true = plainly_normed(leaf, scale, weight)
    torch.autograd.backward(true, grad_normed.double())
    assert leaf.grad is not None and weight.grad is not None
    whole = leaf.grad + (grad_total.double() if grad_total is not None else 0)

    total, normed, rstd = passes.rms_norm_forward(library, x, added, scale, added_scale=share)
    grad_x, grad_added, grad_weight = passes.rms_norm_backward(
        library, total, rstd, scale, grad_total, grad_normed, adds=adds, added_scale=share
    )

    assert error(total, leaf.detach()) < 1e-6
    assert error(normed, true.detach()) < ONE_ROUNDING
    assert error(grad_x, whole) < 1e-4
    assert grad_weight is not None and error(grad_weight, weight.grad) < 1e-5
    assert (grad_added is not None) == adds
    if grad_added is not None:
        assert torch.equal(grad_added, (grad_x * share).to(BF16))


@pytest.mark.parametrize(("rows", "width"), [(1, 2), (70, 33), (130, 576)])
def test_the_rms_norm_of_bf16_numbers_is_that_of_torch(
    library: Library, threads: int, rows: int, width: int
) -> None:
    x, grad = random(rows, width).to(BF16), random(rows, width, seed=5).to(BF16)
    scale = NormScale(random(width, seed=2), eps=1e-6, offset=1.0)
    leaf, weight = x.double().requires_grad_(), scale.weight.double().requires_grad_()
    true = plainly_normed(leaf, scale, weight)
    torch.autograd.backward(true, grad.double())

    same, normed, rstd = passes.rms_norm_forward(library, x, None, scale)
    found, _, grad_weight = passes.rms_norm_backward(
        library, same, rstd, scale, None, grad, adds=False
    )

    assert leaf.grad is not None and weight.grad is not None
    assert error(normed, true.detach()) < ONE_ROUNDING
    assert grad_weight is not None and error(grad_weight, weight.grad) < 1e-5
    if width > 2:
        # With two elements a row, the gradient is a difference of equal numbers.
        assert error(found, leaf.grad) < ONE_ROUNDING


@pytest.mark.parametrize(
    ("length", "heads", "key_heads", "width", "turned_width"),
    [(1, 1, 1, 2, 2), (5, 3, 1, 6, 6), (33, 9, 3, 64, 64), (33, 3, 1, 64, 48), (2, 1, 1, 6, 2)],
)
def test_queries_and_keys_turn_in_place_and_back(
    library: Library,
    threads: int,
    length: int,
    heads: int,
    key_heads: int,
    width: int,
    turned_width: int,
) -> None:
    sizes = HeadSizes(length, heads, key_heads, width)
    rotation = rotation_of(length, turned_width)
    before = random(2 * length, heads + 2 * key_heads, width).to(BF16)
    qkv = before.clone()

    passes.rotate(library, qkv, rotation, sizes, back=False)

    turned = heads + key_heads
    true = plainly_rotated(before[:, :turned].double(), rotation, length)
    assert error(qkv[:, :turned], true) < ONE_ROUNDING
    assert torch.equal(qkv[:, turned:], before[:, turned:])
    passes.rotate(library, qkv, rotation, sizes, back=True)
    assert error(qkv, before) < 2 * ONE_ROUNDING


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(
    ("length", "heads", "key_heads", "width"), [(3, 1, 1, 4), (5, 3, 1, 6), (70, 4, 2, 128)]
)
def test_normed_and_turned_queries_and_keys_are_those_of_torch(
    library: Library,
    threads: int,
    length: int,
    heads: int,
    key_heads: int,
    width: int,
    offset: float,
    joint: bool,
    share: float,
) -> None:
    sizes, rotated = HeadSizes(length, heads, key_heads, width), heads + key_heads
    rotation = rotation_of(length, int(width * share) // 2 * 2) if share else None
    shape = (rotated * width,) if joint else (2, width)
    scale = NormScale(random(*shape, seed=2), eps=1e-6, offset=offset)
    qkv = random(2 * length, heads + 2 * key_heads, width).to(BF16)
    grad = random(*qkv.shape, seed=3).to(BF16)
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
    if rotation is not None:
        true = plainly_rotated(true, rotation, length)
    torch.autograd.backward(true, grad[:, :rotated].double())
    assert leaf.grad is not None and weight.grad is not None
    values = grad[:, rotated:].clone()

    qk = passes.norm_rotate_forward(library, qkv, scale, rotation, sizes)
    grad_weight = passes.norm_rotate_backward(library, qkv, scale, rotation, grad, sizes)

    assert error(qk, true.detach()) < ONE_ROUNDING
    assert error(grad[:, :rotated], leaf.grad) < ONE_ROUNDING
    assert torch.equal(grad[:, rotated:], values)
    assert error(grad_weight, weight.grad) < 1e-5


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (7, 15), (33, 1536)])
def test_the_gate_and_its_gradient_are_those_of_torch(
    library: Library, threads: int, rows: int, width: int, gate: passes.Gate
) -> None:
    wide = random(rows, 2 * width).mul(4).to(BF16)
    grad = random(rows, width, seed=1).to(BF16)
    leaf = wide.double().requires_grad_()
    first, up = leaf.chunk(2, dim=1)
    is_silu = gate == "silu"
    true = (functional.silu(first) if is_silu else functional.gelu(first, approximate="tanh")) * up
    torch.autograd.backward(true, grad.double())

    found = passes.gated_forward(library, wide, gate)
    grad_wide = passes.gated_backward(library, wide, grad, gate)

    assert torch.equal(found, grad)
    assert leaf.grad is not None
    assert error(found, true.detach()) < ONE_ROUNDING
    assert error(grad_wide, leaf.grad) < ONE_ROUNDING


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_a_gate_far_from_zero_neither_overflows_nor_vanishes(
    library: Library, gate: passes.Gate
) -> None:
    wide = torch.tensor([[-3e4, -200, -100, 200, 3e4, 1, 1, 1, 1, 1]]).to(BF16)
    grad = torch.ones(1, 5, dtype=BF16)
    found = passes.gated_forward(library, wide, gate)
    assert found[0].tolist() == pytest.approx([0, 0, 0, 200, 3e4], abs=1e-6, rel=1e-2)
    grad_wide = passes.gated_backward(library, wide, grad, gate)
    assert grad_wide[0, :5].tolist() == pytest.approx([0, 0, 0, 1, 1], abs=1e-6)


@pytest.mark.bf16
def test_weights_side_by_side_get_their_gradients_in_their_own_places(
    library: Library, threads: int
) -> None:
    tokens, width = 70, 33
    rows = (130, 5, 64)
    grad, x = random(tokens, sum(rows)).to(BF16), random(tokens, width, seed=1).to(BF16)
    before = [random(each, width, seed=2) for each in rows]
    totals = [each.clone() for each in before]

    library.weight_gradients(grad, x, [(totals[0], True), (totals[1], False), (totals[2], True)])

    parts = torch.split(grad.double().t() @ x.double(), list(rows))
    for total, part, start, adds in zip(totals, parts, before, (1, 0, 1), strict=True):
        assert error(total, part + adds * start) < 1e-5


@pytest.mark.bf16
def test_the_decoder_s_passes_give_the_same_bits_with_any_number_of_threads(
    library: Library,
) -> None:
    sizes = HeadSizes(length=75, heads=4, key_heads=2, width=32)
    qkv = random(150, 8, 32).to(BF16)
    scale = NormScale(random(2, 32, seed=1), eps=1e-6)
    before, seen = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            shaped = qkv.view(2, 75, 8, 32)
            out, log_sums = library.grouped_attention_forward(shaped, key_heads=2)
            grad = library.grouped_attention_backward(shaped, out, log_sums, out, key_heads=2)
            flat = grad.view_as(qkv)
            weights = passes.norm_rotate_backward(library, qkv, scale, None, flat, sizes)
            seen.append((out, flat, weights))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, three) for one, three in zip(*seen, strict=True))
