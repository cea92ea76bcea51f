"""The classification benchmark with real text, a small model and the peers, in short runs."""

from __future__ import annotations

import ast
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import classify
from benchmarks import docstrings as docstring_set
from benchmarks.package_texts import PackageText, divide, read_packages, write_csv
from payload.data.tokenizer_files import gpt2_files
from payload.train.models.hf_weights import save_hf
from tests.train.test_model import make_model

PACKAGES = ("asyncio", "email", "unittest")
LISTED = """Package: libjam4
Source: jam (2.5+b1)
Section: non-free/libs
Description: searches for dependencies

Package: jam-doc
Source: jam
Description: searches for dependencies: manual
 Continued lines are no part of it: really.
Section: doc

Package: again
Section: libs
Description: searches for dependencies

Package: jelly
Section: utils
Description-en: sets: slowly
"""


def docstrings() -> Iterator[PackageText]:
    """Yield the first docstring lines of some packages of the standard library."""
    for package in PACKAGES:
        for path in sorted((Path(sysconfig.get_path("stdlib")) / package).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    text = ast.get_docstring(node)
                    if text:
                        first = text.split("\n")[0]
                        yield PackageText(text=first, label=package, source=node.name)


def test_a_package_has_its_source_and_a_description_comes_once() -> None:
    assert list(read_packages(LISTED)) == [
        PackageText(text="searches for dependencies", label="libs", source="jam"),
        PackageText(text="searches for dependencies: manual", label="doc", source="jam"),
        PackageText(text="sets: slowly", label="utils", source="jelly"),
    ]


def test_the_parts_share_no_source_and_are_the_same_for_the_same_lists() -> None:
    rows = [
        PackageText(text=f"{label} {number}", label=label, source=f"s{number % 20}")
        for label, count in (("a", 3), ("b", 90), ("c", 70))
        for number in range(count)
    ]
    parts = divide(rows, labels=2, train=50, validation=30, held_out=20)
    assert parts == divide(rows[::-1], labels=2, train=50, validation=30, held_out=20)
    each = (parts.train, parts.validation, parts.held_out)
    assert [len(part) for part in each] == [50, 30, 20]
    assert {row.label for part in each for row in part} == {"b", "c"}
    sources = [{row.source for row in part} for part in each]
    assert not sources[0] & sources[1] and not sources[2] & (sources[0] | sources[1])

    mixed = divide(rows, labels=2, train=50, validation=30, by_source=False)
    assert len(mixed.held_out) == 80 and not set(mixed.held_out) & {*mixed.train, *mixed.validation}
    assert {row.source for row in mixed.train} & {row.source for row in mixed.held_out}


def test_a_margin_has_the_error_of_paired_texts_that_are_clustered_by_source() -> None:
    ours, theirs = [True] * 9 + [False], [True] * 4 + [False] * 6
    each_its_own = [str(number) for number in range(10)]
    margin = classify.Margin.of(ours, theirs, each_its_own)
    assert margin.points == pytest.approx(50)
    assert margin.standard_error == pytest.approx(100 * (0.25 / 9) ** 0.5)
    assert margin.p == pytest.approx(0.0027, rel=1e-2)  # for 3 standard errors
    # The five gained texts are one package's and count as one.
    of_one = classify.Margin.of(ours, theirs, ["0"] * 4 + ["1"] * 5 + ["2"])
    assert of_one.points == margin.points
    assert of_one.standard_error == pytest.approx(10 * ((2**2 + 2.5**2 + 0.5**2) * 3 / 2) ** 0.5)
    assert classify.Margin.of(ours, ours, each_its_own).p == 1
    with pytest.raises(ValueError, match="too few for a standard error"):
        classify.Margin.of(ours, theirs, ["0"] * 10)


def test_texts_that_are_there_already_keep_their_time(tmp_path: Path) -> None:
    path = tmp_path / "texts.csv"
    for ending, times in (("?", False), ("?", True), ("!", False)):
        write_csv(path, list(read_packages(LISTED)), ending=ending)
        assert (path.stat().st_mtime_ns == 1) == times
        os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(
    ("keeps", "again"), [(True, "it resumes from the last checkpoint"), (False, "--work DIR")]
)
def test_a_training_that_was_stopped_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool, again: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text('{"status": "stopped"}')
    monkeypatch.setattr(classify, "_run_quietly", lambda *options: None)
    with pytest.raises(
        SystemExit, match=f"^error: the training ended with status stopped. .*{again}"
    ):
        classify._train(tmp_path, config=classify.CONFIG, sets=(), keeps=keeps)


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    for action in classify._benchmark().parser._actions:
        assert action.help, action.option_strings
    with pytest.raises(SystemExit):
        classify.main(["--help"])
    assert "validation texts, to choose a recipe (default: 2,000)" in " ".join(
        capsys.readouterr().out.split()
    )


def test_the_set_of_docstrings_shows_its_examples_and_refuses_an_empty_choice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        docstring_set.main(["--help"])
    assert "\n    python -m benchmarks.docstrings FILE\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        docstring_set.main(["--every", "0", "FILE"])
    assert "error: --every 0: must be 1 or more" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.seeds
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
    arguments = ["--model", str(model), "--labels", "3", "--texts", "150"]
    arguments += ["--validation", "50", "--held-out", "200"]
    arguments += ["--set", "train.steps=12", "--set", "optimizer.lr=3e-3"]
    arguments += ["--set", "schedule.warmup_steps=2"]
    code = classify.main([*arguments, "--work", str(tmp_path / "work")])
    captured = capfd.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    margins = result["margins"]
    assert code == (0 if min(each["points"] for each in margins.values()) > 0 else 1)
    assert (result["texts"], result["measured"], result["labels"]) == (150, 200, 3)
    for name, accuracy in result["peer_accuracy"].items():
        assert accuracy > 0.5
        assert margins[name]["points"] == pytest.approx(100 * (result["accuracy"] - accuracy))
        (line,) = [line for line in captured.err.splitlines() if line.startswith(name)]
        assert f"{margins[name]['points']:+.2f}" in line.split()
    rows = map(json.loads, (tmp_path / "work" / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.1

    peers = ["--peers", "--split", "texts", *arguments[2:8], "--held-out", "200"]
    assert classify.main(peers) == 0
    alone = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert 0 < alone["shared"] < 1
    for each in alone["peers"].values():
        parts = (each["shared source"], each["other sources"])
        assert min(parts) <= each["accuracy"] <= max(parts)
