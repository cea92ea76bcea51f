"""The copy of uPlot is its npm package's, and the page carries its licence."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

from payload.report.page import render
from payload.report.source import Run
from payload.run_record.run_files import RunPaths

UPLOT = Path(__file__).parents[2] / "payload/report/uplot"


def test_the_copy_of_uplot_is_unchanged() -> None:
    record = tomllib.loads((UPLOT / "package.toml").read_text(encoding="utf-8"))
    files = {path.name: path.read_bytes() for path in UPLOT.iterdir()}
    del files["package.toml"]
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    assert hashes == record["sha256"]
    assert f"(v{record['version']})" in files["uPlot.iife.min.js"].decode()


def test_a_page_has_uplot_and_its_licence(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "empty")
    paths.root.mkdir()
    page = render([Run(paths)])
    for path in UPLOT.iterdir():
        if path.name != "package.toml":
            assert path.read_text(encoding="utf-8") in page
