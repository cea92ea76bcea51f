"""HTML from text that nobody trusts: everything is escaped here, and every figure names its source.

A figure carries `data-source` (`summary.json#steps`) and `data-value` (JSON), so that a test, or a
reader's script, can compare the page with the files that it was made from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from payload.core.printable_text import printable


class Html(str):
    """Text that is markup already; a plain `str` is escaped wherever it meets one."""

    __slots__ = ()


NOTHING = Html('<span class="none">&ndash;</span>')
_MOST_CHARS = 4_000


def text(value: object) -> Html:
    """Return text as markup: no tag, no control character, and of a length that can be read."""
    plain = printable(str(value))
    if len(plain) > _MOST_CHARS:
        plain = f"{plain[:_MOST_CHARS]}... ({len(plain):,} characters)"
    return Html(escape(plain, quote=True))


def join(parts: Iterable[str], between: str = "") -> Html:
    """Return the parts in a row, as markup."""
    return Html(between.join(part if isinstance(part, Html) else text(part) for part in parts))


def tag(name: str, content: str, **attributes: object) -> Html:
    """Return an element; an attribute `class_` is written `class`, `data_x` as `data-x`."""
    content = join([content])
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{words}>{content}</{name}>")


def figure(value: Any, form: Callable[[Any], str], source: str, *, run: str) -> Html:
    """Return a value of a file as people read it; a dash where the file has none."""
    if value is None:
        return NOTHING
    return tag(
        "span",
        text(form(value)),
        class_="figure",
        data_source=source,
        data_run=run,
        data_value=json.dumps(value),
    )


def derived(value: float | None, form: Callable[[Any], str], how: str, *, run: str) -> Html:
    """Return a value that was computed from several; `how` names the computation."""
    if value is None:
        return NOTHING
    return tag(
        "span",
        text(form(value)),
        class_="figure",
        data_derived=how,
        data_run=run,
        data_value=json.dumps(value),
    )


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False, **attributes: str
) -> Html:
    """Return a table whose first column names the row; `numbers` aligns the others right."""
    kind = "numbers" if numbers else "words"
    head = join(tag("th", each, scope="col") for each in heads)
    lines = []
    for first, *rest in rows:
        cells = join(tag("td", cell) for cell in rest)
        lines.append(tag("tr", join([tag("th", first, scope="row"), cells])))
    made = join([tag("thead", tag("tr", head)) if any(heads) else "", tag("tbody", join(lines))])
    return tag("div", tag("table", made, class_=kind, **attributes), class_="scroll")


def count(value: float) -> str:
    """Return `1,234`."""
    return f"{value:,.0f}"


def loss(value: float) -> str:
    """Return a loss."""
    return f"{value:.4f}"


def percent(value: float) -> str:
    """Return `41.2 %`."""
    return f"{value:.1%}".replace("%", " %")


def usd(value: float) -> str:
    """Return dollars: two digits, more where the amount is below a cent."""
    if value and abs(value) < 0.01:
        return f"${value:.2g}"
    return f"${value:,.2f}"


def seconds(value: float) -> str:
    """Return a short time to three digits."""
    return f"{value * 1e3:.3g} ms" if 0 < value < 0.9995 else f"{value:.3g} s"


def gib(value: float) -> str:
    """Return bytes as GiB."""
    return f"{value / 2**30:.2f} GiB"


def plain(value: object) -> str:
    """Return a setting as run.toml writes it, without quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def moment(value: float) -> str:
    """Return a time of the calendar, in UTC."""
    try:
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "?"
