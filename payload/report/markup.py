"""Renders HTML from untrusted text. jinja2 escapes every value, and each number names its source.

Each number has the attributes `data-source` (such as `summary.json#steps`) and `data-value` (JSON).
With these, a test or a script can compare the page with the files of the run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from payload.core.durations import in_words
from payload.core.printable_text import printable
from payload.report import number_formats

_TEMPLATES = Path(__file__).resolve().parent / "templates"
_MOST_CHARS = 4_000
_FORMATS = (
    *("count", "loss", "percent", "usd", "seconds", "gib", "megabytes", "memory_gib"),
    *("tflops", "plain", "moment"),
)


def environment() -> Environment:
    """Return the jinja2 environment with the templates and formats of the page."""
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        finalize=_readable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {name: getattr(number_formats, name) for name in _FORMATS}
    made.globals |= {"duration": in_words, "text": str}
    made.filters |= {"json": json.dumps, "script_json": script_json, "one_line": one_line}
    return made


def text(value: object) -> Markup:
    """Return text as HTML without control characters, truncated to 4,000 characters."""
    return escape(_readable(value))


def _readable(value: object) -> object:
    if isinstance(value, Markup):
        return value
    plain = printable(str(value))
    if len(plain) > _MOST_CHARS:
        return f"{plain[:_MOST_CHARS]}... ({len(plain):,} characters)"
    return plain


def one_line(markup: Markup) -> Markup:
    """Return the markup with each sequence of white space replaced by one space."""
    return Markup(re.sub(r"\s+", " ", markup).strip())


def script_json(data: object) -> Markup:
    """Return JSON for a script element, escaped so that it cannot end the element."""
    made = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(made.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))
