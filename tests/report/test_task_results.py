"""Each task's own metric comes first: on the page, in the result, in `list` and in comparisons."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from payload.orchestrate.follow.run_text import result_lines, status_lines
from payload.orchestrate.runs.run_index import view_run
from payload.report.__main__ import main
from payload.run_record.metrics_log import EvalMetrics, read_metrics
from payload.run_record.run_files import RunPaths, Summary, read_json, to_json
from payload.run_record.run_statistics import with_rows
from payload.run_record.task_metrics import confusion_of, val_metrics
from tests.report.figures import check_curves, check_figures
from tests.support.browser import Browser
from tests.support.launching import REPO

OLD_RUNS = REPO / "tests" / "fixtures" / "9e71e47" / "project" / "runs"
"""Runs of a version without `val_metrics` in summary.json."""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A copy of the old runs."""
    return Path(shutil.copytree(OLD_RUNS, tmp_path / "runs", symlinks=True))


def summary_of(paths: RunPaths) -> Summary:
    """Return the summary that today's code makes from an old run's metrics."""
    old = read_json(Summary, paths.summary)
    assert old is not None and not old.val_metrics
    return with_rows(old, read_metrics(paths.metrics), saved_step=0)


@pytest.mark.parametrize(("untrained", "is_better"), [(0.001, False), (99.0, True), (None, None)])
def test_the_summary_and_the_report_tell_whether_the_run_is_better_than_the_untrained_model(
    untrained: float | None, is_better: bool | None, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(runs / "full")
    rows = [row for row in read_metrics(paths.metrics) if row["step"] > 0]
    first = [] if untrained is None else [{"step": 0, "val_loss": untrained, "val_tokens": 9}]
    old = read_json(Summary, paths.summary)
    assert old is not None and old.is_better_than_untrained is None
    summary = with_rows(old, [*first, *rows], saved_step=0)
    assert summary.is_better_than_untrained is is_better
    paths.summary.write_text(to_json(summary), encoding="utf-8")
    page = page_of(capsys, paths.root).read_text(encoding="utf-8")
    assert ("No checkpoint is better than the untrained model" in page) == (is_better is False)


@pytest.mark.parametrize(
    ("run", "first", "others"),
    [
        ("labels", "accuracy", ("macro_f1",)),
        ("pairs", "preference_accuracy", ()),
        ("full", "perplexity", ()),
    ],
)
def test_the_summary_and_the_result_have_the_tasks_metric_first(
    run: str, first: str, others: tuple[str, ...], runs: Path
) -> None:
    paths = RunPaths(runs / run)
    summary = summary_of(paths)
    assert list(summary.val_metrics) == [first, *others]
    lines = result_lines(summary, checkpoint=paths.newest_checkpoint(), width=80)
    names = [line.split("  ")[0] for line in lines]
    assert names.index(first.replace("_", " ")) == names.index("tokens") + 1
    assert names.index("validation loss") < names.index("loss")
    (best,) = [line for line in lines if line.startswith("best checkpoint")]
    assert best.endswith(f"{summary.best_checkpoint}, by validation loss")
    assert max(len(line) for line in lines if "/" not in line) <= 80
    last = [row for row in read_metrics(paths.metrics) if "val_loss" in row][-1]
    assert summary.final_val_step == last["step"]
    (shown,) = [line for line in lines if line.startswith("validation loss")]
    assert f" {last['val_loss']:.4f} at step {last['step']} (best " in shown


def test_a_classifiers_result_ends_with_its_confusion_matrix(runs: Path) -> None:
    paths = RunPaths(runs / "labels")
    last = [row for row in read_metrics(paths.metrics) if "val_loss" in row][-1]
    summary = summary_of(paths)
    counts = [list(row) for row in summary.val_confusion]
    assert counts == last["val_confusion"] and sum(map(sum, counts)) == last["val_texts"]
    lines = result_lines(summary, checkpoint=paths.newest_checkpoint(), width=80)
    table = lines[lines.index("confusion matrix (a column per predicted label)") + 1 :]
    config = json.loads((paths.checkpoints / "step_00000006" / "config.json").read_text())
    labels = list(config["id2label"].values())
    assert table[0].split() == ["true", "label", *labels]
    assert [line.split()[1:] for line in table[1:]] == [list(map(str, row)) for row in counts]
    many = replace(summary, val_confusion=((0,) * 40,) * 40)
    narrow = result_lines(many, checkpoint=None, width=80)
    assert max(map(len, narrow)) <= 80 and "summary.json" in narrow[-1]


def test_status_shows_the_accuracy_of_an_old_run(runs: Path) -> None:
    view = view_run(RunPaths(runs / "labels"), now_unix=2e9)
    lines = status_lines(view, width=80)
    assert "accuracy         83.33%" in lines and "macro F1         0.8333" in lines
    assert f"validation loss  {view.val_loss:.4f} at step 6" in lines


def test_the_log_line_of_an_evaluation_has_the_perplexity_beside_the_loss() -> None:
    line = EvalMetrics(step=1, val_loss=2.0, val_tokens=1000).describe()
    assert line == "validation loss 2.0000, perplexity 7.39 over 1,000 tokens"
    huge = EvalMetrics(step=1, val_loss=1e4, val_tokens=1000).describe()
    assert huge == "validation loss 10000.0000 over 1,000 tokens"


def test_damaged_metrics_are_left_out() -> None:
    row = {"step": 1, "val_loss": 0.5, "val_tokens": 3}
    assert val_metrics({**row, "val_accuracy": "1", "val_f1": 0.5}) == {"macro_f1": 0.5}
    assert val_metrics({**row, "val_accuracy": float("nan"), "val_margin": 1.0}) == {}
    for damaged in ([[1]], [[1, 2]], [[1, -1], [0, 0]], [[1, True], [0, 0]], [1, 2], "x", None):
        found = confusion_of({**row, "val_confusion": damaged})
        assert found == (((1,),) if damaged == [[1]] else ())


def page_of(capsys: pytest.CaptureFixture[str], *runs: Path) -> Path:
    """Write the page of these runs next to them."""
    out = runs[0].parent / "page.html"
    assert main([*map(str, runs), "--out", str(out)]) == 0
    capsys.readouterr()
    return out


@pytest.mark.processes
@pytest.mark.parametrize(
    ("run", "tiles", "change"),
    [
        ("labels", ["accuracy", "macro F1", "validation loss"], "The accuracy rose from 66.7 %"),
        ("pairs", ["preference accuracy", "validation loss"], "The preference accuracy rose from"),
        ("full", ["perplexity", "validation loss"], "The validation loss fell from"),
    ],
)
def test_the_report_headlines_the_tasks_metric(
    run: str,
    tiles: list[str],
    change: str,
    runs: Path,
    browser: Browser,
    capsys: pytest.CaptureFixture[str],
) -> None:
    browser.open(page_of(capsys, runs / run))
    names = browser.run(
        "return [...document.querySelectorAll('.tiles dt')].map(each => each.textContent)"
    )
    assert names[: len(tiles)] == tiles
    assert change in browser.run("return document.querySelector('.verdict').textContent")
    check_figures(browser, runs)
    check_curves(browser, runs)
    charts = browser.run(
        "return [...document.querySelectorAll('[data-chart]')].map(each => each.dataset.chart)"
    )
    assert charts[0] == ("loss" if run == "full" else "accuracy")
    assert ("Confusion matrix" in browser.run("return document.body.textContent")) == (
        run == "labels"
    )


def test_a_best_loss_is_marked_only_among_equal_tasks_and_data(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def table(*names: str) -> list[str]:
        assert main(["--compare", *(str(runs / name) for name in names)]) == 0
        return capsys.readouterr().out.splitlines()

    def marked(lines: list[str], name: str) -> bool:
        return any(line.startswith(f"{name} ") and "*" in line for line in lines)

    equal, different = table("full", "kept"), table("full", "labels")
    note = "The tasks or the data differ, so no best loss is marked."
    assert marked(equal, "validation loss") and marked(equal, "perplexity") and note not in equal
    assert note in different and marked(different, "tokens/s")
    assert not any(
        marked(different, name)
        for name in ("validation loss", "best validation loss", "final loss")
    )
    page = page_of(capsys, runs / "full", runs / "labels").read_text(encoding="utf-8")
    assert note in page and note not in page_of(capsys, runs / "full", runs / "kept").read_text()
