"""CONTRACT OUT: reads and writes metrics.jsonl, with a JSON object per step and evaluation.

Readers skip damaged rows. When the trainer resumes the run, it moves a damaged file aside.
"""

from __future__ import annotations

import json
import math
import os
import time
import typing
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from payload.core.errors import ConfigError
from payload.core.regular_files import open_regular
from payload.core.validation.fields import checked
from payload.core.validation.readers import DeclaredField, fields_of
from payload.core.validation.records import build
from payload.core.validation.refusal import RefusedError

_MAX_LINE_BYTES = 2**20  # A row with the times of 10,000 ranks takes half of this.
MOST_BYTES = 2**30
"""Limit on the bytes of a file that are read."""
_MAX_ROWS = 3_000_000
"""A file with more rows counts as damaged."""
_HELD_BYTES = 2**28  # A step without the ranks' times has 350 bytes as text and 1,600 as a dict.
_HELD_ROWS = 1_000_000
_MOST_NAMES = 64
_BYTES_PER_LIST = 64
_MOST_SHORT_LISTS = 16
"""Number of lists that a line may have, in addition to one list per `_BYTES_PER_LIST` bytes. The
additional lists are for a small confusion matrix, which has short lists."""
_MOST_READ_BYTES = 2**24
_MAX_INTEGER = 2**63
_MOST_SECONDS = 1e9
_MOST_EXPONENT = 700.0
"""Limit on an exponent: the exponential of a larger number is infinite."""

