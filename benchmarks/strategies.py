"""A step's time and a rank's memory under each strategy, beside the plan's predictions.

    python -m benchmarks.strategies --data data/stdlib --cases gpt2:2:replicate gpt2:2:shard
    python -m benchmarks.strategies --cases gpt2:2:replicate gpt2:2:pipeline2 --network hosts:1
    python -m benchmarks.strategies --cases gpt2-medium:4:shard --dtype fp32 --steps 2

A case is a preset, a number of ranks, and a mesh: `replicate`, `shard`, `shard2` (groups of two),
`zero3`, `tensor2`, `pipeline2`, or several joined by `+`. Each is a run of the trainer under
mpirun, ended after its steps. All have the same global batch: a case makes twice as many
micro-batches if two ranks make one together. With `--network hosts:GBIT` each of two ranks is on a
separate host, a network namespace whose cable has that rate (root only).

The step is the median after the first. Its prediction uses three measurements: the computing time
of the first case with the same number of ranks (its step minus wait and update, so it should be
`replicate`), an all-reduce between these ranks, and the copies in the calibration of sharded ranks.
The peak is the largest peak of any rank (high-water mark of the resident set), and the estimate is
the estimate of the plan. States are a rank's memory when an update begins, minus its memory before
it had a model: weights, gradients and optimizer state, also as a share of the states in the model's
first case. A table goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import REPO, Benchmark
from benchmarks.meshes import mesh_settings
from benchmarks.scaling.runs import Arrangement, Work, measure
from payload.config.run_config import RunConfig, parse_run_config
from payload.core.files import write_whole
from payload.estimates.network import CopyTimes, Network, ShardTimes, sends_per_byte
from payload.estimates.sent_bytes import sent_bytes
from payload.estimates.step_time import run_step_time, update_s
from payload.models.gpt2.spec import PRESETS

_AS_RANK = "--as-rank"


@dataclass(frozen=True, slots=True)
class Case:
    """A model to train, and its layout on the ranks."""

    model: str
    ranks: int
    mesh: str

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parse `gpt2:2:shard` or `gpt2:4:pipeline2+shard`. Raises argparse.ArgumentTypeError."""
        model, *rest = text.split(":")
        if model not in PRESETS or len(rest) != 2 or not rest[0].isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r} is not MODEL:RANKS:MESH")
        mesh_settings(rest[1])
        return cls(model, int(rest[0]), rest[1])


def main(argv: Sequence[str]) -> int:
    """Measure all cases, or run as one of the ranks."""
    if argv and argv[0] == _AS_RANK:
        return _train_as_rank(argv[1:])
    benchmark = Benchmark("strategies", __doc__)
    _add_options(benchmark.parser)
    arguments = benchmark.parse(argv)
    table = benchmark.table(
        *("ranks", "mesh", "step s", "waiting s", "predicted s", "off by"),
        *("sent MB", "peak GB", "estimate", "states GB", "of first"),
        title="model",
        labels=[each.model for each in arguments.cases],
    )
    rates: dict[int, float] = {}
    computing: dict[int, float] = {}
    found: list[dict[str, Any]] = []
    for case in arguments.cases:
        if case.ranks not in rates:
            rates[case.ranks] = _rate(case, arguments)
        row = _measure(case, arguments)
        if case.ranks not in computing:
            config, spec = _config(case, arguments), PRESETS[case.model]
            mesh = config.distributed.mesh(case.ranks)
            computing[case.ranks] = row["step_s"] - row["sync_s"] - update_s(config, spec, mesh)
        shards = row["shards"] and ShardTimes(
            **row["shards"] | {"copies": CopyTimes(**row["shards"]["copies"])}
        )
        network = Network(ranks=case.ranks, bytes_per_s=rates[case.ranks], shards=shards)
        row |= _predicted(case, arguments, compute_s=computing[case.ranks], network=network)
        first = next((each for each in found if each["model"] == case.model), row)
        row["states_of_first"] = row["states_bytes"] / first["states_bytes"]
        found.append({"model": case.model, "ranks": case.ranks, "mesh": case.mesh, **row})
        table.row(case.model, str(case.ranks), case.mesh, *_cells(row))
    benchmark.finish({"bytes_per_s": rates, "cases": found})
    return 0


def _cells(row: dict[str, Any]) -> Iterator[str]:
    yield from (f"{row[key]:.2f}" for key in ("step_s", "sync_s", "predicted_s"))
    yield f"{row['predicted_s'] / row['step_s'] - 1:+.0%}"
    yield f"{row['sent_bytes'] / 1e6:.0f}"
    yield f"{row['peak_bytes'] / 1e9:.2f}"
    yield f"{row['estimated_bytes'] / row['peak_bytes'] - 1:+.0%}"
    yield f"{row['states_bytes'] / 1e9:.2f}"
    yield f"{row['states_of_first']:.2f}"


