"""`report`: what it says about the browser and about a folder without runs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from payload.report.__main__ import main
from payload.run_record.run_files import Summary, write_json
from payload.run_record.suggested_run_commands import no_runs
from tests.support.run_folders import make_run


@pytest.mark.processes
def test_without_a_display_open_says_so_and_names_the_page_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    paths = make_run(tmp_path / "one")
    assert main(["one", "--runs-dir", str(tmp_path), "--open"]) == 0
    said = capsys.readouterr()
    assert said.out.strip() == str(paths.report)
    assert said.err.startswith("note: the page is not shown: there is no display.")
    assert "report.html" not in said.err


@pytest.mark.processes
def test_the_browser_that_the_user_has_set_shows_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = tmp_path / "shown"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {shown}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(browser))
    paths = make_run(tmp_path / "one")
    assert main(["one", "--runs-dir", str(tmp_path), "--open"]) == 0
    assert shown.read_text().strip() == paths.report.as_uri()
    assert capsys.readouterr().err == ""


def test_latest_without_a_run_says_how_to_start_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--runs-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {no_runs(tmp_path)}\n"


@pytest.mark.processes
def test_the_time_of_a_resumed_run_is_said_to_leave_out_its_pauses(tmp_path: Path) -> None:
    summary = Summary(
        run_id="one",
        status="finished",
        exit_class="ok",
        world_size=1,
        nodes=1,
        steps=24,
        wall_s=195.0,
    )
    for resumes in (0, 1):
        paths = make_run(tmp_path / f"run{resumes}", status="finished")
        write_json(paths.summary, replace(summary, run_id=paths.run_id, resumes=resumes))
        assert main([str(paths.root)]) == 0
        text = re.sub(r"<[^>]*>", "", paths.report.read_text(encoding="utf-8"))
        assert "Finished 24 steps in 3 min 15 s" in text
        assert ("not counting the pauses" in text) is bool(resumes)
