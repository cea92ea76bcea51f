"""Records of ranks on other nodes."""

from __future__ import annotations

import pytest

from payload.supervise.workers import records


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("", []),
        ('{"rank": 1}\n', [1]),
        ('{"rank": 1}\n{"rank": 2}\n', [1, 2]),
        ('{"rank": 1}\n{"ra', [1]),
        ("a greeting\n", []),
        ('[3]\n{"rank": 1}', [1]),
    ],
)
def test_records_are_read_up_to_what_is_none(text: str, ranks: list[int]) -> None:
    assert [record["rank"] for record in records(text)] == ranks
