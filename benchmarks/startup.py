"""From `orchestrate run` to the first finished step on this machine, phase by phase.

    python -m benchmarks.startup [--data DIR] [--models tiny gpt2] [--rounds 3]

Two ranks run the command that a user types, with warm caches: one round warms up. A run evaluates
before its first step, here on one sequence per rank. Times come from the run's own files: plan.json
and state.json, `ready_unix` and `start_s` of summary.json, and metrics.jsonl, where the first step
ends the measurement. Medians count. A table goes to stderr, one JSON object to stdout; the exit
status is 1 if a model took longer than the goal.

A virtual machine that returns free memory to its host has to get each page back, which takes
seconds per GiB instead of a tenth of a second. `--warm-memory 8` touches 8 GiB in another process
before each start, as on a machine that keeps its memory.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Benchmark, in_turn
from payload.run_record.metrics_log import read_metrics
from payload.run_record.run_files import RunPaths, RunState, Summary, read_json

GOAL_S = 15.0
_RANKS = 2
_RUN_ID = "startup"
_LIMIT_S = 600.0
_TOUCH = "import sys; held = [bytearray(2**30) for _ in range(int(sys.argv[1]))]"
_SEQUENCE_LENGTH = {"tiny": 256, "gpt2": 1024}
_CONFIG = """
[data]
dir = "{data}"
sequence_length = {length}
[model]
preset = "{model}"
[batch]
global_batch_size = {batch}
micro_batch_size = {micro}
[train]
steps = 1
eval_tokens = {eval_tokens}
checkpoint_every = 0
[launch]
ranks_per_node = {ranks}
"""


def main(argv: Sequence[str]) -> int:
    """Measure each model in turn; return 1 if one took longer than the goal."""
    benchmark = Benchmark("startup", __doc__)
    add = benchmark.parser.add_argument
    add("--data", type=Path, default=Path("data/stdlib"), metavar="DIR")
    names = sorted(_SEQUENCE_LENGTH)
    add("--models", nargs="+", choices=names, default=["tiny", "gpt2"])
    add("--micro-batch-size", type=int, default=1, metavar="SEQUENCES")
    add("--rounds", type=int, default=3, metavar="COUNT")
    add("--warm-memory", type=int, default=0, metavar="GIB")
    arguments = benchmark.parse(argv)

    def start(name: str) -> dict[str, float]:
        _touch(arguments.warm_memory)
        return _start(_config(name, arguments))

    calls = {name: partial(start, name) for name in arguments.models}
    found = in_turn(calls, rounds=arguments.rounds, warm_up=1)
    results = {name: _medians(phases) for name, phases in found.items()}
    for name, result in results.items():
        phases = result["phases_s"] | {"to the first step": result["total_s"]}
        table = benchmark.table("seconds", title=name, labels=phases)
        for phase, seconds in phases.items():
            table.row(phase, f"{seconds:.2f}")
    benchmark.finish({"ranks": _RANKS, "goal_s": GOAL_S, "models": results})
    return 0 if all(result["total_s"] < GOAL_S for result in results.values()) else 1


def _config(model: str, arguments: argparse.Namespace) -> str:
    length, micro = _SEQUENCE_LENGTH[model], arguments.micro_batch_size
    return _CONFIG.format(
        data=arguments.data.absolute(),
        length=length,
        model=model,
        batch=_RANKS * micro,
        micro=micro,
        eval_tokens=_RANKS * length,
        ranks=_RANKS,
    )


def _touch(gib: int) -> None:
    """Touch and free `gib` GiB in another process."""
    subprocess.run([sys.executable, "-c", _TOUCH, str(gib)], check=True)


def _start(config: str) -> dict[str, float]:
    """Run once; return each phase's seconds in order; `then` are those until the command ended."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(config, encoding="utf-8")
        command = [sys.executable, "-m", "payload.orchestrate", "run", "--inventory", "local"]
        command += ["--config", str(folder / "run.toml"), "--runs-dir", str(folder / "runs")]
        paths = RunPaths(folder / "runs" / _RUN_ID)
        with (folder / "output").open("wb") as output:
            began_unix = time.time()
            process = subprocess.Popen(
                [*command, "--run-id", _RUN_ID], stdout=output, stderr=subprocess.STDOUT
            )
            step = _first_step(paths, process)
            stepped_unix = time.time()
            status = process.wait(timeout=_LIMIT_S)
        if step is None or status:
            sys.stderr.write((folder / "output").read_text(encoding="utf-8", errors="replace"))
            raise SystemExit(f"error: the run ended with status {status}; its output is above.")
        then_s = time.time() - stepped_unix
        return _phases(paths, step, began_unix=began_unix, stepped_unix=stepped_unix) | {
            "then": then_s
        }


def _first_step(paths: RunPaths, process: subprocess.Popen[bytes]) -> Mapping[str, Any] | None:
    """Wait for the first step and return its row, or None if the command ended without one."""
    while True:
        ended = process.poll() is not None
        row = next((row for row in read_metrics(paths.metrics) if "loss" in row), None)
        if row is not None or ended:
            return row
        time.sleep(0.01)


def _phases(
    paths: RunPaths, step: Mapping[str, Any], *, began_unix: float, stepped_unix: float
) -> dict[str, float]:
    state, summary = read_json(RunState, paths.state), read_json(Summary, paths.summary)
    assert state is not None and summary is not None and summary.ready_unix is not None
    planned_unix = paths.plan.stat().st_mtime
    spawned_unix = summary.ready_unix - sum(summary.start_s.values())
    return {
        "orchestrate and plan": planned_unix - began_unix,
        "supervisor": state.started_unix - planned_unix,
        "mpirun": spawned_unix - state.started_unix,
        **summary.start_s,
        "evaluation": stepped_unix - step["step_time_s"] - summary.ready_unix,
        "first step": step["step_time_s"],
    }


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    totals = [sum(phases.values()) - phases["then"] for phases in rounds]
    medians = {phase: statistics.median(each[phase] for each in rounds) for phase in rounds[0]}
    then_s = medians.pop("then")
    return {
        "total_s": round(statistics.median(totals), 2),
        "all_totals_s": [round(total, 2) for total in totals],
        "phases_s": {phase: round(seconds, 2) for phase, seconds in medians.items()},
        "then_until_return_s": round(then_s, 2),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
