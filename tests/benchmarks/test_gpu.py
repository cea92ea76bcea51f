"""`benchmarks.gpu`: a line that fails says why and leaves the others their turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu


def _refused(runs: gpu.Runs) -> gpu.Line:
    runs.run("refused", train__steps=0)
    raise AssertionError("a run of no steps was taken")


def _fine(_runs: gpu.Runs) -> gpu.Line:
    return gpu.Line(name="fine", wanted="1", found="1", passed=True)


def test_a_line_that_fails_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "LINES", {"refused": _refused, "fine": _fine})
    page = tmp_path / "page.md"
    gpu.main(["--rehearse", "--page", str(page)])
    refused, fine = json.loads(capsys.readouterr().out)["lines"]
    assert (refused["name"], refused["passed"], fine["passed"]) == ("refused", False, True)
    assert "ended with 10" in refused["found"] and "train.steps" in refused["found"]
    assert "| refused |" in page.read_text() and "| fine |" in page.read_text()
