"""Renders tables for the terminal with rich, without borders, with two spaces between columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.measure import Measurement
from rich.table import Table

from payload.core.one_line import printable_line
from payload.orchestrate.terminal.console import text_console

_ANY_WIDTH = 100_000


def table(*names: str, wrapped: Collection[str] = (), right: Collection[str] = ()) -> Table:
    """Return an empty table with these columns; without names it has no header.

    The columns in `wrapped` may take several lines; columns in `right` are right-aligned.
    """
    made = Table(box=None, pad_edge=False, show_header=bool(names))
    for name in names:
        made.add_column(
            name,
            no_wrap=name not in wrapped,
            overflow="fold" if name in wrapped else "ellipsis",
            justify="right" if name in right else "left",
        )
    return made


def table_lines(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int | None = None,
    optional: Sequence[str] = (),
) -> list[str]:
    """Return a table's lines; if the table is wider than `width`, return an indented block per row.

    Columns in `optional` are left out of a table that is too wide, starting with the first.
    """
    for count in range(len(optional) + bool(optional)):
        kept = [place for place, name in enumerate(names) if name not in optional[:count]]
        lines = table_lines([names[at] for at in kept], [[row[at] for at in kept] for row in rows])
        if width is None or max(map(len, lines)) <= width:
            return lines
    whole = table(*names)
    for row in rows:
        whole.add_row(*row)
    console = text_console(stderr=False)
    options = console.options.update(width=_ANY_WIDTH)
    if width is None or Measurement.get(console, options, whole).maximum <= width:
        rendered = console.render_lines(whole, options, pad=False)
        return ["".join(part.text for part in line).rstrip() for line in rendered]
    lines = []
    for first, *rest in rows:
        lines.append(f"{names[0]} {first}")
        cells = [f"{name} {cell}" for name, cell in zip(names[1:], rest, strict=True)]
        lines += _filled(cells, width=width)
    return lines


def _filled(cells: Sequence[str], *, width: int) -> list[str]:
    """Return the cells in as few indented lines as possible."""
    lines = ["  " + cells[0]]
    for cell in cells[1:]:
        if len(lines[-1]) + 2 + len(cell) <= width:
            lines[-1] += "  " + cell
        else:
            lines.append("  " + cell)
    return lines


def labelled_lines(rows: Sequence[tuple[str, str]], *, width: int) -> list[str]:
    """Return lines of names and values; a value that does not fit is placed below its name.

    A value is one line: line breaks in a record of another machine could forge further lines.
    """
    column = max(len(name) for name, _ in rows)
    lines: list[str] = []
    for name, value in ((name, printable_line(value)) for name, value in rows):
        beside = f"{name:<{column}}  {value}"
        lines += [beside] if len(beside) <= width else [name, f"  {value}"]
    return lines
