"""A small chat model learns which of three functions to call, and is tested with new values.

    python -m benchmarks.tools --model FOLDER
    python -m benchmarks.tools --model FOLDER --conversations 60 --requests 20

SmolLM2-135M-Instruct has a chat template without tools, so data and model get trl's template of
Qwen2.5, which has the same special tokens. The base model gets the same prompts. A request counts
if `generate --chat --tools` reads exactly one call from the answer, of the right function, with
arguments that are valid JSON; the values of the arguments are also compared with the request's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from benchmarks.harness import REPO, Benchmark
from benchmarks.tool_requests import TOOLS, Request, requests

CONVERSATIONS, REQUESTS, GOAL = 500, 100, 90
_LENGTH = 800
_BATCH = 2
_LEARNING_RATE = 2e-4
_ANSWER_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Numbers of requests that a model answers with the right call."""

    requests: int
    right_function: int
    """Number of requests that the model answered with one call of the right function, with
    parseable arguments."""
    right_values: int
    """Number of calls of the right function whose arguments also have the values of the request."""


def main(argv: Sequence[str]) -> int:
    """Train, query both models, and report; return 0 if the trained model reaches the goal."""
    benchmark = Benchmark("tools", __doc__)
    add = benchmark.parser.add_argument
    add("--model", type=Path, required=True, metavar="FOLDER", help="SmolLM2-135M-Instruct")
    add("--conversations", type=int, default=CONVERSATIONS, metavar="COUNT", help="for training")
    add("--requests", type=int, default=REQUESTS, metavar="COUNT", help="held out")
    add("--epochs", type=float, default=1.0, metavar="COUNT", help="passes over the conversations")
    add("--work", type=Path, metavar="DIR", help="keep data, run and answers in this folder")
    arguments = benchmark.parse(argv)
    with tempfile.TemporaryDirectory() as temporary:
        base, tuned, train_s = compare(arguments, work=arguments.work or Path(temporary))
    table = benchmark.table("right function", "right values", labels=("base model", "fine-tuned"))
    for label, score in (("base model", base), ("fine-tuned", tuned)):
        table.row(label, str(score.right_function), str(score.right_values))
    benchmark.note(
        f"{arguments.conversations:,} conversations of training in {train_s:.0f} s, "
        f"{arguments.requests} held-out requests."
    )
    result = {"base": base, "tuned": tuned, "train_s": round(train_s, 1)}
    benchmark.finish(result, packages=("torch", "trl"))
    return int(tuned.right_function < GOAL / REQUESTS * arguments.requests)


def compare(arguments: argparse.Namespace, *, work: Path) -> tuple[Score, Score, float]:
    """Return the scores of the base model and of the trained one, and the seconds of training."""
    work.mkdir(parents=True, exist_ok=True)
    train, held_out = requests(arguments.conversations, arguments.requests)
    template = (files("trl") / "chat_templates" / "qwen2_5.jinja").read_text(encoding="utf-8")
    (work / "tools.jinja").write_text(template, encoding="utf-8")
    (work / "tools.json").write_text(json.dumps(TOOLS), encoding="utf-8")
    rows = [json.dumps(each.row(number)) + "\n" for number, each in enumerate(train)]
    (work / "train.jsonl").write_text("".join(rows), encoding="utf-8")
    (work / "requests.txt").write_text("".join(each.text + "\n" for each in held_out))
    base = work / "base"
    if not base.exists():
        shutil.copytree(arguments.model, base)
        (base / "chat_template.jinja").write_text(template, encoding="utf-8")
    train_s = _train(arguments, work)
    return _score(work, base, held_out), _score(work, work / "run", held_out), train_s


def _train(arguments: argparse.Namespace, work: Path) -> float:
    """Prepare the conversations and train all weights on them; return the seconds of training."""
    prepare = ["prepare", "--task", "chat", "--source", "jsonl", "--input", work / "train.jsonl"]
    prepare += ["--tokenizer", arguments.model, "--chat-template", work / "tools.jinja"]
    prepare += ["--sequence-length", _LENGTH, "--val-fraction", 0.04, "--out", work / "data"]
    _run("payload.data", *prepare, "--force")
    meta = json.loads((work / "data" / "meta.json").read_text(encoding="utf-8"))
    steps = max(1, round(arguments.epochs * meta["train_tokens"] / _LENGTH / _BATCH))
    config = work / "run.toml"
    config.write_text(
        f"""
        [data]
        dir = "{work / "data"}"
        sequence_length = {_LENGTH}
        [task]
        kind = "chat"
        [model]
        init = "{arguments.model}"
        [batch]
        global_batch_size = {_BATCH}
        micro_batch_size = {_BATCH}
        [optimizer]
        lr = {_LEARNING_RATE}
        min_lr = {_LEARNING_RATE / 10}
        weight_decay = 0.0
        [schedule]
        warmup_steps = {max(1, steps // 20)}
        [train]
        steps = {steps}
        eval_every = 0
        checkpoint_every = 0
        """,
        encoding="utf-8",
    )
    began_s = time.perf_counter()
    _run("payload.train", "--config", config, "--run-dir", work / "run")
    return time.perf_counter() - began_s


def _score(work: Path, model: Path, held_out: Sequence[Request]) -> Score:
    """Send every request to a model, each in a separate conversation."""
    options = ["--chat", "--tools", work / "tools.json", "--prompts-file", work / "requests.txt"]
    options += ["--temperature", 0, "--max-new-tokens", _ANSWER_TOKENS, "--json"]
    printed = _run("payload.generate", model, *options)
    (work / f"{model.name}_answers.jsonl").write_text(printed, encoding="utf-8")
    answers = [json.loads(line) for line in printed.splitlines()]
    assert [each["prompt"] for each in answers] == [each.text for each in held_out]
    calls = [each["samples"][0].get("tool_calls", []) for each in answers]
    pairs = [
        (found[0]["arguments"], each.arguments)
        for found, each in zip(calls, held_out, strict=True)
        if len(found) == 1 and found[0]["name"] == each.function
    ]
    return Score(
        requests=len(held_out),
        right_function=len(pairs),
        right_values=sum(found == wanted for found, wanted in pairs),
    )


def _run(module: str, *words: object) -> str:
    command = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{module} failed with exit code {done.returncode}:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
