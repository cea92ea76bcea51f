"""Gradients of several micro-batches, added in place, against autograd's sums."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from payload.config.launch_sections import DistributedSection
from payload.kernels.kernels import Kernels
from payload.kernels.library import Library
from payload.train.families.gpt2.model import GPT
from payload.train.ranks.world import World
from payload.train.strategies.gradients import GradientExchange
from tests.train.test_kernels import bf16, error
from tests.train.test_model import make_model, tokens

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

PASSES = 3
# The other rank contributes zeros, so means are halves.
FIRST_OF_TWO = World(rank=0, world_size=2, local_rank=0, local_world_size=2, node="here")


@pytest.fixture
def alone() -> Iterator[None]:
    """Initialize a process group of one process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradients(
    model: GPT, kernels: Kernels | None, *, dtype: str, exchange: GradientExchange | None = None
) -> dict[str, Tensor]:
    """Return the gradients of a mean over micro-batches with different tokens."""
    model.kernels = kernels
    for index in range(PASSES):
        batch = tokens(3, 40).roll(index, dims=1)
        with bf16() if dtype == "bf16" else nullcontext():
            loss = model(batch[:, :-1], batch[:, 1:])
        if exchange is not None and index == PASSES - 1:
            exchange.begin(batch[:, :-1])
        (loss / PASSES).backward()
    if exchange is not None:
        exchange.finish()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 2e-6), ("bf16", 2e-2)])
@pytest.mark.parametrize("kind", ["all", "without products", "torch alone"])
def test_passes_add_up_to_the_reference_s_gradients(
    library: Library, kind: str, dtype: str, bound: float
) -> None:
    model = make_model()
    expected = gradients(copy.deepcopy(model), None, dtype=dtype)
    chosen = None if kind == "torch alone" else copy.copy(library)
    if chosen and kind == "without products":
        chosen.has_products = False
    found = gradients(model, Kernels(chosen), dtype=dtype)
    assert found.keys() == expected.keys()
    for name, true in expected.items():
        assert error(found[name], true) < bound, name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("with_library", [True, False])
def test_the_exchange_takes_the_sums(
    library: Library, alone: None, with_library: bool, dtype: str
) -> None:
    kernels = Kernels(library if with_library else None)
    model = make_model()
    expected = gradients(copy.deepcopy(model), kernels, dtype=dtype)
    exchange = GradientExchange(DistributedSection(), FIRST_OF_TWO)
    model.kernels = kernels
    exchange.attach(model)
    for _ in range(2):
        found = gradients(model, kernels, dtype=dtype, exchange=exchange)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if name == "wte.weight":  # has two parts, which are added in another order
                assert error(found[name], value / 2) < 1e-6
            else:
                assert torch.equal(found[name], value / 2), name
        model.zero_grad()


def test_weights_gradients_are_made_where_they_are_exchanged(library: Library, alone: None) -> None:
    model = make_model()
    model.kernels = Kernels(library)
    exchange = GradientExchange(DistributedSection(), FIRST_OF_TWO)
    exchange.attach(model)
    batch = tokens(3, 40)
    with bf16():
        model(batch[:, :-1], batch[:, 1:]).backward()
    made = {name: parameter.grad for name, parameter in matrices(model).items()}
    with bf16():
        loss = model(batch[:, :-1], batch[:, 1:])
    exchange.begin(batch[:, :-1])
    loss.backward()
    exchange.finish()
    assert len(made) == 1 + 4 * len(model.h)  # the token embedding; four of a layer
    for name, parameter in matrices(model).items():
        assert parameter.grad is made[name], name


def test_a_pass_that_never_went_back_leaves_the_next_one_right(
    library: Library, alone: None
) -> None:
    model = make_model()
    batch = tokens(3, 40)
    model.kernels = Kernels(library)
    with bf16():
        model(batch[:, :-1], batch[:, 1:]).backward()
    expected = {name: p.grad / 2 for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    exchange = GradientExchange(DistributedSection(), FIRST_OF_TWO)
    exchange.attach(model)
    with bf16():
        with torch.no_grad():
            model(batch[:, 1:], batch[:, :-1])
        dropped = model(batch[:, 1:], batch[:, :-1])
        for _ in range(2):
            loss = model(batch[:, :-1], batch[:, 1:])
            exchange.begin(batch[:, :-1])
            loss.backward()
            exchange.finish()
            for name, value in expected.items():
                found = model.get_parameter(name).grad
                assert found is not None
                assert error(found, value) < 1e-6, name
            model.zero_grad()
    assert dropped.isfinite()


def matrices(model: GPT) -> dict[str, torch.nn.Parameter]:
    """Return the weights of matmuls."""
    named = model.named_parameters()
    return {name: each for name, each in named if each.ndim == 2 and name != "wpe.weight"}


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (7, 65), (300, 192)])
def test_rows_are_added_where_indices_say(library: Library, rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    total, added = (torch.randn(size, width, generator=generator) for size in (11, rows))
    indices = torch.randint(11, (rows,), generator=generator)
    expected = total.index_add(0, indices, added)
    library.add_rows(total, indices, added)
    assert torch.equal(total, expected)
