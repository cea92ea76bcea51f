"""A training step on a machine that is also busy: how long libgomp's threads should spin.

    python -m benchmarks.busy --model tiny --spins default 0 1000 10000 passive --rounds 3

libgomp's threads spin at the end of each parallel region before they sleep: by default for some
milliseconds. Where another program wants the core, the others wait for the spinning. Each setting
of GOMP_SPINCOUNT takes its steps on the machine as it is, and beside as many endless loops as there
are cores, all in turn. `ours` is what a run gets (payload/launch/environment.py). A table of the
medians goes to stderr, one JSON object to stdout; the ratios are to the best setting of that load.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.contenders import Contender
from benchmarks.machine import describe_machine
from benchmarks.tables import Table
from payload.launch.environment import malloc_environment, spin_environment
from payload.models.gpt2.spec import PRESETS


def main(argv: Sequence[str]) -> int:
    """Measure all in turn, print."""
    arguments = _parser().parse_args(argv)
    loads = {"quiet": 0, "busy": os.cpu_count() or 1}
    found: dict[str, dict[str, list[float]]] = {
        load: {spin: [] for spin in arguments.spins} for load in loads
    }
    for _ in range(arguments.rounds):
        for load, loops in loads.items():
            for spin in arguments.spins:
                with _busy_loops(loops):
                    report = _contender(spin, arguments).run()
                # The first step warms up.
                found[load][spin] += report["step_s"][1:]
                print(
                    f"{load} {spin}: {statistics.median(report['step_s'][1:]):.3f} s",
                    file=sys.stderr,
                )
    result = _summarise(found, arguments)
    _print_table(result, loads=list(loads))
    print(json.dumps(result))
    return 0


def _contender(spin: str, arguments: argparse.Namespace) -> Contender:
    work = {
        "model": arguments.model,
        "micro_batch_size": arguments.micro_batch_size,
        "accumulation": 1,
        "sequence_length": arguments.sequence_length,
        "dtype": "bf16",
        "steps": arguments.steps,
        "kernels": "auto",
    }
    command = [sys.executable, "-m", "benchmarks.step_ours", json.dumps(work)]
    return Contender(spin, command, malloc_environment("tuned") | _environment(spin))


def _environment(spin: str) -> dict[str, str]:
    if spin == "default":
        return {}
    if spin == "passive":
        return {"OMP_WAIT_POLICY": "passive"}
    return spin_environment() if spin == "ours" else {"GOMP_SPINCOUNT": spin}


@contextmanager
def _busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _summarise(
    found: dict[str, dict[str, list[float]]], arguments: argparse.Namespace
) -> dict[str, object]:
    medians = {
        load: {spin: statistics.median(seconds) for spin, seconds in of_load.items()}
        for load, of_load in found.items()
    }
    return {
        "benchmark": "busy",
        "model": arguments.model,
        "micro_batch_size": arguments.micro_batch_size,
        "sequence_length": arguments.sequence_length,
        "median_s": {
            load: {spin: round(seconds, 4) for spin, seconds in of_load.items()}
            for load, of_load in medians.items()
        },
        "speed_to_best": {
            load: {
                spin: round(min(of_load.values()) / seconds, 3) for spin, seconds in of_load.items()
            }
            for load, of_load in medians.items()
        },
        "machine": describe_machine(),
    }


def _print_table(result: dict[str, object], *, loads: Sequence[str]) -> None:
    medians, ratios = result["median_s"], result["speed_to_best"]
    assert isinstance(medians, dict) and isinstance(ratios, dict)
    heads = [head for load in loads for head in (f"{load} s", "of best")]
    table = Table(*heads, title="spin", labels=medians[loads[0]])
    for spin in medians[loads[0]]:
        pairs = ((f"{medians[load][spin]:.3f}", f"{ratios[load][spin]:.2f}") for load in loads)
        table.row(spin, *(cell for pair in pairs for cell in pair))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.busy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--micro-batch-size", type=int, default=4, metavar="SEQUENCES")
    parser.add_argument("--sequence-length", type=int, default=256, metavar="TOKENS")
    parser.add_argument("--steps", type=int, default=20, help="of each process; the first warms up")
    parser.add_argument("--rounds", type=int, default=3, help="turns of all settings")
    parser.add_argument(
        "--spins",
        nargs="+",
        default=["default", "ours", "passive"],
        metavar="SETTING",
        help="default, passive, ours, or a GOMP_SPINCOUNT (default: default ours passive)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
