"""Pipeline stages: one rank's losses with either schedule, checkpoints for any strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.testing import assert_close

from payload.train.strategies.pipeline import order
from tests.support.launching import losses, train
from tests.train.alone import train_alone
from tests.train.strategies.runs import STEPS as BASE_STEPS
from tests.train.strategies.runs import (
    error_of_spoiled,
    first_half,
    require_bitwise_resume,
    require_equal_runs,
    require_same_decoder,
    require_same_layout,
    tensors,
    train_decoders,
)

pytestmark = pytest.mark.ranks

PIPELINE = "distributed.pipeline_parallel=2"
DECODERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("llama, untied, biases", ("memory.activation_checkpointing=on",)),
    ("gemma3_text", ("engine.kernels=off",)),
    ("qwen3", ("precision.dtype=bf16",)),
)
STEPS = (*BASE_STEPS, "model.n_layer=3")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_config: Path) -> Path:
    """The run of one rank, which holds everything."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train_alone(folder, tiny_config, *STEPS)
    return folder


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory, tiny_config: Path) -> Path:
    """The same on two stages, of which each has the embedding; not to be changed."""
    folder = tmp_path_factory.mktemp("stages") / "run"
    train(folder, tiny_config, PIPELINE, *STEPS, num_ranks=2)
    return folder


def test_two_stages_train_and_evaluate_as_one_rank_does(alone: Path, stages: Path) -> None:
    require_equal_runs(stages, alone)


def test_their_checkpoint_has_the_tensors_of_any_other(alone: Path, stages: Path) -> None:
    ours, theirs = tensors(stages, step=3), tensors(alone, step=3)
    assert ours.keys() == theirs.keys()
    for name, each in ours.items():
        if not name.endswith("c_attn.bias"):
            assert_close(each, theirs[name], rtol=1e-3, atol=2e-5)


def test_a_resume_on_the_same_stages_is_bitwise(
    tmp_path: Path, tiny_config: Path, stages: Path
) -> None:
    settings = (PIPELINE, *STEPS)
    require_bitwise_resume(stages, tmp_path / "half", tiny_config, *settings, num_ranks=2)


def test_one_rank_goes_on_from_their_checkpoint(
    tmp_path: Path, tiny_config: Path, stages: Path
) -> None:
    half = first_half(stages, tmp_path / "half")
    train_alone(half, tiny_config, *STEPS)
    assert losses(half) == pytest.approx(losses(stages), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ((PIPELINE, "distributed.pipeline_schedule=gpipe", "batch.micro_batch_size=1"), 4),
        ((PIPELINE, "distributed.tensor_parallel=2"), 4),
        (("distributed.pipeline_parallel=3",), 3),
    ],
    ids=["two replicas, GPipe", "two tensor ranks", "three stages"],
)
def test_stages_go_on_from_the_checkpoint_of_one_rank(
    tmp_path: Path, tiny_config: Path, alone: Path, settings: tuple[str, ...], ranks: int
) -> None:
    half = first_half(alone, tmp_path / "half")
    train(half, tiny_config, *settings, *STEPS, num_ranks=ranks)
    require_equal_runs(half, alone)
    require_same_layout(half, alone)


def test_the_kernels_run_a_stages_layers(tmp_path: Path, tiny_config: Path) -> None:
    bf16 = (*STEPS, "precision.dtype=bf16", "train.steps=3")
    train_alone(tmp_path / "alone", tiny_config, *bf16)
    said = train(tmp_path / "two", tiny_config, PIPELINE, *bf16, num_ranks=2).stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)
    assert "without kernels" not in said


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory, tiny_config: Path) -> Path:
    """A folder with the runs of `DECODERS`."""
    root = tmp_path_factory.mktemp("decoders")
    train_decoders(root, tiny_config, PIPELINE, DECODERS, vocab_size=600)
    return root


@pytest.mark.parametrize("case", range(len(DECODERS)), ids=[name for name, _ in DECODERS])
def test_a_decoder_is_in_stages(decoders: Path, case: int) -> None:
    require_same_decoder(decoders / str(case), DECODERS[case][1])


def test_a_head_that_is_not_the_embedding_any_more_stops_the_run(
    tmp_path: Path, tiny_config: Path
) -> None:
    error = error_of_spoiled(
        tmp_path, tiny_config, PIPELINE, *STEPS, num_ranks=2, rank=1, parameter="wte.weight"
    )
    assert "after step 3 the ranks do not hold one model" in error


def test_1f1b_keeps_as_many_passes_as_stages_follow() -> None:
    first = [f"{kind[0]}{number}" for kind, number in order("1f1b", stage=0, stages=3, passes=5)]
    assert first == ["f0", "f1", "f2", "b0", "f3", "b1", "f4", "b2", "b3", "b4"]
    last = [f"{kind[0]}{number}" for kind, number in order("1f1b", stage=2, stages=3, passes=3)]
    assert last == ["f0", "b0", "f1", "b1", "f2", "b2"]
    gpipe = [f"{kind[0]}{number}" for kind, number in order("gpipe", stage=0, stages=2, passes=2)]
    assert gpipe == ["f0", "f1", "b0", "b1"]
