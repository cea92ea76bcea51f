"""The benchmark of classification, whole but short: real text, a small model, the peer."""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import classify
from payload.data.tokenizer_files import gpt2_files
from payload.train.weights import save_hf
from tests.train.test_model import make_model

PACKAGES = ("asyncio", "email", "unittest")


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the first line of each docstring in some of the standard library, and its package."""
    for package in PACKAGES:
        for path in sorted((Path(sysconfig.get_path("stdlib")) / package).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    text = ast.get_docstring(node)
                    if text:
                        yield text.split("\n")[0], package


def test_the_same_texts_are_chosen_of_the_most_frequent_labels() -> None:
    rows = [
        (f"{label} {number}", label)
        for label, count in (("a", 3), ("b", 9), ("c", 7))
        for number in range(count)
    ]
    chosen, others = classify.choose(rows, labels=2, texts=10, others=4)
    assert len(chosen) == 10 and {label for _, label in chosen} == {"b", "c"}
    assert len(others) == 4 and not set(others) & set(chosen)
    assert (chosen, others) == classify.choose(rows[::-1], labels=2, texts=10, others=4)
    assert (chosen, []) == classify.choose(rows, labels=2, texts=10)


def test_a_margin_has_the_error_and_the_p_of_paired_texts() -> None:
    ours, theirs = [True] * 9 + [False], [True] * 4 + [False] * 6
    margin = classify.Margin.of(ours, theirs)
    assert margin.points == pytest.approx(50)
    assert margin.standard_error == pytest.approx(100 * (0.25 / 10) ** 0.5)
    assert margin.p == pytest.approx(2 * 0.5**5)
    assert classify.Margin.of(ours, ours).p == 1


def test_both_learn_and_the_margin_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_hf(
        make_model(n_embd=32, n_head=2, n_layer=1, vocab_size=50_257, sequence_length=64), model
    )
    for name, content in gpt2_files(context=64).items():
        (model / name).write_bytes(content)
    monkeypatch.setattr(classify, "packages", docstrings)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--model", str(model), "--labels", "3", "--texts", "300", "--steps", "12"]
    words += ["--few", "150"]
    code = classify.main([*words, "--work", str(tmp_path / "work")])
    said = capfd.readouterr()
    result = json.loads(said.out.splitlines()[-1])
    margins = result["margins"]
    assert code == (0 if min(each["points"] for each in margins.values()) > 0 else 1)
    assert result["held_out"] == 300 and 100 < result["texts"] < 150 and result["labels"] == 3
    for name, accuracy in result["peer_accuracy"].items():
        assert accuracy > 0.5
        assert margins[name]["points"] == pytest.approx(100 * (result["accuracy"] - accuracy))
        (line,) = [line for line in said.err.splitlines() if line.startswith(name)]
        assert f"{margins[name]['points']:+.2f}" in line.split()
    rows = map(json.loads, (tmp_path / "work" / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [row["val_loss"] for row in rows if "val_loss" in row]
    assert losses[-1] < losses[0]
