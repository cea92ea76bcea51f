"""Ranks that train an adapter: equal losses on 1, 2 and 4 ranks; only the adapter is exchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from payload.models.adapter import AdaptedSpec
from payload.train.models.hf_weights import save_hf
from payload.train.models.loading import load
from tests.support.accelerate_state import forget_accelerate
from tests.support.launching import losses, summary, train_several
from tests.train.alone import train_alone
from tests.train.test_model import make_model

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4
SETTINGS = (
    *("adapter.kind=lora", "adapter.rank=4", "optimizer.lr=0.01", f"train.steps={STEPS}"),
    *("model.preset=tiny", "model.n_layer=none", "model.n_head=none", "model.n_embd=none"),
)
CHECKPOINT = f"checkpoints/step_{STEPS:08d}/adapter_model.safetensors"

# Ranks of the trainer that count the bytes of all-reduces during computation: the gradients, and a
# few numbers of each step.
_COUNTING = """
import json, os
from pathlib import Path
import torch.distributed as dist
from tests.support import several_runs

sent, all_reduce, train = [], dist.all_reduce, several_runs.program.main

def counted(tensor, *more, async_op=False, **settings):
    if async_op:
        sent.append(tensor.nbytes)
    return all_reduce(tensor, *more, async_op=async_op, **settings)

def train_counted(arguments, env):
    sent.clear()
    code = train(arguments, env)
    folder = arguments[arguments.index("--run-dir") + 1]
    Path(f"{folder}.sent.{env['PMI_RANK']}").write_text(json.dumps(sum(sent)))
    return code

dist.all_reduce, several_runs.program.main = counted, train_counted
several_runs.main()
"""
CASES = {
    "fp32": ("fp32", False, "none"),
    "bf16": ("bf16", False, "none"),
    "dora": ("fp32", True, "none"),
    "tokens": ("fp32", False, "11,318"),
    "tokens-bf16": ("bf16", False, "11,318"),
}
"""Dtype, DoRA, and the tokens whose rows are trained."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_hf(make_model(n_embd=32, n_head=2, n_layer=2, vocab_size=50_257), folder)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_config: Path, base: Path) -> Path:
    """Return a folder with the runs of each case: `NAME-1` and `NAME-2`, for fp32 also `fp32-4`."""
    root = tmp_path_factory.mktemp("trained")
    program = root / "counting.py"
    program.write_text(_COUNTING, encoding="utf-8")
    settings = {
        name: (
            *(f"model.init={base}", *SETTINGS, "schedule.warmup_steps=0"),
            *(f"precision.dtype={dtype}", f"adapter.dora={dora}".lower()),
            f"adapter.train_tokens={tokens}",
        )
        for name, (dtype, dora, tokens) in CASES.items()
    }
    for name, words in settings.items():
        train_alone(root / f"{name}-1", tiny_config, *words)
        forget_accelerate()
    for ranks in (2, 4):
        names = CASES if ranks == 2 else ["fp32"]
        runs = {root / f"{name}-{ranks}": settings[name] for name in names}
        train_several(runs, tiny_config, num_ranks=ranks, program=[str(program)])
    return root


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_one_two_and_four_ranks_are_equal_and_exchange_the_adapter_alone(
    base: Path, trained: Path, name: str
) -> None:
    dtype, dora, tokens = CASES[name]
    alone = load_file(trained / f"{name}-1" / CHECKPOINT)
    spec = AdaptedSpec.of(
        load(base).spec, rank=4, target="all-linear", is_dora=dora, train_tokens=tokens
    )
    parameters = spec.num_trainable_params()
    assert parameters == sum(value.numel() for value in alone.values())
    for ranks in (2, 4) if name == "fp32" else (2,):
        folder = trained / f"{name}-{ranks}"
        # In bf16 a micro-batch of one rank sums in another order.
        bound = 1e-5 if dtype == "fp32" else 1e-3
        assert losses(folder) == pytest.approx(losses(trained / f"{name}-1"), rel=bound)
        assert summary(folder)["ranks_identical"] is True
        for rank in range(ranks):
            sent = json.loads(Path(f"{folder}.sent.{rank}").read_text())
            assert 0 <= sent - STEPS * parameters * 4 <= STEPS * 64
        if dtype == "fp32":
            for key, value in load_file(folder / CHECKPOINT).items():
                torch.testing.assert_close(value, alone[key], rtol=1e-3, atol=1e-5)
