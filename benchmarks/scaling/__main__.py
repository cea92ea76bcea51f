"""Weak scaling: two ranks of one core each, which exchange gradients, against one rank of one core.

    python -m benchmarks.scaling --data data/stdlib --rounds 3 --runs scaling.jsonl
    python -m benchmarks.scaling --rounds 0 --runs scaling.jsonl

Every rank has the same micro-batch and number of passes whatever their number. Trainers are
started by mpirun with the environment that a plan gives its ranks, and rank 0's metrics.jsonl has
the times. Arrangements run in turn, round by round; the first step of each run warms up, medians of
the others count:

    alone               one rank on one core; nothing runs on the other core
    side-by-side        two runs of one rank, each on a core; they exchange nothing
    loopback            one run of two ranks on this machine
    hosts:GBIT          the same on two network namespaces, each cable limited to GBIT both ways
    exchange:N[:GBIT]   N ranks exchange a step's gradients and do nothing else

`vs_alone` is the step alone over the step of two ranks. A rank that is alone has the machine's
memory bandwidth and last cache for itself, so it counts what the cores take from each other as
well; `vs_side_by_side` counts the exchange only. `best_...` is of the shortest steps, which other
work on the machine disturbed least, `cpu_...` of the processor time that rank 0's steps took, which
counts the exchange's work and no waiting. Namespaces need root; no delay is added to their cables.

The constants of payload/estimates/step_time.py are fitted to the exchanges; the model's error is
given for every measured point, and its predictions for more nodes. With `--runs`, every run is
added to that file and all that is in it counts; `--rounds 0` then recomputes without running
anything.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.machine import describe_machine
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
from benchmarks.tables import Table
from payload.models.gpt2.spec import PRESETS

STEPS_OF_TWO = ("loopback", "hosts:16", "hosts:1", "hosts:0.3")
EXCHANGES = ("exchange:2", "exchange:2:16", "exchange:2:1", "exchange:2:0.3", "exchange:3:1")
EXCHANGES_OF_MANY = ("exchange:4:1", "exchange:4:0.3", "exchange:8:0.3")
DEFAULT = ("alone", "side-by-side", *STEPS_OF_TWO, *EXCHANGES, *EXCHANGES_OF_MANY)


def main(argv: Sequence[str]) -> int:
    """Measure in turn, fit, print."""
    arguments = _parser().parse_args(argv)
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
            print(_words(record), file=sys.stderr)
            records.append(record)
            if arguments.runs:
                with arguments.runs.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
    if not records:
        print("error: nothing measured: --rounds 0 needs --runs FILE of before.", file=sys.stderr)
        return 2
    result = summarise(records)
    _print_table(result)
    print(json.dumps(result))
    return 0


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """Everything that follows from the measured runs."""
    medians = step_medians(records)
    first = records[0]
    result: dict[str, Any] = {
        "benchmark": "scaling",
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
    result["versions"] = {name: version(name) for name in ("torch", "accelerate", "impi-rt")}
    result["machine"] = describe_machine()
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


def _words(record: Record) -> str:
    if "took_s" in record:
        times = " ".join(f"{each:.3f}" for each in record["took_s"])
        return f"{label(record)}: {times} s, small {record['small_s'] * 1e6:.0f} us"
    times = " ".join(f"{each:.2f}" for each in record["step_s"])
    waits = " ".join(f"{each:.2f}" for each in record["sync_s"])
    return f"{label(record)}: {times} s, waited {waits} s"


def _print_table(result: dict[str, Any]) -> None:
    heads = ("s a step", "best", "CPU s", "waited", "vs alone", "best", "CPU", *_SIDE)
    table = Table(*heads, labels=result["step_s"])
    for name, step_s in result["step_s"].items():
        times = (step_s, *(result[key][name] for key in ("best_s", "cpu_s", "sync_s")))
        shares = result["efficiency"].get(name, {})
        cells = [f"{each:.2f}" for each in times]
        cells += [f"{shares[key]:.3f}" if key in shares else "" for key in _SHARES]
        table.row(name, *cells)
    _print_points(result.get("points", []))


def _print_points(points: Sequence[Mapping[str, Any]]) -> None:
    labels = [f"{each['point']} {each['what']}" for each in points]
    if points:
        table = Table("measured s", "by the model", labels=labels)
    for name, each in zip(labels, points, strict=True):
        table.row(name, f"{each['measured']:.3f}", f"{each['predicted']:.3f}")


_SIDE = ("vs side", "best", "CPU")
_SHARES = tuple(
    prefix + base for base in ("vs_alone", "vs_side_by_side") for prefix in ("", "best_", "cpu_")
)


def _arrangements(text: str) -> list[Arrangement]:
    return [Arrangement.parse(name) for name in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=sorted(PRESETS), default="gpt2")
    parser.add_argument("--data", type=Path, default=Path("data/stdlib"), metavar="DIR")
    parser.add_argument("--micro-batch-size", type=int, default=1, metavar="SEQUENCES")
    parser.add_argument("--accumulation", type=int, default=4, metavar="PASSES")
    parser.add_argument("--sequence-length", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--grad-dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--connections", type=int, default=1, help="of gloo, to each other rank")
    parser.add_argument("--steps", type=int, default=3, help="that count, of each run")
    parser.add_argument("--rounds", type=int, default=3, help="turns of all arrangements")
    parser.add_argument(
        "--only", type=_arrangements, default=_arrangements(",".join(DEFAULT)), metavar="NAMES"
    )
    parser.add_argument("--runs", type=Path, metavar="FILE", help="every run, a JSON object a line")
    return parser


def _end(_number: int, _frame: object) -> NoReturn:
    raise SystemExit("error: ended by SIGTERM.")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
