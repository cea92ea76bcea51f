"""A new model family is one file and one line of the registry: a toy family is trained this way."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import cast

import pytest
import torch

from payload.config.training_sections import OptimizerSection
from payload.core.errors import CheckpointError, ExitCode
from payload.estimates.gradient_buckets import buckets
from payload.formats.hf_folder import WEIGHTS_FILE
from payload.models.registry import FAMILIES, read_spec, spec_of
from payload.orchestrate.__main__ import main as orchestrate
from payload.run_record.run_files import RunPaths
from payload.train.models.base import CausalLM, trainable
from payload.train.models.hf_weights import save_hf
from payload.train.models.loading import build, load
from payload.train.optimizers.optimizer import build_optimizers
from payload.train.strategies.buckets import make_buckets
from tests.models import toy_family
from tests.support.launching import REPO, losses, train_several
from tests.train.alone import train_alone

MOST_LINES = 119
RANKS = ("-m", toy_family.__name__)
CONFIG = {"model_type": "toy", "hidden": 16, "vocab_size": 640}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a toy model, and its family as an additional line of the registry."""
    for name, module in toy_family.LINE.items():
        monkeypatch.setitem(cast("dict[str, str]", FAMILIES), name, module)
    model = tmp_path / "model"
    model.mkdir()
    torch.manual_seed(5)
    save_hf(build(spec_of(CONFIG, where="test")), model)
    return model


@pytest.mark.parametrize(
    "settings",
    [["engine.kernels=off"], ["engine.kernels=auto"], ["optimizer.name=muon"]],
    ids=["reference", "kernels", "muon"],
)
def test_a_family_of_two_files_trains_and_resumes_as_any_other(
    toy: Path, tmp_path: Path, tiny_config: Path, settings: list[str]
) -> None:
    more = [*settings_of(toy), *settings]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    train_alone(whole, tiny_config, *more, "train.steps=4")
    train_alone(halves, tiny_config, *more, "train.steps=2")
    train_alone(halves, tiny_config, *more, "train.steps=4")
    assert losses(whole) == losses(halves)
    assert losses(whole)[-1] < losses(whole)[0]
    ends = [RunPaths(run).checkpoint(4) for run in (whole, halves)]
    assert len({(end / WEIGHTS_FILE).read_bytes() for end in ends}) == 1
    assert json.loads((ends[0] / "config.json").read_text()) == CONFIG
    assert type(load(ends[0])).__name__ == "Toy"


@pytest.mark.ranks
def test_two_ranks_train_it_to_the_losses_of_one_and_resume_it_bitwise(
    toy: Path, tmp_path: Path, tiny_config: Path
) -> None:
    assert len(Path(toy_family.__file__).read_text("utf-8").splitlines()) <= MOST_LINES
    more = [*settings_of(toy), "engine.kernels=off"]
    one, two, halves = tmp_path / "one", tmp_path / "two", tmp_path / "halves"
    train_alone(one, tiny_config, *more, "train.steps=4")
    runs = {two: [*more, "train.steps=4"], halves: [*more, "train.steps=2"]}
    train_several(runs, tiny_config, num_ranks=2, program=RANKS)
    train_several({halves: runs[two]}, tiny_config, num_ranks=2, program=RANKS)
    assert losses(two) == pytest.approx(losses(one), rel=1e-6)
    assert losses(halves) == losses(two)
    ends = [RunPaths(run).checkpoint(4) for run in (two, halves)]
    assert len({(end / WEIGHTS_FILE).read_bytes() for end in ends}) == 1


@pytest.mark.processes
def test_a_plan_prints_its_registered_name_and_its_parameters(
    toy: Path, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(toy, tiny_config, tmp_path) == ExitCode.OK
    printed = capsys.readouterr()
    assert f"model.init = '{toy}'" in printed.err
    (name,) = toy_family.LINE
    assert f"model family     {name}\n" in printed.out
    assert "parameters       20,736" in printed.out


@pytest.mark.processes
def test_without_its_line_in_the_registry_the_error_lists_the_known_families(
    toy: Path, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in toy_family.LINE:
        monkeypatch.delitem(cast("dict[str, str]", FAMILIES), name)
    for use in (load, read_spec):
        with pytest.raises(
            CheckpointError,
            match=r"'toy'.* families are gemma4, gpt2, llama, qwen3_5, transformers\.",
        ):
            use(toy)
    assert plan(toy, tiny_config, tmp_path) == ExitCode.CONFIG


def test_a_family_is_a_folder_of_numbers_and_one_of_tensors() -> None:
    for folder in ("models", "train/families"):
        found = {path.parent.name for path in (REPO / "payload" / folder).glob("*/__init__.py")}
        assert found == set(FAMILIES)


def settings_of(model: Path) -> list[str]:
    """Return settings of a short run of this model with checkpoints."""
    sizes = [f"model.{name}=none" for name in ("n_layer", "n_head", "n_embd")]
    run = ["train.checkpoint_every=2", "schedule.decay_steps=4", "optimizer.lr=0.03"]
    return [*sizes, f"model.init={model}", *run, "schedule.warmup_steps=0"]


def plan(model: Path, config: Path, folder: Path) -> int:
    """Plan a run of this model on this machine; return the exit code."""
    words = [word for setting in settings_of(model) for word in ("--set", setting)]
    place = ["--inventory", "local", "--runs-dir", str(folder / "runs"), "--config", str(config)]
    return orchestrate(["plan", *place, *words], os.environ)


def test_its_numbers_serve_the_prediction_of_a_step(toy: Path) -> None:
    spec = read_spec(toy)
    found = buckets(spec, tokens=1024)
    assert sum(each.elements for each in found) == spec.num_params()
    assert found[-1].ready == 1.0
    assert spec.summary() == "1 layers, 1 heads, width 16, context 4096"


def test_a_frozen_weight_has_no_optimizer_state_and_no_place_in_the_exchange(toy: Path) -> None:
    model = load(toy)
    model.get_parameter("embed.weight").requires_grad_(False)
    before = model.get_parameter("embed.weight").clone()
    assert [name for name, _ in trainable(model)] == ["mix.weight", "head.weight"]
    optimizers = build_optimizers(model, OptimizerSection())
    (bucket,) = make_buckets(parameter for _, parameter in trainable(model))
    assert [each.numel() for each in bucket.parameters] == [640 * 16, 16 * 16]
    tokens = torch.arange(32).view(2, 16)
    for _ in range(2):
        model(tokens, tokens).backward()
        optimizers.clip(1.0)
        optimizers.step()
    held = {name.partition(".")[2] for name in optimizers.state_tensors()}
    assert held == {"mix.weight", "head.weight"}
    assert torch.equal(model.get_parameter("embed.weight"), before)


def test_a_name_that_no_family_has_is_not_taken_for_one_like_it(toy: Path) -> None:
    with pytest.raises(CheckpointError, match="'toys'"):
        spec_of({"model_type": "toys"}, where="config.json")
    assert isinstance(load(toy), CausalLM)
