"""Writes the output of commands: safe text, questions to the operator, and the live line.

Text from other machines cannot control the terminal or end a run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from payload.config.training_sections import TrainSection
from payload.core.durations import as_clock
from payload.core.errors import UsageError
from payload.core.one_line import printable_line
from payload.core.printable_text import printable
from payload.orchestrate.terminal.narrow import fitted_log_line, fitted_message
from payload.orchestrate.terminal.time_left import Eta
from payload.run_record.checkpoint_grace import START_PHASES
from payload.run_record.run_files import RankProgress

_PIPE_WIDTH = 200


class TextConsole(Console):
    """A console for plain text and tables, without markup, emoji codes or highlighting.

    Escape sequences and control characters are removed, also from table cells: most text comes
    from nodes, logs and run folders.
    """

    def __init__(self, *, stderr: bool) -> None:
        self._output = _Output(sys.stderr if stderr else sys.stdout)
        super().__init__(
            file=cast(TextIO, self._output),
            markup=False,
            emoji=False,
            highlight=False,
            soft_wrap=True,
        )
        if not self.is_terminal:
            self.width = _PIPE_WIDTH

    @property
    def is_closed(self) -> bool:
        """Return True if the reader is gone: `head` has ended, or the terminal was closed."""
        return self._output.is_closed

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text without control sequences."""
        return super().render_str(printable(text), **options)


class _Output:
    """A standard stream that drops failed writes: a lost reader must not end a run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text, or drop it after an error."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            return self._stream.write(text.encode(encoding, "replace").decode(encoding))
        except OSError:
            self._close()
            return len(text)

    def flush(self) -> None:
        """Flush the stream; ignore errors."""
        try:
            self._stream.flush()
        except OSError:
            self._close()

    def _close(self) -> None:
        """Redirect the stream to /dev/null, so that Python prints no error at its exit."""
        self.is_closed = True
        with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())


def text_console(*, stderr: bool) -> TextConsole:
    """Return the console for results (stdout) or for messages (stderr)."""
    return TextConsole(stderr=stderr)


def confirm(question: str, *, assume_yes: bool) -> bool:
    """Return True if the operator confirms. Raises UsageError without an answer."""
    if assume_yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"{question} No terminal for an answer: repeat with --yes.")
    answer = _answer(f"{question} [y/N] ")
    if answer is None:
        raise UsageError(f"{question} The input ended without an answer: repeat with --yes.")
    return answer.lower() in ("y", "yes")


def confirm_by_name(
    question: str,
    *,
    name: str,
    otherwise: str = "Answer this question at a terminal; --yes does not answer it.",
) -> bool:
    """Return True if the operator types `name`; --yes does not suffice.

    Without an answer, raises UsageError with the alternative `otherwise`.
    """
    answer = _answer(f"{question} Type {name} to continue: ") if sys.stdin.isatty() else None
    if answer is None:
        raise UsageError(f"{question} {otherwise}")
    return answer == name


def _answer(prompt: str) -> str | None:
    """Return the operator's line; None at the end of the input (Ctrl-D)."""
    talk = text_console(stderr=True)
    talk.print(prompt, end="")
    line = sys.stdin.readline()
    if not line:
        talk.print()
        return None
    return line.strip()


_REDRAWS_PER_S = 4
# If there is no terminal, print a status line after this time without output.
_PLAIN_EVERY_S = 30.0
_BAR_CELLS = 24
_ERROR_PREFIX = "error: "
_WRAPPED_PREFIXES = (_ERROR_PREFIX, "note: ", "warning: ")
# Parts of the line from this priority on are left out before other parts are shortened.
_OPTIONAL = 6
_PHASE_NAMES = {
    "load": "loading",
    "calibration": "calibrating",
    "start": "preparing",
    "kernels": "building kernels",
    "weights": "sharing weights",
    "eval": "evaluating",
    "sync check": "checking ranks",
    "checkpoint": "saving",
    "end": "ending",
}


