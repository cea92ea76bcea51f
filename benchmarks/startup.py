"""From `orchestrate run` to the first finished step on this machine, phase by phase.

    python -m benchmarks.startup [--data DIR] [--models tiny gpt2] [--ranks 2] [--rounds 3]

The ranks run the command that a user types, with warm caches: one round warms up. `gpt2-folder` is
GPT-2 with random weights read from a folder. `transformers` is a GPT-NeoX of 6 million parameters,
also from a folder, whose layers are transformers' own. A run evaluates before its first step, here
on one sequence per rank. Times come from the run's own files: plan.json and state.json,
`ready_unix` and `start_s` of summary.json, and metrics.jsonl, where the first step ends the
measurement. Medians count. A table goes to stderr, one JSON object to stdout; the exit status is 1
if a model took longer than a goal.

A virtual machine that returns free memory to its host has to get each page back, which takes
seconds per GiB instead of a tenth of a second. `--warm-memory 8` touches 8 GiB in another process
before each start, as on a machine that keeps its memory.
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
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import REPO, Benchmark, in_turn
from payload.run_record.metrics_log import read_metrics
from payload.run_record.run_files import RunPaths, RunState, Summary, read_json

GOAL_S = 15.0
"""Goal for the time to the end of the first step."""
_START_GOALS_S = {"tiny": 2.5, "gpt2": 8.0, "gpt2-folder": 8.0}
"""Goals for the time to the start of the first step, without the evaluation before it."""
_RANK_GOALS_S = {"transformers": 5.0}
"""Goals for the part of that time that a rank takes."""
_RUN_ID = "startup"
_LIMIT_S = 600.0
_BEFORE_RANK = ("orchestrate and plan", "supervisor", "mpirun")
"""The phases before the start of the ranks' processes."""
_TOUCH = "import sys; held = [bytearray(2**30) for _ in range(int(sys.argv[1]))]"
_SEQUENCE_LENGTH = {"tiny": 256, "gpt2": 1024, "gpt2-folder": 1024, "transformers": 256}
_FOLDERS: Mapping[str, Mapping[str, Any]] = {
    "gpt2-folder": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
    },
    "transformers": {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "vocab_size": 50257,
        "max_position_embeddings": 512,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
}
"""config.json of the models that are read from a folder."""
_WRITE_FOLDER = """
import json, sys
from pathlib import Path
import torch
from payload.models.registry import spec_of
from payload.train.models.hf_weights import save_hf
from payload.train.models.loading import build
torch.manual_seed(0)
save_hf(build(spec_of(json.loads(sys.argv[1]), where="the benchmark")), Path(sys.argv[2]))
"""
_CONFIG = """
[data]
dir = "{data}"
sequence_length = {length}
[model]
{model}
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
    add("--ranks", type=int, default=2, metavar="COUNT")
    add("--micro-batch-size", type=int, default=1, metavar="SEQUENCES")
    add("--rounds", type=int, default=3, metavar="COUNT")
    add("--warm-memory", type=int, default=0, metavar="GIB")
    arguments = benchmark.parse(argv)

    with tempfile.TemporaryDirectory() as folder:
        models = {name: _model(name, Path(folder)) for name in arguments.models}

        def start(name: str) -> dict[str, float]:
            _touch(arguments.warm_memory)
            return _start(_config(name, models[name], arguments))

        calls = {name: partial(start, name) for name in arguments.models}
        found = in_turn(calls, rounds=arguments.rounds, warm_up=1)
    results = {name: _medians(phases) for name, phases in found.items()}
    for name, result in results.items():
        phases = result["phases_s"] | {
            "a rank's own start": result["rank_s"],
            "to the start of the first step, without evaluation": result["start_s"],
            "to the first step": result["total_s"],
        }
        table = benchmark.table("seconds", title=name, labels=phases)
        for phase, seconds in phases.items():
            table.row(phase, f"{seconds:.2f}")
    goals = {"goal_s": GOAL_S, "start_goals_s": _START_GOALS_S, "rank_goals_s": _RANK_GOALS_S}
    benchmark.finish({**goals, "models": results})
    return 0 if all(_meets_goals(name, result) for name, result in results.items()) else 1


def _meets_goals(name: str, result: Mapping[str, Any]) -> bool:
    """Return whether a model's times are below all goals that it has."""
    goals = {
        "total_s": GOAL_S,
        "start_s": _START_GOALS_S.get(name, GOAL_S),
        "rank_s": _RANK_GOALS_S.get(name, GOAL_S),
    }
    return all(result[part] < goal_s for part, goal_s in goals.items())


def _model(name: str, root: Path) -> str:
    """Return the line of run.toml that selects the model; write the model's folder if it has one.

    Another process writes the folder, because a process with torch and the weights would leave less
    memory to the ranks.
    """
    if name not in _FOLDERS:
        return f'preset = "{name}"'
    folder = root / name
    folder.mkdir()
    command = [sys.executable, "-c", _WRITE_FOLDER, json.dumps(_FOLDERS[name]), str(folder)]
    subprocess.run(command, cwd=REPO, check=True)
    return f'init = "{folder}"'


def _config(name: str, model: str, arguments: argparse.Namespace) -> str:
    length, micro, ranks = _SEQUENCE_LENGTH[name], arguments.micro_batch_size, arguments.ranks
    return _CONFIG.format(
        data=arguments.data.absolute(),
        length=length,
        model=model,
        batch=ranks * micro,
        micro=micro,
        eval_tokens=ranks * length,
        ranks=ranks,
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
    before_rank_s = (
        planned_unix - began_unix,
        state.started_unix - planned_unix,
        spawned_unix - state.started_unix,
    )
    return {
        **dict(zip(_BEFORE_RANK, before_rank_s, strict=True)),
        **summary.start_s,
        "evaluation": stepped_unix - step["step_time_s"] - summary.ready_unix,
        "first step": step["step_time_s"],
    }


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    totals = [sum(phases.values()) - phases["then"] for phases in rounds]
    starts = [
        total - phases["evaluation"] - phases["first step"]
        for total, phases in zip(totals, rounds, strict=True)
    ]
    ranks = [
        start - sum(phases[part] for part in _BEFORE_RANK)
        for start, phases in zip(starts, rounds, strict=True)
    ]
    medians = {phase: statistics.median(each[phase] for each in rounds) for phase in rounds[0]}
    then_s = medians.pop("then")
    return {
        "total_s": round(statistics.median(totals), 2),
        "all_totals_s": [round(total, 2) for total in totals],
        "start_s": round(statistics.median(starts), 2),
        "rank_s": round(statistics.median(ranks), 2),
        "phases_s": {phase: round(seconds, 2) for phase, seconds in medians.items()},
        "then_until_return_s": round(then_s, 2),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
