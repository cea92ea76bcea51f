"""AGENTS.md, the page for coding assistants: short, and the files that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

from payload.cli.commands import BY_NAME

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "AGENTS.md"
MOST_BYTES = 4000  # assistants read it whole, in every session
_SPAN = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"[\w/.-]+\.(?:py|md|toml|json)")


def test_the_page_is_short() -> None:
    assert PAGE.stat().st_size < MOST_BYTES


def test_every_folder_and_file_that_it_names_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    names = {each for span in _SPAN.findall(text) for each in _FILE.findall(span)}
    table = text.partition("## The tree")[2].partition("## Rules")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    folders = [folder for cell in first_cells for folder in _SPAN.findall(cell)]
    assert len(names) >= 7 and len(folders) >= 20
    places = (ROOT, ROOT / "payload", ROOT / "payload" / "config")
    for name in {*names, *folders}:
        assert any((place / name).exists() for place in places), name


def test_the_command_that_explains_settings_exists() -> None:
    assert "`tileforge explain KEY`" in PAGE.read_text(encoding="utf-8") and "explain" in BY_NAME
