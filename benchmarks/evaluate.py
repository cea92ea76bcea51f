"""Evaluation, and reading the data, against the training step.

    python -m benchmarks.evaluate --data data/stdlib [--model gpt2] [--micro-batch-size 4]

Takes the trainer's own parts, in one process and in turn: a training step (reading its tokens,
forward, backward, clipping, update), then an evaluation of `--passes` micro-batches of validation
tokens. Medians over the rounds count, after one to warm up. A table goes to stderr, one JSON object
to stdout; the exit status is 1 when a token costs an evaluation over 1 / 2.5 of what it costs
training, or reading takes over 1 % of the step. Reading includes the comparison with meta.json's
hashes, which is shown by itself as well: what the first reading of a block costs over the second.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from benchmarks.machine import describe_machine
from benchmarks.tables import Table
from payload.config.training_sections import EngineSection, OptimizerSection
from payload.data.reading.blocks import BlockOrder, TokenData
from payload.launch.environment import malloc_environment
from payload.models.gpt2.spec import PRESETS
from payload.train.families.gpt2.model import GPT
from payload.train.losses.next_token import NextToken
from payload.train.optimizers.optimizer import build_optimizers
from payload.train.ranks.world import World
from payload.train.tasks.evaluate import EvalPass, evaluate
from payload.train.torch_engines import apply_engine

SPEED_BOUND = 2.5
"""Tokens a second of an evaluation, over those of training."""
DATA_BOUND = 0.01
"""Share of the step that reading takes."""
SEED = 1


@dataclass(frozen=True, slots=True)
class Round:
    """One step and one evaluation."""

    step_s: float
    data_s: float
    """The data's part of the step."""
    check_s: float
    """The part of that for the comparison with meta.json's hashes."""
    eval_s: float


def main(argv: Sequence[str]) -> int:
    """Measure, print; 1 when a bound is missed."""
    arguments = _parser().parse_args(argv)
    _allocate_as_a_run_does(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    measure = _measurement(arguments)
    rounds = [measure(i) for i in range(arguments.rounds + 1)][1:]
    result = summarise(rounds, arguments)
    _print_table(result)
    print(json.dumps(result))
    return 0 if result["bounds_reached"] else 1


def _allocate_as_a_run_does(argv: Sequence[str]) -> None:
    """Start this program again with a run's allocator settings, which glibc reads at the start."""
    wanted = malloc_environment("tuned")
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        words = [sys.executable, "-m", "benchmarks.evaluate", *argv]
        os.execve(sys.executable, words, os.environ | wanted)


def _measurement(arguments: argparse.Namespace) -> Callable[[int], Round]:
    torch.manual_seed(SEED)
    micro = arguments.micro_batch_size
    preset = PRESETS[arguments.model]
    data = TokenData.open(arguments.data, sequence_length=preset.sequence_length)
    model = GPT(replace(preset, vocab_size=data.meta.vocab_size))
    optimizers = build_optimizers(model, OptimizerSection())
    alone = World(rank=0, world_size=1, local_rank=0, local_world_size=1, node="here")
    engaged = apply_engine(model, optimizers, settings=EngineSection(), world=alone)
    is_bf16 = arguments.dtype == "bf16"
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if is_bf16 else "no")
    trained = accelerator.prepare(engaged).train()
    order = BlockOrder(num_blocks=data.train.num_full_blocks(), seed=SEED)
    eval_tokens = arguments.passes * micro * preset.sequence_length

    def measure(number: int) -> Round:
        started_s = time.perf_counter()
        samples = np.arange(number * micro, (number + 1) * micro, dtype=np.int64)
        tokens, targets = data.train.gather(order.blocks(samples))
        data.train.expect(order.blocks(samples + micro))
        read_s = time.perf_counter()
        data.train.gather(order.blocks(samples))
        again_s = time.perf_counter() - read_s
        accelerator.backward(trained(tokens, targets))
        optimizers.clip(1.0)
        optimizers.step()
        stepped_s = time.perf_counter()
        how = EvalPass(
            world=alone,
            step=0,
            micro_batch_size=micro,
            max_tokens=eval_tokens,
            autocast=accelerator.autocast,
            should_stop=lambda _done, _of: False,
        )
        evaluate(model, data.val, how, NextToken())
        return Round(
            step_s=stepped_s - started_s - again_s,
            data_s=read_s - started_s,
            check_s=max(0.0, read_s - started_s - again_s),
            eval_s=time.perf_counter() - stepped_s,
        )

    return measure


def summarise(rounds: Sequence[Round], arguments: argparse.Namespace) -> dict[str, object]:
    """Return the printed result."""
    length = PRESETS[arguments.model].sequence_length
    tokens = arguments.micro_batch_size * length
    step_s = statistics.median(each.step_s for each in rounds)
    eval_s = statistics.median(each.eval_s for each in rounds) / arguments.passes
    share = statistics.median(each.data_s / each.step_s for each in rounds)
    check_share = statistics.median(each.check_s / each.step_s for each in rounds)
    ratio = step_s / eval_s
    return {
        "benchmark": "evaluate",
        "model": arguments.model,
        "micro_batch_size": arguments.micro_batch_size,
        "sequence_length": length,
        "dtype": arguments.dtype,
        "rounds": len(rounds),
        "training_tokens_per_s": round(tokens / step_s, 1),
        "evaluation_tokens_per_s": round(tokens / eval_s, 1),
        "ratio_vs_training": round(ratio, 3),
        "data_share": round(share, 6),
        "check_share": round(check_share, 6),
        "bounds_reached": ratio >= SPEED_BOUND and share <= DATA_BOUND,
        "step_s": [round(each.step_s, 3) for each in rounds],
        "eval_s": [round(each.eval_s, 3) for each in rounds],
        "versions": {"torch": torch.__version__},
        "machine": describe_machine(),
    }


def _print_table(result: dict[str, object]) -> None:
    passes = {"training": 1, "evaluation": result["ratio_vs_training"]}
    table = Table("tokens/s", "ratio", labels=passes)
    for name, ratio in passes.items():
        table.row(name, str(result[f"{name}_tokens_per_s"]), str(ratio))
    table.note(
        f"reading {result['data_share']:.4%} of the step, {result['check_share']:.4%} for hashes"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="a prepared folder")
    add("--model", choices=sorted(PRESETS), default="gpt2")
    add("--micro-batch-size", type=int, default=4, metavar="SEQUENCES")
    add("--dtype", choices=["bf16", "fp32"], default="bf16")
    add("--passes", type=int, default=2, help="of an evaluation (default: %(default)s)")
    add("--rounds", type=int, default=5, help="after one to warm up (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
