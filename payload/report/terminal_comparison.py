"""Renders a table that compares several runs in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from payload.core.one_line import printable_line
from payload.report import compared_values
from payload.report.number_formats import plain
from payload.report.source import Run

_BEST = " *"
_LEAST_CELL = 12
_AROUND_CELL = len("  ") + len(_BEST)


def comparison(runs: Sequence[Run], *, width: int | None = None) -> str:
    """Return a table of results and settings; a star marks the best result of a row.

    If the table is wider than `width`, long cells are shortened, and the runs are divided among
    several tables.
    """
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
    lines = [[printable_line(cell) for cell in line] for line in lines]
    if width is not None:
        return "\n\n".join(_aligned(each) for each in _fitted(lines, width=width))
    return _aligned(lines)


def _fitted(lines: Sequence[list[str]], *, width: int) -> Iterator[list[list[str]]]:
    """Yield tables that are at most `width` wide, with the same names in the first column."""
    name_width = max(len(line[0]) for line in lines if len(line) > 1)
    most = max(_LEAST_CELL, (width - name_width) // 2 - _AROUND_CELL)
    cells = [[_shortened(cell, most) for cell in line[1:]] for line in lines]
    cell_width = max((len(cell) for line in cells for cell in line), default=0) + _AROUND_CELL
    runs, together = len(cells[0]), max(1, (width - name_width) // cell_width)
    for first in range(0, runs, together):
        part = slice(first, first + together)
        yield [[*line[:1], *values[part]] for line, values in zip(lines, cells, strict=True)]


def _shortened(cell: str, most: int) -> str:
    """Return the cell with its middle left out, because paths and run ids differ at their ends."""
    if len(cell) <= most:
        return cell
    after = (most - 3) * 2 // 3
    return f"{cell[: most - 3 - after]}...{cell[-after:]}"


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