TimedPart = Literal["data", "forward", "backward", "wait", "checkpoint"]
TIMED_PARTS: tuple[TimedPart, ...] = typing.get_args(TimedPart)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Mean seconds per step in each part, one entry per rank."""

    steps: int = checked(low=1)
    """Number of steps over which the times are averaged. The last of these steps is the row's
    step."""
    data: tuple[float, ...] = checked(low=0, high=_MOST_SECONDS)
    """Time for reading and collating samples."""
    forward: tuple[float, ...] = checked(low=0, high=_MOST_SECONDS)
    """Time for the forward pass, without waiting for other ranks. `backward` is the same for the
    backward pass."""
    backward: tuple[float, ...] = checked(low=0, high=_MOST_SECONDS)
    wait: tuple[float, ...] = checked(low=0, high=_MOST_SECONDS)
    """Time spent waiting for other ranks: for gradients, weights, or the decision to stop."""
    checkpoint: tuple[float, ...] = checked(low=0, high=_MOST_SECONDS)
    """Time for the snapshot of a checkpoint, or for waiting until the previous checkpoint is
    written."""

    def work(self) -> tuple[float, ...]:
        """Return each rank's own work per step in seconds: data, forward and backward."""
        parts = zip(self.data, self.forward, self.backward, strict=True)
        return tuple(map(sum, parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One step: a line of metrics.jsonl."""

    step: int = checked(low=0, high=_MAX_INTEGER)
    tokens: int = checked(low=1, high=_MAX_INTEGER)
    """Number of training tokens so far, including this step."""
    loss: float
    lr: float
    grad_norm: float
    step_time_s: float = checked(low=0, high=_MOST_SECONDS)
    tokens_per_s: float
    """Tokens per second of the whole job."""
    mfu: float | None
    """Model FLOP/s divided by the measured peak of these nodes; None if the peak is not
    plausible."""
    data_time_s: float
    sync_time_s: float
    """Time that rank 0 waited for gradients after its backward pass."""
    rss_bytes: int = checked(high=_MAX_INTEGER)
    time_unix: float = field(default_factory=time.time)
    """End of the step by rank 0's clock."""
    ranks: RankTimes | None = None
    """Times of all ranks; with many ranks, only some rows contain these times."""
    idle_experts: int | None = None
    """Number of experts, over all layers, that received no token in this step; None if the model
    has no experts."""

    def describe(self) -> str:
        """Return the text that the task adds to the log line of a step; empty by default."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalMetrics:
    """One evaluation: a line of metrics.jsonl."""

    step: int = checked(low=0, high=_MAX_INTEGER)
    val_loss: float
    val_tokens: int = checked(high=_MAX_INTEGER)
    time_unix: float = field(default_factory=time.time)
    """End of the evaluation by rank 0's clock."""

    def describe(self) -> str:
        """Return the result as one line of a log."""
        value = perplexity(self.val_loss)
        beside = "" if value is None else f", perplexity {value:,.2f}"
        return f"validation loss {self.val_loss:.4f}{beside} over {self.val_tokens:,} tokens"


def perplexity(loss: float) -> float | None:
    """Return the exponential of a mean loss per token; None if it is too large."""
    return math.exp(loss) if loss < _MOST_EXPONENT else None


def to_json_line(row: StepMetrics | EvalMetrics) -> str:
    """Return one line of metrics.jsonl with its newline. Raises ValueError for NaN or infinity."""
    values = asdict(row)
    for name in ("ranks", "idle_experts"):
        if values.get(name, 0) is None:
            del values[name]
    return json.dumps(values, allow_nan=False) + "\n"


def rank_times(row: Mapping[str, Any]) -> RankTimes | None:
    """Return the ranks' times in a row; None if they are absent or invalid."""
    try:
        times = build(RankTimes, row.get("ranks"), where="ranks")
    except ConfigError:
        return None
    lengths = {len(getattr(times, part)) for part in TIMED_PARTS}
    return times if len(lengths) == 1 and 0 not in lengths else None


def read_metrics(path: Path) -> list[Mapping[str, Any]]:
    """Return the valid rows of a metrics.jsonl; empty if the file does not exist.

    From a very long file, only the last million rows within the last 256 MiB are returned.
    """
    return list(deque(stream_metrics(path, newest=True), maxlen=_HELD_ROWS))


def stream_metrics(path: Path, *, newest: bool = False) -> Iterator[Mapping[str, Any]]:
    """Yield the valid rows of a metrics.jsonl; with `newest`, only rows in the last 256 MiB."""
    with suppress(OSError):
        yield from (row for _, row in read_lines(path, newest=newest) if row is not None)


def read_val_losses(path: Path) -> dict[int, float]:
    """Return the validation loss of each evaluated step in a metrics.jsonl."""
    return {row["step"]: row["val_loss"] for row in stream_metrics(path) if "val_loss" in row}


def is_better_than_untrained(val_losses: Mapping[int, float]) -> bool | None:
    """Return True if a later step has a lower loss than step 0; None if either loss is missing.

    `val_losses` maps steps to validation losses.
    """
    untrained = val_losses.get(0)
    later = [value for step, value in val_losses.items() if step > 0]
    return min(later) < untrained if untrained is not None and later else None


def untrained_is_best(val_losses: Mapping[int, float]) -> str | None:
    """Return a line with a remedy if no step of a run is better than step 0; otherwise None.

    `val_losses` maps steps to validation losses.
    """
    if is_better_than_untrained(val_losses) is not False:
        return None
    return (
        f"no checkpoint is better than the untrained model ({val_losses[0]:.4f} at step 0). Lower "
        "optimizer.lr, train fewer epochs, or use more data"
    )


def read_lines(
    path: Path, *, newest: bool = False
) -> Iterator[tuple[bytes, Mapping[str, Any] | None]]:
    """Yield each complete line with its row, or with None for a damaged line.

    An incomplete last line is left out. With `newest`, only lines in the last 256 MiB are yielded.
    Raises OSError.
    """
    with open_regular(path) as file:
        left, rows = MOST_BYTES, _MAX_ROWS
        before = os.fstat(file.fileno()).st_size - _HELD_BYTES
        if newest and before > 0:
            file.seek(before - 1)
            file.readline(_MAX_LINE_BYTES)  # skips to the end of the line
            left = rows = _HELD_BYTES
        while left > 0 and rows > 0 and (line := file.readline(_MAX_LINE_BYTES)):
            left, rows = left - len(line), rows - 1
            if line.endswith(b"\n"):
                yield line, parse_row(line)
            elif len(line) == _MAX_LINE_BYTES:
                yield line, None
        if left <= 0 or rows <= 0:
            yield b"", None


def parse_row(line: bytes) -> Mapping[str, Any] | None:
    """Return the row in a line of metrics.jsonl; None for an invalid row."""
    # Checked before parsing: parsing a line of empty lists takes twenty times its length in memory.
    lists = line.count(b"[") + line.count(b"{")
    if lists > _MOST_SHORT_LISTS + len(line) // _BYTES_PER_LIST or line.count(b":") > _MOST_NAMES:
        return None
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    # A row of both kinds would be read as a step, but only checked as an evaluation.
    if not isinstance(row, dict) or ("loss" in row) == ("val_loss" in row):
        return None
    try:
        for key, each in _required(EvalMetrics if "val_loss" in row else StepMetrics).items():
            each.read(row[key])
    except (KeyError, RefusedError):
        return None
    return row


class MetricsTail:
    """Reads the new rows of a metrics.jsonl as it grows.

    A resumed run replaces the file with a file that ends at the checkpoint. The new file is read
    from the start.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        """With `from_end`, skip the rows that the file has now."""
        self._path = path
        self._inode, self._offset = _identity(path) if from_end else (0, 0)

    def new_rows(self) -> list[Mapping[str, Any]]:
        """Return the valid rows since the last call, at most 16 MiB; the next call continues."""
        try:
            with open_regular(self._path) as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset = found.st_ino, 0
                file.seek(self._offset)
                content = file.read(_MOST_READ_BYTES)
        except OSError:
            return []
        whole, end, _ = content.rpartition(b"\n")
        self._offset += len(whole) + len(end)
        return [row for line in whole.splitlines() if (row := parse_row(line)) is not None]


def _identity(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_size


def missing_steps(steps: Iterable[int], *, trained: int) -> tuple[tuple[int, int], ...]:
    """Return the first and last step of each gap in `steps`, up to step `trained`."""
    present = sorted({step for step in steps if step <= trained})
    pairs = zip([0, *present], [*present, trained + 1], strict=True)
    return tuple((before + 1, after - 1) for before, after in pairs if after - before > 1)


def describe_missing(missing: Iterable[tuple[int, int]]) -> str:
    """Return the ranges as text, such as `3, 12 to 20`."""
    return ", ".join(
        f"{first}" if first == last else f"{first} to {last}" for first, last in missing
    )


@cache
def _required(kind: type) -> Mapping[str, DeclaredField]:
    """Return the required fields of a row; rows of older versions have no time."""
    return {key: each for key, each in fields_of(kind).items() if each.is_required}
