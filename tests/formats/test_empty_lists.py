"""A list that is empty on one machine has no elements that a reader could miss."""

from __future__ import annotations

import pytest

from tests.support.formats import Format, breaking

KNOWN = {"flags": "list | null", "flags[]": "str", "rows": "list", "rows[].name": "str"}


@pytest.mark.parametrize(
    ("found", "missing"),
    [
        ({"flags": "list", "rows": "list"}, []),
        ({"rows": "list", "rows[].name": "str"}, ["flags", "flags[]"]),
        ({"flags": "list", "rows": "list", "rows[].age": "int"}, ["rows[].name"]),
    ],
)
def test_only_elements_of_an_empty_list_may_be_missing(
    found: dict[str, str], missing: list[str]
) -> None:
    known, new = (
        Format(version=None, refuses_unknown_keys=False, keys=keys) for keys in (KNOWN, found)
    )
    problems = breaking("test", known, new)
    assert [each.split(" ")[1] for each in problems] == missing
