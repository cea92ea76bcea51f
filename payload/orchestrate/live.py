"""The live line: where the run is now, below everything that rank 0 says."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_PLAIN_EVERY_S = 10.0
# Steps whose median time the ETA goes by.
_RECENT = 20


class LiveLine:
    """Step, loss, tokens/s, MFU and ETA: redrawn on a terminal, elsewhere a line now and then."""

    def __init__(self, console: Console, *, steps: int, nodes: int) -> None:
        self._console = console
        self._steps = steps
        self._nodes = nodes
        self._cost_usd: float | None = None
        self._step_times: deque[float] = deque(maxlen=_RECENT)
        self._last_plain_s = time.monotonic()
        self._news: str | None = None
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[numbers]}"),
                console=console,
                transient=True,
            )
            self._task = self._progress.add_task("starting", total=steps, numbers="")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, line: str) -> None:
        """Print a line above."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def news(self, text: str) -> None:
        """Print a line above, unless it is the last one of its kind."""
        if text != self._news:
            self._news = text
            self.say(text)

    def status(self, word: str) -> None:
        """What the run as a whole is doing."""
        if self._progress is not None:
            self._progress.update(self._task, description=word)

    def cost(self, usd: float | None) -> None:
        """What the run has cost so far, from the next step on."""
        self._cost_usd = usd

    def step(self, row: Mapping[str, Any]) -> None:
        """A step was finished; `row` is its line of metrics.jsonl."""
        self._step_times.append(row["step_time_s"])
        left_s = (self._steps - row["step"]) * statistics.median(self._step_times)
        numbers = describe_step(
            row,
            steps=self._steps,
            left_s=left_s,
            nodes=self._nodes,
            cost_usd=self._cost_usd,
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=row["step"], numbers=numbers)
        elif time.monotonic() - self._last_plain_s >= _PLAIN_EVERY_S:
            self._last_plain_s = time.monotonic()
            self.say(numbers)


def describe_step(
    row: Mapping[str, Any], *, steps: int, left_s: float, nodes: int, cost_usd: float | None
) -> str:
    """The live line's numbers as text."""
    parts = [
        f"{nodes} node{'s' if nodes > 1 else ''}",
        f"step {row['step']}/{steps}",
        f"loss {row['loss']:.4f}",
        f"{row['tokens_per_s']:,.0f} tokens/s",
    ]
    if row["mfu"] is not None:
        parts.append(f"MFU {row['mfu']:.1%}")
    if cost_usd is not None:
        parts.append(f"${cost_usd:.2f} (${cost_usd / row['tokens'] * 1e6:.2f} per million tokens)")
    return "  ".join([*parts, f"ETA {duration(left_s)}"])


def duration(seconds: float) -> str:
    """`0:42`, `12:05` or `3:20:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
