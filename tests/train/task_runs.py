"""Runs on conversations, on preference pairs and on labelled texts, for several test files."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from payload.data.__main__ import main as data
from payload.train.models.hf_weights import save_hf
from tests.support.chat_data import prepare, write_rows
from tests.support.launching import metrics
from tests.train.test_model import make_model

SEED, BATCH, LR = 5, 4, 1e-3
CHAT_LENGTH, CHAT_STEPS = 128, 20
PAIR_LENGTH, PAIR_STEPS, BETA = 64, 20, 0.1

_CONFIG = """
[run]
seed = {seed}
[data]
dir = "{data}"
sequence_length = {length}
[task]
{task}
[model]
init = "{model}"
[batch]
global_batch_size = {batch}
micro_batch_size = 2
[optimizer]
lr = {lr}
min_lr = {lr}
weight_decay = 0.0
beta2 = 0.999
grad_clip = 0.0
[schedule]
kind = "constant"
warmup_steps = 0
[train]
steps = {steps}
eval_every = 0
checkpoint_every = {checkpoint_every}
[precision]
dtype = "fp32"
"""

LORA = ("adapter.kind=lora", "adapter.rank=4")
WORDS = {
    "animal": ["dog", "cat", "horse", "cow", "sheep"],
    "city": ["Paris", "London", "Rome", "Tokyo", "Cairo"],
    "food": ["bread", "apple", "soup", "rice", "cake"],
}
CLASSIFY = (
    "task.kind=classify",
    "model.n_layer=none",
    "model.n_head=none",
    "model.n_embd=none",
    "data.sequence_length=16",
    "optimizer.lr=3e-3",
    "batch.global_batch_size=12",
    "batch.micro_batch_size=2",
    "train.steps=12",
    "train.checkpoint_every=6",
)
"""Overrides of `tiny_config`."""


def chat_config(
    folder: Path, model: Path, rows: Sequence[Mapping[str, Any]], *flags: object
) -> Path:
    """Prepare conversations in `folder / "data"` and write the config of a run on them."""
    return _config(folder, model, rows, *flags, task="chat", length=CHAT_LENGTH, steps=CHAT_STEPS)


def preference_config(folder: Path, model: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Prepare pairs in `folder / "data"` and write the config of a run on them."""
    flags = ("--val-fraction", 0.2)
    return _config(
        folder, model, rows, *flags, task="preference", length=PAIR_LENGTH, steps=PAIR_STEPS
    )


def _config(
    folder: Path,
    model: Path,
    rows: Sequence[Mapping[str, Any]],
    *flags: object,
    task: str,
    length: int,
    steps: int,
) -> Path:
    source = write_rows(folder / "in.jsonl", rows)
    # Tests that compare with TRL compute the split of all rows, some of which are equal.
    flags = ("--sequence-length", length, "--dedup", "none", *flags)
    out = prepare(model, source, folder / "data", *flags, task=task)
    return _write_config(folder, model, out, task=task, length=length, steps=steps)


def chat_run_config(folder: Path, model: Path, data: Path, *, length: int, steps: int) -> Path:
    """Write the config of a run on prepared conversations."""
    return _write_config(folder, model, data, task="chat", length=length, steps=steps)


def _write_config(
    folder: Path, model: Path, data: Path, *, task: str, length: int, steps: int
) -> Path:
    config = folder / "config.toml"
    beta = f"\nbeta = {BETA}" if task == "preference" else ""
    text = _CONFIG.format(
        **{"seed": SEED, "data": data, "length": length, "model": model, "batch": BATCH},
        **{"task": f'kind = "{task}"{beta}', "lr": LR},
        **{"steps": steps, "checkpoint_every": steps // 2},
    )
    config.write_text(text, encoding="utf-8")
    return config


def classify_texts(count: int = 120, seed: int = 1) -> list[tuple[str, str]]:
    """Return texts whose tokens belong to one kind, and the kind."""
    chosen = random.Random(seed)
    kinds = [chosen.choice(list(WORDS)) for _ in range(count)]
    return [
        (" ".join(chosen.choices(WORDS[kind], k=chosen.randint(2, 20))), kind) for kind in kinds
    ]


def classify_data(folder: Path) -> Path:
    """Return a data folder of 89 texts for training and 31 for validation."""
    rows = [{"text": text, "label": kind} for text, kind in classify_texts()]
    source = write_rows(folder / "rows.jsonl", rows)
    words = ["--task", "classify", "--source", "jsonl", "--input", str(source), "--quiet"]
    words += ["--val-fraction", "0.25", "--out", str(folder / "data")]
    assert data(["prepare", *words]) == 0
    return folder / "data"


def classify_base(folder: Path) -> Path:
    """Return the folder of a small GPT-2."""
    folder.mkdir(exist_ok=True)
    save_hf(make_model(n_embd=32, n_head=2, n_layer=2, vocab_size=50_257), folder)
    return folder


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's evaluations, without their times."""
    rows = [row for row in metrics(run_dir) if "val_loss" in row]
    return [{key: row[key] for key in row if key != "time_unix"} for row in rows]


def json_of(printed: str) -> dict[str, Any]:
    """Return the last JSON object in the output of a command."""
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    loaded: dict[str, Any] = json.loads(lines[-1])
    return loaded
