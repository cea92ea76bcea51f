"""Renders a table that compares several runs in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from payload.core.one_line import printable_line
from payload.report import compared_values
from payload.report.number_formats import plain
from payload.report.source import Run

_BEST = " *"


def comparison(runs: Sequence[Run]) -> str:
    """Return a table of results, with a star at the best value of a row, and of settings."""
    lines = [["", *(run.run_id for run in runs)]]
    for row, values, best in compared_values.compared(runs):
        cells = ["-" if each.value is None else row.form(each.value) for each in values]
        lines.append([row.name, *(f"{c}{_BEST}" if i in best else c for i, c in enumerate(cells))])
    if not compared_values.have_equal_tasks(runs):
        lines.append([])
        lines.append(["The tasks or the data differ, so no best loss is marked."])
    differing = compared_values.different(runs)
    if differing:
        lines.append([])
        lines.append(["settings that differ"])
        lines += [[each.name, *map(plain, each.values)] for each in differing]
    return _aligned([[printable_line(cell) for cell in line] for line in lines])


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    columns = max(map(len, lines))
    whole = [line for line in lines if len(line) == columns]
    widths = [max(len(line[column]) for line in whole) for column in range(columns)]
    # The star follows the number, so that the numbers stay aligned.
    return "\n".join(
        "  ".join(
            [f"{cell:<{width}}" for cell, width in zip(line[:1], widths, strict=False)]
            + [
                f"{cell:>{width - len(_BEST)}}{'' if cell.endswith(_BEST) else '  '}"
                if not cell.endswith(_BEST)
                else f"{cell:>{width}}"
                for cell, width in zip(line[1:], widths[1:], strict=False)
            ]
        ).rstrip()
        for line in lines
    )
