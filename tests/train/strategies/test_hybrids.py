"""Shards of what stages or tensor ranks hold; checkpoints that go from strategy to strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from payload.results import RunPaths
from tests.support.launching import losses
from tests.train.alone import train_alone
from tests.train.strategies.runs import (
    STEPS,
    ZERO3,
    error_of_spoiled,
    first_half,
    require_bitwise_resume,
    require_equal_runs,
    require_same_layout,
    tensors,
    train_ranks,
)

pytestmark = pytest.mark.ranks

SHARD = "distributed.strategy=shard"
PIPELINE = "distributed.pipeline_parallel=2"
TENSOR = "distributed.tensor_parallel=2"
STAGES = (SHARD, PIPELINE)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory, tiny_config: Path) -> Path:
    """Two stages of two shards; not to be changed."""
    folder = tmp_path_factory.mktemp("stages") / "run"
    train_ranks(folder, tiny_config, *STAGES, *STEPS, num_ranks=4)
    return folder


def test_shards_of_stages_train_as_one_rank_does(alone: Path, stages: Path) -> None:
    require_equal_runs(stages, alone)
    require_same_layout(stages, alone)


def test_a_resume_on_the_same_mesh_is_bitwise(
    tmp_path: Path, tiny_config: Path, stages: Path
) -> None:
    settings = (*STAGES, *STEPS)
    require_bitwise_resume(stages, tmp_path / "half", tiny_config, *settings, num_ranks=4)


def test_one_rank_and_transformers_read_their_checkpoint(
    tmp_path: Path, tiny_config: Path, stages: Path
) -> None:
    half = first_half(stages, tmp_path / "half")
    model = AutoModelForCausalLM.from_pretrained(RunPaths(half).checkpoint(3))
    saved = tensors(half, step=3)
    assert all(
        torch.equal(each, saved[f"model.safetensors: {name}"])
        for name, each in model.named_parameters()
    )
    train_alone(half, tiny_config, *STEPS)
    assert losses(half) == pytest.approx(losses(stages), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ((SHARD, TENSOR), 4),
        ((SHARD, PIPELINE, "distributed.shard_size=1"), 4),
        ((ZERO3,), 2),
        ((TENSOR,), 2),
        ((PIPELINE,), 2),
    ],
    ids=["tensor x shard", "groups of one shard", "zero3", "tensor", "pipeline"],
)
def test_a_sharded_checkpoint_goes_on_under_other_strategies(
    tmp_path: Path, tiny_config: Path, sharded: Path, settings: tuple[str, ...], ranks: int
) -> None:
    half = first_half(sharded, tmp_path / "half")
    train_ranks(half, tiny_config, *settings, *STEPS, num_ranks=ranks)
    require_equal_runs(half, sharded)
    require_same_layout(half, sharded)


def test_a_tied_head_unlike_its_embedding_stops_the_run(tmp_path: Path, tiny_config: Path) -> None:
    settings = (*STAGES, *STEPS)
    error = error_of_spoiled(
        tmp_path, tiny_config, *settings, num_ranks=4, rank=1, parameter="wte.weight"
    )
    assert "after step 3 the ranks do not hold one model" in error


def test_a_replica_of_a_stage_that_differs_stops_the_run(tmp_path: Path, tiny_config: Path) -> None:
    settings = (*STAGES, "distributed.shard_size=1", *STEPS)
    error = error_of_spoiled(
        tmp_path, tiny_config, *settings, num_ranks=4, rank=1, parameter="h.0.mlp.c_fc.weight"
    )
    assert "after step 3 the ranks do not hold one model" in error
