"""The charts of the report page, with the columns of metrics.jsonl that each chart draws.

A series draws the sum of its columns. In a stacked chart, the values of a series include the values
of all later series.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from payload.report.source import Run
from payload.run_record.task_metrics import accuracy_of

ACCURACY: Mapping[str, Any] = {
    "id": "accuracy",
    "title": "Accuracy",
    "series": [
        {"columns": ["val_accuracy"], "label": "validation", "points": True, "colour": "--c1"}
    ],
    "wide": True,
    "format": "percent",
}
CHARTS: Sequence[Mapping[str, Any]] = (
    {
        "id": "loss",
        "title": "Loss",
        "series": [
            {"columns": ["loss"], "label": "training", "faint": True},
            {"columns": ["loss_smooth"], "label": "training, smoothed"},
            {"columns": ["val_loss"], "label": "validation", "points": True, "colour": "--c1"},
        ],
        "wide": True,
        "canLog": True,
    },
    {
        "id": "lr",
        "title": "Learning rate",
        "series": [{"columns": ["lr"], "label": "learning rate"}],
        "format": "small",
        "fromZero": True,
        "canLog": True,
    },
    {
        "id": "grad_norm",
        "title": "Gradient norm",
        "series": [{"columns": ["grad_norm"], "label": "gradient norm"}],
        "fromZero": True,
        "canLog": True,
    },
    {
        "id": "speed",
        "title": "Tokens per second",
        "series": [{"columns": ["tokens_per_s"], "label": "tokens/s"}],
        "fromZero": True,
        "canLog": True,
    },
    {
        "id": "mfu",
        "title": "MFU: share of the measured peak",
        "series": [{"columns": ["mfu"], "label": "MFU"}],
        "format": "percent",
        "fromZero": True,
    },
    {
        "id": "time",
        "title": "Where a step's time went (rank 0)",
        "stacked": True,
        "series": [
            {"columns": ["step_time_s"], "label": "computing", "colour": "--compute"},
            {
                "columns": ["data_time_s", "sync_time_s"],
                "label": "waiting for gradients",
                "colour": "--wait",
            },
            {"columns": ["data_time_s"], "label": "reading data", "colour": "--data"},
        ],
        "format": "seconds",
        "fromZero": True,
    },
    {
        "id": "memory",
        "title": "Memory of rank 0",
        "series": [{"columns": ["rss_bytes"], "label": "resident"}],
        "format": "bytes",
        "fromZero": True,
    },
)


def charts(runs: Sequence[Run]) -> list[Mapping[str, Any]]:
    """Return the charts of a page; accuracy comes first if a run has evaluated its accuracy."""
    has_accuracy = any(accuracy_of(row) is not None for run in runs for row in run.evaluations)
    return [*([ACCURACY] if has_accuracy else []), *CHARTS]
