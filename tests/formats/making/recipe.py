"""The commands that write the fixtures, in order; they run with the code of the recorded commit.

This module imports only files of this folder: all other code is the recorded commit's.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.formats.making.inputs import copy_to_hub, make_model, write_texts
from tests.formats.making.programs import ADAPTER_RUN, CLUSTER, SAMPLES, STACK, TEXT_RUN

HOME = Path("/srv/ada")
CODE, PROJECT, CLOUD, HUB = HOME / "tileforge", HOME / "project", HOME / "cloud", HOME / "hub"
RESULTS = HOME / "results"
MODEL = "ada/base"
PROMPTS = {"full": "one two three", "lora": "the a of", "labels": "list file open blue blue"}

RUNS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "full": ("text.toml", ("launch.ranks_per_node=2", "train.profile_step=3")),
    "kept": (
        "text.toml",
        ("model.n_embd=16", "optimizer.name=muon", f"storage.results={RESULTS}"),
    ),
    "lora": ("adapter.toml", (f"model.init={MODEL}", "task.kind=chat", "data.dir=data/chat")),
    "labels": (
        "adapter.toml",
        (f"model.init={MODEL}", "task.kind=classify", "data.dir=data/classify"),
    ),
    "pairs": (
        "adapter.toml",
        ("model.init=./models/base", "task.kind=preference", "data.dir=data/preference"),
    ),
}
"""Config and settings of each run on one machine."""
LAST_STEPS = {"full": 12, "kept": 12, "lora": 8, "labels": 8, "pairs": 8}
"""Step at which the learning rate's decay ends; the stored runs end earlier."""


def main() -> None:
    """Write everything below HOME."""
    os.environ |= {"HOME": str(HOME), "USER": "ada", "LOGNAME": "ada", "PYTHONPATH": str(CODE)}
    os.environ |= {"HF_HUB_CACHE": str(HUB), "HF_HUB_OFFLINE": "1"}
    os.environ["PATH"] = f"{CODE}/.venv/bin:{os.environ['PATH']}"
    os.chdir(PROJECT)
    make_model(Path("models/base"))
    copy_to_hub(Path("models/base"), cache=HUB, name=MODEL)
    prepare_data()
    Path("text.toml").write_text(TEXT_RUN, encoding="utf-8")
    Path("adapter.toml").write_text(ADAPTER_RUN, encoding="utf-8")
    for name in RUNS:
        run(name, runs_dir=PROJECT / "runs")
    python("-c", SAMPLES)
    words = ("run", "text.toml", "--inventory", "rack.json", "--run-id", "far")
    python("-c", CLUSTER, *words, "--set", "model.n_embd=16", "--set", "track.to=[]")
    python("-c", STACK, folder=CLOUD)
    text = json.dumps(expectations(), indent=2) + "\n"
    (HOME / "expected.json").write_text(text, encoding="utf-8")


def prepare_data() -> None:
    """Prepare a data folder for each task."""
    write_texts(Path("sources"))
    for task, more in {
        "text": (),
        "chat": ("--sequence-length", "64"),
        "preference": ("--sequence-length", "64"),
        "classify": ("--text-column", "text", "--label-column", "label"),
    }.items():
        source = ("text", "text.txt") if task == "text" else ("jsonl", f"{task}.jsonl")
        words = ("--task", task, "--source", source[0], "--input", f"sources/{source[1]}", *more)
        common = ("--tokenizer", "./models/base", "--val-fraction", "0.2", "--out", f"data/{task}")
        python("-m", "payload.data", "prepare", *words, *common)


def run(name: str, *more: str, runs_dir: Path) -> None:
    """Train one complete run on this machine; `more` are further settings."""
    config, settings = RUNS[name]
    words = ("run", config, "--inventory", "local", "--run-id", name, "--runs-dir", str(runs_dir))
    every = (*settings, f"run.name={name}", *more)
    sets = [word for setting in every for word in ("--set", setting)]
    python("-m", "payload.orchestrate", *words, *sets)


def expectations() -> dict[str, Any]:
    """Return the recorded commit's results with the fixtures."""
    expected: dict[str, Any] = {name: _rest_of(name) for name in RUNS}
    data = {"full": "text", "lora": "chat", "labels": "classify", "far": "text"}
    for name, folder in data.items():
        words = ("--checkpoint", f"runs/{name}", "--data", f"data/{folder}", "--json")
        expected.setdefault(name, {})["evaluate"] = answer("payload.evaluate", *words)
    greedy = ("--temperature", "0", "--num-samples", "1", "--max-new-tokens", "16", "--json")
    for name in ("full", "lora"):
        prompt = ("--checkpoint", f"runs/{name}", "--prompt", PROMPTS[name])
        expected[name]["generate"] = answer("payload.generate", *prompt, *greedy)
    prompt = ("--checkpoint", "runs/labels", "--prompt", PROMPTS["labels"])
    label = answer("payload.generate", "--classify", *prompt, "--json")
    expected["labels"]["classify"] = label
    plan = answer(
        "payload.orchestrate", "plan", "text.toml", "--inventory", "rack.json", "--json", whole=True
    )
    expected["rack"] = {"hosts": plan["hosts"], "ranks": plan["ranks"]}
    return expected


def _rest_of(name: str) -> dict[str, Any]:
    """Return the losses after a run's stored end, from an uninterrupted run to LAST_STEPS."""
    whole, last = HOME / "whole", LAST_STEPS[name]
    # A later setting overrides an earlier one: the store has only the stored run.
    run(name, "storage.results=none", f"train.steps={last}", runs_dir=whole)
    rows, stored = metrics(whole / name), metrics(PROJECT / "runs" / name)
    end = max(row["step"] for row in stored)
    return {
        "stored_step": end,
        "last_step": last,
        "losses": {row["step"]: row["loss"] for row in rows if row["step"] > end and "loss" in row},
        "last_val_loss": [row["val_loss"] for row in rows if "val_loss" in row][-1],
    }


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def answer(module: str, *words: str, whole: bool = False) -> Any:
    """Return the JSON that a command prints: all of its output, or its last line."""
    said = python("-m", module, *words)
    return json.loads(said if whole else said.splitlines()[-1])


def python(*words: str, folder: Path = PROJECT) -> str:
    """Run Python in `folder` and return its stdout."""
    command = [str(CODE / ".venv" / "bin" / "python"), *words]
    done = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


if __name__ == "__main__":
    main()
