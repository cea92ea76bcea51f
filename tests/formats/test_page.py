"""docs/reference has a row for each golden file, with its version."""

from __future__ import annotations

import re

from tests.support.formats import GOLDEN, read_format
from tests.support.launching import REPO

_LINK = re.compile(r"\.\./tests/golden/formats/([^)]+)\.json\)")


def test_every_format_is_on_the_page_with_its_version() -> None:
    with_version, without = (
        (REPO / "docs" / "reference" / name).read_text(encoding="utf-8")
        for name in ("file_formats.md", "unversioned_formats.md")
    )
    lines = [*with_version.splitlines(), *without.splitlines()]
    rows = {name: line for line in lines for name in _LINK.findall(line)}
    assert set(rows) == {path.name.removesuffix(".json") for path in GOLDEN.glob("*.json")}
    for name, row in rows.items():
        version = read_format(GOLDEN / f"{name}.json").version
        if row in with_version or name.startswith("output."):
            shown = row.split("|")[2].strip().partition(",")[0]
            assert shown == ("none" if version is None else str(version)), row
        else:
            assert version is None, row
