"""`python -m payload.train.reference`: store a model's log-probabilities beside preference pairs.

A run stores missing log-probabilities at its start. The command replaces another model's values.
"""

from __future__ import annotations

if __name__ == "__main__":
    from payload.core.missing_packages import explain_missing_packages

    explain_missing_packages()

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from payload.core.command_line import CommandParser
from payload.core.errors import ConfigError
from payload.core.suggested_commands import command

if TYPE_CHECKING:
    from payload.train.ranks.world import World

_BATCH_PAIRS = 4


def parser() -> CommandParser:
    """Return the parser of the command-line options."""
    made = CommandParser(
        prog=command("train.reference"),
        description="Compute a reference model's log-probabilities of both answers of every pair, "
        "and store them in the data folder of prepare --task preference. A run with "
        "task.kind=preference reads them, or computes them at its start; this command "
        "replaces log-probabilities of another model. Under mpirun or torchrun the "
        "ranks share the work.",
        example=command("train.reference", "--model", "MODEL", "--data", "data/pairs"),
    )
    add = made.add_argument
    add("--model", required=True, metavar="NAME", help="reference model: the run's model.init")
    add("--data", required=True, type=Path, metavar="DIR", help="folder of prepared pairs")
    add(
        "--dtype",
        choices=("bf16", "fp32"),
        default="bf16",
        help="dtype of the matmuls: the run's precision.dtype (default: %(default)s)",
    )
    add(
        "--quantize",
        choices=("none", "nf4"),
        default="none",
        help="quantization: the run's model.quantize (default: %(default)s)",
    )
    return made


def main(argv: Sequence[str] | None, env: Mapping[str, str]) -> int:
    """Run the command and return its exit code."""
    arguments = parser().parse_args(argv)
    # torch takes seconds to import; --help should not wait for it.
    from payload.train.ranks.multi_rank_cli import carry_out

    return carry_out(lambda world: _make(arguments, world), env)


def _make(arguments: argparse.Namespace, world: World) -> None:
    from payload.config.launch_sections import DistributedSection
    from payload.data.reading.pairs import open_pairs
    from payload.data.tokenizer_match import require_same_tokens
    from payload.formats.data_folder import load_meta, require_task
    from payload.kernels.kernels import find_kernels
    from payload.train.checkpoints.initial_weights_identity import identify
    from payload.train.models.classifier import Classifier
    from payload.train.models.hf_weights import model_folder
    from payload.train.models.loading import load
    from payload.train.models.lora import cast_base_to_fp32
    from payload.train.ranks.multi_rank_cli import autocast, progress
    from payload.train.tasks.evaluate import EvalPass
    from payload.train.tasks.pair_evaluation import reference_log_probs
    from payload.train.tasks.preference import reference_model, store

    folder: Path = arguments.data
    meta = load_meta(folder)
    require_task(folder, meta, task="preference")
    assert meta.preference is not None
    length = meta.preference.sequence_length
    train, val = (
        open_pairs(folder, split="train", sequence_length=length),
        open_pairs(folder, split="val", sequence_length=length),
    )
    weights = model_folder(arguments.model, setting="--model")
    names = ("--data", "--model")
    require_same_tokens(meta, data=folder, folder=weights, init=arguments.model, settings=names)
    model = load(weights, quantize=arguments.quantize)
    if arguments.dtype == "fp32":
        cast_base_to_fp32(model)
    if isinstance(model, Classifier) or model.spec.context() < length:
        why = "is a classifier" if isinstance(model, Classifier) else "has a shorter context"
        raise ConfigError(
            f"--model {arguments.model!r}: the model {why}; the pairs have up to {length} tokens. "
            "Choose the language model that the run starts from."
        )
    model.kernels = find_kernels()
    how = EvalPass(
        world=world,
        step=0,
        micro_batch_size=_BATCH_PAIRS,
        max_tokens=None,
        autocast=autocast(arguments.dtype),
        should_stop=progress(world, clock=time.monotonic),
    )
    world.join(DistributedSection())
    try:
        found = reference_log_probs(model, (train, val), how)
    finally:
        world.leave()
    assert found is not None, "no stop was requested"
    if world.is_main:
        base = reference_model(identify(arguments.model, weights, quantize=arguments.quantize))
        store(folder, meta, base, dtype=arguments.dtype, values=found)
        print(
            f"{folder}: stored the reference log-probabilities of {len(found):,} pairs "
            f"({base.name()}, {arguments.dtype})"
        )


if __name__ == "__main__":
    sys.exit(main(None, os.environ))
