"""The page in a real browser: every value matches its file, and nothing is fetched."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from payload.report.__main__ import main
from payload.report.series import MOST_ROWS
from payload.run_record.metrics_log import read_metrics
from payload.run_record.profile_table import PROFILE_TABLE, read_table
from payload.run_record.run_files import RunPaths
from tests.report.figures import check_curves, check_figures
from tests.report.real_runs import STEPS
from tests.report.synthetic import HOSTILE, make_hostile, make_long
from tests.support.browser import Browser
from tests.support.sampled import sampled

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
WIDTHS = (390, 820, 1280)


def write(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Path:
    """Write a page with the command; return its path."""
    assert main([str(argument) for argument in arguments]) == 0
    return Path(capsys.readouterr().out.strip())


def require_quiet(browser: Browser, page: Path) -> None:
    """Fail if the page logged anything or requested anything other than itself."""
    assert browser.console() == []
    requested = [url for url in browser.requests() if not url.startswith("data:")]
    assert requested == [page.resolve().as_uri()]


@pytest.mark.parametrize(
    ("run", "sentence", "status"),
    [
        ("resumed", f"Finished {STEPS} steps in ", "finished"),
        ("stopped", "Stopped after ", "stopped"),
        ("failed", "Failed after ", "failed"),
    ],
)
def test_every_value_on_the_page_of_a_run_matches_its_file(
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
    expected = {
        f"{run} summary.json#{key}" for key in ("steps", "tokens", "final_loss", "cost_usd")
    }
    assert expected <= set(shown) and len(shown) > 40
    assert (summary["error"] or "").rstrip(".") in verdict
    # The failed run failed before its first checkpoint.
    assert ("It can be resumed from its last checkpoint" in verdict) == (run == "stopped")


def test_a_run_that_lost_a_rank_shows_when_and_why(
    runs: Path, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    browser.open(write(capsys, runs / "resumed"))
    events = browser.run(
        "return [...document.querySelectorAll('.event')].map(each => each.textContent)"
    )
    assert events == ["started", "stopped", "resumed", "failed", "restarted", "finished"]
    verdict = browser.run("return document.querySelector('.verdict').textContent")
    assert "It was restarted 1 time after failures. It was resumed 1 time." in verdict
    assert browser.run("return document.querySelectorAll('[data-chart=loss] .mark').length") == 1
    assert heat_colours(browser) > 50


def heat_colours(browser: Browser) -> int:
    """Return the number of colours in the heat map."""
    return int(
        browser.run(
            "const canvas = document.querySelector('[data-heat] canvas');"
            "const context = canvas.getContext('2d');"
            "const {data} = context.getImageData(0, 0, canvas.width, canvas.height);"
            "return new Set(new Uint32Array(data.buffer)).size;"
        )
    )


def test_the_heat_map_shows_the_value_of_the_rank_and_the_step_under_the_pointer(
    runs: Path, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    browser.open(write(capsys, runs / "resumed"))
    browser.resize(1280, 900)
    data = json.loads(browser.run("return document.getElementById('data').textContent"))
    (heat,) = data["heat"]
    middle = next(column for column, last in enumerate(heat["last"]) if last >= (STEPS + 1) // 2)
    columns = range(middle - 1, middle + 2)
    for rank, down in enumerate((0.25, 0.75)):
        browser.hover("[data-heat] .u-over", across=0.5, down=down)
        shown = browser.run("return document.querySelector('[data-heat] .u-legend').textContent")
        near = {f"{100 * heat['values'][rank][column]:.3g}" for column in columns}
        found = re.search(r"rank (\d), steps? .*, ([\d.]+) % of the time", shown)
        assert found and int(found[1]) == rank and f"{float(found[2]):.3g}" in near, shown


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
        "return [...document.querySelectorAll('[data-chart=loss] .u-series.full .u-label')]"
        ".map(each => each.textContent)"
    )
    assert keys == [
        f"{run}, {what}"
        for run in ("resumed", "stopped")
        for what in ("training, smoothed", "validation")
    ]


def test_ten_runs_are_on_one_page(
    runs: Path, browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"run-{number}" for number in range(10)]
    for number, name in enumerate(names):
        make_long(runs / "resumed", tmp_path / "runs" / name, steps=40 + number, ranks=2)
    page = write(capsys, *names, "--runs-dir", tmp_path / "runs", "--out", tmp_path)
    browser.open(page)
    browser.resize(1280, 900)
    check_curves(browser, tmp_path / "runs")
    require_quiet(browser, page)
    markers = browser.run(
        "return [...document.querySelectorAll('[data-chart=lr] tr.full')].map(each => ["
        "each.querySelector('.u-label').textContent,"
        "each.querySelector('.u-marker').style.background])"
    )
    assert [name for name, _ in markers] == names
    assert len({colour for _, colour in markers}) == len(names)


def test_a_list_setting_is_shown_as_run_toml_has_it(
    runs: Path, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    browser.open(write(capsys, runs / "resumed"))
    shown = browser.run("return document.querySelector('section.settings').textContent")
    assert '["csv", "mlflow"]' in shown and '["auto"]' in shown


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


def test_curves_zoom_together_and_have_a_log_scale(
    runs: Path, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    page = write(capsys, runs / "resumed")
    browser.open(page)
    browser.resize(1280, 900)
    whole = shown_ranges(browser)
    assert whole == {f"step 0 to {STEPS}"}
    browser.drag("[data-chart=loss] .u-over", start=0.5, end=0.75)
    (near,) = shown_ranges(browser)  # all charts zoom together
    low, high = map(float, re.findall(r"[\d.]+", near))
    assert abs(low - STEPS * 0.5) < STEPS / 50 and abs(high - STEPS * 0.75) < STEPS / 50
    browser.run("document.querySelector('[data-reset]').click()")
    browser.settle()
    assert shown_ranges(browser) == whole
    browser.drag("[data-chart=lr] .u-over", start=0.2, end=0.4)
    assert shown_ranges(browser) != whole
    browser.double_click("[data-chart=mfu] .u-over")
    assert shown_ranges(browser) == whole
    linear = pixels(browser, "grad_norm")
    browser.run("document.querySelector('[data-chart=grad_norm] button').click()")
    browser.settle()
    assert (
        browser.run("return document.querySelector('[data-chart=grad_norm] button').ariaPressed")
        == "true"
    )
    assert pixels(browser, "grad_norm") != linear
    browser.run("document.querySelector('[data-x=tokens]').click()")
    browser.settle()
    assert all(re.fullmatch(r"tokens 0 to [\d.]+k", shown) for shown in shown_ranges(browser))
    require_quiet(browser, page)


def test_a_drag_that_begins_on_a_mark_zooms(
    runs: Path, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    browser.open(write(capsys, runs / "resumed"))
    browser.resize(1280, 900)
    whole = shown_ranges(browser)
    start = browser.run(
        "const [plot, mark] = ['.u-over', '.u-over .mark'].map(each =>"
        " document.querySelector(`[data-chart=lr] ${each}`).getBoundingClientRect());"
        "return (mark.left + mark.width / 2 - plot.left) / plot.width;"
    )
    browser.drag("[data-chart=lr] .u-over", start=start, end=0.9 if start < 0.5 else 0.1)
    assert shown_ranges(browser) != whole


def shown_ranges(browser: Browser) -> set[str]:
    """Return the ranges of the charts' horizontal axes, as assistive technology reads them."""
    found = browser.run(
        "return [...document.querySelectorAll('[data-chart] canvas')].map(each => each.ariaLabel)"
    )
    assert len(found) == 7
    return {label.rpartition(", ")[2] for label in found}


