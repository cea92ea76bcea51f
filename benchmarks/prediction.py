"""Time of a step and peak memory of short runs, beside the prediction of their plan.

    python -m benchmarks.prediction [--cases NAME...] [--steps N]

Each case is planned and then trained on this machine, as one rank with a thread on each core, and
as one rank for each core. The first plan measures this machine, so no other program should run. The
actual step is the median of the steps after the fifth, the actual memory is the high-water mark of
the rank with the highest peak. SmolLM2-135M comes from its Python package, as in `make run`. A
table goes to stderr, one JSON object to stdout. The exit status is 1 if a prediction is off by more
than 20 % in time or 10 % in memory, or if a plan was not based on a measurement.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import docstrings
from benchmarks.harness import REPO, Benchmark, peak_of_run
from payload.core.python_processes import code_environment, module_command
from payload.first_run.packaged_model import cache_folder, model_folder
from payload.machines.machine import discover
from payload.run_record.metrics_log import read_metrics
from payload.run_record.run_files import RunPaths
from tests.support.data_folders import make_data_folder

TIME_BOUND, MEMORY_BOUND = 0.2, 0.1
"""Limits on the error of a prediction, as shares of the actual value."""
_WARM_UP = 5
"""First steps of a run, which are not counted."""
_GPT2_VOCAB = 50_257
_LORA = {"adapter.kind": "lora", "optimizer.lr": 1e-4}


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of run: the task of its data, and its settings."""

    task: str
    settings: Mapping[str, object]
    is_smollm2: bool = False


