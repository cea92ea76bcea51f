"""Computes the statistics in summary.json from metrics.jsonl, for rank 0 and the supervisor."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from payload.core.errors import ConfigError
from payload.formats.checkpoint_listing import best_checkpoints, checkpoint_step
from payload.machines.inventory import ClusterInventory
from payload.run_record.metrics_log import (
    is_better_than_untrained,
    missing_steps,
    read_val_losses,
    stream_metrics,
)
from payload.run_record.run_files import RunPaths, Summary
from payload.run_record.stragglers import find_stragglers
from payload.run_record.task_metrics import confusion_of, val_metrics

# The medians leave out this many first steps, which build kernels and warm caches.
_WARM_UP_STEPS = 3


def with_metrics(summary: Summary, paths: RunPaths) -> Summary:
    """Return the summary with the statistics of metrics.jsonl and the ranges of lost rows."""
    newest = paths.newest_checkpoint()
    saved_step = checkpoint_step(newest) if newest else 0
    return with_rows(summary, list(stream_metrics(paths.metrics)), saved_step=saved_step)


def with_rows(summary: Summary, rows: Sequence[Mapping[str, Any]], *, saved_step: int) -> Summary:
    """Return the summary with steps, tokens, losses, and the medians over the steps after warm-up.

    `saved_step` is the step of the newest checkpoint: the run has reached this step even if rows
    are missing.
    """
    steps = [row for row in rows if "loss" in row]
    trained = max(saved_step, steps[-1]["step"] if steps else 0)
    missing = missing_steps((row["step"] for row in steps), trained=trained)
    summary = replace(summary, steps=trained, missing_metrics=missing)
    evaluations = [row for row in rows if "val_loss" in row]
    if evaluations:
        last = evaluations[-1]
        summary = replace(
            summary,
            best_val_loss=min(row["val_loss"] for row in evaluations),
            final_val_loss=last["val_loss"],
            final_val_step=last["step"],
            is_better_than_untrained=is_better_than_untrained(
                {row["step"]: row["val_loss"] for row in evaluations}
            ),
            val_metrics=val_metrics(last),
            val_confusion=confusion_of(last),
        )
    if not steps:
        return summary
    steady = steps[min(_WARM_UP_STEPS, len(steps) - 1) :]
    mfus = [row["mfu"] for row in steady if row["mfu"] is not None]
    return replace(
        summary,
        tokens=steps[-1]["tokens"],
        first_loss=steps[0]["loss"],
        final_loss=steps[-1]["loss"],
        tokens_per_s=statistics.median(row["tokens_per_s"] for row in steady),
        mfu=statistics.median(mfus) if mfus else None,
        stragglers=find_stragglers(steps),
    )


def with_best(summary: Summary, paths: RunPaths) -> Summary:
    """Return the summary with the name of the best checkpoint."""
    best = best_checkpoints(paths.checkpoints, read_val_losses(paths.metrics))
    return replace(summary, best_checkpoint=best[0].name if best else None)


def with_time(summary: Summary, paths: RunPaths, *, wall_s: float) -> Summary:
    """Return the summary with the wall time, and with the cost if the inventory has prices."""
    hourly_usd = None
    with suppress(ConfigError):
        hourly_usd = ClusterInventory.load(paths.inventory).hourly_usd()
    cost_usd = None if hourly_usd is None else hourly_usd * wall_s / 3600
    return with_cost(replace(summary, wall_s=wall_s), cost_usd)


def with_cost(summary: Summary, cost_usd: float | None) -> Summary:
    """Return the summary with the run's cost."""
    known = cost_usd is not None and summary.tokens > 0
    per_million = cost_usd / summary.tokens * 1e6 if known and cost_usd is not None else None
    return replace(summary, cost_usd=cost_usd, usd_per_million_tokens=per_million)
