"""Checks before a checkpoint: equal weights and optimizer state, without NaN."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from payload.core.errors import TrainingError
from payload.formats.checkpoint_listing import checkpoint_folders, manifest_problems
from payload.run_record.run_files import RunPaths
from payload.train.checkpoints.saving import Saving
from payload.train.checkpoints.snapshot import Snapshot
from payload.train.optimizers.optimizer import Optimizers
from payload.train.strategies import sync_check
from payload.train.strategies.sync_check import RankState, rank_state
from payload.train.trainer import Trainer
from tests.support.launching import mpirun, run, train_program
from tests.train.alone import train_alone
from tests.train.test_checkpoint import STATE, model_of, trained_optimizers


def flip_a_bit(tensor: Tensor) -> None:
    flat = tensor.detach().view(-1).view(torch.int32)
    flat[len(flat) // 2] ^= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_one_bit_of_any_tensor_changes_the_hash(name: str) -> None:
    optimizers = trained_optimizers(name)
    before = rank_state(optimizers)
    assert rank_state(optimizers) == before
    for tensor in optimizers.state_tensors().values():
        flip_a_bit(tensor)
        changed = rank_state(optimizers)
        assert (changed.weights, changed.not_finite) == (before.weights, None)
        assert changed.optimizer != before.optimizer
        flip_a_bit(tensor)
    for parameter in optimizers.model.parameters():
        flip_a_bit(parameter)
        changed = rank_state(optimizers)
        assert changed.weights != before.weights
        assert changed.optimizer == before.optimizer
        flip_a_bit(parameter)
    assert rank_state(optimizers) == before


@pytest.mark.slow
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(bad: float) -> None:
    optimizers = trained_optimizers()
    weights = dict(optimizers.model.named_parameters())
    for name, tensor in (weights | optimizers.state_tensors()).items():
        flat = tensor.detach().view(-1)
        before = flat[-1].clone()
        flat[-1] = bad
        assert rank_state(optimizers, is_alone=True).not_finite == name
        flat[-1] = before
    assert rank_state(optimizers, is_alone=True).not_finite is None


def test_large_numbers_are_finite() -> None:
    optimizers = trained_optimizers()
    with torch.no_grad():
        next(optimizers.model.parameters()).fill_(3e38)
    assert rank_state(optimizers).not_finite is None


@pytest.mark.parametrize("spoil", ["a weight", "a moment"])
def test_nan_is_never_saved_over_the_only_good_checkpoint(
    tmp_path: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    """Loss and gradients are finite: the NaN comes from the update after them."""
    train_step = Trainer._train_step

    def spoiled(self: Trainer) -> bool:
        stopping = train_step(self)
        if self._step == 4:
            optimizers: Optimizers = self._context.optimizers
            found = dict(optimizers.model.named_parameters()) | optimizers.state_tensors()
            name = "wpe.weight" if spoil == "a weight" else "exp_avg.wpe.weight"
            found[name].detach()[5, 5] = torch.nan
        return stopping

    monkeypatch.setattr(Trainer, "_train_step", spoiled)
    saving = ("train.steps=6", "train.checkpoint_every=2", "train.keep_checkpoints=1")
    with pytest.raises(TrainingError, match=r"after step 4 \S+ holds NaN .* of step 2 or earlier"):
        train_alone(tmp_path, tiny_config, *saving)
    (kept,) = checkpoint_folders(RunPaths(tmp_path).checkpoints)
    assert kept == RunPaths(tmp_path).checkpoint(2)
    assert not manifest_problems(kept)


def test_a_checkpoint_thread_that_dies_at_once_ends_the_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without memory, when the thread ends before its work begins."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def run_out_of_memory(self: threading.Thread) -> None:
        raise MemoryError

    optimizers = trained_optimizers()
    saving = Saving(tmp_path, keep=1, tokenizer={}, waiting=lambda: None)
    monkeypatch.setattr(threading.Thread, "run", run_out_of_memory)
    saving.begin(
        tmp_path / "step_00000007",
        model=model_of(optimizers),
        snapshot=Snapshot.of(model_of(optimizers), optimizers.state_tensors()),
        state=STATE,
    )
    for come_next in (saving.before_update, saving.finish):
        with pytest.raises(TrainingError, match=r"could not start or ended early\. Free memory"):
            come_next()


def test_a_checkpoint_thread_that_cannot_be_started_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    optimizers = trained_optimizers()
    saving = Saving(tmp_path, keep=1, tokenizer={}, waiting=lambda: None)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(
        TrainingError, match=r"could not start or ended early \(can't start new thread\)"
    ):
        saving.begin(
            tmp_path / "step_00000007",
            model=model_of(optimizers),
            snapshot=Snapshot.of(model_of(optimizers), optimizers.state_tensors()),
            state=STATE,
        )
    saving.finish()


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_a_flipped_bit_in_a_moment_of_rank_0_is_found_before_it_is_saved(
    tmp_path: Path, tiny_config: Path, name: str
) -> None:
    program = tmp_path / "flip.py"
    program.write_text(_FLIP.replace("NAME", name), encoding="utf-8")
    saving = ("train.steps=8", "train.checkpoint_every=2")
    words = train_program(tmp_path / "run", tiny_config, *saving)[2:]
    result = run(mpirun(2, str(program), *words))
    assert result.returncode == 40, result.stderr
    record = json.loads((tmp_path / "run" / "exits" / "rank_0001.json").read_text())
    assert "after step 6 the ranks no longer hold the same optimizer state" in record["error"]
    assert "of step 4 or earlier" in record["error"]
    saved = checkpoint_folders(tmp_path / "run" / "checkpoints")
    assert [path.name for path in saved] == ["step_00000002", "step_00000004"]


# A bit flips in one rank's memory after the sixth update, as with broken RAM.
_FLIP = """
import os, sys
import torch
from payload.train import trainer
from payload.train.__main__ import main

step = trainer.Trainer._train_step

def flipped(self):
    stopping = step(self)
    if self._context.world.is_main and self._step == 6:
        moment = self._context.optimizers.state_tensors()["NAME.wte.weight"]
        moment.view(-1).view(torch.int32)[1000] ^= 1
    return stopping

trainer.Trainer._train_step = flipped
sys.exit(main(sys.argv[1:], os.environ))
"""


def test_with_two_ranks_neither_is_blamed() -> None:
    states = [RankState(weights=name * 64, optimizer="0" * 64, not_finite=None) for name in "ab"]
    words = sync_check._difference(states, step=20, passed_step=10)
    assert "so the wrong rank is unknown" in words
    assert "rank 0 aaaaaaaa/00000000, rank 1 bbbbbbbb/00000000" in words
    assert "differs" not in words and "the memory of each of their nodes" in words
