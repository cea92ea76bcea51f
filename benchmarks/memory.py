"""Peak memory of the training step, beside its estimate and nanoGPT's peak.

    python -m benchmarks.memory --cases gpt2:8 --nanogpt CHECKOUT
    python -m benchmarks.memory --cases tiny:8 gpt2:1 gpt2:4 --data data/stdlib --ranks 1 2
    python -m benchmarks.memory --cases FOLDER:4 --eager

A case is a model and a micro-batch of sequences of 1024 tokens. The model is a preset, or a folder
with a config.json in the Hugging Face layout, as in `benchmarks.step`. Each contender is a process
of `benchmarks.step` on random tokens, with the same allocator settings; its peak is the high-water
mark of its resident set. With `--data` the trainer itself also runs each case: two steps, an
evaluation and a checkpoint, on one or several ranks of this machine; the rank with the highest peak
counts. The estimate is the one that the trainer prints when it starts. A table goes to stderr, one
JSON object to stdout. The exit status is 1 if an estimate is off by more than 15 %, or if this
project takes over half of nanoGPT's memory at micro-batch 8 or more.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import contenders
from benchmarks.harness import Benchmark, peak_of_run
from benchmarks.step_model import model_argument
from payload.config.run_config import RunConfig, parse_run_config
from payload.launch.environment import malloc_environment
from payload.models.gpt2.spec import PRESETS
from payload.run_record.run_files import RunPaths

ESTIMATE_BOUND = 0.15
"""Limit on the estimate's error, as a share of the measured peak."""
PEER_BOUND = 0.5
"""Limit on our peak divided by nanoGPT's, for `PEER_BOUND_FROM` sequences or more."""
PEER_BOUND_FROM = 8
STEPS = 2
SEQUENCE_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class Case:
    """A model and micro-batch to train."""

    model: str
    micro_batch_size: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parse `gpt2:8` or `FOLDER:8`. Raises argparse.ArgumentTypeError."""
        model, _, size = text.rpartition(":")
        if not model or not size.isdecimal() or not int(size):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not MODEL:SEQUENCES, as in gpt2:8 or FOLDER:8"
            )
        return cls(model_argument(model), int(size))


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak memory of one process, and its estimate if the process is this project's."""

    name: str
    case: Case
    peak_bytes: int
    estimated_bytes: int | None = None

    def estimate_error(self) -> float | None:
        """Return the estimate's error as a share of the peak; negative for a low estimate."""
        if self.estimated_bytes is None:
            return None
        return self.estimated_bytes / self.peak_bytes - 1


def main(argv: Sequence[str]) -> int:
    """Measure all cases; return 1 if a bound is missed."""
    benchmark = Benchmark("memory", __doc__)
    _add_options(benchmark.parser)
    arguments = benchmark.parse(argv)
    if arguments.ranks and not arguments.data:
        benchmark.parser.error("--ranks needs --data.")
    folders = [each.model for each in arguments.cases if each.model not in PRESETS]
    if folders and (arguments.data or arguments.nanogpt):
        benchmark.parser.error(f"--data and --nanogpt are for presets, not for {folders[0]}.")
    peaks: list[Peak] = []
    heads = ("sequences", "contender", "peak GB", "estimate off by")
    table = benchmark.table(*heads, title="model", labels=[each.model for each in arguments.cases])
    for case in arguments.cases:
        for peak in (*_steps(case, arguments), *_runs(case, arguments)):
            peaks.append(peak)
            error = peak.estimate_error()
            cells = (str(case.micro_batch_size), peak.name, f"{peak.peak_bytes / 1e9:.2f}")
            table.row(case.model, *cells, "" if error is None else f"{error:+.1%}")
    result = summarise(peaks)
    cases = [f"{each.model}:{each.micro_batch_size}" for each in arguments.cases]
    benchmark.finish(result | {"cases": cases})
    return 0 if result["estimates_hold"] and result["half_of_nanogpt"] is not False else 1


def _steps(case: Case, arguments: argparse.Namespace) -> list[Peak]:
    work = argparse.Namespace(
        model=case.model,
        micro_batch_size=case.micro_batch_size,
        accumulation=arguments.accumulation,
        sequence_length=SEQUENCE_LENGTH,
        dtype="bf16",
        steps=STEPS,
        threads=arguments.threads,
        eager=arguments.eager,
        nanogpt=arguments.nanogpt,
        intel_module=None,
        adapter=arguments.adapter,
        rank=arguments.rank,
        adapter_dropout=arguments.adapter_dropout,
    )
    found = []
    for contender in contenders(work):
        report = contender.run()
        estimate = report.get("estimated_bytes")
        found.append(Peak(contender.name, case, report["peak_rss_bytes"], estimate))
    return found


