"""Ranks that compute each layer together: one rank's losses, checkpoints for any strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from payload.train.models.split import Split
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
    require_same_decoder,
    tensors,
    train_decoders,
)
from tests.train.test_model import make_model

pytestmark = pytest.mark.ranks

TENSOR = "distributed.tensor_parallel=2"
DECODERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("llama, untied, biases", ("memory.activation_checkpointing=on",)),
    ("qwen3", ("engine.kernels=off",)),
    ("qwen3", ("precision.dtype=bf16",)),
    ("gemma3_text", ()),
)
WITH_REPLICAS = (TENSOR, "batch.micro_batch_size=1")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A GPT-2 whose vocabulary does not divide by two."""
    folder = tmp_path_factory.mktemp("base")
    save_hf(make_model(n_embd=32, n_head=2, n_layer=2, vocab_size=513), folder)
    return (*STEPS, *SIZES, f"model.init={folder}")


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory, tiny_config: Path, settings: tuple[str, ...]
) -> Path:
    """The run of one rank, which holds everything."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train_alone(folder, tiny_config, *settings)
    return folder


@pytest.fixture(scope="module")
def halves(
    tmp_path_factory: pytest.TempPathFactory, tiny_config: Path, settings: tuple[str, ...]
) -> Path:
    """The same on two ranks with a half of each layer; not to be changed."""
    folder = tmp_path_factory.mktemp("halves") / "run"
    train(folder, tiny_config, TENSOR, *settings, num_ranks=2)
    return folder


def test_two_halves_of_each_layer_train_and_evaluate_as_one_rank_does(
    alone: Path, halves: Path
) -> None:
    require_equal_runs(halves, alone)


def test_their_checkpoint_has_the_tensors_of_any_other(alone: Path, halves: Path) -> None:
    ours, theirs = tensors(halves, step=6), tensors(alone, step=6)
    assert ours.keys() == theirs.keys()
    for name, each in ours.items():
        assert each.shape == theirs[name].shape and each.dtype == theirs[name].dtype
        if name.endswith("c_attn.bias"):
            # A key's bias changes no softmax: its gradient is what rounding makes of zero.
            continue
        assert_close(each, theirs[name], rtol=1e-3, atol=2e-5)


def test_a_resume_on_the_same_ranks_is_bitwise(
    tmp_path: Path, tiny_config: Path, settings: tuple[str, ...], halves: Path
) -> None:
    words = (TENSOR, *settings)
    require_bitwise_resume(halves, tmp_path / "half", tiny_config, *words, num_ranks=2)


def test_one_rank_goes_on_from_their_checkpoint(
    tmp_path: Path, tiny_config: Path, settings: tuple[str, ...], halves: Path
) -> None:
    half = first_half(halves, tmp_path / "half")
    train_alone(half, tiny_config, *settings)
    assert losses(half) == pytest.approx(losses(halves), rel=1e-6)


def test_two_pairs_go_on_from_the_checkpoint_of_one_rank(
    tmp_path: Path, tiny_config: Path, settings: tuple[str, ...], alone: Path
) -> None:
    half = first_half(alone, tmp_path / "half")
    train(half, tiny_config, *WITH_REPLICAS, *settings, num_ranks=4)
    require_equal_runs(half, alone)


def test_the_kernels_run_a_part_of_each_layer(
    tmp_path: Path, tiny_config: Path, settings: tuple[str, ...]
) -> None:
    bf16 = (*settings, "precision.dtype=bf16", "train.steps=3")
    train_alone(tmp_path / "alone", tiny_config, *bf16)
    said = train(tmp_path / "two", tiny_config, TENSOR, *bf16, num_ranks=2).stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)
    assert "without kernels" not in said


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory, tiny_config: Path) -> Path:
    """A folder with the runs of `DECODERS`."""
    root = tmp_path_factory.mktemp("decoders")
    train_decoders(root, tiny_config, TENSOR, DECODERS, vocab_size=600, num_key_value_heads=2)
    return root


@pytest.mark.parametrize("case", range(len(DECODERS)), ids=[name for name, _ in DECODERS])
def test_a_decoder_is_shared_out_by_its_key_heads(decoders: Path, case: int) -> None:
    require_same_decoder(decoders / str(case), DECODERS[case][1])


def test_dropout_masks_the_residual_stream_alike_on_both_ranks(
    tmp_path: Path, tiny_config: Path
) -> None:
    words = ("model.dropout=0.2", "train.steps=3", "train.sync_check_every=1")
    train(tmp_path / "two", tiny_config, TENSOR, *words, num_ranks=2)
    assert summary(tmp_path / "two")["ranks_identical"] is True


def test_a_norm_that_differs_on_one_rank_stops_the_run(tmp_path: Path, tiny_config: Path) -> None:
    error = error_of_spoiled(
        tmp_path, tiny_config, TENSOR, *STEPS, num_ranks=2, rank=1, parameter="h.0.ln_1.weight"
    )
    assert "after step 3 the ranks do not hold one model" in error


def test_parts_of_sections_come_together_again() -> None:
    whole = torch.arange(30.0).view(15, 2)
    split = Split(0, sections=3)
    parts = [split.part(whole, index=index, size=2) for index in range(2)]
    assert parts[0][:, 0].tolist() == [0, 2, 4, 10, 12, 14, 20, 22, 24]
    assert tuple(parts[1].shape) == split.part_shape((15, 2), index=1, size=2)
    joined = torch.zeros_like(whole)
    for index, part in enumerate(parts):
        split.put(part, joined, index=index, size=2)
    assert torch.equal(joined, whole)
