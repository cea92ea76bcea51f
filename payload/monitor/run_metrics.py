"""Reads the current metrics of a run from the records in its folder.

The supervisor or a separate process reads them, so that training steps are not delayed.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from payload.core.errors import ConfigError
from payload.formats.checkpoint_listing import MANIFEST_FILE, checkpoint_step
from payload.launch.budget import TimeLimit, time_limit
from payload.launch.ranks import load_ranks
from payload.machines.inventory import ClusterInventory
from payload.run_record.metrics_log import (
    TIMED_PARTS,
    MetricsTail,
    RankTimes,
    rank_times,
    read_metrics,
)
from payload.run_record.run_files import RankProgress, RunPaths, RunState, last_record
from payload.run_record.run_repair import known_config
from payload.run_record.store_state import StoreState
from payload.run_record.stragglers import StragglerWatch

PREFIX = "tileforge_"
_RECENT = 50
_MOST_HISTORY = 5000
_MOST = 1e18
"""Limit above which values are dropped, because one integer too large for a float would fail the
entire scrape."""
_REST = "optimizer"
PHASES = (*TIMED_PARTS, _REST)
"""Parts of a step; `optimizer` is the rest of the step: clipping, update, bookkeeping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One gauge: its name, help text and labels."""

    name: str
    help: str
    labels: tuple[str, ...]


_RUN = ("run", "node")
_RANK = (*_RUN, "rank")

METRICS = tuple(
    Metric(name=PREFIX + name, help=text, labels=labels)
    for name, text, labels in (
        ("running", "1 while the run is active, otherwise 0.", _RUN),
        ("ranks", "Number of ranks.", _RUN),
        ("step", "Number of finished steps.", _RUN),
        ("steps_planned", "Number of planned steps, train.steps.", _RUN),
        ("tokens", "Number of tokens trained on.", _RUN),
        ("loss", "Training loss of the last step.", _RUN),
        ("validation_loss", "Loss of the last evaluation.", _RUN),
        ("learning_rate", "Learning rate of the last step.", _RUN),
        ("gradient_norm", "Gradient norm of the last step, before clipping.", _RUN),
        ("tokens_per_second", "Tokens per second of all ranks in the last step.", _RUN),
        ("mfu_ratio", "Model FLOP/s over the measured peak of all ranks.", _RUN),
        ("step_seconds", "Duration of the last step.", _RUN),
        ("step_age_seconds", "Time since the end of the last step, or since the start.", _RUN),
        ("eta_seconds", "Time until the run's final step, at the pace of the last 50 steps.", _RUN),
        ("checkpoint_step", "Step of the newest checkpoint.", _RUN),
        (
            "checkpoint_age_seconds",
            "Time since the newest checkpoint was written, or since the start.",
            _RUN,
        ),
        (
            "checkpoint_interval_seconds",
            "Time for train.checkpoint_every steps, at the pace of the last 50 steps.",
            _RUN,
        ),
        ("restarts", "Number of restarts by the supervisor after a failure.", _RUN),
        ("resumes", "Number of resumes by a command.", _RUN),
        ("cost_dollars", "Cost of the nodes so far.", _RUN),
        ("spent_seconds", "Time that the run has used the nodes.", _RUN),
        ("limit_seconds", "The stricter of limits.max_hours and limits.max_usd, in seconds.", _RUN),
        ("store_checkpoint_step", "Step of the newest checkpoint in the store.", _RUN),
        ("store_sent_bytes", "Bytes uploaded to the store since the start or resume.", _RUN),
        ("store_upload_age_seconds", "Time since the last upload to the store.", _RUN),
        (
            "store_waiting_bytes",
            "Bytes of checkpoints on the head's disk that are not in the store yet.",
            _RUN,
        ),
        ("store_failures", "Number of uploads to the store that failed after their retries.", _RUN),
        ("store_failing_seconds", "Time since uploads began to fail; 0 while they work.", _RUN),
        ("rank_step", "Current step of the rank.", _RANK),
        ("rank_heartbeat_age_seconds", "Time since the rank's last heartbeat.", _RANK),
        ("rank_memory_bytes", "Resident memory of the rank.", _RANK),
        (
            "rank_slowdown_ratio",
            "Ratio of a slow rank's own work to the other ranks' median; 1 for other ranks.",
            _RANK,
        ),
        (
            "step_phase_seconds",
            "A rank's time in one part of a step. wait: waiting for other ranks, mainly in the "
            "all-reduce of gradients. optimizer: the rest of the step.",
            (*_RANK, "phase"),
        ),
    )
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one gauge."""

    name: str
    labels: Mapping[str, str]
    value: float
    time_unix: float | None = None
    """Unix time of the value; None means now."""


