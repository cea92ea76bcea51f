"""Finds faults in tool calls that a template would render without an error."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from payload.data.rows.conversation import Message

_ARGUMENTS = "tool arguments that are not valid JSON"
_UNKNOWN = "a call of a function that its tools lack"
_UNMATCHED = "a tool result whose tool_call_id matches no earlier call"


def tool_faults(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the kinds of faults in the calls, each described once."""
    return list(dict.fromkeys(_faults(messages, tools)))


def fault_lines(found: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each kind of fault. `found` has pairs of a fault and the row's location."""
    places: dict[str, list[str]] = {}
    for fault, where in found:
        places.setdefault(fault, []).append(where)
    return [fault_line(fault, len(each), each[0]) for fault, each in places.items()]


def fault_line(fault: str, count: int, where: str) -> str:
    """Return the line about a fault in `count` rows.

    `where` is the location of the first such row.
    """
    rows = "1 row has" if count == 1 else f"{count:,} rows have"
    return f"{rows} {fault}, for example {where}"


def _faults(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    ids = set()
    names = {each.get("function", each).get("name") for each in tools if _is_readable(each)}
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call["function"]
            ids.add(str(call.get("id")))
            if isinstance(function["arguments"], str) and not _is_json(function["arguments"]):
                yield _ARGUMENTS
            if names and function["name"] not in names:
                yield _UNKNOWN
        result_of = message.get("tool_call_id") if message["role"] == "tool" else None
        if result_of is not None and str(result_of) not in ids:
            yield _UNMATCHED


def _is_readable(tool: Mapping[str, Any]) -> bool:
    return isinstance(tool.get("function", tool), Mapping)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
