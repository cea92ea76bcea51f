"""A new optimizer and a new loss are one file each: toys train, resume and appear in a plan."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from payload import optimizers
from payload.config.run_config import parse_run_config
from payload.config.training_sections import OptimizerSection, TaskSection
from payload.core.errors import ConfigError
from payload.core.tasks import TASKS, TrainingTask
from payload.formats.data_folder import IGNORED_TARGET, load_meta
from payload.optimizers.registry import find, names
from payload.orchestrate.__main__ import main as orchestrate
from payload.run_record.run_files import RunPaths
from payload.train import losses as losses_package
from payload.train.losses import registry as losses_registry
from payload.train.losses.next_token import NextToken
from payload.train.optimizers.optimizer import build_optimizers
from tests.supervise.planned import StandInAccess
from tests.support.launching import losses, summary, train_several
from tests.support.recorded_output import record_output
from tests.train import toys
from tests.train.alone import train_alone
from tests.train.test_model import make_model

STEPS = ("train.steps=4", "train.checkpoint_every=2", "schedule.warmup_steps=0")
TOYS = {"optimizer": "optimizer.name=toy", "loss": "task.kind=toy"}
PROGRAM = ("-m", "tests.train.toys.ranks")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register both toys in this process."""
    for package in (optimizers, losses_package):
        monkeypatch.setattr(package, "__path__", [*package.__path__])
    monkeypatch.delitem(TASKS, "toy", raising=False)
    toys.register_optimizer()
    toys.register_loss()
    yield
    TASKS.pop("toy")
    for package in (optimizers, losses_package):
        sys.modules.pop(f"{package.__name__}.toy", None)
        vars(package).pop("toy", None)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory, tiny_config: Path) -> dict[str, Path]:
    """Return the folders of the toys' runs on two ranks."""
    root = tmp_path_factory.mktemp("toys")
    folders = {name: root / name for name in TOYS}
    runs = {folders[name]: (*STEPS, setting) for name, setting in TOYS.items()}
    train_several(runs, tiny_config, num_ranks=2, program=PROGRAM)
    return folders


@pytest.mark.ranks
@pytest.mark.parametrize("toy", TOYS)
def test_a_toy_trains_two_ranks_to_the_losses_of_one_and_resumes_bitwise(
    registered: None, on_two_ranks: dict[str, Path], tiny_config: Path, tmp_path: Path, toy: str
) -> None:
    whole, half = tmp_path / "whole", tmp_path / "half"
    train_alone(whole, tiny_config, *STEPS, TOYS[toy])
    assert losses(whole) == pytest.approx(losses(on_two_ranks[toy]), rel=1e-5)
    assert losses(whole)[-1] < losses(whole)[0]
    assert summary(on_two_ranks[toy])["ranks_identical"] is True

    shutil.copytree(whole, half)
    shutil.rmtree(RunPaths(half).checkpoint(4))
    train_alone(half, tiny_config, *STEPS, TOYS[toy])
    assert losses(half) == losses(whole)
    ends = [RunPaths(run).checkpoint(4) for run in (whole, half)]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert len({(end / name).read_bytes() for end in ends}) == 1, name


@pytest.mark.processes
def test_a_plan_has_a_toy_s_name_and_the_bytes_of_its_state(
    registered: None, tiny_config: Path, tmp_path: Path
) -> None:
    usual = plan(tiny_config, tmp_path)
    with_toys = plan(tiny_config, tmp_path, *TOYS.values())
    assert with_toys["config"]["optimizer"]["name"] == "toy"
    assert with_toys["config"]["task"]["kind"] == "toy"
    before, after = usual["plan"]["arithmetic"], with_toys["plan"]["arithmetic"]
    saved = 4 * before["params"]
    for key in ("checkpoint_bytes", "memory_bytes_per_rank"):
        assert before[key] - after[key] == saved, key


def plan(config: Path, folder: Path, *settings: str) -> Any:
    """Return the output of `plan --json` for two ranks on this machine."""
    words = ["plan", "--json", "--inventory", "local", "--config", str(config)]
    for setting in ("launch.ranks_per_node=2", *settings):
        words += ["--set", setting]
    with record_output() as said:
        access = StandInAccess(os.environ)
        status = orchestrate([*words, "--runs-dir", str(folder)], os.environ, access=access)
    assert status == 0, said.err
    return json.loads(said.out)


def test_the_time_of_an_update_and_the_conflicts_are_the_toy_s(registered: None) -> None:
    config = parse_run_config("", overrides=[TOYS["optimizer"]], where="test")
    assert find(config.optimizer.name).update_s == 1e-9
    with pytest.raises(ConfigError, match=r"was not tried with distributed\.strategy"):
        shard = [TOYS["optimizer"], "distributed.strategy=shard"]
        parse_run_config("", overrides=shard, where="test")
    with pytest.raises(ConfigError, match=r'task\.kind = "toy" does not run with distributed'):
        split = [TOYS["loss"], "distributed.tensor_parallel=2"]
        parse_run_config("", overrides=split, where="test")


@pytest.mark.parametrize(
    ("setting", "known"),
    [
        ("optimizer.name=toy", "choose one of adamw, adamw8bit, muon"),
        ("task.kind=toy", "choose one of text, chat, classify, preference"),
    ],
)
def test_without_its_line_a_toy_is_refused_by_name_with_the_known_ones(
    setting: str, known: str
) -> None:
    with pytest.raises(ConfigError, match=f"'toy': {known}"):
        parse_run_config("", overrides=[setting], where="test")


def test_an_optimizer_or_a_loss_without_a_file_names_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, tiny_data: Path
) -> None:
    with pytest.raises(ConfigError, match="'toy': choose one of adamw, adamw8bit, muon"):
        build_optimizers(make_model(), OptimizerSection(name="toy"))
    monkeypatch.setitem(TASKS, "toy", TrainingTask(data="text", loss="toy"))
    with pytest.raises(ConfigError, match="Use one of classification, next_token, preference"):
        losses_registry.loss_of(TaskSection(kind="toy"), load_meta(tiny_data))


def test_each_optimizer_has_the_name_of_its_file_and_each_task_a_loss() -> None:
    assert [find(name).name for name in names()] == names()
    assert {each.loss for each in TASKS.values()} == set(losses_registry.names())


def test_the_mean_that_a_head_computes_is_the_loss_of_the_next_token() -> None:
    model = make_model()
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, dims=1)
    targets[0, 5:] = IGNORED_TARGET
    found = NextToken()(model.token_losses(tokens, targets), targets)
    torch.testing.assert_close(found, model(tokens, targets))


@pytest.mark.parametrize("kind", ["optimizers", "losses"])
def test_a_toy_is_one_short_file(kind: str) -> None:
    lines = (toys.FOLDER / kind / "toy.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 120
