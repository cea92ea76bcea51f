"""Decisions of the training loop without training: samples, parameter groups, evaluation."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from payload.config.run_config import RunConfig, parse_run_config
from payload.config.training_sections import OptimizerSection
from payload.data.reading.blocks import BlockOrder, TokenBlocks
from payload.run_record.metrics_log import read_metrics
from payload.run_record.run_files import RunPaths
from payload.train.checkpoints.saving import Saving
from payload.train.gemm_and_network_benchmark import calibrate
from payload.train.losses.next_token import NextToken
from payload.train.optimizers.optimizer import build_optimizers
from payload.train.parts import TrainContext
from payload.train.rank_metrics_and_heartbeat import Heartbeat
from payload.train.ranks.world import World, as_rank_lost
from payload.train.strategies.replicate import Replicate
from payload.train.tasks.text import BlockSamples
from payload.train.trainer import Trainer
from tests.train.alone import ALONE, train_alone
from tests.train.test_model import make_model


def make_trainer(config: RunConfig, *, rank: int, world_size: int) -> Trainer:
    blocks = SimpleNamespace(num_full_blocks=lambda: 1000)
    world = replace(ALONE, rank=rank, world_size=world_size)
    parts = SimpleNamespace(
        config=config,
        world=world,
        strategy=Replicate(config.distributed, world),
        paths=RunPaths(Path("nowhere")),
        task=SimpleNamespace(train=BlockSamples(cast(TokenBlocks, blocks), NextToken())),
        tokenizer={},
        copied=None,
    )
    return Trainer(cast(TrainContext, parts), start=None)


@pytest.mark.parametrize(
    ("world_size", "micro"), [(1, 12), (1, 3), (2, 3), (3, 4), (4, 1), (12, 1)]
)
def test_a_step_trains_on_the_same_sequences_whoever_shares_it(world_size: int, micro: int) -> None:
    config = parse_run_config(
        "",
        overrides=["batch.global_batch_size=12", f"batch.micro_batch_size={micro}"],
        where="test",
    )
    seen = [
        int(sample)
        for rank in range(world_size)
        for micro_step in range(config.batch.grad_accum_steps(world_size))
        for sample in make_trainer(config, rank=rank, world_size=world_size).samples(micro_step)
    ]
    order = BlockOrder(num_blocks=1000, seed=config.run.seed)
    assert sorted(seen) == sorted(order.blocks(np.arange(12, dtype=np.int64)).tolist())


def groups_of(name: str) -> list[dict[str, Any]]:
    model = make_model()
    optimizers = build_optimizers(model, OptimizerSection(name=name))
    names: dict[torch.Tensor, str] = {p: n for n, p in model.named_parameters()}
    groups = [
        {
            "kind": type(optimizer).__name__,
            "decay": group["weight_decay"],
            "names": {names[parameter] for parameter in group["params"]},
        }
        for optimizer in optimizers.members
        for group in optimizer.param_groups
    ]
    assert sum(len(group["names"]) for group in groups) == len(names)
    return groups


def test_only_matrices_and_embeddings_decay() -> None:
    decayed, plain = groups_of("adamw")
    assert (decayed["decay"], plain["decay"]) == (0.1, 0.0)
    assert {"wte.weight", "wpe.weight", "h.0.attn.c_attn.weight"} <= decayed["names"]
    assert {"ln_f.weight", "h.0.attn.c_attn.bias", "h.2.ln_1.bias"} <= plain["names"]


def test_muon_takes_the_layers_matrices_and_nothing_else() -> None:
    muon, embeddings, plain = groups_of("muon")
    assert [group["kind"] for group in (muon, embeddings, plain)] == ["Muon", "AdamW", "AdamW"]
    assert len(muon["names"]) == 3 * 4
    assert embeddings["names"] == {"wte.weight", "wpe.weight"}


def test_adamw_is_the_fused_one() -> None:
    (adamw,) = build_optimizers(make_model(), OptimizerSection()).members
    assert adamw.defaults["fused"] is True


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, (3, 4, 1)),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}, (2, 4, 0)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            },
            (1, 2, 1),
        ),
    ],
)
def test_each_launchers_names_are_understood(
    environment: dict[str, str], expected: tuple[int, int, int]
) -> None:
    world = World.from_env(environment)
    assert (world.rank, world.world_size, world.local_rank) == expected


@pytest.mark.parametrize(
    "message",
    [
        "[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]",
        "Application timeout caused pair closure",
        "Read error [127.0.0.1]:2222: Connection reset by peer",
    ],
)
def test_gloos_complaints_about_a_vanished_peer_are_a_lost_rank(message: str) -> None:
    world = replace(ALONE, world_size=2)
    lost = as_rank_lost(RuntimeError(message), world=world)
    assert lost is not None
    assert lost.exit_code == 41
    assert (
        as_rank_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), world=world) is None
    )
    assert as_rank_lost(RuntimeError(message), world=ALONE) is None


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Record step and phase of every heartbeat."""
    found: list[tuple[int, str]] = []
    report = Heartbeat.report

    def record(self: Heartbeat, *, step: int, phase: str, **passes: int | None) -> None:
        found.append((step, phase))
        report(self, step=step, phase=phase, **passes)

    monkeypatch.setattr(Heartbeat, "report", record)
    return found


