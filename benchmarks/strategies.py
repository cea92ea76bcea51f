"""A step's time and a rank's memory under each strategy, beside the plan's figures.

    python -m benchmarks.strategies --data data/stdlib --cases gpt2:2:replicate gpt2:2:shard
    python -m benchmarks.strategies --data data/stdlib --cases gpt2-medium:4:shard --dtype fp32

A case is a preset, a number of ranks on this machine, and a strategy; `gpt2:4:shard:2` is in groups
of two. Each is a run of the trainer. The step is the median after the first one, the peak that of
the largest process (resident set, high-water mark); the bytes sent and the estimate of the peak are
the plan's. A table goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import REPO
from benchmarks.machine import describe_machine
from benchmarks.tables import Table
from payload.launch.environment import malloc_environment
from payload.metrics_log import read_metrics
from payload.models.gpt2 import PRESETS
from payload.models.spec import Dtype
from payload.results import RunPaths
from payload.run_config import RunConfig, parse_run_config
from payload.step_time import sent_bytes


@dataclass(frozen=True, slots=True)
class Case:
    """A model to train, and its layout on the ranks."""

    model: str
    ranks: int
    strategy: str
    shard_size: int | None

    @classmethod
    def parse(cls, text: str) -> Case:
        """From `gpt2:2:shard` or `gpt2:4:shard:2`. Raises argparse.ArgumentTypeError."""
        model, *words = text.split(":")
        if model not in PRESETS or len(words) not in (2, 3) or not words[0].isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r} is not MODEL:RANKS:STRATEGY[:SHARD_SIZE]")
        shard_size = int(words[2]) if len(words) == 3 else None
        return cls(model, int(words[0]), words[1], shard_size)

    def name(self) -> str:
        """Return the strategy in words."""
        return self.strategy if self.shard_size is None else f"{self.strategy} of {self.shard_size}"


def main(argv: Sequence[str]) -> int:
    """Measure all cases and print."""
    arguments = _parser().parse_args(argv)
    table = Table(
        *("ranks", "strategy", "step s", "waiting s", "sent MB", "peak GB", "estimate off by"),
        labels=[each.model for each in arguments.cases],
    )
    found = []
    for case in arguments.cases:
        config = _run_config(case, arguments)
        row = {"case": case.name(), "model": case.model, "ranks": case.ranks}
        row |= _measure(config, case, threads=arguments.threads)
        row |= _predicted(config, case)
        found.append(row)
        table.row(
            case.model,
            str(case.ranks),
            case.name(),
            f"{row['step_s']:.3f}",
            f"{row['sync_s']:.3f}",
            f"{row['sent_bytes'] / 1e6:.0f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
            f"{row['estimated_bytes'] / row['peak_bytes'] - 1:+.0%}",
        )
    settings = {key: getattr(arguments, key) for key in ("micro_batch_size", "sequence_length")}
    print(
        json.dumps(
            {
                "benchmark": "strategies",
                **settings,
                "dtype": arguments.dtype,
                "machine": describe_machine(),
                "cases": found,
            }
        )
    )
    return 0


def _run_config(case: Case, arguments: argparse.Namespace) -> RunConfig:
    settings = {
        "data.dir": arguments.data.resolve(),
        "data.sequence_length": arguments.sequence_length,
        "model.preset": case.model,
        "batch.micro_batch_size": arguments.micro_batch_size,
        "batch.global_batch_size": arguments.micro_batch_size * case.ranks,
        "train.steps": arguments.steps,
        "train.eval_tokens": arguments.sequence_length,
        "train.sync_check_every": 0,
        "precision.dtype": arguments.dtype,
        "memory.activation_checkpointing": "off",
        "distributed.strategy": case.strategy,
        "distributed.shard_size": "none" if case.shard_size is None else case.shard_size,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    return parse_run_config("", overrides=words, where="benchmark")


def _measure(config: RunConfig, case: Case, *, threads: int | None) -> dict[str, Any]:
    """Run the trainer; return its median step and wait, and the largest process's peak."""
    starts = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks), "-m"]
    threads = threads or max(1, (os.cpu_count() or 1) // case.ranks)
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder) / "run")
        paths.root.mkdir()
        paths.config.write_text(config.to_toml(), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", *starts, "payload.train", "--run-dir", str(paths.root)],
            cwd=REPO,
            env=os.environ
            | malloc_environment(config.malloc())
            | {"OMP_NUM_THREADS": str(threads)},
            stdout=sys.stderr,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"error: the run ended with status {process.returncode}.")
        rows = [row for row in read_metrics(paths.metrics) if "loss" in row]
    return {
        "step_s": statistics.median(row["step_time_s"] for row in rows[1:]),
        "sync_s": statistics.median(row["sync_time_s"] for row in rows[1:]),
        "losses": [row["loss"] for row in rows],
        "peak_bytes": usage.ru_maxrss * 1024,
    }


def _predicted(config: RunConfig, case: Case) -> dict[str, Any]:
    spec = PRESETS[case.model].with_sequence_length(config.data.sequence_length)
    dtype: Dtype = "fp32" if config.precision.dtype == "fp32" else "bf16"
    sent = sent_bytes(config, spec, ranks=case.ranks)
    return {
        "estimated_bytes": config.memory_bytes(spec, dtype=dtype, world_size=case.ranks),
        "sent_bytes": sent.total(),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.strategies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cases = [Case.parse(each) for each in ("tiny:2:replicate", "tiny:2:shard")]
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--cases", type=Case.parse, nargs="+", default=cases, metavar="CASE")
    parser.add_argument("--steps", type=int, default=6, metavar="STEPS")
    parser.add_argument("--micro-batch-size", type=int, default=4, metavar="SEQUENCES")
    parser.add_argument("--sequence-length", type=int, default=256, metavar="TOKENS")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--threads", type=int, metavar="THREADS", help="of each rank")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
