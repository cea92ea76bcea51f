"""Training on conversations equals TRL's SFTTrainer with TRL's own training templates."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.architecture_cases import CASES, make_folder
from payload.data.reading.blocks import BlockOrder
from payload.data.reading.packed_blocks import FIRST, PADDING, TRAINED, open_packed
from tests.chat_templates.conversations import TOOLS, as_file_row
from tests.chat_templates.sources import trl_templates
from tests.chat_templates.tokenizer import make_tokenizer
from tests.support.chat_data import prepare, write_rows
from tests.support.launching import losses
from tests.support.sampled import sampled
from tests.train.alone import train_alone
from tests.train.task_runs import BATCH, LR, SEED, chat_run_config

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
]

STEPS, ROWS = 50, 60
LENGTHS = {"one turn": 128, "three turns": 256, "tools": 768, "thoughts": 128}
"""Tokens of a block for each kind of rows."""
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": max(LENGTHS.values()),
    "pad_token_id": None,
}
TEMPLATES = ("qwen3_training", "glm4moe_training", "nemotron_3_nano_training")
"""They have `{% generation %}` blocks, tools and thoughts."""
SAMPLE = {
    ("qwen3_training", "one turn"),
    ("nemotron_3_nano_training", "three turns"),
    ("glm4moe_training", "tools"),
    ("qwen3_training", "thoughts"),
}
"""Every template and every kind of rows; `make test-seeds` runs the other pairs."""
_TEXT = "what is the one two three of and walnut cactus gondola bramble"
_WORDS = _TEXT.split()

Row = dict[str, Any]


def rows_of(kind: str) -> list[Row]:
    """Return rows of one kind in the form of transformers' `apply_chat_template`."""
    draw = random.Random(kind)

    def words() -> str:
        return " ".join(draw.choices(_WORDS, k=draw.randint(1, 9)))

    def question() -> Row:
        return {"role": "user", "content": words()}

    def answer(**more: str) -> Row:
        return {"role": "assistant", "content": words(), **more}

    def called() -> Row:
        function = {"name": "get_harvest", "arguments": {"cobalt": words()}}
        calls = [{"id": "abcd12345", "type": "function", "function": function}]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    made: list[Row] = []
    for _ in range(ROWS):
        if kind == "one turn":
            messages = [question(), answer()]
        elif kind == "three turns":
            messages = [each for _ in range(3) for each in (question(), answer())]
        elif kind == "thoughts":
            messages = [question(), answer(reasoning_content=words())]
        else:
            result = {"role": "tool", "tool_call_id": "abcd12345", "content": words()}
            messages = [question(), called(), result, answer()]
        made.append({"messages": messages, **({"tools": TOOLS} if kind == "tools" else {})})
    return made


def make_model(folder: Path, template: str) -> Path:
    """Make a small model whose tokenizer has one of TRL's training templates."""
    make_tokenizer(folder, trl_templates()[f"trl/{template}"])
    make_folder({**CASES["llama"], **SIZES}, folder)
    return folder


def trainer(model: Path, rows: Sequence[Row], folder: Path, **more: Any) -> Any:
    """Return TRL's trainer for these rows, a batch a step in their order."""
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    settings = SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        max_length=None,
        train_sampling_strategy="sequential",
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta2=0.999,
        max_grad_norm=0.0,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        logging_first_step=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **more,
    )
    return SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_list(list(rows)),
    )


def packed_documents(
    data: Path, length: int
) -> list[list[tuple[tuple[int, ...], tuple[bool, ...]]]]:
    """Return for each block its conversations: the tokens, and which of them are trained."""
    blocks = open_packed(data, split="train", sequence_length=length)
    every = np.arange(blocks.num_blocks(), dtype=np.int64)
    found = []
    for tokens, marks in zip(blocks.tokens.whole(every), blocks.marks_of(every), strict=True):
        starts = np.flatnonzero((marks & FIRST) != 0).tolist()
        documents = []
        for start, end in zip(starts, [*starts[1:], length], strict=True):
            if not marks[start] & PADDING:
                trained = (marks[start:end] & TRAINED) != 0
                documents.append((tuple(tokens[start:end].tolist()), tuple(trained.tolist())))
        found.append(documents)
    return found


@pytest.mark.parametrize(
    ("template", "kind"), sampled(itertools.product(TEMPLATES, LENGTHS), sample=SAMPLE)
)
def test_fifty_losses_and_every_mask_are_those_of_trl(
    template: str, kind: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", template)
    rows, length = rows_of(kind), LENGTHS[kind]
    source = write_rows(tmp_path / "in.jsonl", [as_file_row(row) for row in rows])
    flags = ("--sequence-length", length, "--val-fraction", 0.1)
    data = prepare(model, source, tmp_path / "data", *flags)
    theirs = {
        tuple(row["input_ids"]): tuple(label != -100 for label in row["labels"])
        for row in trainer(model, rows, tmp_path / "masks", assistant_only_loss=True).train_dataset
    }
    packed = packed_documents(data, length)
    documents = [each for block in packed for each in block]
    assert len(documents) == 54 and len(packed) < 54
    for tokens, trained in documents:
        assert trained == theirs[tokens]

    train_alone(
        tmp_path / "run", chat_run_config(tmp_path, model, data, length=length, steps=STEPS)
    )
    order = BlockOrder(num_blocks=len(packed), seed=SEED).blocks(np.arange(STEPS * BATCH))
    visited = [
        {
            "input_ids": [token for tokens, _ in packed[block] for token in tokens],
            "labels": [
                token if trained else -100
                for tokens, _ in packed[block]
                for token, trained in zip(tokens, theirs[tokens], strict=True)
            ],
            "seq_lengths": [len(tokens) for tokens, _ in packed[block]],
        }
        for block in order.tolist()
    ]
    reference = trainer(model, visited, tmp_path / "trl", padding_free=True)
    reference.train()
    wanted = [row["loss"] for row in reference.state.log_history if "loss" in row]
    assert len(wanted) == STEPS and wanted[-1] < wanted[0] - 0.3
    assert losses(tmp_path / "run") == pytest.approx(wanted, abs=1e-5)
