"""Training on conversations: TRL's losses, exact resume, and rejected settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from payload.core.errors import ConfigError, ExitCode
from payload.data.reading.blocks import BlockOrder
from payload.data.reading.packed_blocks import open_packed
from payload.evaluate.__main__ import main as evaluate
from payload.formats.data_folder import IGNORED_TARGET, load_meta
from payload.generate.__main__ import main as generate
from payload.run_record.run_files import RunPaths
from payload.train.models.loading import load
from tests.support.chat_data import MARKED_TEMPLATE, conversations, make_model, prepare
from tests.support.launching import losses
from tests.train.alone import train_alone
from tests.train.task_runs import BATCH, CHAT_LENGTH, CHAT_STEPS, LR, SEED, chat_config

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("one_thread")]

Messages = list[dict[str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), template=MARKED_TEMPLATE)


@pytest.fixture(scope="module")
def packed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the config of a run on packed conversations of one turn and of two."""
    rows = [{"messages": each} for turns in (1, 2) for each in conversations(40, turns=turns)]
    return chat_config(tmp_path_factory.mktemp("packed"), model, rows, "--val-fraction", 0.2)


def trl_losses(model: Path, rows: Sequence[Messages], folder: Path) -> list[float]:
    """Return the losses of TRL's trainer on the conversations in this order, a batch a step."""
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    settings = SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=CHAT_STEPS,
        max_length=CHAT_LENGTH,
        assistant_only_loss=True,
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
    )
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_list([{"messages": messages} for messages in rows]),
    )
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def visited(folder: Path, rows: Sequence[Messages]) -> list[Messages]:
    """Return the conversations in the order of an unpacked run; each is a block."""
    meta = load_meta(folder)
    order = np.random.default_rng(meta.split.seed).permutation(len(rows))
    held_out = set(order[: meta.val_documents].tolist())
    kept = [row for number, row in enumerate(rows) if number not in held_out]
    blocks = BlockOrder(num_blocks=len(kept), seed=SEED).blocks(np.arange(CHAT_STEPS * BATCH))
    return [kept[block] for block in blocks.tolist()]


def long_answers(count: int) -> list[Messages]:
    """Return conversations, most of them longer than a block."""
    made = conversations(count, turns=2, seed=3)
    for number, messages in enumerate(made):
        messages[-1]["content"] += " and" * (20 * (number % 9))
    return made


@pytest.mark.parametrize(
    ("rows", "truncated"),
    [
        pytest.param(conversations(60), 0, id="one turn", marks=pytest.mark.slow),
        pytest.param(conversations(60, turns=3), 0, id="three turns", marks=pytest.mark.slow),
        pytest.param(long_answers(60), 20, id="truncated"),
    ],
)
def test_twenty_losses_are_those_of_trl(
    model: Path, tmp_path: Path, rows: list[Messages], truncated: int
) -> None:
    given = [{"messages": messages} for messages in rows]
    config = chat_config(tmp_path, model, given, "--packing", "none")
    chat = load_meta(tmp_path / "data").chat
    assert chat is not None and chat.dropped_conversations == 0
    assert chat.truncated_conversations >= truncated
    train_alone(tmp_path / "run", config)
    wanted = trl_losses(model, visited(tmp_path / "data", rows), tmp_path / "trl")
    assert len(wanted) == CHAT_STEPS and wanted[-1] < wanted[0] - 0.3
    assert losses(tmp_path / "run") == pytest.approx(wanted, abs=1e-5)


def test_packed_and_unpacked_data_have_the_same_loss_of_every_token(
    model: Path, packed: Path, tmp_path: Path
) -> None:
    alone = prepare(
        model,
        packed.with_name("in.jsonl"),
        tmp_path / "alone",
        *("--sequence-length", CHAT_LENGTH, "--val-fraction", 0.2, "--packing", "none"),
    )
    module = load(model)
    found = []
    for folder in (packed.with_name("data"), alone):
        blocks = open_packed(folder, split="train", sequence_length=CHAT_LENGTH)
        batch = blocks.gather(np.arange(blocks.num_blocks(), dtype=np.int64))
        with torch.inference_mode():
            token_losses = module.token_losses(*batch)
        found.append(sorted(token_losses[batch[1] != IGNORED_TARGET].tolist()))
    assert len(found[0]) > 500
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_a_resumed_run_is_bitwise_the_unbroken_one(packed: Path, tmp_path: Path) -> None:
    whole, parts = RunPaths(tmp_path / "whole"), RunPaths(tmp_path / "parts")
    faster = ("optimizer.lr=5e-3", "optimizer.min_lr=5e-3", "train.checkpoint_every=6")
    train_alone(whole.root, packed, *faster, "train.steps=12")
    train_alone(parts.root, packed, *faster, "train.steps=6")
    train_alone(parts.root, packed, *faster, "train.steps=12")
    assert losses(parts.root) == losses(whole.root)
    assert losses(whole.root)[-1] < losses(whole.root)[0] - 0.5


def test_evaluate_gives_the_loss_of_the_trained_tokens(
    model: Path, packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = packed.with_name("data")
    assert evaluate(["--checkpoint", str(model), "--data", str(folder), "--json"], {}) == 0
    row = json.loads(capsys.readouterr().out)
    blocks = open_packed(folder, split="val", sequence_length=CHAT_LENGTH)
    tokens, targets, starts = blocks.gather(np.arange(blocks.num_blocks(), dtype=np.int64))
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    places = torch.arange(CHAT_LENGTH) - starts
    with torch.inference_mode():
        logits = reference(input_ids=tokens, position_ids=places, use_cache=False).logits.double()
    wanted = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert row["val_tokens"] == int((targets != IGNORED_TARGET).sum())
    assert row["val_loss"] == pytest.approx(float(wanted), abs=1e-5)


def test_evaluate_refuses_another_length(
    model: Path, packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(packed.with_name("data"))
    arguments = ["--checkpoint", str(model), "--data", folder, "--sequence-length", "64"]
    assert evaluate(arguments, {}) == ExitCode.CONFIG
    assert "was packed into blocks of 128" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("task.kind=text", r"task\.kind = 'text', but .* was prepared with --task chat"),
        ("data.sequence_length=64", r"data\.sequence_length = 64, but .* blocks of 128"),
    ],
)
def test_data_of_another_task_or_length_is_refused(
    packed: Path, tmp_path: Path, override: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        train_alone(tmp_path / "run", packed, override)


def test_text_is_not_taken_for_conversations(tiny_config: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.kind = 'chat', but .* with --task text"):
        train_alone(tmp_path / "run", tiny_config, "task.kind=chat")


def test_a_checkpoint_carries_the_template_of_its_data(packed: Path, tmp_path: Path) -> None:
    train_alone(tmp_path / "run", packed, "train.steps=1")
    checkpoint = RunPaths(tmp_path / "run").checkpoint(1)
    assert (checkpoint / "chat_template.jinja").read_text() == MARKED_TEMPLATE


def test_a_chat_with_a_run_samples_as_its_base_would(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    shutil.copytree(model, base)
    (base / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    rows = [{"messages": each} for each in conversations(8)]
    train_alone(tmp_path / "run", chat_config(tmp_path, base, rows), "train.steps=1")
    words = ["--chat", "--prompt", "open", "--max-new-tokens", "2"]
    notes = []
    for each in (base, tmp_path / "run"):
        assert generate([str(each), *words]) == ExitCode.OK
        notes += [line for line in capsys.readouterr().err.splitlines() if "sampling:" in line]
    assert notes == ["sampling: temperature 0.6, from the model's generation_config.json"] * 2
