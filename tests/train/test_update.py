"""Clipping and AdamW in one pass against torch's own: equal values, state and names."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from payload.config.training_sections import EngineSection, OptimizerSection
from payload.kernels.kernels import Kernels
from payload.kernels.library import Library
from payload.train.optimizers.optimizer import Optimizers, build_optimizers
from payload.train.ranks.world import World
from payload.train.torch_engines import apply_engine
from tests.train.alone import ALONE
from tests.train.test_model import make_model

STEPS = 6
# Rounding to fp32 is 6e-8 of a value; a moment has three such roundings a step.
ROUNDING = 6e-8
SETTINGS = OptimizerSection(lr=1e-2)


class Weights(nn.Module):
    """Two parameter groups, with sizes that are not multiples of tasks and vectors."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        matrix = nn.Parameter(torch.randn(129, 131, generator=generator))
        self.h = nn.ParameterDict({"matrix": matrix})
        self.one = nn.Parameter(torch.randn(1, generator=generator))
        self.two_tasks = nn.Parameter(torch.randn(16_384 + 17, generator=generator))
        self.without_gradient = nn.Parameter(torch.randn(5, generator=generator))

    def is_hidden_matrix(self, name: str) -> bool:
        """Return True for the matrix, so that Muon trains it."""
        return name == "h.matrix"

    @property
    def matrix(self) -> nn.Parameter:
        """Return the parameter with weight decay."""
        matrix: nn.Parameter = self.h["matrix"]
        return matrix


def give_gradients(model: nn.Module, *, step: int) -> None:
    """Set equal gradients for equal steps; from tiny to large, above the limit and below it."""
    generator = torch.Generator().manual_seed(100 + step)
    for name, parameter in model.named_parameters():
        if name != "without_gradient":
            sizes = 10.0 ** torch.randint(-7, 1, parameter.shape, generator=generator)
            gradient = torch.randn(parameter.shape, generator=generator) * sizes
            gradient = gradient if step % 2 else gradient * 1e-4
            parameter.grad = gradient.to(parameter.grad_dtype or parameter.dtype)


def train(kernels: Kernels | None, *, threads: int = 2, name: str = "adamw") -> Optimizers:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    settings = replace(SETTINGS, name=name)
    optimizers = build_optimizers(Weights(), settings)
    optimizers.kernels = kernels
    for step in range(STEPS):
        give_gradients(optimizers.model, step=step)
        optimizers.set_lr(1e-2 / (step + 1))
        optimizers.clip(1.0)
        optimizers.step()
    torch.set_num_threads(before)
    return optimizers


def tensors(optimizers: Optimizers) -> dict[str, Tensor]:
    named = {name: value.detach() for name, value in optimizers.model.named_parameters()}
    return named | optimizers.state_tensors()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_update_is_torch_s_but_for_rounding(library: Library, name: str) -> None:
    expected, found = tensors(train(None, name=name)), tensors(train(Kernels(library), name=name))
    assert expected.keys() == found.keys()
    # Muon's own arithmetic is bf16: half a rounding of it, for updates of 1e-2.
    bound = 3 * STEPS * ROUNDING
    for key, true in expected.items():
        assert found[key].dtype == true.dtype and found[key].shape == true.shape
        if name == "muon" and key == "h.matrix":
            assert float((found[key] - true).abs().max()) < 1e-2 * 4e-3 * STEPS
        else:
            largest = float(true.abs().max())
            assert float((found[key] - true).abs().max()) <= bound * largest, key
    assert torch.equal(found["without_gradient"], Weights().without_gradient)


def test_the_update_is_the_same_to_the_bit_with_any_number_of_threads(library: Library) -> None:
    one, three = (tensors(train(Kernels(library), threads=count)) for count in (1, 3))
    assert all(torch.equal(value, three[key]) for key, value in one.items())


