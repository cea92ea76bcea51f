"""Strategies: one rank's losses, checkpoints for any other strategy, compared ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from payload.run_record.run_files import RunPaths
from tests.support.launching import losses, summary
from tests.train.strategies.cases import (
    ADAPTERS,
    CONTINUED,
    DECODERS,
    KERNELS,
    RESUMED,
    SPOILED,
    STRATEGIES,
    names,
)
from tests.train.strategies.runs import (
    Runs,
    first_half,
    norms,
    require_bitwise_equal,
    require_equal_runs,
    require_same_layout,
    tensors,
)

pytestmark = pytest.mark.ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", names(STRATEGIES))
def test_a_strategy_trains_and_evaluates_as_one_rank_does(name: str, runs: Runs) -> None:
    require_equal_runs(runs.folder(name), runs.alone(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", names(STRATEGIES))
def test_its_checkpoint_has_the_layout_and_nearly_the_numbers_of_one_ranks(
    name: str, runs: Runs
) -> None:
    require_same_layout(runs.folder(name), runs.alone(name))
    for step in (3, 6):
        wanted = tensors(runs.alone(name), step=step)
        for key, each in tensors(runs.folder(name), step=step).items():
            if name == "zero3":
                assert_close(each, wanted[key], rtol=1e-5, atol=2e-5)
            elif not key.endswith("c_attn.bias"):
                # A key's bias has no effect on a softmax: its gradient is only rounding errors.
                assert_close(each, wanted[key], rtol=1e-3, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", names(RESUMED))
def test_a_resume_on_the_same_ranks_is_bitwise_and_each_rank_reads_its_own_state(
    name: str, runs: Runs
) -> None:
    require_bitwise_equal(runs.folder(name), runs.resumed(name))
    assert "each rank reads its own shard of the state" in runs.output(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", names(STRATEGIES))
def test_one_rank_continues_from_its_checkpoint(name: str, tmp_path: Path, runs: Runs) -> None:
    half = first_half(runs.folder(name), tmp_path / "half")
    runs.train_alone(half, name)
    assert losses(half) == pytest.approx(losses(runs.folder(name)), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", names(CONTINUED))
def test_other_strategies_and_numbers_of_ranks_continue_from_a_checkpoint(
    name: str, runs: Runs
) -> None:
    require_equal_runs(runs.folder(name), runs.resumed(name))
    require_same_layout(runs.folder(name), runs.resumed(name))


@pytest.mark.slow
def test_transformers_reads_the_checkpoint_of_sharded_stages(runs: Runs) -> None:
    folder = runs.folder("pipeline x shard")
    model = AutoModelForCausalLM.from_pretrained(RunPaths(folder).checkpoint(3))
    saved = tensors(folder, step=3)
    assert all(
        torch.equal(each, saved[f"model.safetensors: {name}"])
        for name, each in model.named_parameters()
    )


@pytest.mark.parametrize("name", names(KERNELS))
def test_the_kernels_run_the_layers(name: str, runs: Runs) -> None:
    assert losses(runs.folder(name)) == pytest.approx(losses(runs.alone(name)), rel=1e-4)
    assert "without kernels" not in runs.output(name)


@pytest.mark.parametrize("name", names(ADAPTERS))
def test_an_adapter_is_trained_beside_a_base_in_uneven_parts(name: str, runs: Runs) -> None:
    several, alone = runs.folder(name), runs.alone(name)
    assert losses(several) == pytest.approx(losses(alone), rel=1e-6)
    assert norms(several) == pytest.approx(norms(alone), rel=1e-5)
    ours, theirs = (
        load_file(RunPaths(folder).checkpoint(6) / "adapter_model.safetensors")
        for folder in (several, alone)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[key], theirs[key], atol=2e-5) for key in ours)


@pytest.mark.parametrize("name", names(DECODERS))
def test_a_decoder_trains_as_on_one_rank(name: str, runs: Runs) -> None:
    two, alone = runs.folder(name), runs.alone(name)
    close = 1e-4 if "precision.dtype=bf16" in DECODERS[name].settings else 1e-6
    assert losses(two) == pytest.approx(losses(alone), rel=close)
    assert norms(two) == pytest.approx(norms(alone), rel=close * 300)
    assert len(losses(two)) == 6
    assert summary(two)["ranks_identical"] is True


def test_dropout_masks_the_residual_stream_alike_on_both_tensor_ranks(runs: Runs) -> None:
    assert summary(runs.folder("tensor, dropout"))["ranks_identical"] is True


@pytest.mark.slow
def test_deepspeed_has_stage_3_and_warns_of_nothing(runs: Runs) -> None:
    stage = json.loads((runs.folder("zero3") / "deepspeed.json").read_text())
    assert stage["zero_optimization"]["stage"] == 3
    assert "DeepSpeed gathers weights only around modules" in runs.output("zero3")
    assert "Warning" not in runs.output("zero3") and "WARNING" not in runs.output("zero3")


@pytest.mark.seeds
@pytest.mark.bf16
def test_deepspeeds_bf16_has_the_losses_of_shards_without_kernels(runs: Runs) -> None:
    shard, zero3 = (
        losses(runs.folder(f"{name}, bf16 without kernels")) for name in ("shard", "zero3")
    )
    assert zero3 == pytest.approx(shard, rel=1e-6)


@pytest.mark.parametrize("name", names(SPOILED))
def test_a_bit_that_flips_on_one_rank_stops_the_run(name: str, runs: Runs) -> None:
    folder = runs.folder(name)
    record = json.loads((folder / "exits" / "rank_0000.json").read_text())
    assert "after step 3 the ranks no longer hold the same model" in record["error"]
    assert not (folder / "checkpoints").exists()
    if name == "shard, spoiled":
        assert "rank 1" in record["error"] and "rank 3" in record["error"]
