"""Weak scaling: two ranks of one core each that exchange gradients, beside one rank of one core.

    python -m benchmarks.scaling --data data/stdlib --rounds 3 --runs scaling.jsonl
    python -m benchmarks.scaling --rounds 0 --runs scaling.jsonl

Every rank has the same micro-batch and accumulation, for any number of ranks. mpirun starts the
trainers with the environment of a planned run, and rank 0's metrics.jsonl has the times.
Arrangements run in turn, round by round; the first step of each run warms up, and the median of the
others counts:

    alone               one rank on one core; the other core is idle
    side-by-side        two runs of one rank, each on a core, without an exchange
    loopback            one run of two ranks on this machine
    hosts:GBIT          the same on two network namespaces, each cable limited to GBIT both ways
    exchange:N[:GBIT]   N ranks that only exchange a step's gradients

`vs_alone` is the step alone over the step of two ranks. A rank alone has all memory bandwidth and
the last-level cache for itself, so `vs_alone` includes the contention between cores;
`vs_side_by_side` includes only the exchange. `best_...` compares the shortest steps, which other
work disturbed least. `cpu_...` compares the CPU time of rank 0's steps, which includes the
exchange's work but no waiting. Namespaces need root, and their cables have no added delay.

The constants of payload/estimates/step_time.py are fitted to the exchanges. The result has the
model's error for every measured point, and its predictions for more nodes. With `--runs`, every run
is appended to the file, and all runs in it count; `--rounds 0` only recomputes the result.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.harness import Benchmark
from benchmarks.scaling.fit import (
    Record,
    efficiencies,
    fit,
    label,
    points,
    predictions,
    step_medians,
)
from benchmarks.scaling.hosts import missing
from benchmarks.scaling.runs import Arrangement, Work, measure
from payload.models.gpt2.spec import PRESETS

STEPS_OF_TWO = ("loopback", "hosts:16", "hosts:1", "hosts:0.3")
EXCHANGES = ("exchange:2", "exchange:2:16", "exchange:2:1", "exchange:2:0.3", "exchange:3:1")
EXCHANGES_OF_MANY = ("exchange:4:1", "exchange:4:0.3", "exchange:8:0.3")
DEFAULT = ("alone", "side-by-side", *STEPS_OF_TWO, *EXCHANGES, *EXCHANGES_OF_MANY)


def main(argv: Sequence[str]) -> int:
    """Measure in turn and fit the model."""
    benchmark = Benchmark("scaling", __doc__)
    _add_options(benchmark.parser)
    arguments = benchmark.parse(argv)
    problem = missing()
    arrangements = arguments.only
    if problem and arguments.rounds and any(each.gbit_per_s for each in arrangements):
        arrangements = [each for each in arrangements if each.gbit_per_s is None]
        print(f"{problem}: runs on one machine only", file=sys.stderr)
    records = _read(arguments.runs)
    work = _work(arguments)
    for _ in range(arguments.rounds):
        for arrangement in arrangements:
            record = measure(arrangement, work)
            print(_times(record), file=sys.stderr)
            records.append(record)
            if arguments.runs:
                with arguments.runs.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
    if not records:
        print("error: nothing was measured. Use --rounds 1 or more, or --runs.", file=sys.stderr)
        return 2
    result = summarise(records)
    _add_tables(benchmark, result)
    result["only"] = [each.name for each in arrangements]
    benchmark.finish(result, packages=("torch", "accelerate", "impi-rt"))
    return 0


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """Return the result of the measured runs."""
    medians = step_medians(records)
    first = records[0]
    result: dict[str, Any] = {
        **{key: first[key] for key in _SETTING},
        "step_s": {name: round(times["step_s"], 4) for name, times in medians.items()},
        "sync_s": {name: round(times["sync_s"], 4) for name, times in medians.items()},
        "best_s": {name: round(times["best_s"], 4) for name, times in medians.items()},
        "cpu_s": {name: round(times["cpu_s"], 2) for name, times in medians.items()},
        "steps": {name: int(times["steps"]) for name, times in medians.items()},
        "efficiency": efficiencies(medians),
    }
    if "loopback" in medians:
        tokens = 2 * first["micro_batch_size"] * first["accumulation"] * first["sequence_length"]
        result["tokens_per_s"] = round(tokens / medians["loopback"]["step_s"], 1)
    try:
        constants = fit(records)
    except ValueError as error:
        result["fit"] = f"none: {error}"
    else:
        result["fit"] = asdict(constants)
        result["points"] = points(records, constants)
        result["predictions"] = predictions(records, constants)
    loads = [record["load_before"] for record in records]
    result["load_before"] = {"least": min(loads), "most": max(loads)}
    return result


_SETTING = ("model", "micro_batch_size", "accumulation", "sequence_length", "dtype")


def _read(path: Path | None) -> list[Record]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _work(arguments: argparse.Namespace) -> Work:
    return Work(
        model=arguments.model,
        data=str(arguments.data.resolve()),
        micro_batch_size=arguments.micro_batch_size,
        accumulation=arguments.accumulation,
        sequence_length=arguments.sequence_length,
        dtype=arguments.dtype,
        grad_dtype=arguments.grad_dtype,
        connections=arguments.connections,
        steps=arguments.steps,
    )


def _times(record: Record) -> str:
    if "took_s" in record:
        times = " ".join(f"{each:.3f}" for each in record["took_s"])
        return f"{label(record)}: {times} s, small {record['small_s'] * 1e6:.0f} us"
    times = " ".join(f"{each:.2f}" for each in record["step_s"])
    waits = " ".join(f"{each:.2f}" for each in record["sync_s"])
    return f"{label(record)}: {times} s, waited {waits} s"


def _add_tables(benchmark: Benchmark, result: dict[str, Any]) -> None:
    heads = ("s a step", "best", "CPU s", "waited", "vs alone", "best", "CPU", *_SIDE)
    table = benchmark.table(*heads, labels=result["step_s"])
    for name, step_s in result["step_s"].items():
        times = (step_s, *(result[key][name] for key in ("best_s", "cpu_s", "sync_s")))
        shares = result["efficiency"].get(name, {})
        cells = [f"{each:.2f}" for each in times]
        cells += [f"{shares[key]:.3f}" if key in shares else "" for key in _SHARES]
        table.row(name, *cells)
    points: Sequence[Mapping[str, Any]] = result.get("points", [])
    labels = [f"{each['point']} {each['what']}" for each in points]
    if points:
        table = benchmark.table("measured s", "by the model", labels=labels)
    for name, each in zip(labels, points, strict=True):
        table.row(name, f"{each['measured']:.3f}", f"{each['predicted']:.3f}")


_SIDE = ("vs side", "best", "CPU")
_SHARES = tuple(
    prefix + base for base in ("vs_alone", "vs_side_by_side") for prefix in ("", "best_", "cpu_")
)


def _arrangements(text: str) -> list[Arrangement]:
    return [Arrangement.parse(name) for name in text.split(",")]


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=sorted(PRESETS), default="gpt2")
    parser.add_argument("--data", type=Path, default=Path("data/stdlib"), metavar="DIR")
    parser.add_argument("--micro-batch-size", type=int, default=1, metavar="SEQUENCES")
    parser.add_argument("--accumulation", type=int, default=4, metavar="COUNT")
    parser.add_argument("--sequence-length", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--grad-dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument(
        "--connections", type=int, default=1, help="gloo's connections to each other rank"
    )
    parser.add_argument("--steps", type=int, default=3, help="steps of each run after the first")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of all arrangements")
    parser.add_argument(
        "--only", type=_arrangements, default=_arrangements(",".join(DEFAULT)), metavar="NAMES"
    )
    parser.add_argument(
        "--runs", type=Path, metavar="FILE", help="append every run as a line of JSON"
    )


def _end(_number: int, _frame: object) -> NoReturn:
    raise SystemExit("error: ended by SIGTERM.")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
