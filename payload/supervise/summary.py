"""Completes summary.json with the values that the trainer could not write itself."""

from __future__ import annotations

from dataclasses import replace

from payload.launch.outcome import Verdict
from payload.launch.plan_record import LaunchPlan
from payload.run_record.reserved_space import write_record
from payload.run_record.run_files import RunPaths, RunState, Summary, last_record
from payload.run_record.run_statistics import with_best, with_cost, with_metrics, with_time


def complete_summary(
    paths: RunPaths,
    verdict: Verdict,
    *,
    plan: LaunchPlan,
    state: RunState,
    wall_s: float,
) -> None:
    """Record in summary.json how the run ended.

    A trainer that reached the end has written all other values itself. Otherwise, the existing
    summary.json is from the start of the run. In this case the values are computed from
    metrics.jsonl, and `wall_s` is the time of all attempts. The cost always comes from `state`.
    Raises OSError.
    """
    written = last_record(Summary, paths.summary)
    summary = replace(
        written or _blank(paths, plan=plan),
        status=verdict.status,
        exit_class=verdict.exit_code.label,
        error=verdict.error,
        restarts=state.restarts(),
        resumes=state.resumes,
    )
    if written is None or written.status not in ("finished", "stopped"):
        summary = with_best(with_metrics(summary, paths), paths)
        summary = with_time(summary, paths, wall_s=wall_s)
    summary = replace(with_cost(summary, state.cost_usd), store=state.store)
    if verdict.status == "failed":
        summary = replace(summary, ranks_identical=False)
    if summary != written:
        write_record(paths.summary, summary)


def _blank(paths: RunPaths, *, plan: LaunchPlan) -> Summary:
    """Return the summary of a run for which rank 0 never wrote a summary."""
    return Summary(
        run_id=paths.run_id,
        status="failed",
        exit_class="",
        world_size=plan.world_size,
        nodes=plan.nodes,
    )