CASES: Mapping[str, Case] = {
    "GPT-2 of width 256": Case(
        "random",
        {
            **{"model.n_layer": 6, "model.n_head": 4, "model.n_embd": 256},
            **{"data.sequence_length": 512, "batch.micro_batch_size": 4},
        },
    ),
    "GPT-2 124M": Case(
        "random",
        {"model.preset": "gpt2", "data.sequence_length": 512, "batch.micro_batch_size": 1},
    ),
    "SmolLM2 LoRA": Case(
        "text", {**_LORA, "data.sequence_length": 512, "batch.micro_batch_size": 1}, is_smollm2=True
    ),
    "chat": Case(
        "chat", {"data.sequence_length": 512, "batch.micro_batch_size": 1}, is_smollm2=True
    ),
    "classify": Case(
        "classify",
        {"task.kind": "classify", "data.sequence_length": 256, "batch.micro_batch_size": 8},
        is_smollm2=True,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The prediction of a run and what the run took."""

    case: str
    ranks: int
    threads: int
    basis: str
    predicted_s: float
    actual_s: float
    predicted_bytes: int
    actual_bytes: int

    def is_within_bounds(self) -> bool:
        """Return whether the prediction came from a measurement and holds."""
        time = abs(self.predicted_s / self.actual_s - 1) <= TIME_BOUND
        memory = abs(self.predicted_bytes / self.actual_bytes - 1) <= MEMORY_BOUND
        return time and memory and "measured on this machine" in self.basis


def main(argv: Sequence[str]) -> int:
    """Plan and train all cases; return 1 if a prediction is out of its bounds."""
    benchmark = Benchmark("prediction", __doc__)
    add = benchmark.parser.add_argument
    add(
        "--cases", nargs="+", choices=CASES, default=[*CASES], metavar="NAME", help="(default: all)"
    )
    add("--steps", type=int, default=20, metavar="N", help="steps of each run (default: 20)")
    arguments = benchmark.parse(argv)
    if arguments.steps <= _WARM_UP:
        benchmark.parser.error(f"--steps {arguments.steps}: must be more than {_WARM_UP}")
    heads = ("ranks", "step s", "predicted", "ratio", "GiB a rank", "predicted", "ratio")
    table = benchmark.table(*heads, title="run", labels=CASES)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in arguments.cases:
            data = _make_data(root, CASES[name].task)
            for ranks in sorted({1, discover().num_cores()}):
                row = _measure(root, name, data=data, ranks=ranks, steps=arguments.steps)
                rows.append(row)
                table.row(name, *_cells(row))
    for basis in sorted({row.basis for row in rows}):
        benchmark.note(f"predicted {basis}")
    benchmark.finish({"rows": [asdict(row) for row in rows]})
    return int(not all(row.is_within_bounds() for row in rows))


def _cells(row: Row) -> list[str]:
    gib = [each / 2**30 for each in (row.actual_bytes, row.predicted_bytes)]
    return [
        f"{row.ranks} x {row.threads}",
        *(f"{row.actual_s:.3f}", f"{row.predicted_s:.3f}"),
        f"{row.predicted_s / row.actual_s:.2f}",
        *(f"{each:.2f}" for each in gib),
        f"{gib[1] / gib[0]:.2f}",
    ]


def _make_data(root: Path, task: str) -> Path:
    """Return the data folder of a task, made if it is missing."""
    folder = root / task
    if folder.exists():
        return folder
    if task == "random":
        return make_data_folder(folder, num_train_tokens=200_000, vocab_size=_GPT2_VOCAB)
    rows = root / f"{task}.jsonl"
    docstrings.write(rows, every=3)
    lines = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    made = [_row(each, task) for each in lines]
    rows.write_text("".join(json.dumps(each) + "\n" for each in made), encoding="utf-8")
    words = ["--task", task, "--source", "jsonl", "--input", str(rows), "--out", str(folder)]
    length = [] if task != "chat" else ["--sequence-length", "512"]
    words += ["--tokenizer", str(_smollm2()), "--val-fraction", "0.05", "--quiet", *length]
    _run(module_command("payload.data", "prepare", *words))
    return folder


def _row(pair: Mapping[str, str], task: str) -> dict[str, Any]:
    if task == "text":
        return {"text": f"{pair['prompt']}\n{pair['completion']}"}
    if task == "classify":
        return {"text": pair["completion"], "label": "a to m" if pair["module"] < "n" else "n to z"}
    return {key: pair[key] for key in ("prompt", "completion")}


def _smollm2() -> Path:
    return model_folder(cache_folder(os.environ))


def _measure(root: Path, name: str, *, data: Path, ranks: int, steps: int) -> Row:
    """Plan and train one case, and return both results."""
    case, cores = CASES[name], discover().num_cores()
    # A rank has at least one micro-batch in a step.
    sequences = int(str(case.settings["batch.micro_batch_size"])) * cores
    settings = {
        **case.settings,
        **({"model.init": _smollm2()} if case.is_smollm2 else {}),
        **({"task.kind": "chat"} if case.task == "chat" else {}),
        **{"data.dir": data, "batch.global_batch_size": sequences},
        **{"train.steps": steps, "train.eval_tokens": 1024, "train.keep_checkpoints": 1},
        **{"launch.ranks_per_node": ranks, "launch.threads_per_rank": cores // ranks},
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    words += ["--inventory", "local", "--runs-dir", str(root / "runs")]
    planned = json.loads(_run(module_command("payload.orchestrate", "plan", "--json", *words)))
    numbers, run_id = planned["plan"]["arithmetic"], f"run-{name.replace(' ', '-')}-{ranks}".lower()
    estimate = planned["estimate"]
    command = module_command("payload.orchestrate", "run", *words, "--run-id", run_id)
    actual_bytes = peak_of_run(command, env=code_environment(os.environ))
    paths = RunPaths(root / "runs" / run_id)
    took_s = [row["step_time_s"] for row in read_metrics(paths.metrics) if "step_time_s" in row]
    return Row(
        case=name,
        ranks=ranks,
        threads=cores // ranks,
        basis=estimate["basis"].rpartition(" tokens/s, ")[2],
        predicted_s=estimate["time"]["training_s"] / steps,
        actual_s=statistics.median(took_s[_WARM_UP:]),
        predicted_bytes=numbers["memory_bytes_per_rank"],
        actual_bytes=actual_bytes,
    )


def _run(command: Sequence[str]) -> str:
    env = code_environment(os.environ)
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
