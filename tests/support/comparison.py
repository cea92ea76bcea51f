"""The tables of docs/comparison.md, made from docs/comparison.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

_DATA = Path(__file__).resolve().parents[2] / "docs" / "comparison.toml"


def comparison() -> str:
    """Return a section with a table for each compared tool."""
    return "\n\n".join(map(_section, read_tools()))


def read_tools() -> list[dict[str, Any]]:
    """Return the compared tools, each with its rows."""
    tools: list[dict[str, Any]] = tomllib.loads(_DATA.read_text(encoding="utf-8"))["tool"]
    return tools


def _section(tool: dict[str, Any]) -> str:
    name = tool["name"]
    rows = [
        f"| {row['subject']} | {row['theirs']} | {row['ours']} | {_link(row['source'])} |"
        for row in tool["row"]
    ]
    head = [f"| Subject | {name} | Tileforge | Source |", "|---|---|---|---|"]
    return "\n".join([f"## {name}", "", f"Choose {name} if {tool['choose']}", "", *head, *rows])


def _link(source: str) -> str:
    """Return a link to an address; a file of a repository stays as text."""
    if not source.startswith("https://"):
        return source
    *_, owner, name = source.partition("/pull/")[0].partition("/issues/")[0].split("/")
    number = source.rpartition("/")[2]
    label = f"{owner}/{name}" + (f"#{number}" if number.isdigit() else "")
    return f"[{label}]({source})"
