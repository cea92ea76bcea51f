"""Downsamples the curves of a run for the report page by selecting rows, not averaging them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from payload.report.source import Run
from payload.run_record.metrics_log import RankTimes
from payload.run_record.task_metrics import accuracy_of

COLUMNS = (
    *("step", "tokens", "loss", "lr", "grad_norm", "step_time_s", "tokens_per_s", "mfu"),
    *("data_time_s", "sync_time_s", "rss_bytes"),
)
MOST_ROWS = 1_200
_A_BUCKET = 3
_MOST_CELLS = 6_000
_MOST_HEAT_COLUMNS = 160
_MOST_EVALUATIONS = 600
_DIGITS = 6

Row = Mapping[str, Any]


def chosen(steps: Sequence[Row], most: int = MOST_ROWS) -> list[int]:
    """Return the indices of at most `most` rows that preserve the shape of the curves.

    From each bucket of steps, the rows with the lowest loss, the highest loss and the longest step
    are selected. The first and the last row are always included.
    """
    if len(steps) <= most:
        return list(range(len(steps)))
    buckets = max(1, (most - 2) // _A_BUCKET)
    places = {0, len(steps) - 1}
    for bucket in range(buckets):
        span = range(bucket * len(steps) // buckets, (bucket + 1) * len(steps) // buckets)
        places.add(min(span, key=lambda place: steps[place]["loss"]))
        places.add(max(span, key=lambda place: steps[place]["loss"]))
        places.add(max(span, key=lambda place: steps[place]["step_time_s"]))
    return sorted(places)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return a centred moving average of the losses over a window of 2 % of the run."""
    half = max(1, len(losses) // 100)
    sums = [0.0]
    for loss in losses:
        sums.append(sums[-1] + loss)
    means = []
    for place in range(len(losses)):
        # The window shrinks symmetrically at the ends: an asymmetric window would bias the means.
        reach = min(half, place, len(losses) - 1 - place)
        low, high = place - reach, place + reach + 1
        means.append((sums[high] - sums[low]) / (high - low))
    return means


def curves(run: Run) -> dict[str, Any]:
    """Return the curves for the script of the page, with exact values of the selected rows."""
    steps = run.steps
    places = chosen(steps)
    rows = [steps[place] for place in places]
    began_unix = _began_unix(rows)
    found: dict[str, Any] = {name: [row[name] for row in rows] for name in COLUMNS}
    found["time"] = [_elapsed(row, began_unix) for row in rows]
    means = smoothed([row["loss"] for row in steps])
    found["loss_smooth"] = [_short(means[place]) for place in places]
    return {
        "id": run.run_id,
        "rows": found,
        "evaluations": _evaluations(run, began_unix),
        "marks": _marks(run, began_unix),
    }


def timeline(run: Run) -> dict[str, Any] | None:
    """Return the times, in seconds since the start, at which the run trained, evaluated, failed and
    restarted."""
    events = run.state.get("events", ())
    times = [(_time_of(row), row) for row in run.rows if _time_of(row)]
    if not times and not events:
        return None
    first = times[0][0] - times[0][1].get("step_time_s", 0.0) if times else events[0].time_unix
    began = min([first, *(event.time_unix for event in events)])
    ended = max([*(at for at, _ in times), *(event.time_unix for event in events), began])
    # A gap narrower than a pixel is not shown.
    joined_s = (ended - began) / 1_000
    spans: list[list[float]] = []
    for at, row in times:
        if "loss" not in row:
            continue
        start = at - row["step_time_s"]
        if spans and start - spans[-1][1] <= joined_s:
            spans[-1][1] = at
        else:
            spans.append([start, at])
    return {
        "length": _short(ended - began),
        "spans": [[_short(start - began), _short(end - began)] for start, end in spans],
        "evaluations": [_short(at - began) for at, row in times if "val_loss" in row][
            :_MOST_EVALUATIONS
        ],
        "events": [
            {"time": _short(event.time_unix - began), "kind": event.kind, "text": event.text}
            for event in events
        ],
    }


def heat(run: Run) -> dict[str, Any] | None:
    """Return the fraction of time that each rank waited, for ranges of steps; None if unknown."""
    found = run.timed_steps
    if not found:
        return None
    ranks = len(found[-1][1].wait)
    # If the number of ranks changed at a resume, only rows with the last number are shown.
    found = [(step, times) for step, times in found if len(times.wait) == ranks]
    if ranks < 2:
        return None
    columns = max(1, min(len(found), _MOST_HEAT_COLUMNS, _MOST_CELLS // ranks))
    groups = [
        found[place * len(found) // columns : (place + 1) * len(found) // columns]
        for place in range(columns)
    ]
    shares = [_shares([times for _, times in group]) for group in groups]
    return {
        "run": run.run_id,
        "first": [group[0][0] for group in groups],
        "last": [group[-1][0] for group in groups],
        "values": [[column[rank] for column in shares] for rank in range(ranks)],
    }


def mean_times(run: Run) -> RankTimes | None:
    """Return the mean times of each rank over the run, without the first step."""
    found = [times for step, times in run.timed_steps if step > 1]
    found = [times for times in found if len(times.wait) == len(found[-1].wait)]
    if not found:
        return None
    steps = sum(times.steps for times in found)

    def mean(part: str) -> tuple[float, ...]:
        columns = zip(*(getattr(times, part) for times in found), strict=True)
        weights = [times.steps for times in found]
        return tuple(
            sum(value * weight for value, weight in zip(column, weights, strict=True)) / steps
            for column in columns
        )

    parts = ("data", "forward", "backward", "wait", "checkpoint")
    return RankTimes(steps=steps, **{part: mean(part) for part in parts})


def _shares(group: Sequence[RankTimes]) -> list[float]:
    shares = []
    for rank in range(len(group[0].wait)):
        waited = sum(times.wait[rank] * times.steps for times in group)
        whole = sum(
            (times.work()[rank] + times.wait[rank] + times.checkpoint[rank]) * times.steps
            for times in group
        )
        shares.append(round(waited / whole, 3) if whole > 0 else 0.0)
    return shares


def _evaluations(run: Run, began_unix: float | None) -> dict[str, Any]:
    rows = run.evaluations
    tokens = {row["step"]: row["tokens"] for row in run.steps}
    best = min(range(len(rows)), key=lambda place: rows[place]["val_loss"], default=0)
    every = -(-len(rows) // _MOST_EVALUATIONS) or 1
    kept = [row for place, row in enumerate(rows) if place % every == 0 or place == best]
    if rows and rows[-1] is not kept[-1]:
        kept.append(rows[-1])
    return {
        "step": [row["step"] for row in kept],
        "val_loss": [row["val_loss"] for row in kept],
        "val_accuracy": [accuracy_of(row) for row in kept],
        "tokens": [tokens.get(row["step"], 0 if row["step"] == 0 else None) for row in kept],
        "time": [_elapsed(row, began_unix) for row in kept],
    }


def _marks(run: Run, began_unix: float | None) -> list[dict[str, Any]]:
    """Return, for each restart, the reason and the last step before the restart."""
    marks = []
    for event in run.state.get("events", ()):
        if event.kind != "restart":
            continue
        after = [row for row in run.steps if _time_of(row) <= event.time_unix]
        last = after[-1] if after else None
        marks.append(
            {
                "step": last["step"] if last else 0,
                "tokens": last["tokens"] if last else 0,
                "time": None if began_unix is None else _short(event.time_unix - began_unix),
                "text": event.text,
            }
        )
    return marks


def _began_unix(rows: Sequence[Row]) -> float | None:
    if not rows or not _time_of(rows[0]):
        return None
    return _time_of(rows[0]) - float(rows[0]["step_time_s"])


def _elapsed(row: Row, began_unix: float | None) -> float | None:
    at = _time_of(row)
    return None if began_unix is None or not at else _short(at - began_unix)


def _time_of(row: Row) -> float:
    """Return when a row was written; 0 if an older version wrote the row without a time."""
    found = row.get("time_unix")
    return float(found) if isinstance(found, int | float) and abs(found) < 1e11 else 0.0


def _short(value: float) -> float | None:
    """Return the value with six significant digits; None for infinity and NaN."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
