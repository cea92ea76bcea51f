"""The options --columns and --ignore-key: other names for columns, and keys that are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from payload.core.errors import UsageError
from payload.core.printable_text import shown
from payload.data.rows.columns import (
    NO_CONTENT_KEYS,
    chat_columns,
    is_absent,
    preference_columns,
)

_ROLES = ("system", "user", "assistant")
_JOIN = "\n\n"


def parse_columns(text: str) -> tuple[tuple[str, str], ...]:
    """Parse a list such as `question=user,answer=assistant` into pairs. Raises UsageError."""
    known = dict.fromkeys((*_ROLES, *chat_columns(), *preference_columns(), "text"))
    found = []
    for entry in text.split(","):
        column, equals, target = (part.strip() for part in entry.rpartition("="))
        if not equals or not column:
            raise UsageError(
                f"--columns {shown(entry)}: not COLUMN=NAME. For example: "
                "--columns question=user,answer=assistant"
            )
        if target not in known:
            raise UsageError(
                f"--columns {shown(entry)}: unknown name {shown(target)}. Use one of: "
                f"{', '.join(known)}."
            )
        found.append((column, target))
    return tuple(found)


def _column_of(row: Mapping[str, Any], name: str) -> str | None:
    """Return the row's column of this name. Ignore case if exactly one column then matches."""
    if name in row:
        return name
    found = [column for column in row if column.casefold() == name.casefold()]
    return found[0] if len(found) == 1 else None


def _is_message(value: Mapping[str, Any]) -> bool:
    return "role" in value or "from" in value


class NamedColumns:
    """Renames the columns of rows, and removes ignored keys from rows and their messages."""

    def __init__(self, columns: Sequence[tuple[str, str]], ignored: Sequence[str]) -> None:
        self._columns = tuple(columns)
        self._ignored = frozenset(ignored)
        self._missing = {name for name, _ in columns}
        self._removed: Counter[str] = Counter()
        self._first: list[str] = []

    def identity(self) -> list[Any]:
        """Return JSON that changes when the options change; empty without options."""
        named = [["columns", list(map(list, self._columns))]] if self._columns else []
        return [*named, *([["ignored", sorted(self._ignored)]] if self._ignored else [])]

    def state(self) -> dict[str, Any]:
        """Return JSON for `restore`: the columns and ignored keys that were found in the rows so
        far."""
        return {
            "missing": sorted(self._missing),
            "removed": dict(self._removed),
            "first": list(self._first),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue after the rows of an interrupted run."""
        self._missing = set(state["missing"])
        self._removed, self._first = Counter(state["removed"]), list(state["first"])

    def convert(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the row with the new names, without ignored keys.

        The texts of several columns with the same new name are joined by empty lines.
        """
        if not self._columns and not self._ignored:
            return row
        if not self._first:
            self._first = list(row)
        if self._ignored:
            removed: set[str] = set()
            row = {key: self._without(value, removed) for key, value in row.items()}
            removed |= self._ignored & row.keys()
            row = {key: value for key, value in row.items() if key not in self._ignored}
            self._removed.update(removed)
        found = {name: _column_of(row, name) for name, _ in self._columns}
        renamed = {key: value for key, value in row.items() if key not in found.values()}
        for name, target in self._columns:
            column = found[name]
            if column is None:
                continue
            self._missing.discard(name)
            value, other = row[column], renamed.get(target)
            if isinstance(value, str) and isinstance(other, str):
                value = _JOIN.join(filter(None, (other, value)))
            elif not is_absent(other):
                if not is_absent(value):
                    raise UsageError(
                        f"--columns {shown(column)}={target}: the row has {target} = "
                        f"{shown(other)}, too, and only texts can be joined. Leave one of them out "
                        "with --ignore-key."
                    )
                value = other
            renamed[target] = value
        return renamed

    def _without(self, value: Any, removed: set[str]) -> Any:
        """Return a list of messages without the keys in `removed`, and any other value unchanged.

        The keys are also removed from the content parts and the tool calls of each message.
        """
        if not isinstance(value, list):
            return value
        found: list[Any] = []
        for each in value:
            if not isinstance(each, Mapping):
                found.append(each)
                continue
            # The name of a function belongs to a call, and to the list of functions.
            ignored = self._ignored if _is_message(each) else self._ignored - {"name"}
            removed |= ignored & each.keys()
            kept = {
                key: self._without(inner, removed)
                for key, inner in each.items()
                if key not in ignored
            }
            if "role" in kept and ignored.intersection(each.keys(), NO_CONTENT_KEYS):
                # The message may have had only a call or a thought.
                kept.setdefault("content", "")
            found.append(kept)
        return found

    def require_found(self) -> None:
        """Raise UsageError for a renamed column that no row has."""
        if self._missing and self._first:
            columns = ", ".join(map(shown, self._first[:8]))
            raise UsageError(
                f"--columns: no row has the column {shown(min(self._missing))}; the columns are "
                f"{columns}."
            )

    def notes(self) -> list[str]:
        """Return notes about the ignored keys."""
        if not self._ignored:
            return []
        counts = [f"{shown(name)} ({self._removed[name]:,} rows)" for name in sorted(self._ignored)]
        return [f"keys ignored by --ignore-key: {', '.join(counts)}"]