def test_a_rank_says_what_it_is_about_to_do(
    tmp_path: Path, tiny_config: Path, told: list[tuple[int, str]]
) -> None:
    train_alone(tmp_path, tiny_config, "train.steps=1")
    assert list(dict.fromkeys(told)) == [
        (0, "load"),
        (0, "calibration"),
        (0, "start"),
        (0, "kernels"),
        (0, "weights"),
        (0, "eval"),
        (0, "step"),
        (1, "sync check"),
        (1, "checkpoint"),
        (1, "eval"),
        (1, "end"),
    ]
    # Once before, and after each batch.
    assert told.count((1, "eval")) > 2


def test_the_rows_up_to_a_checkpoint_are_on_the_disk_before_it(
    tmp_path: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, paths, flushed = os.fsync, RunPaths(tmp_path), []

    def record(descriptor: int) -> None:
        fsync(descriptor)
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        flushed.append((name, [row["step"] for row in read_metrics(paths.metrics)]))

    monkeypatch.setattr(os, "fsync", record)
    train_alone(tmp_path, tiny_config, "train.steps=1")
    names = [name for name, _ in flushed]
    before = flushed[: names.index("manifest.json")]
    assert ("metrics.jsonl", [0, 1]) in before


def test_a_stop_in_the_middle_of_a_step_leaves_the_last_checkpoint_alone(
    tmp_path: Path, tiny_config: Path
) -> None:
    train_alone(tmp_path, tiny_config, "train.steps=1")
    saved = RunPaths(tmp_path).checkpoint(1)
    before = saved.stat()
    stopped = train_alone(tmp_path, tiny_config, "train.steps=2", stops=True)
    assert (stopped.step, stopped.stopped) == (1, True)
    assert (saved.stat().st_ino, saved.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_rank_that_waited_for_a_checkpoint_is_in_its_step_again(
    tmp_path: Path,
    tiny_config: Path,
    told: list[tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before_update = Saving.before_update

    def wait(self: Saving) -> None:
        self._waiting()
        before_update(self)

    monkeypatch.setattr(Saving, "before_update", wait)
    train_alone(tmp_path, tiny_config, "train.steps=1")
    assert told[told.index((1, "sync check")) - 1] == (0, "step")
    assert (0, "checkpoint") in told


def test_an_mfu_above_one_is_left_out_and_said_once(
    tmp_path: Path,
    tiny_config: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def disturbed(*args: Any, **named: Any) -> Any:
        return replace(calibrate(*args, **named), peak_flops_per_s=1.0)

    monkeypatch.setattr("payload.train.session.calibrate", disturbed)
    with caplog.at_level("WARNING"):
        train_alone(tmp_path / "run", tiny_config, "train.steps=3")
    rows = read_metrics(RunPaths(tmp_path / "run").metrics)
    assert [row["mfu"] for row in rows if "loss" in row] == [None] * 3
    said = [each for each in caplog.messages if "MFU is unknown" in each]
    assert len(said) == 1
