"""`evaluate RUN --dtype D` gives the numbers of the run's own last evaluation in D."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.evaluate.__main__ import main as evaluate
from tests.support.accelerate_state import forget_accelerate
from tests.support.chat_data import PLAIN_TEMPLATE, conversations, make_model
from tests.support.preference_data import pairs
from tests.train.alone import train_alone
from tests.train.task_runs import (
    CLASSIFY,
    LORA,
    chat_config,
    classify_base,
    classify_data,
    evaluations,
    preference_config,
)

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("one_thread")]

BF16 = ("precision.dtype=bf16", *LORA, "train.checkpoint_every=4", "train.steps=4")


def check(
    run: Path, data: Path, capsys: pytest.CaptureFixture[str], *more: str, keys: Sequence[str]
) -> None:
    """Compare the numbers that `evaluate` prints with the run's last evaluation."""
    last = evaluations(run)[-1]
    capsys.readouterr()
    words = ["--checkpoint", str(run), "--data", str(data), "--dtype", "bf16", *more, "--json"]
    assert evaluate(words, {}) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {key: found[key] for key in keys} == pytest.approx(
        {key: last["val_" + key.removeprefix("val_")] for key in keys}, rel=2e-3, abs=2e-4
    )


def test_of_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(tmp_path / "model", template=PLAIN_TEMPLATE)
    config = preference_config(tmp_path, model, pairs(60))
    forget_accelerate()
    # Small changes of the weights are those that a merge in bf16 rounds away.
    train_alone(tmp_path / "run", config, *BF16)
    forget_accelerate()
    check(tmp_path / "run", tmp_path / "data", capsys, keys=("val_loss", "margin", "chosen_reward"))

    words = ["--checkpoint", str(tmp_path / "run"), "--data", str(tmp_path / "data")]
    assert evaluate([*words, "--sequence-length", "64"], {}) == ExitCode.CONFIG
    assert "--sequence-length 64: pairs have the length" in capsys.readouterr().err


def test_of_conversations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(tmp_path / "model")
    rows = [{"messages": each} for each in conversations(40)]
    config = chat_config(tmp_path, model, rows)
    forget_accelerate()
    train_alone(tmp_path / "run", config, *BF16)
    forget_accelerate()
    check(tmp_path / "run", tmp_path / "data", capsys, keys=("val_loss", "val_tokens"))


def test_of_texts_with_labels(
    tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, data = classify_base(tmp_path / "base"), classify_data(tmp_path)
    settings = (*CLASSIFY, *BF16, f"data.dir={data}", f"model.init={base}")
    forget_accelerate()
    train_alone(tmp_path / "run", tiny_config, *settings)
    forget_accelerate()
    check(tmp_path / "run", data, capsys, keys=("val_loss", "accuracy"))
