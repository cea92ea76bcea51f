"""The site: its strict build finds faults, and its pages work offline at three widths."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.conftest import build_site
from tests.support.browser import Browser
from tests.support.launching import REPO

pytestmark = [pytest.mark.processes, pytest.mark.slow]

WIDTHS = (400, 900, 1600)
PAGES = (
    "index.html",
    "troubleshooting.html",
    "guides/google_cloud.html",
    "reference/file_formats.html",
    "explanations/kernels.html",
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[gone](guides/gone.md)", "cross-reference target not found"),
        ("[gone](guides/runs.md#gone)", "local id not found"),
        ("```{toctree}\ngone\n```", "nonexisting document"),
    ],
)
def test_a_dead_link_fails_the_build(text: str, why: str, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    (docs / "guides").mkdir(parents=True)
    shutil.copy(REPO / "docs" / "conf.py", docs)
    shutil.copytree(REPO / "docs" / "_static", docs / "_static")
    (docs / "guides" / "runs.md").write_text("# Runs\n", encoding="utf-8")
    toctree = "\n```{toctree}\n:hidden:\nguides/runs\n```\n"
    (docs / "index.md").write_text(f"# Start\n{toctree}", encoding="utf-8")
    build_site(docs, tmp_path / "whole")
    (docs / "index.md").write_text(f"# Start\n{toctree}\n{text}\n", encoding="utf-8")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        build_site(docs, tmp_path / "site")
    assert why in failed.value.stderr


def test_a_linked_file_of_the_repository_is_in_the_site(site: Path) -> None:
    page = (site / "reference" / "file_formats.html").read_text(encoding="utf-8")
    links = re.findall(r'href="(\.\./_downloads/[^"]+/manifest\.json)"', page)
    golden = REPO / "tests" / "golden" / "formats" / "manifest.json"
    assert links
    assert (site / "reference" / links[0]).read_bytes() == golden.read_bytes()


def test_every_page_loads_only_files_of_the_site(site: Path) -> None:
    loaded = re.compile(r'<(?:script|img|iframe|link)\b[^>]*?(?:src|href)="([^"]+)"')
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        for url in loaded.findall(page.read_text(encoding="utf-8")):
            assert "://" not in url and not url.startswith("//"), (page, url)
    for style in site.rglob("*.css"):
        urls = re.findall(r"url\(([^)]*)\)", style.read_text(encoding="utf-8"))
        assert [url for url in urls if "//" in url and "data:" not in url] == [], style


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_each_width_and_requests_nothing_from_elsewhere(
    page: str, width: int, site: Path, browser: Browser
) -> None:
    browser.open(site / page)
    browser.resize(width, 900)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert len(browser.run("return document.querySelector('article').innerText")) > 300
    assert browser.console() == []
    requested = [url for url in browser.requests() if not url.startswith("data:")]
    assert requested and [url for url in requested if not url.startswith("file://")] == []
