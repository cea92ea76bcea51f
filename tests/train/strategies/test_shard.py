"""A sharded run: one rank's losses, checkpoints for any strategy, ranks that are compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from payload.results import RunPaths
from payload.train.weights import save_hf
from tests.support.launching import losses, summary, train
from tests.train.alone import train_alone
from tests.train.strategies.runs import (
    SIZES,
    STEPS,
    error_of_spoiled,
    first_half,
    require_bitwise_resume,
    require_equal_runs,
    require_same_layout,
)
from tests.train.test_model import make_model

pytestmark = pytest.mark.ranks

SHARD = "distributed.strategy=shard"
GROUPS = (SHARD, "distributed.shard_size=2", "batch.micro_batch_size=1")


def test_two_halves_train_and_evaluate_as_one_rank_does(alone: Path, sharded: Path) -> None:
    require_equal_runs(sharded, alone)


def test_a_sharded_checkpoint_has_the_layout_of_any_other(alone: Path, sharded: Path) -> None:
    require_same_layout(sharded, alone)


def test_a_resume_on_the_same_ranks_is_bitwise(
    tmp_path: Path, tiny_config: Path, sharded: Path
) -> None:
    settings = (SHARD, *STEPS)
    require_bitwise_resume(sharded, tmp_path / "half", tiny_config, *settings, num_ranks=2)


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
        *SIZES,
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
    error = error_of_spoiled(
        tmp_path, tiny_config, *GROUPS, *STEPS, num_ranks=4, rank=3, parameter="h.0.mlp.c_fc.weight"
    )
    assert "after step 3 the ranks do not hold one model" in error
    assert "rank 1" in error and "rank 3" in error
