"""The parts of summary.json that the trainer could not write itself."""

from __future__ import annotations

import time
from dataclasses import replace

from payload.errors import ConfigError
from payload.launch.outcome import Verdict
from payload.launch.plan import LaunchPlan
from payload.results import RunPaths, RunState, Summary, read_json, read_metrics, write_json


def complete_summary(
    paths: RunPaths, verdict: Verdict, *, plan: LaunchPlan, state: RunState
) -> None:
    """Make summary.json say how the run ended; what the trainer wrote there stays."""
    try:
        written = read_json(Summary, paths.summary)
    except ConfigError:
        written = None
    summary = written or _from_metrics(paths, plan=plan, state=state)
    summary = replace(
        summary,
        status=verdict.status,
        exit_class=verdict.exit_code.label,
        error=verdict.error,
        restarts=state.attempt - 1,
        wall_s=summary.wall_s or time.time() - state.started_unix,
    )
    if verdict.status == "failed":
        # The trainer's last word may date from before the failure.
        summary = replace(_with_progress(summary, paths), ranks_identical=False)
    if summary != written:
        write_json(paths.summary, summary)


def _from_metrics(paths: RunPaths, *, plan: LaunchPlan, state: RunState) -> Summary:
    """A summary for a run whose rank 0 never wrote one."""
    return _with_progress(
        Summary(
            run_id=paths.run_id,
            status=state.status,
            exit_class="",
            world_size=plan.world_size,
            nodes=plan.nodes,
        ),
        paths,
    )


def _with_progress(summary: Summary, paths: RunPaths) -> Summary:
    """Steps, tokens and losses as metrics.jsonl has them."""
    rows = read_metrics(paths.metrics)
    steps = [row for row in rows if "loss" in row]
    val_losses = [row["val_loss"] for row in rows if "val_loss" in row]
    if val_losses:
        summary = replace(summary, best_val_loss=min(val_losses), final_val_loss=val_losses[-1])
    if not steps:
        return summary
    return replace(
        summary,
        steps=steps[-1]["step"],
        tokens=steps[-1]["tokens"],
        first_loss=steps[0]["loss"],
        final_loss=steps[-1]["loss"],
    )