@dataclass(slots=True)
class _Curve:
    """The newest values in the rows of metrics.jsonl that were read so far."""

    step: Mapping[str, Any] | None = None
    evaluation: Mapping[str, Any] | None = None
    ranks: RankTimes | None = None
    timed_step_s: float = 0.0
    """Mean duration of the steps over which `ranks` is averaged."""
    recent: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    watch: StragglerWatch = field(default_factory=StragglerWatch)

    def add(self, row: Mapping[str, Any]) -> None:
        if "val_loss" in row:
            self.evaluation = row
            return
        if self.step is not None and row["step"] <= self.step["step"]:
            # Restarted ranks repeat steps.
            self.recent.clear()
        self.step = row
        self.recent.append(row)
        self.watch.add(row)
        times = rank_times(row)
        if times is not None:
            self.ranks = times
            same = [each["step_time_s"] for each in self.recent][-times.steps :]
            self.timed_step_s = statistics.fmean(same)

    def pace_s(self) -> float | None:
        """Return the mean seconds per recent step, including evaluations and checkpoints."""
        timed = [row for row in self.recent if row.get("time_unix")]
        if len(timed) < 2 or timed[-1]["step"] == timed[0]["step"]:
            return self.step["step_time_s"] if self.step else None
        first, last = timed[0], timed[-1]
        spent_s = float(last["time_unix"]) - float(first["time_unix"])
        return max(0.0, spent_s) / (int(last["step"]) - int(first["step"]))


