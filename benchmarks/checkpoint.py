"""The cost of a checkpoint for the training that goes on meanwhile.

    python -m benchmarks.checkpoint [--preset gpt2] [--micro-batch-size 1] [--rounds 3] [--dir DIR]

Blocks of steps on this machine's cores, three kinds in turn: without a checkpoint, with one written
as the trainer does it, and with one that is waited for. Each checkpoint comes after the comparison
of parameters that the trainer makes before it, and is whole on disk within its block. What a block
took longer than the median of those without is the time lost. Medians count. A table goes to
stderr, one JSON object to stdout; the exit status says whether the goal was reached.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.machine import describe_machine
from benchmarks.tables import Table
from payload.config.training_sections import EngineSection, OptimizerSection, TrainSection
from payload.launch.environment import malloc_environment
from payload.models.gpt2.spec import PRESETS
from payload.train.checkpoints.checkpoint import TrainerState
from payload.train.checkpoints.saving import Saving
from payload.train.checkpoints.snapshot import Snapshot
from payload.train.families.gpt2.model import GPT
from payload.train.optimizers.optimizer import build_optimizers
from payload.train.ranks.world import World
from payload.train.strategies.sync_check import rank_state
from payload.train.torch_engines import apply_engine

GOAL = 0.05
"""Time lost to a checkpoint, over the time of the steps between two of them."""
_STATE = TrainerState(
    step=0, next_sample=0, tokens=0, seed=1, dtype="bf16", train_sha256="", world_size=1
)


def main(argv: Sequence[str]) -> int:
    """Measure in turn, print; 1 when the goal was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="gpt2")
    parser.add_argument("--micro-batch-size", type=int, default=1, metavar="SEQUENCES")
    parser.add_argument("--sequence-length", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--steps", type=int, default=8, metavar="COUNT", help="a block's")
    parser.add_argument("--rounds", type=int, default=3, metavar="COUNT")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to write to")
    arguments = parser.parse_args(argv)
    training = _Training(arguments)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        saving = Saving(Path(folder), keep=1, tokenizer={}, waiting=lambda: None)
        training.block(saving, checkpoint="none")
        rounds = [
            {kind: training.block(saving, checkpoint=kind) for kind in ("none", "beside", "waited")}
            for _ in range(arguments.rounds)
        ]
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    result = _result(rounds, arguments) | {"checkpoint_bytes": size}
    keys = ("step_s", "lost_s", "lost_when_waited_for_s", "share_of_the_steps_between")
    table = Table("value", labels=keys)
    for key in keys:
        table.row(key, str(result[key]))
    print(json.dumps(result))
    return 0 if result["goal_reached"] else 1


class _Training:
    """The trainer's step, on one batch of random tokens."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(1)
        length = arguments.sequence_length
        shape = replace(PRESETS[arguments.preset], sequence_length=length)
        self._model = GPT(shape)
        self._optimizers = build_optimizers(self._model, OptimizerSection())
        alone = World(rank=0, world_size=1, local_rank=0, local_world_size=1, node="here")
        apply_engine(self._model, self._optimizers, settings=EngineSection(), world=alone)
        self._batch = torch.randint(shape.vocab_size, (arguments.micro_batch_size, length + 1))
        self._steps = arguments.steps
        self._saved = 0

    def block(self, saving: Saving, *, checkpoint: str) -> float:
        """Seconds of one block of steps, and the checkpoint at its beginning."""
        began_s = time.perf_counter()
        if checkpoint != "none":
            self._begin(saving)
            if checkpoint == "waited":
                saving.finish()
        for _ in range(self._steps):
            self._step(saving.before_update)
        saving.finish()
        return time.perf_counter() - began_s

    def _begin(self, saving: Saving) -> None:
        rank_state(self._optimizers)
        self._saved += 1
        saving.begin(
            saving.checkpoints / f"step_{self._saved:08d}",
            model=self._model,
            snapshot=Snapshot.of(self._model, self._optimizers.state_tensors()),
            state=_STATE,
        )

    def _step(self, before_update: Callable[[], None]) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = self._model(self._batch[:, :-1], self._batch[:, 1:])
        loss.backward()
        self._optimizers.clip(1.0)
        before_update()
        self._optimizers.step()


def _result(rounds: Sequence[dict[str, float]], arguments: argparse.Namespace) -> dict[str, object]:
    plain_s = statistics.median(each["none"] for each in rounds)
    step_s = plain_s / arguments.steps
    lost_s, waited_s = (
        statistics.median(each[kind] for each in rounds) - plain_s for kind in ("beside", "waited")
    )
    interval = TrainSection().checkpoint_every
    share = lost_s / (interval * step_s)
    return {
        "benchmark": "checkpoint",
        "preset": arguments.preset,
        "micro_batch_size": arguments.micro_batch_size,
        "sequence_length": arguments.sequence_length,
        "rounds": arguments.rounds,
        "step_s": round(step_s, 3),
        "lost_s": round(lost_s, 2),
        "lost_when_waited_for_s": round(waited_s, 2),
        "blocks_s": [{kind: round(took, 2) for kind, took in each.items()} for each in rounds],
        "checkpoint_every": interval,
        "share_of_the_steps_between": round(share, 4),
        "goal": GOAL,
        "goal_reached": share < GOAL,
        "versions": {"torch": version("torch")},
        "threads": torch.get_num_threads(),
        "machine": describe_machine(),
    }


if __name__ == "__main__":
    tuned = malloc_environment("tuned")
    if not tuned.items() <= os.environ.items():
        # The allocator's settings of a run, which it reads when a process begins.
        command = [sys.executable, "-m", "benchmarks.checkpoint", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | tuned)
    sys.exit(main(sys.argv[1:]))
