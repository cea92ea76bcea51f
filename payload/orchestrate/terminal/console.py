"""Output of commands: safe text, questions to the operator, and the live line.

Text that others wrote cannot steer the terminal or end a run.
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
from payload.core.printable_text import printable
from payload.orchestrate.terminal.time_left import Eta
from payload.run_record.checkpoint_grace import START_PHASES
from payload.run_record.run_files import RankProgress

_PIPE_WIDTH = 200


class TextConsole(Console):
    """A console for plain text and tables: no markup, no emoji codes, no colours by content.

    Escape sequences and control characters are removed, also from table cells: most of what is
    printed comes from nodes, logs and run folders.
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
        """Tell whether nobody reads any more: `head` has seen enough, or the terminal is gone."""
        return self._output.is_closed

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text without anything that a terminal would obey."""
        return super().render_str(printable(text), **options)


class _Output:
    """A standard stream that drops what it cannot write: a lost reader must not end a run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write as the stream does."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            return self._stream.write(text.encode(encoding, "replace").decode(encoding))
        except OSError:
            self._close()
            return len(text)

    def flush(self) -> None:
        """Flush as the stream does."""
        try:
            self._stream.flush()
        except OSError:
            self._close()

    def _close(self) -> None:
        """Send the rest nowhere; Python would complain at its own exit otherwise."""
        self.is_closed = True
        with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())


def text_console(*, stderr: bool) -> TextConsole:
    """Return the console for results (stdout) or for messages (stderr)."""
    return TextConsole(stderr=stderr)


def confirm(question: str, *, assume_yes: bool) -> bool:
    """Return whether the operator agrees. Raises UsageError where nobody can be asked."""
    if assume_yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"{question} Nobody is here to say yes: repeat with --yes.")
    return _answer(f"{question} [y/N] ").lower() in ("y", "yes")


def confirm_by_name(
    question: str,
    *,
    name: str,
    otherwise: str = "Only a person at a terminal can answer this, not --yes.",
) -> bool:
    """Return whether the operator types `name`, which --yes does not answer.

    Raises UsageError where nobody can be asked; `otherwise` says what else can be done.
    """
    if not sys.stdin.isatty():
        raise UsageError(f"{question} {otherwise}")
    return _answer(f"{question} Type {name} to go on: ") == name


def _answer(prompt: str) -> str:
    text_console(stderr=True).print(prompt, end="")
    return sys.stdin.readline().strip()


_REDRAWS_PER_S = 4
# Without a terminal: a line when nothing was printed for so long.
_PLAIN_EVERY_S = 30.0
_BAR_CELLS = 24
_LAST_WORDS = "error: "
# Parts of the line from this rank on are left out before any other is shortened.
_EXTRA = 6
_PHASES = {
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
    """Phase, step, micro-step, elapsed time, ETA, loss and speed in one line of any width.

    A terminal redraws it several times a second; elsewhere it is printed now and then.
    """

    def __init__(self, console: Console, *, train: TrainSection, nodes: int) -> None:
        self._console = console
        self._eta = Eta(train)
        self._view = View(steps=train.steps, nodes=nodes)
        self._began_s = self._printed_s = time.monotonic()
        self._news: str | None = None
        self._kept = ""
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
        """Print a line above."""
        self._printed_s = time.monotonic()
        self._console.print(line)

    def log(self, line: str) -> None:
        """Print a line of rank 0's log; its last words wait, as the run's error may repeat them."""
        self.say_kept()
        if line.startswith(_LAST_WORDS):
            self._kept = line
        else:
            self.say(line)

    def say_kept(self, *, unless: str = "") -> None:
        """Print rank 0's last words if they were kept back, but not when `unless` repeats them."""
        kept, self._kept = self._kept, ""
        if kept and kept.removeprefix(_LAST_WORDS) not in unless:
            self.say(kept)

    def news(self, text: str) -> None:
        """Print a line above, unless it is the last one of its kind."""
        if text != self._news:
            self._news = text
            self.say(text)

    def status(self, word: str) -> None:
        """Show what the run as a whole is doing; called often, it also prints the plain lines."""
        self._view = replace(self._view, status=word)
        if self._live is None and time.monotonic() - self._printed_s >= _PLAIN_EVERY_S:
            self.say(self._now().line(self._console.width))

    def cost(self, usd: float | None) -> None:
        """Show what the run has cost so far."""
        self._view = replace(self._view, cost_usd=usd)

    @property
    def has_stepped(self) -> bool:
        """Tell whether a finished step has been shown."""
        return self._view.row is not None

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a finished step; `row` is its line of metrics.jsonl."""
        self._eta.step(row)
        self._view = replace(self._view, row=row)

    def progress(self, progress: RankProgress | None) -> None:
        """Show rank 0's last heartbeat, or that there is none yet."""
        if progress is not None:
            self._eta.progress(progress)
            if progress.phase in START_PHASES:
                # Ranks that begin again go on from their checkpoint, not from the last step shown.
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

    rank: int
    """0 is the most important."""
    forms: Sequence[str]
    """From long to short; none when there is nothing to show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Content of the live line at one moment."""

    steps: int
    nodes: int
    status: str = "starting"
    progress: RankProgress | None = None
    row: Mapping[str, Any] | None = None
    """The last finished step's."""
    elapsed_s: float = 0.0
    left_s: float | None = None
    cost_usd: float | None = None

    def line(self, width: int) -> str:
        """Return what fits into `width` cells; what matters least is shortened and left out."""
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
                doing = _PHASES.get(progress.phase, progress.phase)
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
    """Join one form of each part: extras are left out first, then all shortened, then left out."""
    form = {part.rank: 0 for part in parts}
    by_importance = sorted(parts, key=lambda part: -part.rank)
    moves = [(part, len(part.forms)) for part in by_importance if part.rank >= _EXTRA]
    moves += [(part, len(part.forms) - 1) for part in by_importance if part.forms]
    moves += [(part, len(part.forms)) for part in by_importance if part.rank]
    line = ""
    for part, target in [(parts[0], 0), *moves]:
        form[part.rank] = max(form[part.rank], target)
        chosen = (each.forms[form[each.rank] :][:1] for each in parts)
        line = "  ".join(text for texts in chosen for text in texts)
        if len(line) <= width:
            break
    return line[: max(0, width)]
