"""Rendered text against the files in tests/golden. TILEFORGE_WRITE_GOLDEN=1 writes new ones."""

from __future__ import annotations

import os
from pathlib import Path

GOLDEN = Path(__file__).parent.parent / "golden"


def assert_golden(name: str, text: str) -> None:
    """Fail unless `text` equals tests/golden/`name`."""
    path = GOLDEN / name
    if os.environ.get("TILEFORGE_WRITE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path} differs; see its diff after writing"
