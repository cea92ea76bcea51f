"""A sharded run: one rank's losses, checkpoints for any strategy, ranks that are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import equal

from payload.results import RunPaths
from payload.train.weights import save_hf
from tests.support.launching import (
    evaluations,
    losses,
    mpirun,
    rank_env,
    run,
    summary,
    train,
    train_program,
)
from tests.train.alone import train_alone
from tests.train.strategies.runs import first_half, norms
from tests.train.test_model import make_model

pytestmark = pytest.mark.ranks

SHARD = "distributed.strategy=shard"
STEPS = ("schedule.warmup_steps=0", "train.steps=6", "train.checkpoint_every=3")
GROUPS = (SHARD, "distributed.shard_size=2", "batch.micro_batch_size=1")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_config: Path) -> Path:
    """The run of one rank, which holds everything."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train_alone(folder, tiny_config, *STEPS)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, tiny_config: Path) -> Path:
    """The same on two ranks with a half of the model each; not to be changed."""
    folder = tmp_path_factory.mktemp("sharded") / "run"
    train(folder, tiny_config, SHARD, *STEPS, num_ranks=2)
    return folder


def test_two_halves_train_and_evaluate_as_one_rank_does(alone: Path, sharded: Path) -> None:
    assert losses(sharded) == pytest.approx(losses(alone), rel=1e-6)
    assert evaluations(sharded) == pytest.approx(evaluations(alone), rel=1e-6)
    assert norms(sharded) == pytest.approx(norms(alone), rel=1e-5)
    assert summary(sharded)["ranks_identical"] is True


def test_a_sharded_checkpoint_has_the_layout_of_any_other(alone: Path, sharded: Path) -> None:
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(RunPaths(each).checkpoint(3) / name) for each in (sharded, alone))
        assert {key: (each.shape, each.dtype) for key, each in ours.items()} == {
            key: (each.shape, each.dtype) for key, each in theirs.items()
        }


def test_a_resume_on_the_same_ranks_is_bitwise(
    tmp_path: Path, tiny_config: Path, sharded: Path
) -> None:
    half = first_half(sharded, tmp_path / "half")
    train(half, tiny_config, SHARD, *STEPS, num_ranks=2)
    assert losses(half) == losses(sharded)
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(RunPaths(each).checkpoint(6) / name) for each in (half, sharded))
        assert ours.keys() == theirs.keys()
        assert all(equal(ours[key], theirs[key]) for key in ours)


def test_one_rank_without_shards_goes_on_from_a_sharded_checkpoint(
    tmp_path: Path, tiny_config: Path, sharded: Path
) -> None:
    half = first_half(sharded, tmp_path / "half")
    train_alone(half, tiny_config, *STEPS)
    assert losses(half) == pytest.approx(losses(sharded), rel=1e-6)


def test_four_ranks_in_two_groups_go_on_from_an_unsharded_checkpoint(
    tmp_path: Path, tiny_config: Path, alone: Path
) -> None:
    half = first_half(alone, tmp_path / "half")
    train(half, tiny_config, *GROUPS, *STEPS, num_ranks=4)
    assert losses(half) == pytest.approx(losses(alone), rel=1e-6)
    assert summary(half)["ranks_identical"] is True


def test_an_adapter_is_trained_beside_a_sharded_base_in_uneven_parts(
    tmp_path: Path, tiny_config: Path
) -> None:
    (tmp_path / "base").mkdir()
    save_hf(make_model(n_embd=32, n_head=2, n_layer=2, vocab_size=512), tmp_path / "base")
    settings = (
        *STEPS,
        f"model.init={tmp_path / 'base'}",
        *(f"model.{name}=none" for name in ("n_layer", "n_head", "n_embd")),
        *("adapter.kind=lora", "adapter.rank=4", "batch.global_batch_size=6"),
        "memory.activation_checkpointing=on",
    )
    train_alone(tmp_path / "alone", tiny_config, *settings)
    train(tmp_path / "three", tiny_config, SHARD, *settings, num_ranks=3)
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "alone"), rel=1e-6)
    ours, theirs = (
        load_file(RunPaths(tmp_path / name).checkpoint(6) / "adapter_model.safetensors")
        for name in ("three", "alone")
    )
    assert ours.keys() == theirs.keys()


def test_the_kernels_run_a_sharded_models_layers(tmp_path: Path, tiny_config: Path) -> None:
    bf16 = (*STEPS, "precision.dtype=bf16", "train.steps=3")
    train_alone(tmp_path / "alone", tiny_config, *bf16)
    said = train(tmp_path / "two", tiny_config, SHARD, *bf16, num_ranks=2).stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)
    assert "without kernels" not in said


def test_replicas_of_a_part_that_differ_stop_the_run(tmp_path: Path, tiny_config: Path) -> None:
    program = tmp_path / "spoil.py"
    program.write_text(_SPOIL_RANK_3, encoding="utf-8")
    words = train_program(tmp_path / "run", tiny_config, *GROUPS, *STEPS)[2:]
    result = run(mpirun(4, str(program), *words), env=rank_env())
    assert result.returncode == 40, result.stderr
    record = json.loads((tmp_path / "run" / "exits" / "rank_0000.json").read_text())
    assert "after step 3 the ranks do not hold one model" in record["error"]
    assert "rank 1" in record["error"] and "rank 3" in record["error"]
    assert not (tmp_path / "run" / "checkpoints").exists()


# A bit flips in the part of one rank, as broken RAM would do it.
_SPOIL_RANK_3 = """
import os, sys
import torch
from payload.train import trainer
from payload.train.__main__ import main

step = trainer.Trainer._train_step

def spoiled(self):
    stopping = step(self)
    if self._parts.world.rank == 3 and self._step == 2:
        with torch.no_grad():
            self._parts.optimizers.trained()["h.0.mlp.c_fc.weight"][5, 5] += 1e-6
    return stopping

trainer.Trainer._train_step = spoiled
sys.exit(main(sys.argv[1:], os.environ))
"""