def test_a_resumed_update_goes_on_to_the_bit(library: Library) -> None:
    unbroken = train(Kernels(library))
    resumed = build_optimizers(Weights(), SETTINGS)
    resumed.model.load_state_dict(unbroken.model.state_dict())
    state = unbroken.state_tensors().items()
    resumed.load_state_tensors({name: each.clone() for name, each in state})
    resumed.kernels = Kernels(library)
    for optimizers in (unbroken, resumed):
        give_gradients(optimizers.model, step=STEPS)
        optimizers.set_lr(1e-3)
        optimizers.clip(1.0)
        optimizers.step()
    found = tensors(resumed)
    assert all(torch.equal(value, found[key]) for key, value in tensors(unbroken).items())


def test_bf16_copies_that_were_made_follow_the_weights(library: Library) -> None:
    kernels, model = Kernels(library), Weights()
    copy = kernels._copies.of(model.matrix)
    before = copy.clone() if copy is not None else None
    optimizers = build_optimizers(model, SETTINGS)
    optimizers.kernels = kernels
    give_gradients(model, step=1)
    optimizers.step()
    assert kernels._copies.of(model.matrix) is copy
    assert copy is not None and before is not None and not torch.equal(copy, before)
    for each in model.parameters():
        made = kernels._copies.of(each)
        assert made is not None and torch.equal(made, each.detach().to(torch.bfloat16))


def test_the_norm_is_that_of_all_gradients_and_limits_the_next_update_alone(
    library: Library,
) -> None:
    model = Weights()
    optimizers = build_optimizers(model, SETTINGS)
    optimizers.kernels = Kernels(library)
    give_gradients(model, step=1)
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    squares = sum(float(each.double().square().sum()) for each in gradients)
    norm = optimizers.clip(0.5)
    assert norm == pytest.approx(math.sqrt(squares), rel=1e-12) and norm > 0.5
    gradient = unclipped_gradient(model)
    optimizers.step()
    mean = optimizers.members[0].state[model.matrix]["exp_avg"]
    expected = 0.1 * gradient * (0.5 / norm)
    assert float((mean - expected).abs().max()) <= 3 * ROUNDING * float(expected.abs().max())

    give_gradients(model, step=1)
    expected = mean + 0.1 * (unclipped_gradient(model) - mean)
    optimizers.step()
    assert float((mean - expected).abs().max()) <= 3 * ROUNDING * float(expected.abs().max())


def unclipped_gradient(model: Weights) -> Tensor:
    assert model.matrix.grad is not None
    return model.matrix.grad.clone()


def test_a_gradient_kept_in_bf16_is_clipped_and_applied_as_its_fp32_copy(library: Library) -> None:
    found = []
    for keeps in (True, False):
        model = Weights()
        optimizers = build_optimizers(model, SETTINGS)
        optimizers.kernels = Kernels(library)
        if keeps:
            optimizers.keep_bf16_gradients([model.matrix, model.two_tasks])
        for step in range(STEPS):
            give_gradients(model, step=step)
            for each in (model.matrix, model.two_tasks):
                assert each.grad is not None
                assert each.grad.dtype is (torch.bfloat16 if keeps else torch.float32)
                each.grad.copy_(each.grad.to(torch.bfloat16))
            norm = optimizers.clip(1.0)
            optimizers.step()
        found.append(({"norm": torch.tensor(norm)}, tensors(optimizers)))
    for rounded, exact in zip(*found, strict=True):
        assert all(torch.equal(value, exact[key]) for key, value in rounded.items())


def test_a_gradient_that_is_no_number_is_not_hidden(library: Library) -> None:
    model = Weights()
    optimizers = build_optimizers(model, SETTINGS)
    optimizers.kernels = Kernels(library)
    give_gradients(model, step=1)
    assert model.one.grad is not None
    model.one.grad[0] = math.nan
    assert math.isnan(optimizers.clip(1.0))
    optimizers.step()
    assert bool(model.matrix.isnan().all())


def test_ranks_share_the_update_only_where_all_have_it(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("payload.train.torch_engines.find_kernels", lambda: Kernels(library))
    for others, expected in [(1.0, True), (0.0, False)]:
        monkeypatch.setattr(World, "sum", lambda _, here, more=others: here + more)
        model = make_model()
        optimizers = build_optimizers(model, OptimizerSection())
        apply_engine(
            model, optimizers, settings=EngineSection(), world=replace(ALONE, world_size=2)
        )
        assert (optimizers.kernels is not None) is expected
        assert model.kernels is not None
