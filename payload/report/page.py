"""Renders the report page: one HTML file that contains its style, scripts and data."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from payload import __version__
from payload.report import compared_values, number_formats, series, times
from payload.report.chart_definitions import charts
from payload.report.markup import environment
from payload.report.predictions import predictions
from payload.report.reproduce import commands
from payload.report.source import Run
from payload.report.task_results import confusion, evaluated_on, headline, task_results

_FOLDER = Path(__file__).resolve().parent
_STYLES = ("uplot/uPlot.min.css", "page.css")
_SCRIPTS = ("uplot/uPlot.iife.min.js", "page.js")
_EVENT_NAMES = {
    "start": "started",
    "resume": "resumed",
    "failure": "failed",
    "restart": "restarted",
    "finished": "finished",
    "stopped": "stopped",
    "failed": "ended in failure",
}
_DATA_ROWS = (
    ("source", "source", str),
    ("revision", "revision", str),
    ("task", "task", str),
    ("training tokens", "train_tokens", number_formats.count),
    ("validation tokens", "val_tokens", number_formats.count),
    ("training documents", "train_documents", number_formats.count),
    ("validation documents", "val_documents", number_formats.count),
    ("skipped documents", "skipped_documents", number_formats.count),
    ("text", "text_bytes", number_formats.megabytes),
    ("tokenizer", "tokenizer", str),
    ("vocabulary", "vocab_size", number_formats.count),
    ("encoder", "encoder", str),
    ("fingerprint", "fingerprint", str),
)


def render(runs: Sequence[Run]) -> str:
    """Return the HTML page of one run, or of several runs that the page compares."""
    assert runs, "a page needs a run"
    script = _contents(_SCRIPTS)
    heat = [found for run in runs if (found := series.heat(run)) is not None]
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            runs=runs,
            policy=_policy(script),
            style=Markup(_contents(_STYLES)),
            script=Markup(script),
            uplot_license=Markup(_contents(["uplot/LICENSE"])),
            version=__version__,
            data={
                "runs": [series.curves(run) for run in runs],
                "charts": charts(runs),
                "heat": heat,
            },
            heat_runs={each["run"] for each in heat},
            compared=compared_values.compared(runs),
            differing=compared_values.different(runs),
            have_equal_tasks=compared_values.have_equal_tasks,
            task_results=task_results,
            evaluated_on=evaluated_on,
            confusion=confusion,
            headline=headline,
            changed_settings=compared_values.changed,
            predictions_of=predictions,
            commands_of=commands,
            data_rows=_DATA_ROWS,
            event_names=_EVENT_NAMES,
            series=series,
            times=times,
        )
    )


def _contents(names: Sequence[str]) -> str:
    return "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in names)


def _policy(script: str) -> str:
    """Return a Content-Security-Policy that allows only this script and no requests."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
