"""A run's metrics at this moment, from the records that it writes anyway.

Reading happens in the supervisor's process, or beside it: a training step pays nothing for it.
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
"""A worker may tell any integer, and one that no float holds would fail the whole scrape."""
_REST = "optimizer"
PHASES = (*TIMED_PARTS, _REST)
"""Parts of a step. `optimizer` is what the others leave of it: clipping, update, bookkeeping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One gauge: what it is, and the labels that its samples have."""

    name: str
    help: str
    labels: tuple[str, ...]


_RUN = ("run", "node")
_RANK = (*_RUN, "rank")

METRICS = tuple(
    Metric(name=PREFIX + name, help=words, labels=labels)
    for name, words, labels in (
        ("running", "1 while the run is alive, else 0.", _RUN),
        ("ranks", "Ranks of the run.", _RUN),
        ("step", "Steps done.", _RUN),
        ("steps_planned", "train.steps.", _RUN),
        ("tokens", "Tokens trained on.", _RUN),
        ("loss", "Training loss of the last step.", _RUN),
        ("validation_loss", "Loss of the last evaluation.", _RUN),
        ("learning_rate", "Learning rate of the last step.", _RUN),
        ("gradient_norm", "Gradient norm of the last step, before clipping.", _RUN),
        ("tokens_per_second", "Of the whole job, in the last step.", _RUN),
        ("mfu_ratio", "Model FLOP/s over the measured peak of all ranks.", _RUN),
        ("step_seconds", "Duration of the last step.", _RUN),
        ("step_age_seconds", "Since the last step ended, or since the start.", _RUN),
        ("eta_seconds", "Until the last step, at the pace of the last 50.", _RUN),
        ("checkpoint_step", "Step of the newest checkpoint.", _RUN),
        (
            "checkpoint_age_seconds",
            "Since the newest checkpoint was written, or since the start.",
            _RUN,
        ),
        (
            "checkpoint_interval_seconds",
            "train.checkpoint_every steps at the pace of the last 50.",
            _RUN,
        ),
        ("restarts", "Starts by the supervisor after a failure.", _RUN),
        ("resumes", "Continuations by a command.", _RUN),
        ("cost_dollars", "What the nodes have cost so far.", _RUN),
        ("spent_seconds", "Time that the run has had the nodes.", _RUN),
        ("limit_seconds", "The stricter of limits.max_hours and limits.max_usd, as time.", _RUN),
        ("store_checkpoint_step", "Step of the newest checkpoint that the store has.", _RUN),
        ("store_sent_bytes", "Sent to the store since the start or resume.", _RUN),
        ("store_upload_age_seconds", "Since something last got to the store.", _RUN),
        ("store_waiting_bytes", "Checkpoints on the head's disk, not in the store yet.", _RUN),
        ("store_failures", "Attempts at the store that failed after their retries.", _RUN),
        ("store_failing_seconds", "Since the store began to fail; 0 while it works.", _RUN),
        ("rank_step", "Step that the rank works on.", _RANK),
        ("rank_heartbeat_age_seconds", "Since the rank's last heartbeat.", _RANK),
        ("rank_memory_bytes", "The rank's memory in RAM.", _RANK),
        (
            "rank_slowdown_ratio",
            "The rank's own work over the others', for a rank that the run names as slow; else 1.",
            _RANK,
        ),
        (
            "step_phase_seconds",
            "A rank's time in one part of a step. wait: for other ranks, above all in the "
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
    """When it was so; None = now."""


@dataclass(slots=True)
class _Curve:
    """The metrics from the rows of metrics.jsonl so far."""

    step: Mapping[str, Any] | None = None
    evaluation: Mapping[str, Any] | None = None
    ranks: RankTimes | None = None
    timed_step_s: float = 0.0
    """Mean duration of the steps that `ranks` is the mean of."""
    recent: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    watch: StragglerWatch = field(default_factory=StragglerWatch)

    def add(self, row: Mapping[str, Any]) -> None:
        if "val_loss" in row:
            self.evaluation = row
            return
        if self.step is not None and row["step"] <= self.step["step"]:
            # Ranks that were started again repeat steps.
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
        """Return the seconds between two steps, evaluations and checkpoints included."""
        timed = [row for row in self.recent if row.get("time_unix")]
        if len(timed) < 2 or timed[-1]["step"] == timed[0]["step"]:
            return self.step["step_time_s"] if self.step else None
        first, last = timed[0], timed[-1]
        spent_s = float(last["time_unix"]) - float(first["time_unix"])
        return max(0.0, spent_s) / (int(last["step"]) - int(first["step"]))


class RunMetrics:
    """Reads a run's folder; call `samples` as often as metrics are wanted."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._config = known_config(paths)
        self._node_of = _nodes_of_ranks(paths)
        self._limit = _limit(paths, self._config.limits)
        self._tail = MetricsTail(paths.metrics)
        self._curve = _Curve()

    def samples(self) -> list[Sample]:
        """Return every metric that is known now; what is not known is left out."""
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
        """Yield what rows of metrics.jsonl tell, with their times, the oldest first.

        Of a long run they are 5,000 that are evenly apart, and every evaluation.
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
        here = node if node is not None else self._node_of.get(rank, "")
        return {"run": self._paths.run_id, "node": here, "rank": str(rank)}

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
        """Return what storage.json says; nothing where the run has no store."""
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
        """Return its step, and when it was whole."""
        with contextlib.suppress(OSError, ValueError):
            folder = self._paths.newest_checkpoint()
            if folder is not None:
                written_unix = (folder / MANIFEST_FILE).stat().st_mtime
                return int(folder.name.removeprefix("step_")), written_unix
        return None

    def _step_unix(self, state: RunState) -> float:
        """Return when the last step ended; the last start counts where none has since."""
        last = self._curve.step.get("time_unix") if self._curve.step else None
        return max(state.started_unix, last if isinstance(last, int | float) else 0.0)


def by_metric(samples: Iterable[Sample]) -> Iterator[tuple[Metric, list[Sample]]]:
    """Yield each metric that has samples, with them."""
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
