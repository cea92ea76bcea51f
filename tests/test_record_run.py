"""The recording of a command as an SVG: every line, in order, within 80 columns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.record_run import Line, drawn, main

pytestmark = pytest.mark.processes
_TEXT = "{http://www.w3.org/2000/svg}text"


def _texts(svg: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(svg).iter(_TEXT)][1:]


def test_a_command_is_recorded_and_drawn_again_from_its_lines(tmp_path: Path) -> None:
    out = tmp_path / "images" / "run.svg"
    program = f"print('<a & b>', {str(Path.cwd() / 'runs')!r}); print('x' * 100)"

    assert main(["--out", str(out), "--", sys.executable, "-c", program]) == 0

    svg = out.read_text(encoding="utf-8")
    assert _texts(svg)[1:] == ["<a & b> runs", "x" * 80, "x" * 20]
    words = ["--replay", str(out.with_suffix(".jsonl")), "--", sys.executable, "-c", program]
    assert main(["--out", str(tmp_path / "again.svg"), *words]) == 0
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == svg


def test_the_animation_shows_lines_in_order_and_ends_with_the_last(tmp_path: Path) -> None:
    svg = drawn([Line(at_s=each, text=f"step {each}") for each in range(100)], command="make run")

    assert "make run: 1:39 min" in svg
    for times in re.findall(r'keyTimes="([^"]*)"', svg):
        found = [float(each) for each in times.split(";")]
        assert found == sorted(found) and found[0] == 0 and found[-1] < 1
    assert len(svg) < 60_000


def test_a_failed_command_writes_no_recording(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        main(["--out", str(tmp_path / "a.svg"), "--", sys.executable, "-c", "raise SystemExit(3)"])

    assert not list(tmp_path.iterdir())
