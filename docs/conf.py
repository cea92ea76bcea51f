"""Settings of the docs site: Sphinx, MyST and furo. `make site` builds it, for reading offline."""

import re
from pathlib import Path

from sphinx.application import Sphinx

project = "Tileforge"
html_title = "Tileforge"
extensions = ["myst_parser"]
# Links to headings use the same anchors as on GitHub.
myst_heading_anchors = 4
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False

DOCS = Path(__file__).parent
_LINK = re.compile(r"\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)")


def setup(app: Sphinx) -> None:
    """Copy repository files that a page links to into the site."""
    app.connect("source-read", _link_to_copies)


def _link_to_copies(app: Sphinx, page: str, source: list[str]) -> None:
    def link(match: re.Match[str]) -> str:
        target = (DOCS / page).parent / match[1]
        is_page = target.resolve().is_relative_to(DOCS)
        return match[0] if is_page else f"](path:{match[1]})"

    source[0] = _LINK.sub(link, source[0])
