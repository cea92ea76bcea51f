"""The kernels of linear attention against the rule token by token in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from payload.kernels.library import Library
from payload.models.qwen3_5.config import LinearAttention
from payload.train.families.qwen3_5.linear_attention import DeltaWeights, linear_attention
from tests.train.models import test_delta_rule as rule
from tests.train.test_kernels import BF16, error, random

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

SIZES = LinearAttention(
    key_heads=rule.GROUPS,
    value_heads=rule.HEADS,
    key_dim=rule.KEYS,
    value_dim=rule.VALUES,
    taps=4,
)
BATCH, LENGTH, WHOLE = rule.BATCH, rule.LENGTH, [(0, 0, 150), (1, 0, 150)]
EPS = 1e-6
Spans = list[tuple[int, int, int]]


def inputs() -> list[Tensor]:
    """Return the linears' outputs and the weights; each head forgets at another rate."""
    columns = SIZES.mixed() + SIZES.values() + 2 * SIZES.value_heads
    rates = torch.tensor([0.001, 0.1, 2.0, 16.0]).log()
    return [
        random(BATCH, LENGTH, columns),
        random(SIZES.mixed(), 1, SIZES.taps, seed=1),
        rates,
        random(SIZES.value_heads, seed=2),
        random(SIZES.value_dim, seed=3) + 1,
    ]


def in_torch(given: list[Tensor], spans: Spans) -> Tensor:
    """Return the output of torch's operations for each document."""
    made, convolution, log_rate, time_bias, norm = given
    found = made.new_zeros(BATCH, LENGTH, SIZES.values())
    heads = SIZES.value_heads
    for row, first, end in spans:
        text = made[row : row + 1, first:end]
        widths = [SIZES.mixed(), SIZES.values(), heads, heads]
        mixed, gate, write, time = torch.split(text, widths, -1)
        wide = functional.pad(mixed.mT, (SIZES.taps - 1, 0))
        mixed = functional.silu(functional.conv1d(wide, convolution, groups=SIZES.mixed())).mT
        parts = torch.split(mixed, [SIZES.keys(), SIZES.keys(), SIZES.values()], -1)
        counts = (SIZES.key_heads, SIZES.key_heads, heads)
        q, k, v = (
            each.reshape(*each.shape[:-1], count, -1)
            for each, count in zip(parts, counts, strict=True)
        )
        decay = -log_rate.exp() * functional.softplus(time + time_bias)
        read = rule.token_by_token(q, k, v, write, decay)
        scale = torch.rsqrt(read.square().mean(-1, keepdim=True) + EPS) * norm
        found[row, first:end] = ((read * scale).flatten(2) * functional.silu(gate))[0]
    return found


def by_kernels(library: Library, given: list[Tensor], starts: Tensor | None) -> Tensor:
    made, convolution, log_rate, time_bias, norm = given
    weights = DeltaWeights(convolution, log_rate, time_bias, norm, EPS)
    return linear_attention(made, weights, SIZES, starts=starts, library=library)


def parts(grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return the gradients by name: those of the linears' outputs in parts."""
    widths = [SIZES.keys(), SIZES.keys(), SIZES.values(), SIZES.values()]
    widths += [1] * (2 * SIZES.value_heads)
    columns = torch.split(grads[0].double(), widths, -1)
    names = ["query", "key", "value", "gate"]
    names += [f"{name} {head}" for name in ("write", "time") for head in range(SIZES.value_heads)]
    found = dict(zip(names, columns, strict=True))
    found |= zip(("convolution", "log_rate", "time_bias", "norm"), grads[1:], strict=True)
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_outputs_and_gradients_are_those_of_single_tokens(
    library: Library, threads: int, packed: bool
) -> None:
    """The gradients of write strengths and times are compared for each head."""
    given = [each.requires_grad_() for each in inputs()]
    exact = [each.detach().double().requires_grad_() for each in given]
    found = by_kernels(library, given, rule.documents() if packed else None)
    wanted = in_torch(exact, rule.SPANS if packed else WHOLE)
    assert error(found, wanted) < 2e-6
    ours, true = parts(rule.gradients(found, given)), parts(rule.gradients(wanted, exact))
    for name, each in true.items():
        assert error(ours[name], each) < 4e-5, name


@pytest.mark.bf16
@pytest.mark.parametrize("packed", [False, True])
def test_outputs_and_gradients_in_bf16_are_near(
    library: Library, threads: int, packed: bool
) -> None:
    given = inputs()
    given[0] = given[0].to(BF16)
    exact = [each.double().requires_grad_() for each in given]
    given = [each.requires_grad_() for each in given]
    found = by_kernels(library, given, rule.documents() if packed else None)
    assert found.dtype is BF16
    wanted = in_torch(exact, rule.SPANS if packed else WHOLE)
    assert error(found, wanted) < 2e-2
    ours, true = parts(rule.gradients(found, given)), parts(rule.gradients(wanted, exact))
    for name, each in true.items():
        assert error(ours[name], each) < 5e-2, name


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(BF16, marks=pytest.mark.bf16)])
def test_other_documents_and_the_number_of_threads_do_not_change_a_bit(
    library: Library, dtype: torch.dtype, one_thread: None
) -> None:
    seen = []
    for threads, differs in ((1, False), (3, False), (1, True)):
        torch.set_num_threads(threads)
        given = inputs()
        given[0] = given[0].to(dtype)
        if differs:
            given[0][0, :38] += 1
        given = [each.requires_grad_() for each in given]
        found = by_kernels(library, given, rule.documents())
        grads = rule.gradients(found, given)
        seen.append((found.detach(), *grads))
    first, more_threads, other = seen
    assert all(torch.equal(a, b) for a, b in zip(first, more_threads, strict=True))
    for a, b in zip(first[:2], other[:2], strict=True):
        assert torch.equal(a[0, 38:], b[0, 38:]) and torch.equal(a[1], b[1])
        assert not torch.equal(a[0, :38], b[0, :38])


def test_tensors_that_do_not_fit_are_refused(library: Library) -> None:
    made, *weights = inputs()
    late = torch.full((BATCH, LENGTH), 3)
    for bad, starts in (
        (made[..., :-1].contiguous(), None),
        (made.double(), None),
        (made, torch.zeros(BATCH, LENGTH - 1, dtype=torch.int64)),
        (made, late),
    ):
        with pytest.raises(ValueError, match="kernel"):
            by_kernels(library, [bad, *weights], starts)
    weights[0] = weights[0][:-1]
    with pytest.raises(ValueError, match="kernel"):
        by_kernels(library, [made, *weights], None)
