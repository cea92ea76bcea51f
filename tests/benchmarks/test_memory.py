"""The bounds of the memory benchmark, and its cases."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.memory import Case, Peak, summarise
from tests.benchmarks.test_step import CONFIG

LARGE, SMALL = Case("gpt2", 8), Case("gpt2", 1)


def test_a_case_is_a_model_and_a_micro_batch() -> None:
    assert Case.parse("gpt2-medium:4") == Case("gpt2-medium", 4)


def test_a_case_s_model_may_be_a_folder_with_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    assert Case.parse(f"{tmp_path}:4") == Case(str(tmp_path), 4)


@pytest.mark.parametrize("text", ["gpt2", "gpt2:", "gpt2:0", "gpt2:-1", ":", ":4"])
def test_an_invalid_case_is_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not MODEL:SEQUENCES"):
        Case.parse(text)


@pytest.mark.parametrize("model", ["gpt3", "gpt2:4"])
def test_a_case_of_an_unknown_model_is_named(model: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="neither a preset"):
        Case.parse(f"{model}:4")


@pytest.mark.parametrize(("estimate", "holds"), [(84, False), (86, True), (116, False)])
def test_an_estimate_holds_within_15_percent_either_way(estimate: int, holds: bool) -> None:
    result = summarise([Peak("tileforge", SMALL, 100, estimate)])
    assert result["estimates_hold"] is holds
    assert result["half_of_nanogpt"] is None


@pytest.mark.parametrize(("ours", "holds"), [(50, True), (51, False)])
def test_half_of_nanogpt_is_required_of_large_micro_batches(ours: int, holds: bool) -> None:
    peaks = [
        Peak("tileforge", SMALL, 90, 90),
        Peak("nanogpt", SMALL, 100),
        Peak("tileforge", LARGE, ours, ours),
        Peak("nanogpt", LARGE, 100),
    ]
    result = summarise(peaks)
    assert result["half_of_nanogpt"] is holds
    assert result["memory_vs_nanogpt"] == {"gpt2:1": 0.9, "gpt2:8": ours / 100}