def pixels(browser: Browser, chart: str) -> str:
    """Return a chart as a data URL."""
    script = f"return document.querySelector('[data-chart={chart}] canvas').toDataURL()"
    return str(browser.run(script))


def test_the_pointer_over_one_chart_shows_the_values_of_its_step_in_all(
    runs: Path, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    browser.open(write(capsys, runs / "resumed"))
    browser.resize(1280, 900)
    assert set(legend_steps(browser)) == {str(STEPS)}  # without a pointer, the last step
    browser.hover("[data-chart=loss] .u-over", across=0.5)
    (step,) = set(legend_steps(browser))
    assert abs(int(step) - STEPS / 2) <= STEPS / 50
    rows = read_metrics(RunPaths(runs / "resumed").metrics)
    norms = {row["step"]: row["grad_norm"] for row in rows if "loss" in row}
    shown = browser.run(
        "return document.querySelector('[data-chart=grad_norm] .full .u-value').textContent"
    )
    assert abs(float(shown) - norms[int(step)]) < 1e-4


def legend_steps(browser: Browser) -> Sequence[str]:
    """Return the step in each chart's legend."""
    found = browser.run(
        "return [...document.querySelectorAll('[data-chart] .u-series:first-child .u-value')]"
        ".map(each => each.textContent)"
    )
    assert len(found) == 7
    return list(found)


def test_a_series_is_hidden_by_its_name_in_the_legend(
    runs: Path, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    browser.open(write(capsys, runs / "resumed"))
    browser.resize(1280, 900)
    before = pixels(browser, "loss")
    browser.run("document.querySelector('[data-chart=loss] .full th').click()")
    browser.settle()
    assert pixels(browser, "loss") != before


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
    assert cut_off_charts(browser) == []
    background = browser.run("return getComputedStyle(document.documentElement).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is not dark
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def cut_off_charts(browser: Browser) -> list[str]:
    """Return the charts with ink in the first or last column of pixels: a label is cut off."""
    return list(
        browser.run(
            "return [...document.querySelectorAll('[data-chart] canvas')].filter(canvas => {"
            "const context = canvas.getContext('2d');"
            "return [0, canvas.width - 1].some(column => context.getImageData("
            "column, 0, 1, canvas.height).data.some(value => value > 0));"
            "}).map(canvas => canvas.ariaLabel)"
        )
    )


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


@pytest.mark.parametrize("steps", sampled((20_000, 100_000), sample=(20_000,)))
def test_a_long_run_has_a_small_page_with_few_elements(
    runs: Path, browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    make_long(runs / "resumed", tmp_path / "runs" / "long", steps=steps, ranks=8)
    page = write(capsys, tmp_path / "runs" / "long")
    assert page.stat().st_size < (600_000 if steps == 20_000 else 3_000_000)
    browser.open(page)
    # The browser's work is bounded, not its time: elements and rows, whatever the number of steps.
    elements, charts = browser.run(
        "return [document.querySelectorAll('*').length, document.querySelectorAll('canvas').length]"
    )
    assert 0 < elements < 3_000 and charts == 8
    data = json.loads(browser.run("return document.getElementById('data').textContent"))
    assert len(data["runs"][0]["rows"]["step"]) <= MOST_ROWS
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
    assert "Its final status is unknown" in browser.run("return document.body.textContent")


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
    ("arguments", "message"),
    [
        (("nosuch",), "no run 'nosuch'"),
        (("../x",), "no run '../x'"),
        (("--compare", "resumed"), "Name two or more"),
        (("resumed", "--out", "/proc/none/x.html"), "cannot be written"),
    ],
)
def test_what_cannot_be_reported_is_one_line(
    arguments: Sequence[str], message: str, runs: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "payload.report", *arguments, "--runs-dir", str(runs)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (2, 10) and message in done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ")
