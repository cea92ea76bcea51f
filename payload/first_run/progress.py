"""Shows that long work is in progress: a spinner with the time, or one line in a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Reporter:
    """Reports the stages of the command on stderr."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, line: str) -> None:
        """Print a line."""
        self._console.print(line)

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Show `what` and the elapsed time while the context is entered."""
        if not self._console.is_terminal:
            self._console.print(f"{what} ...")
            yield
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as bar:
            task = bar.add_task(what, total=1)
            yield
            bar.update(task, completed=1)
