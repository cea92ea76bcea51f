"""The page: one HTML file with its style, its script and its data within."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from payload import __version__
from payload.report import sections
from payload.report.markup import Html, join, tag
from payload.report.reproduce import reproduce
from payload.report.series import curves, heat
from payload.report.source import Run
from payload.report.verdict import verdict

_FOLDER = Path(__file__).resolve().parent
_CHARTS: Sequence[dict[str, Any]] = (
    {
        "id": "loss",
        "title": "Loss",
        "series": [
            {"column": "loss", "label": "training", "faint": True},
            {"column": "loss_smooth", "label": "training, smoothed"},
            {"column": "val_loss", "label": "validation", "points": True},
        ],
        "wide": True,
        "canLog": True,
    },
    {
        "id": "lr",
        "title": "Learning rate",
        "series": [{"column": "lr", "label": "learning rate"}],
        "format": "small",
        "fromZero": True,
        "canLog": True,
    },
    {
        "id": "grad_norm",
        "title": "Gradient norm",
        "series": [{"column": "grad_norm", "label": "gradient norm"}],
        "fromZero": True,
        "canLog": True,
    },
    {
        "id": "speed",
        "title": "Tokens per second",
        "series": [{"column": "tokens_per_s", "label": "tokens/s"}],
        "fromZero": True,
    },
    {
        "id": "mfu",
        "title": "MFU: share of the measured peak",
        "series": [{"column": "mfu", "label": "MFU"}],
        "format": "percent",
        "fromZero": True,
    },
    {
        "id": "time",
        "title": "Where a step's time went (rank 0)",
        "stack": [
            {"column": "data_time_s", "label": "reading data"},
            {"column": "sync_time_s", "label": "waiting for gradients"},
            {"rest": "step_time_s", "label": "computing"},
        ],
        "format": "seconds",
        "fromZero": True,
    },
    {
        "id": "memory",
        "title": "Memory of rank 0",
        "series": [{"column": "rss_bytes", "label": "resident"}],
        "format": "bytes",
        "fromZero": True,
    },
)


def render(runs: Sequence[Run]) -> str:
    """Return the page of one run, or of several beside each other."""
    assert runs, "a page is about a run"
    style = (_FOLDER / "page.css").read_text(encoding="utf-8")
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    data = {
        "runs": [curves(run) for run in runs],
        "charts": list(_CHARTS),
        "heat": [found for run in runs if (found := heat(run)) is not None],
    }
    title = " and ".join(run.run_id for run in runs)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<link rel="icon" href="data:,">',
            tag("title", f"{title} · Tileforge"),
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            "<main>",
            _body(runs),
            "</main>",
            tag("footer", f"Made by Tileforge {__version__} from the run's own files."),
            f'<script type="application/json" id="data">{_as_script(data)}</script>',
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _policy(script: str) -> str:
    """Return what the page may do: run this one script, and ask nobody for anything."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _as_script(data: object) -> str:
    """Return JSON that cannot end the element that it is in."""
    made = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return made.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _body(runs: Sequence[Run]) -> Html:
    several = len(runs) > 1
    parts = [_headings(runs)]
    if several:
        parts.append(sections.comparison(runs))
    else:
        parts.append(sections.tiles(runs[0]))
    parts.append(_curves(runs))
    for run in runs:
        about = _about(run)
        if several:
            # The first is open, so that the page is not a list of closed boxes.
            state = " open" if run is runs[0] else ""
            summary = tag("summary", run.run_id)
            about = Html(f"<details{state}>{summary}{about}</details>")
        parts.append(about)
    return join(parts, "\n")


def _headings(runs: Sequence[Run]) -> Html:
    heads = []
    for place, run in enumerate(runs):
        name = tag("h1", run.run_id, class_=f"run-{place % 6}" if len(runs) > 1 else None)
        status = tag("span", run.status, class_=f"status {_status_class(run.status)}")
        heads.append(
            tag(
                "header",
                join(
                    [
                        tag("div", join([name, status]), class_="title"),
                        tag("p", verdict(run), class_="verdict"),
                        sections.heading_facts(run),
                    ]
                ),
            )
        )
    return join(heads, "\n")


def _status_class(status: str) -> str:
    return status if status in ("finished", "stopped", "failed", "running") else "unknown"


def _curves(runs: Sequence[Run]) -> Html:
    if not any(run.steps for run in runs):
        note = tag("p", "No step was finished, so there are no curves.", class_="note")
        return sections.section("Curves", note, name="curves")
    figures = [
        tag(
            "figure", Html(""), class_="wide" if chart.get("wide") else None, data_chart=chart["id"]
        )
        for chart in _CHARTS
    ]
    noscript = Html("<noscript><p>The curves need JavaScript; the tables do not.</p></noscript>")
    tools = Html(
        '<div class="tools" role="toolbar" aria-label="Curves"><span>over</span>'
        '<button data-x="step" aria-pressed="true">steps</button>'
        '<button data-x="tokens" aria-pressed="false">tokens</button>'
        '<button data-x="time" aria-pressed="false">time</button>'
        "<button data-reset hidden>whole run</button>"
        '<span class="hint">drag to zoom</span></div>'
    )
    head = tag("div", join([Html("<h2>Curves</h2>"), tools]), class_="head")
    return tag("section", join([head, noscript, *figures]), class_="curves")


def _about(run: Run) -> Html:
    heat_map = tag("figure", Html(""), class_="wide", data_heat=run.run_id) if heat(run) else ""
    ranks = sections.ranks(run)
    return join(
        [
            sections.section(
                "Time",
                sections.where_time_went(run),
                tag("figure", Html(""), class_="wide timeline", data_timeline=run.run_id),
                sections.events(run),
                name="time",
            ),
            sections.section("Ranks", join([heat_map]), ranks, name="ranks") if ranks else "",
            sections.profile(run),
            sections.cost(run),
            sections.store(run),
            sections.samples(run),
            sections.data_card(run),
            sections.settings(run),
            sections.machine(run),
            reproduce(run),
        ],
        "\n",
    )
