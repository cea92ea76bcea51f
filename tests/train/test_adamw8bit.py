"""AdamW with its state in 8 bits: close to AdamW, and only its own state is accepted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from payload.config.run_config import parse_run_config
from payload.config.training_sections import OptimizerSection
from payload.core.errors import CheckpointError, ConfigError
from payload.train.optimizers.optimizer import Optimizers, build_optimizers
from tests.train.test_model import make_model

STEPS = 6


def trained(name: str) -> Optimizers:
    """Return the optimizers of a small model after some steps on the same tokens."""
    torch.manual_seed(0)
    model = make_model(n_embd=64, n_head=2, n_layer=2, vocab_size=512)
    optimizers = build_optimizers(model, OptimizerSection(name=name, lr=1e-2))
    tokens = torch.randint(512, (4, 16))
    for _ in range(STEPS):
        model(tokens, tokens).backward()
        optimizers.clip(1.0)
        optimizers.step()
    return optimizers


def test_the_weights_are_nearly_adamw_s_with_a_quarter_of_the_state() -> None:
    torch.manual_seed(0)
    before = dict(make_model(n_embd=64, n_head=2, n_layer=2, vocab_size=512).named_parameters())
    exact, ours = trained("adamw"), trained("adamw8bit")
    theirs = dict(exact.model.named_parameters())
    for name, each in ours.model.named_parameters():
        moved = float((theirs[name] - before[name]).norm())
        assert float((each - theirs[name]).norm()) < 0.1 * moved, name
    small, large = (sum(map(num_bytes, x.state_tensors().values())) for x in (ours, exact))
    assert small < 0.3 * large


def num_bytes(values: Tensor) -> int:
    return values.numel() * values.element_size()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("absmax1.wte.weight", torch.zeros(127)),
        ("absmax1.wte.weight", torch.zeros(128, dtype=torch.float64)),
        ("state1.wte.weight", torch.zeros(512, 64)),
        ("state1.wte.weight", torch.zeros(64, 512, dtype=torch.uint8)),
        ("absmax1.ln_f.weight", torch.zeros(1)),
        ("exp_avg.wte.weight", torch.zeros(512, 64)),
        ("qmap1.wte.weight", torch.zeros(256)),
    ],
)
def test_state_of_another_form_is_refused(name: str, value: Tensor) -> None:
    """bitsandbytes' kernels would read and write beyond the tensors' memory."""
    optimizers = trained("adamw8bit")
    assert optimizers.state_tensors()["absmax1.wte.weight"].shape == (128,)
    with pytest.raises(CheckpointError, match=f"'{name}' of shape .* fits no parameter"):
        optimizers.load_state_tensors({name: value})


def test_a_resumed_update_continues_bit_by_bit() -> None:
    unbroken = trained("adamw8bit")
    model = make_model(n_embd=64, n_head=2, n_layer=2, vocab_size=512)
    model.load_state_dict(unbroken.model.state_dict())
    resumed = build_optimizers(model, OptimizerSection(name="adamw8bit", lr=1e-2))
    state = {name: each.clone() for name, each in unbroken.state_tensors().items()}
    resumed.load_state_tensors(state)
    for optimizers in (unbroken, resumed):
        torch.manual_seed(1)
        for each in optimizers.model.parameters():
            # Of a layout that autograd can leave, if a matmul made the gradient.
            each.grad = torch.randn_like(each.T).T
        optimizers.step()
    again = resumed.state_tensors()
    assert all(torch.equal(again[name], each) for name, each in unbroken.state_tensors().items())
    first, second = (dict(x.model.named_parameters()) for x in (unbroken, resumed))
    assert all(torch.equal(each, second[name]) for name, each in first.items())


@pytest.mark.parametrize(
    "split",
    [
        "distributed.strategy=shard",
        "distributed.strategy=zero3",
        "distributed.tensor_parallel=2",
        "distributed.pipeline_parallel=2",
    ],
)
def test_it_needs_whole_parameters(split: str) -> None:
    with pytest.raises(ConfigError, match=r'"adamw8bit" needs whole parameters, but distributed'):
        parse_run_config("", overrides=["optimizer.name=adamw8bit", split], where="run.toml")
