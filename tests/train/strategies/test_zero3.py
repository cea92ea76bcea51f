"""A run under DeepSpeed's ZeRO stage 3: the losses, checkpoints and checks of the others."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import allclose

from payload.engines import require_means_here
from payload.errors import ConfigError
from payload.launch_sections import DistributedSection
from payload.results import RunPaths
from payload.run_config import RunConfig, parse_run_config
from payload.train.engine import require_strategy
from payload.train.weights import save_hf
from tests.support.launching import losses, train
from tests.train.alone import train_alone
from tests.train.strategies.runs import (
    SIZES,
    STEPS,
    ZERO3,
    first_half,
    norms,
    require_bitwise_resume,
    require_equal_runs,
    require_same_layout,
    tensors,
    train_ranks,
)
from tests.train.test_model import make_model

ranks = pytest.mark.ranks


@pytest.fixture(scope="module")
def zero3(tmp_path_factory: pytest.TempPathFactory, tiny_config: Path) -> Path:
    """The same by DeepSpeed on two ranks; not to be changed."""
    folder = tmp_path_factory.mktemp("zero3") / "run"
    said = train_ranks(folder, tiny_config, ZERO3, *STEPS, num_ranks=2)
    assert "DeepSpeed gathers weights for modules alone" in said
    assert "Warning" not in said and "WARNING" not in said
    return folder


@ranks
def test_two_halves_train_and_evaluate_as_one_rank_does(alone: Path, zero3: Path) -> None:
    require_equal_runs(zero3, alone)
    stage = json.loads((zero3 / "deepspeed.json").read_text())["zero_optimization"]["stage"]
    assert stage == 3


@ranks
def test_a_checkpoint_has_the_layout_and_nearly_the_numbers_of_any_other(
    alone: Path, zero3: Path
) -> None:
    require_same_layout(zero3, alone)
    theirs = tensors(alone, step=6)
    assert all(
        allclose(each, theirs[name], atol=2e-5) for name, each in tensors(zero3, step=6).items()
    )


@ranks
def test_a_resume_on_the_same_ranks_is_bitwise(
    tmp_path: Path, tiny_config: Path, zero3: Path
) -> None:
    settings = (ZERO3, *STEPS)
    require_bitwise_resume(zero3, tmp_path / "half", tiny_config, *settings, num_ranks=2)


@ranks
def test_one_rank_and_shards_go_on_from_deepspeeds_checkpoint(
    tmp_path: Path, tiny_config: Path, zero3: Path
) -> None:
    one, two = (first_half(zero3, tmp_path / name) for name in ("one", "two"))
    train_alone(one, tiny_config, *STEPS)
    train(two, tiny_config, "distributed.strategy=shard", *STEPS, num_ranks=2)
    assert losses(one) == pytest.approx(losses(zero3), rel=1e-6)
    assert losses(two) == pytest.approx(losses(zero3), rel=1e-6)


@ranks
def test_four_ranks_go_on_from_the_checkpoint_of_one(
    tmp_path: Path, tiny_config: Path, alone: Path
) -> None:
    half = first_half(alone, tmp_path / "half")
    train_ranks(half, tiny_config, ZERO3, *STEPS, num_ranks=4)
    assert losses(half) == pytest.approx(losses(alone), rel=1e-6)


@ranks
def test_an_adapter_is_trained_beside_a_base_in_uneven_parts(
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
    train_ranks(tmp_path / "three", tiny_config, ZERO3, *settings, num_ranks=3)
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "alone"), rel=1e-6)
    assert norms(tmp_path / "three") == pytest.approx(norms(tmp_path / "alone"), rel=1e-5)
    ours, theirs = (
        load_file(RunPaths(tmp_path / name).checkpoint(6) / "adapter_model.safetensors")
        for name in ("three", "alone")
    )
    assert ours.keys() == theirs.keys()
    assert all(allclose(ours[key], theirs[key], atol=2e-5) for key in ours)


@pytest.mark.bf16
@ranks
def test_bf16_has_the_losses_of_shards_without_kernels(tmp_path: Path, tiny_config: Path) -> None:
    bf16 = (*STEPS, "precision.dtype=bf16", "train.steps=3", "engine.kernels=off")
    train(tmp_path / "shard", tiny_config, "distributed.strategy=shard", *bf16, num_ranks=2)
    train_ranks(tmp_path / "zero3", tiny_config, ZERO3, *bf16, num_ranks=2)
    assert losses(tmp_path / "zero3") == pytest.approx(losses(tmp_path / "shard"), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (['optimizer.name="muon"'], "needs whole matrices"),
        (["engine.compile=true"], "does not run with engine.compile = true"),
        (['distributed.backend="ccl"'], "is for gloo alone"),
        (["distributed.shard_size=2"], "leave shard_size out"),
        (['distributed.grad_dtype="bf16"'], "DeepSpeed would add gradients up in it"),
        (['model.quantize="nf4"', 'adapter.kind="lora"'], 'with distributed.strategy = "zero3"'),
    ],
)
def test_what_does_not_go_with_deepspeed_is_one_line(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        parse_run_config("", overrides=[ZERO3, *settings], where="run.toml")
    assert "\n" not in str(refused.value)


def test_without_the_package_the_line_that_installs_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    settings = DistributedSection(strategy="zero3")
    with pytest.raises(ConfigError, match=r"no-build-isolation deepspeed==0\.19\.8") as refused:
        require_strategy(settings)
    assert refused.value.exit_code == 10
    with pytest.raises(ConfigError, match="needs deepspeed"):
        require_means_here(RunConfig(distributed=settings))
