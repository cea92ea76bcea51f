"""Lines about the first rows of a file: rows that repeat earlier rows, and rare labels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from payload.core.printable_text import shown
from payload.core.tasks import TaskKind
from payload.data.rows.conversations import columns_of
from payload.data.rows.preferences import COLUMNS as PREFERENCE_COLUMNS
from payload.data.rows.rows import Row

_NAMES_SHOWN = 3


def repeated_row_lines(
    rows: Sequence[Row], task: TaskKind, *, text_column: str | None, label_column: str | None
) -> list[str]:
    """Return lines about rows that are equal in the trained columns, and about rare labels.

    A label is rare if only one row has this label.
    """
    repeated = len(rows) - len({_content(row, task, text_column) for row in rows})
    lines = []
    if repeated:
        verb = "repeats" if repeated == 1 else "repeat"
        lines.append(f"duplicates: {repeated:,} of {len(rows):,} rows {verb} an earlier row")
    counts = Counter(str(row.values.get(label_column)) for row in rows if label_column is not None)
    rare = [shown(label) for label, count in counts.items() if count == 1]
    if rare:
        more = f" and {len(rare) - _NAMES_SHOWN} more" if len(rare) > _NAMES_SHOWN else ""
        lines.append(f"labels that only one row has: {', '.join(rare[:_NAMES_SHOWN])}{more}")
    return lines


def _content(row: Row, task: TaskKind, text_column: str | None) -> str:
    """Return the row's trained columns as text."""
    if task in ("text", "classify"):
        return str(row.values.get(text_column or ""))
    names = columns_of(row.values) if task == "chat" else PREFERENCE_COLUMNS
    content = {name: row.values.get(name) for name in names}
    return json.dumps(content, default=str)