def _runs(case: Case, arguments: argparse.Namespace) -> list[Peak]:
    """Return the peak of the trainer's own run for each number of ranks in the options."""
    if arguments.data is None:
        return []
    spec = PRESETS[case.model]
    found = []
    for ranks in arguments.ranks or [1]:
        sequences = case.micro_batch_size * ranks * arguments.accumulation
        config = _run_config(case, data=arguments.data.resolve(), sequences=sequences)
        estimate = spec.memory_bytes(config.rank_setting(dtype="bf16", world_size=ranks))
        peak = _peak_of_run(config, ranks=ranks, threads=arguments.threads)
        found.append(Peak(f"run, {ranks} rank{'s'[: ranks > 1]}", case, peak, estimate))
    return found


def _run_config(case: Case, *, data: Path, sequences: int) -> RunConfig:
    settings = {
        "data.dir": data,
        "data.sequence_length": PRESETS[case.model].sequence_length,
        "model.preset": case.model,
        "batch.micro_batch_size": case.micro_batch_size,
        "batch.global_batch_size": sequences,
        "train.steps": STEPS,
        "train.eval_tokens": case.micro_batch_size * PRESETS[case.model].sequence_length,
        "precision.dtype": "bf16",
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return parse_run_config("", overrides=overrides, where="benchmark")


def _peak_of_run(config: RunConfig, *, ranks: int, threads: int | None) -> int:
    """Return the peak of the largest process among the launcher and all ranks."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    # A data folder that only the run's own files name is refused.
    data = ["--set", f"data.dir={config.data.dir}"]
    environment = malloc_environment("tuned")
    threads = threads or max(1, (os.cpu_count() or 1) // ranks)
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder) / "run")
        paths.root.mkdir()
        paths.config.write_text(config.to_toml(), encoding="utf-8")
        return peak_of_run(
            [sys.executable, "-m", *launcher, "payload.train", "--run-dir", str(paths.root), *data],
            env=os.environ | environment | {"OMP_NUM_THREADS": str(threads)},
        )


def summarise(peaks: Sequence[Peak]) -> dict[str, Any]:
    """Return the result with both bounds judged; None for a bound that was not measured."""
    rows = []
    for peak in peaks:
        error = peak.estimate_error()
        rows.append(
            {
                "name": peak.name,
                "model": peak.case.model,
                "micro_batch_size": peak.case.micro_batch_size,
                "peak_rss_bytes": peak.peak_bytes,
                "estimated_bytes": peak.estimated_bytes,
                "estimate_error": None if error is None else round(error, 3),
            }
        )
    ratios = _ratios(peaks)
    bounded = [ratio for case, ratio in ratios if case.micro_batch_size >= PEER_BOUND_FROM]
    errors = [error for peak in peaks if (error := peak.estimate_error()) is not None]
    return {
        "peaks": rows,
        "memory_vs_nanogpt": {
            f"{case.model}:{case.micro_batch_size}": round(ratio, 3) for case, ratio in ratios
        },
        "half_of_nanogpt": all(ratio <= PEER_BOUND for ratio in bounded) if bounded else None,
        "largest_estimate_error": round(max(map(abs, errors)), 3),
        "estimates_hold": all(abs(error) <= ESTIMATE_BOUND for error in errors),
    }


def _ratios(peaks: Sequence[Peak]) -> list[tuple[Case, float]]:
    found = {(peak.name, peak.case): peak.peak_bytes for peak in peaks}
    return [
        (case, found["tileforge", case] / theirs)
        for (name, case), theirs in found.items()
        if name == "nanogpt"
    ]


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--cases",
        nargs="+",
        type=Case.parse,
        default=[Case("tiny", 8), Case("gpt2", 1)],
        metavar="MODEL:SEQUENCES",
        help="default: tiny:8 gpt2:1",
    )
    add(
        "--accumulation",
        type=int,
        default=1,
        metavar="COUNT",
        help="micro-batches of a step (default: 1)",
    )
    add("--nanogpt", type=Path, metavar="DIR", help="also measure nanoGPT in this checkout")
    add("--eager", action="store_true", help="also measure this project without kernels")
    add("--adapter", choices=["lora"], help="train an adapter; not with --data")
    add("--rank", type=int, default=16, help="rank of the adapter (default: 16)")
    add("--adapter-dropout", type=float, default=0.0, metavar="SHARE", help="(default: 0)")
    add(
        "--data", type=Path, metavar="DIR", help="also measure the trainer, on this prepared folder"
    )
    add(
        "--ranks",
        nargs="+",
        type=int,
        metavar="COUNT",
        help="ranks of the trainer's runs (default: 1)",
    )
    add("--threads", type=int, metavar="COUNT", help="default: torch's own choice")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
