"""Time that a checkpoint costs the training that continues in parallel.

    python -m benchmarks.checkpoint [--preset gpt2] [--micro-batch-size 1] [--rounds 3] [--dir DIR]

Runs blocks of steps of three kinds in turn on this machine's cores: without a checkpoint, with a
checkpoint written as the trainer writes it, and with a checkpoint that training waits for. Each
checkpoint follows the trainer's comparison of parameters and is complete on disk within its block.
The lost time is the median block with a checkpoint minus the median block without one. A table goes
to stderr, one JSON object to stdout; the exit status is 1 if the goal was missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import Benchmark, in_turn, medians, use_run_allocator
from payload.config.training_sections import EngineSection, OptimizerSection, TrainSection
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
"""Limit on the cost of a checkpoint, as a share of the time between two checkpoints."""
_STATE = TrainerState(
    step=0, next_sample=0, tokens=0, seed=1, dtype="bf16", train_sha256="", world_size=1
)


def main(argv: Sequence[str]) -> int:
    """Measure in turn; return 1 if the goal was missed."""
    benchmark = Benchmark("checkpoint", __doc__)
    add = benchmark.parser.add_argument
    add("--preset", choices=sorted(PRESETS), default="gpt2")
    add("--micro-batch-size", type=int, default=1, metavar="SEQUENCES")
    add("--sequence-length", type=int, default=1024, metavar="TOKENS")
    add("--steps", type=int, default=8, metavar="COUNT", help="steps of a block")
    add("--rounds", type=int, default=3, metavar="COUNT")
    add("--dir", type=Path, default=Path.cwd(), help="folder on the disk to write to")
    arguments = benchmark.parse(argv)
    use_run_allocator()
    training = _Training(arguments)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        saving = Saving(Path(folder), keep=1, tokenizer={}, waiting=lambda: None)
        training.block(saving, checkpoint="none")
        blocks = {
            kind: partial(training.block, saving, checkpoint=kind)
            for kind in ("none", "beside", "waited")
        }
        found = in_turn(blocks, rounds=arguments.rounds)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    result = _result(found, steps=arguments.steps) | {"checkpoint_bytes": size}
    keys = ("step_s", "lost_s", "lost_when_waited_for_s", "share_of_the_steps_between")
    table = benchmark.table("value", labels=keys)
    for key in keys:
        table.row(key, str(result[key]))
    benchmark.finish(result)
    return 0 if result["goal_reached"] else 1


class _Training:
    """The trainer's step, on one batch of random tokens."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(1)
        length = arguments.sequence_length
        spec = replace(PRESETS[arguments.preset], sequence_length=length)
        self._model = GPT(spec)
        self._optimizers = build_optimizers(self._model, OptimizerSection())
        world = World(rank=0, world_size=1, local_rank=0, local_world_size=1, node="here")
        apply_engine(self._model, self._optimizers, settings=EngineSection(), world=world)
        self._batch = torch.randint(spec.vocab_size, (arguments.micro_batch_size, length + 1))
        self._steps = arguments.steps
        self._saved = 0

    def block(self, saving: Saving, *, checkpoint: str) -> float:
        """Return the seconds of one block of steps with the checkpoint at its beginning."""
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


def _result(found: Mapping[str, Sequence[float]], *, steps: int) -> dict[str, object]:
    median = medians(found)
    step_s = median["none"] / steps
    lost_s, waited_s = (median[kind] - median["none"] for kind in ("beside", "waited"))
    interval = TrainSection().checkpoint_every
    share = lost_s / (interval * step_s)
    return {
        "step_s": round(step_s, 3),
        "lost_s": round(lost_s, 2),
        "lost_when_waited_for_s": round(waited_s, 2),
        "blocks_s": {kind: [round(each, 2) for each in took] for kind, took in found.items()},
        "checkpoint_every": interval,
        "share_of_the_steps_between": round(share, 4),
        "goal": GOAL,
        "goal_reached": share < GOAL,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
