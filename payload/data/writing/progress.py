"""Shows the progress of a prepare run: a bar on a terminal, otherwise lines at intervals."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from payload.core.durations import in_words
from payload.core.printable_text import printable
from payload.core.wrapped_lines import fitted
from payload.data.sources.documents import MIB, Survey
from payload.data.writing.resumable_token_files import Totals

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY_S = 10.0


class Reporter:
    """Prints messages and progress on stderr."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._survey = Survey(documents=None, text_bytes=None)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._started_s = self._last_line_s = 0.0
        self._bytes_before = 0
        self._share_before = 0.0
        self.worked_s = 0.0
        """Seconds from `start` to `stop`."""

    def log(self, line: str) -> None:
        """Print one line. If a progress bar is shown, the line appears above the bar."""
        if self._quiet:
            return
        line = fitted(printable(line), sys.stderr)
        if self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    def start(self, survey: Survey, before: Totals) -> None:
        """Start the progress display. `before` has the totals that an interrupted run reached."""
        self._survey = survey
        self._bytes_before, self._share_before = before.text_bytes, self._share(before) or 0.0
        self._started_s = self._last_line_s = time.monotonic()
        if sys.stderr.isatty() and not self._quiet:
            self._progress, self._task = _make_bar()
            self._progress.start()

    def update(self, totals: Totals) -> None:
        """Show the current progress."""
        if self._progress is not None and self._task is not None:
            share = self._share(totals)
            self._progress.update(
                self._task,
                completed=share or 0.0,
                total=None if share is None else 1.0,
                status=self._status(totals),
            )
        elif time.monotonic() - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            share = self._share(totals)
            percent = "" if share is None else f"{share:.1%}, "
            self.log(f"preparing: {percent}{self._status(totals)}")

    def stop(self) -> None:
        """Stop the progress display."""
        self.worked_s = time.monotonic() - self._started_s
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _share(self, totals: Totals) -> float | None:
        """Return the finished fraction of the source, or None if the source's size is unknown."""
        survey = self._survey
        if survey.text_bytes and (survey.bytes_are_exact or survey.documents is None):
            return min(1.0, totals.text_bytes / survey.text_bytes)
        if survey.documents:
            return min(1.0, (totals.documents + totals.skipped_documents) / survey.documents)
        return None

    def _status(self, totals: Totals) -> str:
        elapsed_s = max(1e-3, time.monotonic() - self._started_s)
        rate = (totals.text_bytes - self._bytes_before) / elapsed_s / 1e6
        parts = [
            f"{rate:.0f} MB/s",
            f"{totals.tokens:,} tokens",
            f"{totals.documents:,} documents",
        ]
        share = self._share(totals)
        if share is not None and share > self._share_before:
            left_s = elapsed_s * (1.0 - share) / (share - self._share_before)
            parts.append(f"{in_words(round(left_s))} left")
        return ", ".join(parts)


def format_bytes(count: float) -> str:
    """Return a size as text, as in `1.5 GiB`."""
    if count < MIB:
        return f"{count / 1024:.1f} KiB"
    if count < 1024 * MIB:
        return f"{count / MIB:.1f} MiB"
    return f"{count / MIB / 1024:.1f} GiB"


def _make_bar() -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    progress = Progress(
        TextColumn("preparing"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[status]}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )
    return progress, progress.add_task("preparing", total=1.0, status="")
