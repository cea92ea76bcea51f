"""The kernels of experts against torch in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from payload.kernels.experts import Pairs, experts
from payload.kernels.kernels import Kernels
from payload.kernels.library import Library
from payload.train.families.llama.mixture import by_expert
from tests.train.test_kernels import bf16, error

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

TOKENS, WIDTH, INNER, EXPERTS, ACTIVE = 37, 32, 24, 5, 2
ONE_ROUNDING = 1e-2


def random(*shape: int, seed: int) -> Tensor:
    """Return random numbers that bf16 holds without rounding."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 4
    return made.to(torch.bfloat16).float()


def plain(x: Tensor, weights: Tensor, chosen: Tensor, stacks: tuple[Tensor, Tensor]) -> Tensor:
    rows = []
    for token in range(len(x)):
        row = torch.zeros(WIDTH, dtype=torch.float64)
        for place, number in enumerate(chosen[token].tolist()):
            gate, up = (stacks[0][number] @ x[token]).chunk(2)
            row = row + weights[token, place] * (stacks[1][number] @ (functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.bf16
def test_experts_and_their_gradients_are_those_of_torch(library: Library) -> None:
    x, grad = random(TOKENS, WIDTH, seed=1), random(TOKENS, WIDTH, seed=2)
    weights = random(TOKENS, ACTIVE, seed=3).abs()
    # The second and the fourth expert get no tokens.
    chosen = torch.tensor([[0, 2], [4, 0], [2, 4]]).repeat(TOKENS, 1)[:TOKENS]
    values = random(EXPERTS, 2 * INNER, WIDTH, seed=4), random(EXPERTS, WIDTH, INNER, seed=5)
    doubles = [each.double().requires_grad_() for each in (x, weights, *values)]
    true = plain(doubles[0], doubles[1], chosen, (doubles[2], doubles[3]))
    torch.autograd.backward(true, grad.double())

    stacks = nn.Parameter(values[0].clone()), nn.Parameter(values[1].clone())
    inputs = x.to(torch.bfloat16).requires_grad_(), weights.clone().requires_grad_()
    with bf16():
        context = Kernels(library).layer_context()
    assert context is not None
    pairs = Pairs(*by_expert(chosen, experts=EXPERTS))

    def run() -> Tensor:
        made = experts(*inputs, pairs, stacks, "silu", context)
        torch.autograd.backward(made, grad.to(torch.bfloat16))
        return made

    assert error(run(), true.detach()) < ONE_ROUNDING
    for found, wanted in zip((*inputs, *stacks), doubles, strict=True):
        assert found.grad is not None and wanted.grad is not None
        assert error(found.grad, wanted.grad) < 2 * ONE_ROUNDING
    for each in stacks:
        assert each.grad is not None
        assert not each.grad[[1, 3]].any()
    first = [each.grad.clone() for each in stacks if each.grad is not None]
    run()
    for each, once in zip(stacks, first, strict=True):
        assert each.grad is not None
        assert error(each.grad, 2 * once) < 1e-5
