"""summary.json, kept by rank 0 from the first moment to the last."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from types import TracebackType
from typing import Self

from payload.errors import ExitCode, TileforgeError
from payload.inventory import ClusterInventory
from payload.results import (
    RunPaths,
    RunState,
    RunStatus,
    StepMetrics,
    Summary,
    read_json,
    read_metrics,
    write_json,
)
from payload.train.metrics import versions
from payload.train.world import World, as_rank_lost

# The first steps build kernels and warm caches; the median leaves out up to this many.
_WARM_UP_STEPS = 3


class SummaryFile:
    """Says `running` on entry, what `end` was told on leaving, and `failed` after any error."""

    def __init__(self, paths: RunPaths, world: World) -> None:
        self._paths = paths
        self._world = world
        self._summary = Summary(
            run_id=paths.run_id,
            status="running",
            exit_class=ExitCode.OK.label,
            world_size=world.world_size,
            nodes=world.nodes(),
            restarts=_restarts(paths),
            versions=versions(),
        )
        self._started_s = time.perf_counter()
        self._wall_s: float | None = None

    def __enter__(self) -> Self:
        self._write()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if value is not None:
            known = as_rank_lost(value, world=self._world) or value
            code = known.exit_code if isinstance(known, TileforgeError) else ExitCode.TRAINING
            self._summary = replace(
                self._summary, status="failed", exit_class=code.label, error=str(known)
            )
        self._write()

    def calibrated(self, *, peak_flops_per_s: float) -> None:
        """Note the measured peak."""
        self._summary = replace(self._summary, peak_flops_per_s=peak_flops_per_s)
        self._write()

    def end(self, status: RunStatus, *, wall_s: float) -> None:
        """Training ended as it should, after a last check that found all ranks equal."""
        self._summary = replace(self._summary, status=status, ranks_identical=True)
        self._wall_s = wall_s

    def _write(self) -> None:
        if self._world.is_main:
            wall_s = self._wall_s or time.perf_counter() - self._started_s
            write_json(self._paths.summary, _with_results(self._summary, self._paths, wall_s))


def _with_results(summary: Summary, paths: RunPaths, wall_s: float) -> Summary:
    """The summary with everything that metrics.jsonl and the inventory say."""
    rows = read_metrics(paths.metrics)
    steps = [StepMetrics(**row) for row in rows if "loss" in row]
    val_losses = [row["val_loss"] for row in rows if "val_loss" in row]
    return replace(
        _with_steps(summary, steps),
        best_val_loss=min(val_losses, default=None),
        final_val_loss=val_losses[-1] if val_losses else None,
        wall_s=wall_s,
        cost_usd=_cost_usd(paths, wall_s),
    )


def _with_steps(summary: Summary, rows: list[StepMetrics]) -> Summary:
    """First and last loss, and the medians over the steps after warm-up."""
    if not rows:
        return summary
    steady = rows[min(_WARM_UP_STEPS, len(rows) - 1) :]
    mfus = [row.mfu for row in steady if row.mfu is not None]
    return replace(
        summary,
        steps=rows[-1].step,
        tokens=rows[-1].tokens,
        first_loss=rows[0].loss,
        final_loss=rows[-1].loss,
        tokens_per_s=statistics.median(row.tokens_per_s for row in steady),
        mfu=statistics.median(mfus) if mfus else None,
    )


def _cost_usd(paths: RunPaths, wall_s: float) -> float | None:
    if not paths.inventory.exists():
        return None
    hourly_usd = ClusterInventory.load(paths.inventory).hourly_usd()
    return None if hourly_usd is None else hourly_usd * wall_s / 3600


def _restarts(paths: RunPaths) -> int:
    state = read_json(RunState, paths.state)
    return state.attempt - 1 if state else 0