class LiveLine:
    """Shows phase, step, micro-step, elapsed time, ETA, loss and speed in one line of any width.

    On a terminal, the line is redrawn several times a second; otherwise, it is printed every 30 s.
    """

    def __init__(self, console: Console, *, train: TrainSection, nodes: int) -> None:
        self._console = console
        self._eta = Eta(train)
        self._view = View(steps=train.steps, nodes=nodes)
        self._began_s = self._printed_s = time.monotonic()
        self._last_message: str | None = None
        self._held_error = ""
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(
                console=console,
                get_renderable=self._draw,
                refresh_per_second=_REDRAWS_PER_S,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        """Print a line above the live line; line breaks in it become spaces."""
        self._printed_s = time.monotonic()
        text = printable_line(line)
        is_message = text.startswith(_WRAPPED_PREFIXES)
        for part in fitted_message(self._console, text) if is_message else [text]:
            self._console.print(part)

    def log(self, line: str) -> None:
        """Print a line of rank 0's log; print an error line only when the next line arrives.

        The error with which the run ends may repeat that line: see `print_held_error`.
        """
        self.print_held_error()
        if line.startswith(_ERROR_PREFIX):
            self._held_error = line
        elif self._console.is_terminal:
            for part in fitted_log_line(printable_line(line), width=self._console.width):
                self.say(part)
        else:
            self.say(line)

    def print_held_error(self, *, unless: str = "") -> None:
        """Print rank 0's held error, if the text `unless` does not contain the error."""
        kept, self._held_error = self._held_error, ""
        if kept and kept.removeprefix(_ERROR_PREFIX) not in unless:
            self.say(kept)

    def news(self, text: str) -> None:
        """Print a line above the live line. A repetition of the previous message is not printed."""
        if text != self._last_message:
            self._last_message = text
            self.say(text)

    def status(self, state: str) -> None:
        """Show the state of the run; without a terminal, also print a status line when due."""
        self._view = replace(self._view, status=state)
        if self._live is None and time.monotonic() - self._printed_s >= _PLAIN_EVERY_S:
            self.say(self._now().line(self._console.width))

    def cost(self, usd: float | None) -> None:
        """Show what the run has cost so far."""
        self._view = replace(self._view, cost_usd=usd)

    @property
    def has_stepped(self) -> bool:
        """Return True if a finished step has been shown."""
        return self._view.row is not None

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a finished step; `row` is the step's line of metrics.jsonl."""
        self._eta.step(row)
        self._view = replace(self._view, row=row)

    def progress(self, progress: RankProgress | None) -> None:
        """Show rank 0's last heartbeat; None before the first heartbeat."""
        if progress is not None:
            self._eta.progress(progress)
            if progress.phase in START_PHASES:
                # Restarted ranks resume from their checkpoint, not from the last shown step.
                self._view = replace(self._view, row=None)
        self._view = replace(self._view, progress=progress)

    def _now(self) -> View:
        return replace(
            self._view,
            elapsed_s=time.monotonic() - self._began_s,
            left_s=self._eta.left_s(),
        )

    def _draw(self) -> Text:
        # The last column stays free: some terminals wrap as soon as it is written.
        line = self._now().line(self._console.width - 1)
        return Text(line, no_wrap=True, overflow="crop", end="")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the live line."""

    priority: int
    """Priority of the part; 0 is the highest."""
    forms: Sequence[str]
    """Texts from long to short; empty if the part is hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Content of the live line at one moment."""

    steps: int
    nodes: int
    status: str = "starting"
    progress: RankProgress | None = None
    row: Mapping[str, Any] | None = None
    """Metrics of the last finished step."""
    elapsed_s: float = 0.0
    left_s: float | None = None
    cost_usd: float | None = None

    def line(self, width: int) -> str:
        """Return the line in at most `width` cells, with shortened or fewer parts if needed."""
        parts = [
            Part(0, self._activity()),
            Part(3, self._micro_step()),
            Part(6, self._bar()),
            Part(4, self._number("loss", "loss {:.4f}")),
            Part(5, self._number("tokens_per_s", "{:,.0f} tokens/s")),
            Part(7, self._number("mfu", "MFU {:.1%}")),
            Part(8, self._cost()),
            Part(9, (f"{self.nodes} nodes",) if self.nodes > 1 else ()),
            Part(1, (f"{as_clock(self.elapsed_s)} elapsed", as_clock(self.elapsed_s))),
            Part(2, self._eta()),
        ]
        return _fit(parts, width)

    def _activity(self) -> tuple[str, ...]:
        progress = self.progress
        done = int(self.row["step"]) if self.row else 0
        doing = f"step {done}/{self.steps}" if done else "starting ranks"
        if progress is not None:
            done = max(progress.step, done)
            if progress.phase == "step":
                doing = f"step {min(done + 1, self.steps)}/{self.steps}"
            else:
                doing = _PHASE_NAMES.get(progress.phase, progress.phase)
                doing += f", step {done}/{self.steps}" if done else ""
        if self.status == "stopping":
            return (f"stopping: {doing}", "stopping")
        return (doing, doing.partition(",")[0])

    def _micro_step(self) -> tuple[str, ...]:
        progress = self.progress
        if progress is None or progress.micro_step is None or (progress.micro_steps or 0) < 2:
            return ()
        counted = f"{progress.micro_step}/{progress.micro_steps}"
        unit = "batch" if progress.phase == "eval" else "micro-step"
        return (f"{unit} {counted}", f"({counted})")

    def _eta(self) -> tuple[str, ...]:
        if self.left_s is None or self.status == "stopping":
            return ()
        return (f"ETA {as_clock(self.left_s)}",)

    def _bar(self) -> tuple[str, ...]:
        if self.row is None:
            return ()
        full = round(_BAR_CELLS * min(1.0, self.row["step"] / self.steps))
        return ("[" + "#" * full + "-" * (_BAR_CELLS - full) + "]",)

    def _number(self, key: str, form: str) -> tuple[str, ...]:
        value = None if self.row is None else self.row.get(key)
        return () if value is None else (form.format(value),)

    def _cost(self) -> tuple[str, ...]:
        if self.cost_usd is None:
            return ()
        spent = f"${self.cost_usd:.2f}"
        if self.row is None or not self.row["tokens"]:
            return (spent,)
        return (f"{spent} (${self.cost_usd / self.row['tokens'] * 1e6:.2f} per M tokens)", spent)


def _fit(parts: Sequence[Part], width: int) -> str:
    """Join one form of each part to a line of at most `width` cells.

    If the line is too long, optional parts are dropped first, then parts are shortened, and then
    more parts are dropped.
    """
    form = {part.priority: 0 for part in parts}
    by_importance = sorted(parts, key=lambda part: -part.priority)
    moves = [(part, len(part.forms)) for part in by_importance if part.priority >= _OPTIONAL]
    moves += [(part, len(part.forms) - 1) for part in by_importance if part.forms]
    moves += [(part, len(part.forms)) for part in by_importance if part.priority]
    line = ""
    for part, target in [(parts[0], 0), *moves]:
        form[part.priority] = max(form[part.priority], target)
        chosen = (each.forms[form[each.priority] :][:1] for each in parts)
        line = "  ".join(text for texts in chosen for text in texts)
        if len(line) <= width:
            break
    return line[: max(0, width)]
