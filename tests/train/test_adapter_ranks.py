"""Ranks that train an adapter: equal losses on 1, 2 and 4, and only the adapter travels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from payload.models.adapter import AdaptedSpec
from payload.train.models.registry import load
from payload.train.weights import save_hf
from tests.support.launching import losses, mpirun, rank_env, run, summary, train_program
from tests.train.alone import train_alone
from tests.train.test_model import make_model

STEPS = 4
SETTINGS = (
    *("adapter.kind=lora", "adapter.rank=4", "optimizer.lr=0.01", f"train.steps={STEPS}"),
    *("model.preset=tiny", "model.n_layer=none", "model.n_head=none", "model.n_embd=none"),
)
CHECKPOINT = f"checkpoints/step_{STEPS:08d}/adapter_model.safetensors"

# A rank of the trainer that counts the bytes of all-reduces that go on while it computes: those of
# the gradients, and a few numbers of each step.
_COUNTING = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist
from payload.train.__main__ import main

sent, all_reduce = [], dist.all_reduce

def counted(tensor, *more, async_op=False, **settings):
    if async_op:
        sent.append(tensor.nbytes)
        Path(f"{os.environ['SENT']}.{dist.get_rank()}").write_text(json.dumps(sum(sent)))
    return all_reduce(tensor, *more, async_op=async_op, **settings)

dist.all_reduce = counted
sys.exit(main(sys.argv[1:], os.environ))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_hf(make_model(n_embd=32, n_head=2, n_layer=2, vocab_size=50_257), folder)
    return folder


@pytest.mark.ranks
@pytest.mark.parametrize(("dtype", "dora"), [("fp32", False), ("bf16", False), ("fp32", True)])
def test_one_two_and_four_ranks_are_equal_and_exchange_the_adapter_alone(
    base: Path, tmp_path: Path, tiny_config: Path, dtype: str, dora: bool
) -> None:
    program = tmp_path / "counting.py"
    program.write_text(_COUNTING, encoding="utf-8")
    settings = (
        f"model.init={base}",
        *SETTINGS,
        f"precision.dtype={dtype}",
        f"adapter.dora={dora}".lower(),
    )
    train_alone(tmp_path / "1", tiny_config, *settings)
    alone = load_file(tmp_path / "1" / CHECKPOINT)
    spec = AdaptedSpec.of(load(base).spec, rank=4, target="all-linear", is_dora=dora)
    trained = spec.num_trainable_params()
    assert trained == sum(value.numel() for value in alone.values())
    for ranks in (2, 4) if dtype == "fp32" and not dora else (2,):
        folder, sent = tmp_path / str(ranks), tmp_path / f"sent{ranks}"
        words = train_program(folder, tiny_config, "schedule.warmup_steps=0", *settings)[2:]
        done = run(mpirun(ranks, str(program), *words), env=rank_env(SENT=str(sent)))
        assert done.returncode == 0, done.stderr
        # In bf16 a pass of one rank adds up in another order.
        bound = 1e-5 if dtype == "fp32" else 1e-3
        assert losses(folder) == pytest.approx(losses(tmp_path / "1"), rel=bound)
        assert summary(folder)["ranks_identical"] is True
        for rank in range(ranks):
            besides = json.loads(Path(f"{sent}.{rank}").read_text()) - STEPS * trained * 4
            assert 0 <= besides <= STEPS * 64
        if dtype == "fp32":
            for name, value in load_file(folder / CHECKPOINT).items():
                torch.testing.assert_close(value, alone[name], rtol=1e-3, atol=1e-5)
