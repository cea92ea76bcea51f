"""The kernels against torch's own operations: results and gradients, odd sizes, any threads."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from payload.config.training_sections import OptimizerSection
from payload.formats.data_folder import IGNORED_TARGET
from payload.kernels import head
from payload.kernels.kernels import Kernels
from payload.kernels.library import Library
from payload.models.gpt2.spec import PRESETS
from payload.models.spec import RankSetting
from payload.train.families.gpt2.model import GPT
from payload.train.optimizers.optimizer import build_optimizers
from tests.train.test_model import make_model, tokens

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

BF16 = torch.bfloat16
# One rounding to bf16 is at most 0.4 %, 0.2 % on average over many elements.
ONE_ROUNDING = 4e-3


def error(ours: Tensor, true: Tensor) -> float:
    """Return the norm of the difference over the norm of the true values."""
    distance = (ours.double() - true.double()).norm()
    return float(distance / true.double().norm().clamp_min(1e-30))


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.bf16
@pytest.mark.parametrize(
    ("batch", "length", "heads", "width"),
    [
        *[(1, 1, 1, 2), (2, 2, 1, 6), (2, 37, 3, 16), (1, 128, 2, 64), (1, 129, 1, 80)],
        *[(1, 17, 2, 66), (1, 143, 1, 34), (2, 300, 2, 64)],
    ],
)
def test_attention_and_its_gradient_are_those_of_torch(
    library: Library, threads: int, batch: int, length: int, heads: int, width: int
) -> None:
    assert library.has_products
    qkv = random(batch, length, 3, heads, width).to(BF16)
    grad_out = random(batch, length, heads, width, seed=1).to(BF16)
    leaf = qkv.double().requires_grad_()
    query, key, value = (part.transpose(1, 2) for part in leaf.unbind(2))
    true = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    true = true.transpose(1, 2)
    torch.autograd.backward(true, grad_out.double())

    out, log_sums = library.attention_forward(qkv)
    grad = library.attention_backward(qkv, out, log_sums, grad_out)

    assert error(out, true.detach()) < ONE_ROUNDING
    assert leaf.grad is not None
    # Probabilities, their gradients and the output: three roundings.
    if length > 1:
        assert error(grad, leaf.grad) < 2 * ONE_ROUNDING
    assert error(grad[:, :, 2], leaf.grad[:, :, 2]) < 2 * ONE_ROUNDING


@pytest.mark.bf16
def test_large_scores_neither_overflow_nor_vanish(library: Library) -> None:
    qkv = (random(1, 200, 3, 2, 32) * 30).to(BF16)
    query, key, value = (part.transpose(1, 2).double() for part in qkv.unbind(2))
    true = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    out, log_sums = library.attention_forward(qkv)
    assert error(out, true.transpose(1, 2)) < ONE_ROUNDING
    grad = library.attention_backward(qkv, out, log_sums, torch.ones_like(out))
    assert bool(grad.isfinite().all())


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("with_library", [True, False])
@pytest.mark.parametrize(
    ("rows", "vocabulary", "width"), [(1, 2, 2), (5, 301, 64), (131, 9001, 2048), (3, 128, 64)]
)
def test_the_loss_and_its_gradient_are_those_of_torch(
    library: Library,
    threads: int,
    dtype: torch.dtype,
    with_library: bool,
    rows: int,
    vocabulary: int,
    width: int,
) -> None:
    slices = -(-vocabulary // width)
    logits = random(slices, rows + 2, width).mul(5).to(dtype)[:, :rows]

    def joined() -> Tensor:
        return logits.transpose(0, 1).flatten(1)

    targets = torch.arange(rows) % vocabulary
    targets[3::4] = IGNORED_TARGET
    leaf = joined()[:, :vocabulary].double().requires_grad_()
    true = functional.cross_entropy(leaf, targets, ignore_index=IGNORED_TARGET, reduction="none")
    torch.autograd.backward(true.sum() * 0.25)
    beyond = joined()[:, vocabulary:]

    chosen = library if with_library else None
    plain, found = (
        head._cross_entropy(list(logits), targets, chosen, vocabulary=vocabulary, grad_scale=scale)
        for scale in (None, 0.25)
    )

    assert torch.equal(plain, found)
    # Losses are up to 30, whose last bit in fp32 is 2e-6.
    assert float((found.double() - true.detach()).abs().max()) < 1e-5
    assert leaf.grad is not None
    grad = joined()[:, :vocabulary]
    if dtype == BF16:
        assert error(grad, leaf.grad) < ONE_ROUNDING
    else:
        assert float((grad.double() - leaf.grad).abs().max()) < 1e-6
    assert torch.equal(joined()[:, vocabulary:], beyond)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_loss_of_a_sure_prediction_far_from_zero_is_exact(
    library: Library, dtype: torch.dtype
) -> None:
    logits = (random(1, 50, 64) * 3 - 100).to(dtype)
    targets = torch.arange(50) % 64
    logits[0, torch.arange(50), targets] = -88.7
    true = functional.cross_entropy(logits[0].double(), targets, reduction="none")
    found = library.cross_entropy(list(logits), targets, vocabulary=64, grad_scale=None)
    assert float(found.min()) >= 0
    assert float((found - true).abs().max()) < 1e-6


@pytest.mark.parametrize("count", [1, 15, 5000])
def test_gelu_and_its_gradient_are_those_of_torch(
    library: Library, threads: int, count: int
) -> None:
    x = random(count).mul(4).to(BF16)
    x[0] = -30.0
    grad = random(count, seed=1).to(BF16)
    leaf = x.double().requires_grad_()
    true = functional.gelu(leaf, approximate="tanh")
    torch.autograd.backward(true, grad.double())

    found = library.gelu_forward(x)
    again = library.gelu_backward(x, grad)

    assert torch.equal(found, again)
    assert leaf.grad is not None
    if count > 1:
        assert error(found, true.detach()) < ONE_ROUNDING
        assert error(grad, leaf.grad) < ONE_ROUNDING
    assert float(found[0]) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (64, 33), (131, 768)])
def test_rows_are_summed_in_fp32(library: Library, threads: int, rows: int, width: int) -> None:
    x = random(rows, width).to(BF16)
    assert float((library.sum_rows(x).double() - x.double().sum(0)).abs().max()) < 1e-4


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(1, 2), (63, 33), (130, 768)])
def test_the_residual_sum_and_its_norm_are_those_of_torch(
    library: Library, threads: int, rows: int, width: int, adds: bool, bias: bool
) -> None:
    x = random(rows, width)
    added = random(rows, width, seed=1).to(BF16) if adds else None
    weight, offset = random(width, seed=2), random(width, seed=3) if bias else None
    grad_total = random(rows, width, seed=4) if adds else None
    grad_normed = random(rows, width, seed=5).to(BF16)
    leaf = x.double() + (added.double() if added is not None else 0)
    leaf.requires_grad_()
    scale = weight.double().requires_grad_()
    shift = offset.double().requires_grad_() if offset is not None else None
    true = functional.layer_norm(leaf, (width,), scale, shift, eps=1e-5)
    torch.autograd.backward(true, grad_normed.double())
    assert leaf.grad is not None and scale.grad is not None

    total, normed, mean, rstd = library.add_norm_forward(x, added, weight, offset, eps=1e-5)
    grad_x, grad_added, grad_weight, grad_bias = library.add_norm_backward(
        (total, mean, rstd), weight, grad_total, grad_normed, adds=adds
    )

    # With two elements a row, the norm is +1 or -1, and its gradient a difference of equal numbers.
    exact = 1e-5 if width > 2 else 1e-2
    assert error(total, leaf.detach()) < 1e-6
    assert error(normed, true.detach()) < ONE_ROUNDING
    whole = leaf.grad + (grad_total.double() if grad_total is not None else 0)
    assert float((grad_x.double() - whole).abs().max()) < exact * 10
    assert error(grad_weight, scale.grad) < exact
    assert error(grad_bias, grad_normed.double().sum(0)) < 1e-5
    if grad_added is not None:
        assert torch.equal(grad_added, grad_x.to(BF16))


@pytest.mark.parametrize("with_library", [True, False])
def test_the_head_gives_the_reference_s_loss_and_gradients_chunk_by_chunk(
    library: Library, with_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "logits_tokens", lambda _vocabulary: 17)
    model = make_model()
    batch = tokens(2, 40)
    targets = batch.clone()
    targets[0, :9] = IGNORED_TARGET
    expected = loss_and_gradients(model, batch, targets, nullcontext)
    model.kernels = Kernels(library if with_library else None)
    found = loss_and_gradients(model, batch, targets, nullcontext)
    assert_close(found, expected, bound=1e-5)
    token_losses = model.token_losses(batch, targets)
    assert not token_losses[0, :9].any()
    count = (targets != IGNORED_TARGET).sum()
    assert float(token_losses.sum() / count) == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("length", [1, 48])
def test_a_pass_in_bf16_is_as_near_to_fp32_as_the_reference_s(
    library: Library, threads: int, bias: bool, length: int
) -> None:
    model = make_model(bias=bias)
    batch, targets = tokens(3, length), tokens(3, length).flip(0)
    exact = loss_and_gradients(model, batch, targets, nullcontext)
    reference = loss_and_gradients(model, batch, targets, bf16)
    model.kernels = Kernels(library)
    ours = loss_and_gradients(model, batch, targets, bf16)
    assert ours[0] == pytest.approx(exact[0], rel=2e-3)
    for name, true in exact[1].items():
        near = error(reference[1][name], true)
        # A single token sees only itself: the gradients of its query and key are only rounding.
        if not (length == 1 and "c_attn" in name):
            assert error(ours[1][name], true) < 1.5 * near + 1e-3, name


@pytest.mark.bf16
def test_a_pass_gives_the_same_bits_with_any_number_of_threads(library: Library) -> None:
    qkv = random(2, 150, 3, 2, 32).to(BF16)
    before, seen = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            out, log_sums = library.attention_forward(qkv)
            seen.append((out, library.attention_backward(qkv, out, log_sums, out)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.slow
def test_fifty_steps_on_real_text_train_as_the_reference_does(library: Library) -> None:
    """In bf16 within 0.2 %, half of one rounding, with the whole step: clipping and update too."""
    exact = curve(None, nullcontext)
    assert curve(Kernels(library), nullcontext) == pytest.approx(exact, rel=1e-5)
    assert curve(Kernels(library), bf16) == pytest.approx(curve(None, bf16), rel=2e-3)
    assert sum(exact[-5:]) < sum(exact[:5]) - 5


def curve(
    kernels: Kernels | None, precision: Callable[[], AbstractContextManager[object]]
) -> list[float]:
    """Return the losses of fifty steps of a small model on new text, in two micro-batches each."""
    text = Path(argparse.__file__).read_bytes()[: 50 * 2 * 49]
    batches = torch.tensor(list(text)).view(50, 2, 1, 49)
    model, found, before = make_model(), [], torch.get_num_threads()
    torch.set_num_threads(1)
    optimizers = build_optimizers(model, OptimizerSection(lr=1e-3))
    model.kernels = optimizers.kernels = kernels
    for passes in batches:
        mean = 0.0
        for batch in passes:
            with precision():
                loss = model(batch[:, :-1], batch[:, 1:])
            (loss / 2).backward()
            mean += loss.item() / 2
        optimizers.clip(1.0)
        optimizers.step()
        found.append(mean)
    torch.set_num_threads(before)
    return found


def test_the_estimate_has_one_chunk_of_logits_however_large_the_batch() -> None:
    shape = PRESETS["gpt2"]

    def estimate(
        size: int, *, kernels: bool = True, alone: bool = True, accumulates: bool = False
    ) -> int:
        return shape.memory_bytes(
            RankSetting(
                micro_batch_size=size,
                dtype="bf16",
                kernels=kernels,
                alone=alone,
                accumulates=accumulates,
            )
        )

    # 35 bytes for each element of twelve layers' width: the batch size does not change the logits.
    assert estimate(8) - estimate(4) == 4 * 1024 * 12 * 35 * 768
    assert estimate(8) < estimate(8, kernels=False)
    # Later micro-batches of a step hold the gradients of earlier ones.
    assert estimate(8, accumulates=True) - estimate(8) == 4 * shape.num_params()
    # With other ranks, the first micro-batch makes the head in its bucket, a later in new memory.
    head_bytes = 4 * shape.vocab_size * shape.n_embd
    assert estimate(8, alone=False, accumulates=True) - estimate(8, alone=False) == head_bytes


def bf16() -> torch.autocast:
    return torch.autocast("cpu", dtype=BF16)


def loss_and_gradients(
    model: GPT,
    batch: Tensor,
    targets: Tensor,
    precision: Callable[[], AbstractContextManager[object]],
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss, and half of its gradients, as with two micro-batches a step."""
    trained = copy.deepcopy(model) if model.kernels is None else model
    trained.zero_grad()
    with precision():
        loss = trained(batch, targets)
    (loss / 2).backward()
    found = {name: p.grad for name, p in trained.named_parameters() if p.grad is not None}
    assert len(found) == len(list(trained.parameters()))
    return loss.item(), found


def assert_close(
    found: tuple[float, dict[str, Tensor]],
    expected: tuple[float, dict[str, Tensor]],
    *,
    bound: float,
) -> None:
    assert found[0] == pytest.approx(expected[0], rel=bound)
    for name, true in expected[1].items():
        assert error(found[1][name], true) < bound, name
