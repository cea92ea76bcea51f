"""Records a command as an animated SVG of a terminal with 80 columns.

    python -m benchmarks.record_run --out docs/images/make_run.svg -- make run
    python -m benchmarks.record_run --out docs/images/make_run.svg --replay make_run.jsonl

The first form runs the command and also writes its lines with their times next to the SVG, as
`.jsonl`. The second form draws such a file again. A program without animations shows the end of the
output.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import argument_parser

_COLUMNS, _ROWS = 80, 47
_CHAR_PX, _LINE_PX, _PAD_PX, _BAR_PX = 8.4, 19, 14, 28
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.2
"""Shortest and longest pause between two lines in the recording; other waits are set to the nearer
limit."""
_END_S = 8.0


class Line(NamedTuple):
    """A line of output, and the seconds since the start."""

    at_s: float
    text: str


def record(command: Sequence[str]) -> list[Line]:
    """Run the command and return its lines, which are also printed. Raises CalledProcessError."""
    env = {**os.environ, "COLUMNS": str(_COLUMNS), "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for text in process.stdout:
        lines.append(Line(round(time.monotonic() - began, 2), _without_paths(text.rstrip())))
        print(text, end="", flush=True)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command)
    return lines


def _without_paths(text: str) -> str:
    """Return the text with paths as a reader of the page would see them."""
    return text.replace(f"{Path.cwd()}/", "").replace(str(Path.home()), "~")


def drawn(lines: Iterable[Line], *, command: str) -> str:
    """Return the SVG. Its clock shows the real time; waits are shortened."""
    rows = [Line(0.0, f"$ {command}"), *_wrapped(lines)]
    shown_s, clock_s = [0.0], 0.0
    for before, row in pairwise(rows):
        clock_s += min(max(row.at_s - before.at_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
        shown_s.append(clock_s)
    total_s = clock_s + _END_S
    width = round(_COLUMNS * _CHAR_PX + 2 * _PAD_PX)
    height = _ROWS * _LINE_PX + 2 * _PAD_PX + _BAR_PX
    texts = "\n".join(
        f'<text y="{(number + 1) * _LINE_PX - 5}"{_style(row.text)}>{escape(row.text)}</text>'
        for number, row in enumerate(rows)
    )
    last = -max(0, len(rows) - _ROWS) * _LINE_PX
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="Recording of {escape(command)}">'
        "\n<style>text{font:14px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        "fill:#d8dee4;white-space:pre}.c{fill:#7ee787}.d{fill:#9aa4ae}.h{fill:#79c0ff}</style>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="#161b22" stroke="#6e7681"/>\n'
        f'<text class="d" x="{_PAD_PX}" y="20">{escape(command)}: {_clock(rows[-1].at_s)} min'
        "</text>\n"
        f'<svg x="{_PAD_PX}" y="{_BAR_PX + _PAD_PX}" width="{width - 2 * _PAD_PX}" '
        f'height="{_ROWS * _LINE_PX}"><g transform="translate(0 {last})">\n{texts}\n'
        f"{_scroll(shown_s, total_s=total_s)}</g>\n"
        f"{_curtain(shown_s, total_s=total_s, width=width)}</svg></svg>\n"
    )


def _wrapped(lines: Iterable[Line]) -> list[Line]:
    """Return the lines as a terminal of 80 columns shows them."""
    return [
        Line(line.at_s, line.text[start : start + _COLUMNS])
        for line in lines
        for start in range(0, max(1, len(line.text)), _COLUMNS)
    ]


def _style(text: str) -> str:
    if text.startswith("$ "):
        return ' class="c"'
    if text.startswith(("step ", "def ", "Next:")):
        return ' class="h"'
    return ' class="d"' if text.endswith(" ...") else ""


def _scroll(shown_s: Sequence[float], *, total_s: float) -> str:
    """Return the animation that moves the text up when a line appears below the last row."""
    offsets = [-max(0, number + 1 - _ROWS) * _LINE_PX for number in range(len(shown_s))]
    return _animation(
        "animateTransform",
        'attributeName="transform" type="translate"',
        [f"0 {each}" for each in offsets],
        shown_s,
        total_s=total_s,
    )


def _curtain(shown_s: Sequence[float], *, total_s: float, width: int) -> str:
    """Return a rectangle that hides the lines that have not appeared yet."""
    tops = [min(number + 1, _ROWS) * _LINE_PX for number in range(len(shown_s))]
    moved = _animation(
        "animate", 'attributeName="y"', list(map(str, tops)), shown_s, total_s=total_s
    )
    return (
        f'<rect y="{tops[-1]}" width="{width}" height="{_ROWS * _LINE_PX}" fill="#161b22">'
        f"{moved}</rect>"
    )


def _animation(
    element: str, target: str, values: Sequence[str], at_s: Sequence[float], *, total_s: float
) -> str:
    """Return a SMIL animation that sets each value at its time; repeated values are left out."""
    kept = [i for i in range(len(values)) if not i or values[i] != values[i - 1]]
    times = ";".join(f"{at_s[i] / total_s:.4f}" for i in kept)
    listed = ";".join(values[i] for i in kept)
    return (
        f'<{element} {target} calcMode="discrete" dur="{total_s:.1f}s" '
        f'repeatCount="indefinite" keyTimes="{times}" values="{listed}"/>'
    )


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def main(argv: Sequence[str]) -> int:
    """Record or replay, and write the SVG."""
    parser = argument_parser("record_run", __doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="SVG to write")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="draw these lines")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="command to run, after --")
    args = parser.parse_args(argv)
    words = [each for each in args.command if each != "--"] or ["make", "run"]
    if args.replay is not None:
        read = args.replay.read_text(encoding="utf-8").splitlines()
        lines = [Line(*json.loads(each)) for each in read]
    else:
        lines = record(words)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(each) + "\n" for each in lines)
        args.out.with_suffix(".jsonl").write_text(text, encoding="utf-8")
    args.out.write_text(drawn(lines, command=" ".join(words)), encoding="utf-8")
    print(f"{args.out}: {args.out.stat().st_size / 1000:.0f} kB", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