def _work(case: Case, arguments: argparse.Namespace) -> Work:
    paths = [str(REPO)]
    if case.mesh == "zero3" and not importlib.util.find_spec("deepspeed"):
        from tests.train.strategies.deepspeed_folder import deepspeed_folder

        paths.append(str(deepspeed_folder()))
    return Work(
        model=case.model,
        data=str(arguments.data.resolve()),
        micro_batch_size=arguments.micro_batch_size,
        accumulation=arguments.accumulation,
        sequence_length=arguments.sequence_length,
        dtype=arguments.dtype,
        grad_dtype="fp32",
        connections=1,
        steps=arguments.steps,
        mesh=case.mesh,
        python_path=os.pathsep.join(paths),
    )


def _arrangement(case: Case, network: str) -> Arrangement:
    arrangement = Arrangement.parse(f"loopback:{case.ranks}" if network == "loopback" else network)
    if arrangement.ranks != case.ranks:
        raise SystemExit(f"error: --network {network} has 2 ranks, not {case.ranks}.")
    return arrangement


def _rate(case: Case, arguments: argparse.Namespace) -> float:
    """Return the bytes per second that a rank sends in an all-reduce of the model's gradients."""
    gbit = arguments.network.partition(":")[2]
    name = f"exchange:{case.ranks}" + (f":{gbit}" if gbit else "")
    work = replace(_work(case, arguments), steps=3, mesh="replicate")
    record = measure(Arrangement.parse(name), work)
    sent = sends_per_byte(case.ranks) * 4 * record["numbers"]
    return float(sent / statistics.median(record["took_s"]))


def _measure(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the median step and wait, the largest rank's peak, and its states."""
    with tempfile.TemporaryDirectory() as folder:
        program = ("benchmarks.strategies", _AS_RANK, folder)
        work = replace(_work(case, arguments), program=program)
        record = measure(_arrangement(case, arguments.network), work)
        files = Path(folder).glob("*.json")
        states = [json.loads(each.read_text(encoding="utf-8")) for each in files]
    return {
        "step_s": statistics.median(record["step_s"]),
        "sync_s": statistics.median(record["sync_s"]),
        "steps_s": record["step_s"],
        "load_before": record["load_before"],
        "peak_bytes": record["peak_bytes"],
        "states_bytes": max(each["at_update"] - each["before"] for each in states),
        "process_bytes": max(each["before"] for each in states),
        "shards": states[0]["shards"],
    }


def _train_as_rank(argv: Sequence[str]) -> int:
    """Train as payload.train does; record the resident set before the model and at each update."""
    import psutil

    from payload.train.__main__ import main as train
    from payload.train.parts import Observer, TrainContext

    class Resident(Observer):
        """Records the resident set before the model, and at the newest update."""

        def before_model(self) -> None:
            self.before_bytes = psutil.Process().memory_info().rss

        def ready(self, context: TrainContext) -> None:
            self.shards = context.calibration.shards

        def before_update(self, step: int) -> None:
            now = psutil.Process().memory_info().rss
            found: dict[str, Any] = {"before": self.before_bytes, "at_update": now}
            found["shards"] = asdict(self.shards) if self.shards else None
            write_whole(Path(folder) / f"{os.getpid()}.json", json.dumps(found))

    folder, *options = argv
    return train(options, os.environ, observer=Resident())


def _config(case: Case, arguments: argparse.Namespace) -> RunConfig:
    return parse_run_config(_work(case, arguments).config(case.ranks), where="the benchmark")


def _predicted(
    case: Case, arguments: argparse.Namespace, *, compute_s: float, network: Network
) -> dict[str, Any]:
    """Return the plan's predictions; `compute_s` is from a mesh with the same number of ranks."""
    config = _config(case, arguments)
    spec = PRESETS[case.model].with_sequence_length(config.data.sequence_length)
    # As in a plan: a step without kernels reaches less of the peak.
    measured = replace(config, distributed=replace(config.distributed, strategy="replicate"))
    compute_s *= measured.typical_mfu(spec) / config.typical_mfu(spec)
    step = run_step_time(config, spec, compute_s=compute_s, network=network)
    return {
        "estimated_bytes": config.memory_bytes(spec, dtype=config.dtype(), world_size=case.ranks),
        "sent_bytes": sent_bytes(config, spec, ranks=case.ranks).total(),
        "predicted_s": step.total_s(),
    }


def _add_options(parser: argparse.ArgumentParser) -> None:
    cases = [Case.parse(each) for each in ("tiny:2:replicate", "tiny:2:shard")]
    parser.add_argument("--data", type=Path, default=Path("data/stdlib"), metavar="FOLDER")
    parser.add_argument("--cases", type=Case.parse, nargs="+", default=cases, metavar="CASE")
    parser.add_argument("--network", default="loopback", metavar="loopback|hosts:GBIT")
    parser.add_argument(
        "--steps", type=int, default=3, metavar="STEPS", help="steps after the first"
    )
    parser.add_argument("--micro-batch-size", type=int, default=2, metavar="SEQUENCES")
    parser.add_argument("--accumulation", type=int, default=2, metavar="COUNT")
    parser.add_argument("--sequence-length", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="fp32")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
