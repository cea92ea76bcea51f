"""CONTRACT: reads and writes profile/operators.json: operator times of a profiled step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from payload.core.errors import ConfigError
from payload.core.files import write_whole
from payload.core.one_line import shortened
from payload.core.regular_files import read_bytes
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build, check_schema

PROFILE_TABLE = "operators.json"
SCHEMA_VERSION = 1
_SHOWN = 15
_NAME_CHARS = 44


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator; a kernel of this package has the name of its autograd function."""

    name: str
    calls: int = checked(low=0)
    self_s: float = checked(low=0)
    """Seconds in the operator itself, without other operators that it called."""
    total_s: float = checked(low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTable:
    """The contents of operators.json."""

    step: int = checked(low=0)
    rank: int = checked(low=0)
    whole_s: float = checked(low=0)
    """Total seconds of all operators, including operators that are not listed."""
    trace: str
    """File name of the trace in the same folder, for https://ui.perfetto.dev or chrome://tracing."""
    operators: tuple[Operator, ...] = checked(max_items=1_000)
    """Operators by time, the slowest first."""
    schema_version: int = SCHEMA_VERSION


def write_table(path: Path, table: ProfileTable) -> None:
    """Write operators.json. Raises OSError."""
    write_whole(path, json.dumps(asdict(table), indent=2) + "\n")


def read_table(path: Path) -> ProfileTable | None:
    """Return the table; None if the file is absent or damaged."""
    try:
        raw = parse_json(read_bytes(path), where=str(path))
        check_schema(raw, SCHEMA_VERSION, where=str(path))
        return build(ProfileTable, raw, where=str(path))
    except (OSError, ConfigError):
        return None


def table_lines(table: ProfileTable) -> Iterator[str]:
    """Yield the slowest operators as lines for a terminal."""
    yield f"profile   step {table.step} on rank {table.rank}: {table.whole_s:.3g} s in operators"
    yield f"{'operator':<{_NAME_CHARS}} {'calls':>7} {'self':>9} {'share':>7} {'total':>9}"
    for each in table.operators[:_SHOWN]:
        share = each.self_s / table.whole_s if table.whole_s else 0.0
        name = shortened(each.name, _NAME_CHARS)
        yield (
            f"{name:<{_NAME_CHARS}} {each.calls:>7,} {each.self_s:>8.4f}s {share:>7.1%} "
            f"{each.total_s:>8.4f}s"
        )
