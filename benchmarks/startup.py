"""From `orchestrate run` to the first finished step on this machine, part by part.

    python -m benchmarks.startup [--data DIR] [--models tiny gpt2] [--rounds 3]

Two ranks through the command that a user types, with warm caches: one round goes before those that
count. A run evaluates before its first step; here one sequence a rank. Times come from the run's
own files: plan.json's and state.json's clock, `ready_unix` and `start_s` of summary.json, and
metrics.jsonl, whose first step ends the measurement. Medians count. A table goes to stderr, one
JSON object to stdout; the exit status says whether every model was under the goal.

A virtual machine that gives its host what it does not use has to get each page back: seconds for a
GiB where its own take a tenth. `--warm-memory 8` has a process touch so many GiB before each
start and end as the command begins, as on a machine that keeps its memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.tables import Table
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
    """Measure each model in turn, print; 1 when one took longer than the goal."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup")
    parser.add_argument("--data", type=Path, default=Path("data/stdlib"), metavar="DIR")
    names = sorted(_SEQUENCE_LENGTH)
    parser.add_argument("--models", nargs="+", choices=names, default=["tiny", "gpt2"])
    parser.add_argument("--micro-batch-size", type=int, default=1, metavar="SEQUENCES")
    parser.add_argument("--rounds", type=int, default=3, metavar="COUNT")
    parser.add_argument("--warm-memory", type=int, default=0, metavar="GIB")
    arguments = parser.parse_args(argv)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.models}
    for number in range(arguments.rounds + 1):
        for name in arguments.models:
            _touch(arguments.warm_memory)
            parts = _start(_config(name, arguments))
            if number:
                rounds[name].append(parts)
    results = {name: _medians(found) for name, found in rounds.items()}
    for name, result in results.items():
        _print_table(name, result)
    print(
        json.dumps(
            {
                "benchmark": "startup",
                "ranks": _RANKS,
                "micro_batch_size": arguments.micro_batch_size,
                "rounds": arguments.rounds,
                "warm_memory_gib": arguments.warm_memory,
                "goal_s": GOAL_S,
                "models": results,
                "versions": {"torch": version("torch")},
                "machine": describe_machine(),
            }
        )
    )
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
    """Have the kernel own so much free memory; a process of its own, so that none of it stays."""
    subprocess.run([sys.executable, "-c", _TOUCH, str(gib)], check=True)


def _start(config: str) -> dict[str, float]:
    """Run once; the seconds of each part, in order, and `then` until the command returned."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(config, encoding="utf-8")
        command = [sys.executable, "-m", "payload.orchestrate", "run", "--inventory", "local"]
        command += ["--config", str(folder / "run.toml"), "--runs-dir", str(folder / "runs")]
        paths = RunPaths(folder / "runs" / _RUN_ID)
        with (folder / "said").open("wb") as said:
            began_unix = time.time()
            process = subprocess.Popen(
                [*command, "--run-id", _RUN_ID], stdout=said, stderr=subprocess.STDOUT
            )
            step = _first_step(paths, process)
            stepped_unix = time.time()
            status = process.wait(timeout=_LIMIT_S)
        if step is None or status:
            sys.stderr.write((folder / "said").read_text(encoding="utf-8", errors="replace"))
            raise SystemExit(f"error: the run ended with status {status}; its words are above.")
        then_s = time.time() - stepped_unix
        return _parts(paths, step, began_unix=began_unix, stepped_unix=stepped_unix) | {
            "then": then_s
        }


def _first_step(paths: RunPaths, process: subprocess.Popen[bytes]) -> Mapping[str, Any] | None:
    """The first step's row as soon as it is there; None when the command ended without one."""
    while True:
        ended = process.poll() is not None
        row = next((row for row in read_metrics(paths.metrics) if "loss" in row), None)
        if row is not None or ended:
            return row
        time.sleep(0.01)


def _parts(
    paths: RunPaths, step: Mapping[str, Any], *, began_unix: float, stepped_unix: float
) -> dict[str, float]:
    state, summary = read_json(RunState, paths.state), read_json(Summary, paths.summary)
    assert state is not None and summary is not None and summary.ready_unix is not None
    planned_unix = paths.plan.stat().st_mtime
    born_unix = summary.ready_unix - sum(summary.start_s.values())
    return {
        "orchestrate and plan": planned_unix - began_unix,
        "supervisor": state.started_unix - planned_unix,
        "mpirun": born_unix - state.started_unix,
        **summary.start_s,
        "evaluation": stepped_unix - step["step_time_s"] - summary.ready_unix,
        "first step": step["step_time_s"],
    }


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    totals = [sum(parts.values()) - parts["then"] for parts in rounds]
    medians = {part: statistics.median(each[part] for each in rounds) for part in rounds[0]}
    then_s = medians.pop("then")
    return {
        "total_s": round(statistics.median(totals), 2),
        "all_totals_s": [round(total, 2) for total in totals],
        "parts_s": {part: round(seconds, 2) for part, seconds in medians.items()},
        "then_until_return_s": round(then_s, 2),
    }


def _print_table(name: str, result: Mapping[str, Any]) -> None:
    parts = result["parts_s"] | {"to the first step": result["total_s"]}
    table = Table("seconds", title=name, labels=parts)
    for part, seconds in parts.items():
        table.row(part, f"{seconds:.2f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
