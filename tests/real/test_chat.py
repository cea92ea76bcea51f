"""A real chat model learns an instruction set with an adapter, and other libraries load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.docstrings import write
from payload.core.errors import ExitCode
from payload.export.__main__ import main as export
from payload.formats.data_folder import load_meta
from payload.machines.core_speed import has_bf16
from payload.models.registry import read_spec
from payload.run_record.run_files import RunPaths
from tests.real.test_smollm2 import of_transformers, run
from tests.support.chat_data import prepare
from tests.support.launching import metrics
from tests.support.slow_imports import peft
from tests.support.smollm2 import smollm2_folder
from tests.support.waiting import DEADLINE_S

pytestmark = [pytest.mark.seeds, pytest.mark.processes, pytest.mark.usefixtures("one_thread")]

LENGTH, STEPS = 256, 60
# On a CPU that emulates bf16 the run would take an hour.
DTYPE = "fp32" if has_bf16() is False else "bf16"
QUESTION = "Write the docstring of this Python function.\n\ndef add(a, b):\n    return a + b"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("docstrings") / "pairs.jsonl"
    assert write(path) >= 3000
    return path


@pytest.fixture(scope="module")
def data(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("docstrings") / "data"
    flags = ("--sequence-length", LENGTH, "--group-column", "module", "--val-fraction", 0.08)
    return prepare(smollm2_folder(), source, out, *flags)


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with an adapter of rank 16 on every linear layer."""
    folder = tmp_path_factory.mktemp("docstrings") / "run"
    config = folder.with_suffix(".toml")
    config.write_text(
        f"""
        [data]
        dir = "{data}"
        sequence_length = {LENGTH}
        [task]
        kind = "chat"
        [model]
        init = "{smollm2_folder()}"
        [adapter]
        kind = "lora"
        rank = 16
        [batch]
        global_batch_size = 2
        micro_batch_size = 2
        [optimizer]
        lr = 2e-3
        min_lr = 2e-4
        weight_decay = 0.0
        [schedule]
        warmup_steps = 3
        [train]
        steps = {STEPS}
        eval_every = 0
        eval_tokens = 2560
        checkpoint_every = 0
        [precision]
        dtype = "{DTYPE}"
        """,
        encoding="utf-8",
    )
    program = ["-m", "payload.train", "--config", str(config), "--run-dir", str(folder)]
    run(program, deadline_s=DEADLINE_S)
    return folder


@pytest.fixture(scope="module")
def merged(trained: Path, large_folder: Path) -> Path:
    out = large_folder / "merged"
    arguments = ["--checkpoint", str(trained), "--merge", "--dtype", "fp32", "--out", str(out)]
    assert export(arguments) == ExitCode.OK
    return out


@pytest.fixture(scope="module")
def adapted(trained: Path) -> Any:
    checkpoint = RunPaths(trained).checkpoint(STEPS)
    return peft().PeftModel.from_pretrained(of_transformers(smollm2_folder()), checkpoint).eval()


def test_modules_that_are_held_out_have_no_pair_in_training(source: Path, data: Path) -> None:
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    meta = load_meta(data)
    assert meta.chat is not None
    assert meta.train_documents + meta.val_documents == len(rows)
    assert meta.chat.val_trained_tokens > 5000
    assert meta.chat.train_padding_tokens < 0.1 * meta.train_tokens
    assert len({row["module"] for row in rows}) > 200


def test_the_loss_of_answers_about_other_modules_falls_by_fifteen_percent(trained: Path) -> None:
    found = [row["val_loss"] for row in metrics(trained) if "val_loss" in row]
    assert found[-1] < 0.85 * found[0]


def test_a_checkpoint_is_below_four_percent_of_one_of_all_weights(trained: Path) -> None:
    checkpoint = RunPaths(trained).checkpoint(STEPS)
    tokenizer = [checkpoint / name for name in ("tokenizer.json", "tokenizer_config.json")]
    size = sum(each.stat().st_size for each in checkpoint.iterdir() if each not in tokenizer)
    # Weights and AdamW's two moments, fp32.
    assert size < 0.04 * read_spec(smollm2_folder()).num_params() * 12


def prompt(folder: Path) -> torch.Tensor:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens: torch.Tensor = tokenizer(text, return_tensors="pt")["input_ids"]
    return tokens


def test_the_merged_model_and_the_adapter_give_equal_logits(merged: Path, adapted: Any) -> None:
    tokens = prompt(merged)
    with torch.inference_mode():
        ours, theirs = of_transformers(merged)(tokens).logits, adapted(tokens).logits
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_the_merged_model_and_the_adapter_give_the_same_answer(merged: Path, adapted: Any) -> None:
    tokens = prompt(merged)
    answers = [
        model.generate(input_ids=tokens, max_new_tokens=24, do_sample=False)
        for model in (of_transformers(merged), adapted)
    ]
    assert torch.equal(*answers)
    assert answers[0].shape[1] > tokens.shape[1] + 2