class RunMetrics:
    """Reads metrics from a run folder; `samples` can be called any number of times."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._config = known_config(paths)
        self._node_of = _nodes_of_ranks(paths)
        self._limit = _limit(paths, self._config.limits)
        self._tail = MetricsTail(paths.metrics)
        self._curve = _Curve()

    def samples(self) -> list[Sample]:
        """Return a sample of every metric that has a value now."""
        now = time.time()
        for row in self._tail.new_rows():
            self._curve.add(row)
        values = self._of_state(now) | self._of_curve(now) | self._of_store(now)
        found = [
            Sample(PREFIX + name, self._run_labels(), value)
            for name, value in values.items()
            if value is not None
        ]
        found += [*self._of_heartbeats(now), *self._of_ranks(self._curve)]
        return [each for each in found if -_MOST <= each.value <= _MOST]

    def history(self) -> Iterator[Sample]:
        """Yield samples from metrics.jsonl with their times, the oldest first.

        From a long run, 5,000 evenly spaced steps and every evaluation are yielded.
        """
        curve, rows = _Curve(), read_metrics(self._paths.metrics)
        stride = math.ceil(len(rows) / _MOST_HISTORY)
        for index, row in enumerate(rows):
            curve.add(row)
            at = row.get("time_unix")
            if not isinstance(at, int | float) or (index % stride and "val_loss" not in row):
                continue
            for name, value in _of_row(row).items():
                if value is not None:
                    yield Sample(PREFIX + name, self._run_labels(), value, at)
            if "val_loss" not in row:
                for each in self._of_ranks(curve):
                    yield Sample(each.name, each.labels, each.value, at)

    def _run_labels(self) -> dict[str, str]:
        return {"run": self._paths.run_id, "node": self._node_of.get(0, "")}

    def _rank_labels(self, rank: int, node: str | None = None) -> dict[str, str]:
        name = node if node is not None else self._node_of.get(rank, "")
        return {"run": self._paths.run_id, "node": name, "rank": str(rank)}

    def _of_state(self, now: float) -> dict[str, float | None]:
        state = last_record(RunState, self._paths.state)
        values: dict[str, float | None] = {
            "ranks": len(self._node_of) or None,
            "steps_planned": self._config.train.steps,
            "limit_seconds": self._limit.seconds if self._limit else None,
        }
        if state is None:
            return values
        newest = self._newest_checkpoint()
        return values | {
            "running": float(state.exit_class is None),
            "restarts": state.restarts(),
            "resumes": state.resumes,
            "cost_dollars": state.cost_usd,
            "spent_seconds": state.spent_s,
            "step_age_seconds": max(0.0, now - self._step_unix(state)),
            "checkpoint_age_seconds": max(0.0, now - (newest[1] if newest else state.started_unix)),
            "checkpoint_step": newest[0] if newest else None,
        }

    def _of_store(self, now: float) -> dict[str, float | None]:
        """Return the values of storage.json; empty if the run has no store."""
        store = last_record(StoreState, self._paths.store_state)
        if store is None:
            return {}
        newest, failing_unix = store.checkpoint, store.failing_since_unix
        sent_unix = store.sent_unix
        return {
            "store_checkpoint_step": checkpoint_step(Path(newest)) if newest else None,
            "store_sent_bytes": store.sent_bytes,
            "store_upload_age_seconds": max(0.0, now - sent_unix) if sent_unix else None,
            "store_waiting_bytes": store.waiting_bytes,
            "store_failures": store.failures,
            "store_failing_seconds": max(0.0, now - failing_unix) if failing_unix else 0.0,
        }

    def _of_curve(self, now: float) -> dict[str, float | None]:
        pace_s, every = self._curve.pace_s(), self._config.train.checkpoint_every
        step = self._curve.step
        values = _of_row(step) if step else {}
        values |= _of_row(self._curve.evaluation) if self._curve.evaluation else {}
        if pace_s is not None and step is not None:
            values["eta_seconds"] = max(0, self._config.train.steps - step["step"]) * pace_s
            values["checkpoint_interval_seconds"] = every * pace_s if every else None
        return values

    def _of_heartbeats(self, now: float) -> Iterator[Sample]:
        for rank in self._node_of:
            beat = last_record(RankProgress, self._paths.rank_progress(rank))
            if beat is None:
                continue
            labels = self._rank_labels(rank, beat.node)
            yield Sample(PREFIX + "rank_step", labels, beat.step)
            age_s = max(0.0, now - beat.time_unix)
            yield Sample(PREFIX + "rank_heartbeat_age_seconds", labels, age_s)
            if beat.rss_bytes is not None:
                yield Sample(PREFIX + "rank_memory_bytes", labels, beat.rss_bytes)

    def _of_ranks(self, curve: _Curve) -> Iterator[Sample]:
        times = curve.ranks
        if times is None:
            return
        slow = {each.rank: each.work_s / each.others_s for each in curve.watch.slow()}
        parts: dict[str, tuple[float, ...]] = {part: getattr(times, part) for part in TIMED_PARTS}
        spent = [sum(each) for each in zip(*parts.values(), strict=True)]
        parts[_REST] = tuple(max(0.0, curve.timed_step_s - each) for each in spent)
        for rank in range(len(spent)):
            labels = self._rank_labels(rank)
            yield Sample(PREFIX + "rank_slowdown_ratio", labels, slow.get(rank, 1.0))
            for phase, seconds in parts.items():
                at = {**labels, "phase": phase}
                yield Sample(PREFIX + "step_phase_seconds", at, seconds[rank])

    def _newest_checkpoint(self) -> tuple[int, float] | None:
        """Return the step of the newest checkpoint and the Unix time when it was complete."""
        with contextlib.suppress(OSError, ValueError):
            folder = self._paths.newest_checkpoint()
            if folder is not None:
                written_unix = (folder / MANIFEST_FILE).stat().st_mtime
                return int(folder.name.removeprefix("step_")), written_unix
        return None

    def _step_unix(self, state: RunState) -> float:
        """Return the later of two Unix times: the end of the last step, and the run's last
        start."""
        last = self._curve.step.get("time_unix") if self._curve.step else None
        return max(state.started_unix, last if isinstance(last, int | float) else 0.0)


def by_metric(samples: Iterable[Sample]) -> Iterator[tuple[Metric, list[Sample]]]:
    """Yield each metric that has samples, with its samples."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.name, []).append(sample)
    for metric in METRICS:
        if metric.name in found:
            yield metric, found[metric.name]


def _of_row(row: Mapping[str, Any]) -> dict[str, float | None]:
    if "val_loss" in row:
        return {"validation_loss": row["val_loss"]}
    return {
        "step": row["step"],
        "tokens": row["tokens"],
        "loss": row["loss"],
        "learning_rate": row["lr"],
        "gradient_norm": row["grad_norm"],
        "tokens_per_second": row["tokens_per_s"],
        "mfu_ratio": row["mfu"],
        "step_seconds": row["step_time_s"],
    }


def _nodes_of_ranks(paths: RunPaths) -> dict[int, str]:
    with contextlib.suppress(ConfigError):
        return {rank.rank: rank.node for rank in load_ranks(paths.ranks)}
    return {}


def _limit(paths: RunPaths, limits: Any) -> TimeLimit | None:
    with contextlib.suppress(ConfigError):
        return time_limit(limits, ClusterInventory.load(paths.inventory).nodes)
    return None
