"""The docs pages: their size, and the messages that the page on troubleshooting quotes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from tests.support.launching import REPO

DOCS = REPO / "docs"
MOST_BYTES = 12_000
PAGES = sorted(DOCS.rglob("*.md"))
TROUBLESHOOTING = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_can_be_read_in_one_sitting(page: Path) -> None:
    assert page.stat().st_size <= MOST_BYTES


def messages() -> Iterator[str]:
    """Yield the texts of the programs, with "{}" for each value in them."""
    for folder in ("payload", "infra"):
        for path in sorted((REPO / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (
                        str(each.value) if isinstance(each, ast.Constant) else "{}"
                        for each in node.values
                    )
                    yield "".join(parts)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
    for path in sorted((REPO / "bootstrap").glob("*.sh")):
        yield from path.read_text(encoding="utf-8").splitlines()


def quoted() -> list[str]:
    """Return the messages that the tables after "## Set-up" quote."""
    tables = TROUBLESHOOTING.partition("## Set-up")[2]
    return re.findall(r"^\| `([^`]+)` \|", tables, re.MULTILINE)


def test_every_quoted_message_is_in_the_code() -> None:
    texts = list(messages())
    found = quoted()
    assert len(found) > 40
    for message in found:
        parts = map(re.escape, message.split("..."))
        pattern = re.compile(".*?".join(parts), re.DOTALL)
        assert any(pattern.search(text) for text in texts), message


def test_every_exit_code_of_a_failure_has_its_first_step() -> None:
    table = TROUBLESHOOTING.partition("## By exit code")[2].partition("\n## ")[0]
    rows = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert rows == {int(code) for code in ExitCode} - {ExitCode.OK}
