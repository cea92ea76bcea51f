"""The page in a real browser: every figure is its file's, and nothing is asked of the network."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from payload.report.__main__ import main
from payload.run_record.profile_table import PROFILE_TABLE, read_table
from payload.run_record.run_files import RunPaths
from tests.report.figures import check_curves, check_figures
from tests.report.real_runs import STEPS
from tests.report.synthetic import HOSTILE, make_hostile, make_long
from tests.support.browser import Browser

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
WIDTHS = (390, 820, 1280)


def write(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Path:
    """Write a page with the command; return its path."""
    assert main([str(word) for word in words]) == 0
    return Path(capsys.readouterr().out.strip())


def require_quiet(browser: Browser, page: Path) -> None:
    """Fail where the page logged anything, or asked for anything but itself."""
    assert browser.console() == []
    asked = [url for url in browser.requests() if not url.startswith("data:")]
    assert asked == [page.resolve().as_uri()]


@pytest.mark.parametrize(
    ("run", "sentence", "status"),
    [
        ("resumed", f"Finished {STEPS} steps in ", "finished"),
        ("stopped", "Stopped after ", "stopped"),
        ("failed", "Failed after ", "failed"),
    ],
)
def test_a_run_that_ended_in_any_way_has_a_page_whose_every_figure_is_its_file_s(
    run: str,
    sentence: str,
    status: str,
    runs_and_failed: Path,
    browser: Browser,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = runs_and_failed
    page = write(capsys, runs / run)
    assert page == RunPaths(runs / run).report
    browser.open(page)
    browser.resize(1280, 900)
    shown = check_figures(browser, runs)
    check_curves(browser, runs)
    require_quiet(browser, page)
    verdict = browser.run("return document.querySelector('.verdict').textContent")
    assert verdict.startswith(sentence)
    assert browser.run("return document.querySelector('.status').textContent") == status
    summary = json.loads(RunPaths(runs / run).summary.read_text(encoding="utf-8"))
    wanted = {f"{run} summary.json#{key}" for key in ("steps", "tokens", "final_loss", "cost_usd")}
    assert wanted <= set(shown) and len(shown) > 40
    assert (summary["error"] or "").rstrip(".") in verdict
    # The one that failed did so before its first checkpoint.
    assert ("It can be continued from its last checkpoint" in verdict) == (run == "stopped")


def test_a_run_that_lost_a_rank_shows_when_and_why(
    runs: Path, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    browser.open(write(capsys, runs / "resumed"))
    events = browser.run(
        "return [...document.querySelectorAll('.event')].map(each => each.textContent)"
    )
    assert events == ["started", "stopped", "continued", "failed", "started again", "finished"]
    words = browser.run("return document.querySelector('.verdict').textContent")
    assert "After a failure it was started again 1 time. It was resumed 1 time." in words
    assert browser.run("return document.querySelectorAll('[data-chart=loss] .mark').length") == 1
    assert browser.run("return document.querySelectorAll('[data-heat] rect').length") > 100


def test_several_runs_are_drawn_over_each_other_and_compared(
    runs: Path, browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = write(capsys, "resumed", "stopped", "--runs-dir", runs, "--out", tmp_path)
    assert page == tmp_path / "report.html"
    browser.open(page)
    browser.resize(1280, 900)
    check_figures(browser, runs)
    check_curves(browser, runs)
    require_quiet(browser, page)
    keys = browser.run(
        "return [...document.querySelectorAll('[data-chart=loss] .keys span')]"
        ".map(each => each.textContent)"
    )
    assert keys == [
        f"{run}, {what}"
        for run in ("resumed", "stopped")
        for what in ("training, smoothed", "validation")
    ]


def test_a_profiled_step_has_a_trace_and_its_operators_on_the_page(
    runs: Path, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    browser.open(write(capsys, runs / "resumed"))
    text = browser.run("return document.querySelector('section.profile').textContent")
    assert "Step 5 on rank 0" in text
    paths = RunPaths(runs / "resumed")
    with gzip.open(paths.profile / "step_00000005_rank_0000.json.gz") as file:
        events = json.load(file)["traceEvents"]
    table = read_table(paths.profile / PROFILE_TABLE)
    assert table is not None and table.operators[0].name in text
    named = {event["name"] for event in events if "name" in event}
    assert {each.name for each in table.operators} <= named
    log = paths.rank_log(0).read_text(encoding="utf-8")
    assert "profile   step 5 on rank 0" in log and table.operators[0].name[:40] in log


def test_curves_zoom_and_have_a_log_scale(
    runs: Path, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    page = write(capsys, runs / "resumed")
    browser.open(page)
    browser.resize(1280, 900)
    whole = axis_labels(browser, "lr")
    assert whole[-1] == str(STEPS)
    browser.drag("[data-chart=loss] svg", start=0.5, end=0.75)
    near = axis_labels(browser, "lr")
    assert near != whole and STEPS / 4 < float(near[-1]) < STEPS  # all curves follow
    browser.run("document.querySelector('[data-reset]').click()")
    assert axis_labels(browser, "lr") == whole
    browser.run("document.querySelector('[data-chart=grad_norm] button').click()")
    assert (
        browser.run("return document.querySelector('[data-chart=grad_norm] button').ariaPressed")
        == "true"
    )
    browser.run("document.querySelector('[data-x=tokens]').click()")
    assert axis_labels(browser, "lr")[-1].endswith("k")
    require_quiet(browser, page)


def axis_labels(browser: Browser, chart: str) -> Sequence[str]:
    """Return the labels of a chart's horizontal axis."""
    found = browser.run(
        f"return [...document.querySelectorAll('[data-chart={chart}] text[text-anchor=middle]')]"
        ".map(each => each.textContent)"
    )
    return list(found)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_every_width_in_light_and_dark(
    width: int,
    dark: bool,
    runs: Path,
    browser: Browser,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    browser.open(write(capsys, runs / "resumed"))
    browser.resize(width, 900, dark=dark)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    hidden = browser.run(
        "return [...document.querySelectorAll('svg text')].filter(each => {"
        "const box = each.getBoundingClientRect();"
        "const of = each.ownerSVGElement.getBoundingClientRect();"
        "return box.left < of.left - 1 || box.right > of.right + 1;}).map(each => each.textContent)"
    )
    assert hidden == []
    background = browser.run("return getComputedStyle(document.documentElement).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is not dark
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_prints(runs: Path, browser: Browser, capsys: pytest.CaptureFixture[str]) -> None:
    browser.open(write(capsys, runs / "resumed"))
    pdf = browser.print_pdf()
    assert pdf.startswith(b"%PDF-") and len(pdf) > 20_000


def test_hostile_text_in_every_file_is_text_on_the_page(
    runs: Path, browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_hostile(runs / "resumed", tmp_path / "runs" / "hostile")
    page = write(capsys, tmp_path / "runs" / "hostile")
    browser.open(page)
    browser.resize(1280, 900)
    require_quiet(browser, page)
    assert browser.run("return typeof window.hacked") == "undefined"
    counts = browser.run(
        "return ['script', 'img', 'iframe', 'a'].map("
        "each => document.querySelectorAll(each).length)"
    )
    assert counts == [2, 0, 0, 0]
    text = browser.run("return document.body.textContent")
    assert all(each in text for each in HOSTILE)


def test_a_run_of_100_000_steps_has_a_small_page_with_few_elements(
    runs: Path, browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_long(runs / "resumed", tmp_path / "runs" / "long", steps=100_000, ranks=8)
    page = write(capsys, tmp_path / "runs" / "long")
    assert page.stat().st_size < 3_000_000
    browser.open(page)
    # What a browser lays out and draws, in place of its time: 2,955 elements and 147,141 letters.
    elements, letters = browser.run(
        "const paths = [...document.querySelectorAll('path')];"
        "const drawn = paths.map(each => each.getAttribute('d').length);"
        "return [document.querySelectorAll('*').length, drawn.reduce((a, b) => a + b)];"
    )
    assert 0 < elements < 6_000 and 0 < letters < 300_000
    check_curves(browser, tmp_path / "runs")


def test_damaged_files_leave_a_page_without_them(
    runs: Path, browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "runs" / "damaged"
    shutil.copytree(runs / "stopped", damaged)
    for name in ("summary.json", "state.json", "inventory.json", "run.toml"):
        (damaged / name).write_bytes(b"\xff{" * 30)
    page = write(capsys, damaged)
    browser.open(page)
    require_quiet(browser, page)
    assert "How it ended is not known" in browser.run("return document.body.textContent")


def test_two_runs_are_a_table_in_the_terminal(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_name = table_of(("resumed", "stopped"), runs, capsys)
    assert by_name["status"] == ["finished", "stopped"]
    assert by_name["steps"][0] == str(STEPS)


def test_settings_that_differ_are_in_the_table(
    runs_and_failed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_name = table_of(("resumed", "failed"), runs_and_failed, capsys)
    assert by_name["status"] == ["finished", "failed"]
    assert by_name["optimizer.lr"] == ["0.001", "1e+30"]


def table_of(
    names: Sequence[str], runs: Path, capsys: pytest.CaptureFixture[str]
) -> Mapping[str, Sequence[str]]:
    """Compare runs in the terminal; return the row of each name."""
    assert main(["--compare", *names, "--runs-dir", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == list(names)
    return {line.split("  ")[0]: line.split()[1:] for line in lines if line}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nosuch",), "'nosuch' is no run"),
        (("../x",), "'../x' is no run"),
        (("--compare", "resumed"), "name two or more"),
        (("resumed", "--out", "/proc/none/x.html"), "cannot be written"),
    ],
)
def test_what_cannot_be_reported_is_one_line(
    words: Sequence[str], message: str, runs: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "payload.report", *words, "--runs-dir", str(runs)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (2, 10) and message in done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ")
