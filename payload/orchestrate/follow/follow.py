"""Follows one run until it ends, stops it on request, and prints its result."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console

from payload.config.training_sections import TrainSection
from payload.core.errors import INTERRUPTED, ConfigError, ExitCode, TileforgeError
from payload.core.interrupts import Interrupts
from payload.core.one_line import printable_line
from payload.core.printable_text import printable
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build
from payload.orchestrate.follow.run_text import failure_lines, result_lines, straggler_line
from payload.orchestrate.runs.site import SiteRun, how_to_attach
from payload.orchestrate.terminal.console import LiveLine, text_console
from payload.orchestrate.terminal.narrow import print_message
from payload.run_record.approved_settings import bounded_wait_s
from payload.run_record.checkpoint_grace import CheckpointWatch
from payload.run_record.metrics_log import StepMetrics, read_val_losses, untrained_is_best
from payload.run_record.report_and_samples_process import write_report
from payload.run_record.run_files import (
    DEFAULT_GRACE_S,
    NAMES,
    RankProgress,
    RunJob,
    RunPaths,
    RunState,
    StopRequest,
    Summary,
    last_record,
    point_latest_at,
    read_json,
    to_json,
)
from payload.run_record.run_lock import FORCE_SIGNAL
from payload.run_record.run_repair import known_config, known_state
from payload.run_record.stragglers import StragglerNews, by_rank
from payload.run_record.suggested_run_commands import run_command
from payload.run_record.tracker_process import send_to_trackers, tracked


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOptions:
    """Options for the end of a run that a command has followed."""

    json: bool = False
    """Print summary.json instead of the table."""
    open: bool = False
    """Show the report in the browser."""
    inventory: str | None = None
    """The value of `--inventory`, for the command that resumes the run."""


def print_result(
    paths: RunPaths, *, summary: Summary, state: RunState, options: EndOptions, talk: Console
) -> None:
    """Print a run's result, the command that resumes an unfinished run, and its report's path."""
    checkpoint = paths.newest_checkpoint()
    out = text_console(stderr=False)
    if options.json:
        out.print(to_json(summary), end="")
    else:
        out.print("\n".join(result_lines(summary, checkpoint=checkpoint, width=out.width)))
    if warning := untrained_is_best(read_val_losses(paths.metrics)):
        print_message(talk, f"note: {warning}")
    for slow in by_rank(summary.stragglers)[-_SHOWN_STRAGGLERS:]:
        print_message(talk, straggler_line(slow, paths))
    if summary.status == "failed":
        log = _log_with_cause(paths, state)
        error, *rest = failure_lines(summary.error or "failed", log=log)
        print_message(talk, error)
        talk.print("\n".join(rest))
    elif summary.error:
        print_message(talk, f"note: {printable_line(summary.error)}")
    if summary.status != "finished" and checkpoint is not None:
        more = ["--inventory", options.inventory] if options.inventory else []
        job = last_record(RunJob, paths.job)
        more = ["--site", job.site] if job is not None else more
        talk.print(f"continue with: {run_command('run --resume', paths, *more)}")
    problem = write_report(paths, show=options.open)
    for note in send_to_trackers(paths, known_config(paths)):
        print_message(talk, note)
    print_message(
        talk, f"note: no report was written: {problem}" if problem else f"report: {paths.report}"
    )


_SHOWN_STRAGGLERS = 5


def _log_with_cause(paths: RunPaths, state: RunState) -> Path:
    """Return the path of the log that shows the cause; an error of all ranks is in every log."""
    if state.failed_rank is not None:
        return paths.rank_log(state.failed_rank)
    is_of_all = state.exit_class in (ExitCode.TRAINING.label, ExitCode.CONFIG.label)
    return paths.rank_log(0) if is_of_all else paths.launcher_log


# Additional time for the supervisor to kill the ranks after its timeout, and to record that.
_MARGIN_S = 20.0


class StopWait:
    """Timeout for the end of a run after a stop request: the supervisor's timeout plus a margin."""

    def __init__(self, paths: RunPaths, request: StopRequest) -> None:
        """Start the timer at the time of the stop request."""
        grace_s = _grace_s(paths) if request.grace_s is None else request.grace_s
        config = known_config(paths)
        self._paths = paths
        stall_s = bounded_wait_s(paths, config, "limits.hang_timeout_s")
        final_wait_s = bounded_wait_s(paths, config, "storage.final_wait_s")
        self._watch = CheckpointWatch(paths, stall_timeout_s=stall_s)
        has_store = config.storage.address() is not None
        self._final_wait_s = final_wait_s if has_store else 0.0
        self._began_s = time.monotonic()
        self._ends_s = self._began_s + grace_s + _MARGIN_S

    def is_over(self) -> bool:
        """Return whether the timeout is over; call this often, so that progress is detected."""
        now = time.monotonic()
        if self._watch.is_progressing():
            self._ends_s = max(self._ends_s, now + _MARGIN_S)
        if now > self._ends_s and self._final_wait_s and _has_ended(self._paths):
            # The supervisor only waits for the store.
            self._ends_s, self._final_wait_s = now + self._final_wait_s, 0.0
        return now > self._ends_s

    def waited_s(self) -> float:
        """Return the time since the stop was requested."""
        return time.monotonic() - self._began_s


def _has_ended(paths: RunPaths) -> bool:
    """Return whether the supervisor has recorded the run's end."""
    state = known_state(paths)
    return state is not None and state.exit_class is not None


def _grace_s(paths: RunPaths) -> float:
    state = known_state(paths)
    return state.grace_s if state else DEFAULT_GRACE_S


_TICK_S = 0.2
_END_BYTES = 256
_LINE_BYTES = 2**20
"""Limit on the length of a line in bytes. Real lines are shorter. The limit bounds the memory for a
file without line breaks."""
_SHOWN_STEPS = 100


class Tail:
    """Reads new complete lines of a file that a process appends to, replaces or truncates.

    The file is identified by its inode and by the last bytes that were read: an offset alone is
    ambiguous once a resumed run has truncated the file and written past the offset. Control
    characters are removed from lines.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._inode: tuple[int, int] | None = None
        self._offset = 0
        self._end = b""
        self._rest = b""
        if from_end:
            self._skip()

    def lines(self) -> Iterator[str]:
        """Yield the lines since the last call; a replaced file is read from the start.

        The file is read in parts, because it can be larger than the memory.
        """
        with _opened(self._path) as file:
            if file is None:
                return
            if not self._continues(file):
                self._offset, self._end, self._rest = 0, b"", b""
            self._inode = _inode(file)
            file.seek(self._offset)
            while content := file.read(_LINE_BYTES):
                self._offset += len(content)
                self._end = (self._end + content)[-_END_BYTES:]
                *whole, self._rest = (self._rest + content).split(b"\n")
                if len(self._rest) > _LINE_BYTES:
                    whole, self._rest = [*whole, self._rest], b""
                yield from map(_text, whole)

    def rest(self) -> str:
        """Return the last line if it has no line break."""
        return _text(self._rest)

    def _skip(self) -> None:
        with _opened(self._path) as file:
            if file is not None:
                self._inode = _inode(file)
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _END_BYTES))
                self._end = file.read(_END_BYTES)
                self._offset = file.tell()

    def _continues(self, file: BinaryIO) -> bool:
        """Return whether `file` still begins with the bytes that were read."""
        if self._inode not in (None, _inode(file)):
            return False
        # A freed inode's number may be reused for the next file immediately.
        file.seek(self._offset - len(self._end))
        return file.read(len(self._end)) == self._end


_PAUSE_TICK_S = 0.1
_CONFIRM_S = 3.0


class Tails:
    """Reads the lines added to rank 0's log and the metrics after this object was created."""

    def __init__(self, paths: RunPaths) -> None:
        self.log = Tail(paths.rank_log(0), from_end=True)
        self.metrics = Tail(paths.metrics, from_end=True)


def follow(run: SiteRun, *, options: EndOptions, talk: Console, tails: Tails | None = None) -> int:
    """Follow a run until it has ended, collect its results, and return its exit code.

    If the run outlives this command, the first Ctrl-C detaches, and the run continues. A second
    Ctrl-C soon after stops the run with a checkpoint, and a third stops it immediately. For other
    runs, the first Ctrl-C requests a stop with a checkpoint, the second an immediate stop. `tails`
    were created before the run was started.
    """
    paths = run.paths
    train = known_config(paths).train
    if not show(run, talk=talk, train=train, tails=tails or Tails(paths)):
        return INTERRUPTED
    try:
        is_alive = run.collect_results().alive
    except TileforgeError as error:
        # A head that is gone must not hide the run's result.
        talk.print(f"warning: {error}")
        is_alive = False
    if is_alive:
        talk.print(f"the run has ended and was started again; {how_to_attach(run.paths)}")
        return ExitCode.OK
    status = print_run_result(run, options=options, talk=talk)
    summary = last_record(Summary, paths.summary)
    unfinished = summary is None or summary.status != "finished"
    # After any stop, a script must not treat the run as finished.
    return INTERRUPTED if status == ExitCode.OK and unfinished else status


def show(run: SiteRun, *, talk: Console, train: TrainSection, tails: Tails) -> bool:
    """Show a run until it has ended; return False if the operator has detached."""
    paths = run.paths
    handled, is_latest, alive = 0, not run.outlives_us, True
    stale, news = read_progress(paths), StragglerNews()
    with (
        Interrupts() as interrupts,
        # Within `Interrupts`: Ctrl-C while the trackers end must not end this command.
        tracked(paths, known_config(paths)),
        LiveLine(talk, train=train, nodes=run.nodes) as live,
        run.followed(live.say),
    ):
        while alive:
            result = run.look(say=live.say, interrupted=partial(interrupts.exceed, handled))
            alive = result.alive
            for sentence in result.news:
                live.news(sentence)
            for line in tails.log.lines():
                live.log(line)
            show_stragglers(show_steps(tails.metrics, live), live, paths=paths, news=news)
            show_progress(paths, live, stale=stale)
            if live.has_stepped and not is_latest:
                is_latest = True
                with suppress(OSError):  # the link is a convenience
                    point_latest_at(paths)
            show_state(paths, live, stopping=handled > 0)
            _pause(interrupts, handled=handled, seconds=run.every_s if alive else 0.0)
            if interrupts.count > handled and alive:
                if handled == 0 and run.outlives_us and not _confirms_stop(interrupts, live):
                    live.say(f"detached; {how_to_attach(paths)}")
                    return False
                handled = ask_to_stop(run, live, handled=handled)
        if tails.log.rest():
            live.log(tails.log.rest())
        live.print_held_error(unless=final_error(paths))
    return True


def print_run_result(run: SiteRun, *, options: EndOptions, talk: Console) -> int:
    """Print how the run ended, as recorded in its local folder; return the run's exit code."""
    unrecorded = run.end_without_record()
    if unrecorded is not None:
        code, message = unrecorded
        talk.print(message)
        return code
    summary = read_json(Summary, run.paths.summary)
    state = read_json(RunState, run.paths.state)
    if summary is None or state is None or state.exit_class is None:
        talk.print(
            "error: the supervisor was killed, or the head restarted; see "
            f"{run.paths.supervisor_log}"
        )
        return ExitCode.RANK_LOST
    print_result(run.paths, summary=summary, state=state, options=options, talk=talk)
    if options.json and run.outlives_us:
        text_console(stderr=True).print(f"files: {run.paths.root}")
    known = {code.label: code for code in ExitCode}
    return known.get(state.exit_class, ExitCode.TRAINING)


def _pause(interrupts: Interrupts, *, handled: int, seconds: float) -> None:
    """Wait until the time is over or the operator requests an end."""
    ends = time.monotonic() + seconds
    while interrupts.count == handled and time.monotonic() < ends:
        time.sleep(_PAUSE_TICK_S)


def _confirms_stop(interrupts: Interrupts, live: LiveLine) -> bool:
    live.say(f"detaching; Ctrl-C again within {_CONFIRM_S:g} s stops the run with a checkpoint")
    _pause(interrupts, handled=1, seconds=_CONFIRM_S)
    return interrupts.count > 1


def ask_to_stop(run: SiteRun, live: LiveLine, *, handled: int) -> int:
    """Request a stop of the run; return the new number of handled requests."""
    if handled == 0:
        live.say("stopping: saving a checkpoint first (Ctrl-C again to stop immediately)")
        run.signal(signal.SIGTERM, StopRequest())
        return 2 if run.outlives_us else 1
    live.say("stopping immediately")
    run.signal(FORCE_SIGNAL, StopRequest())
    return handled + 1


def follow_log(tail: Tail, *, show: Callable[[str], None], alive: Callable[[], bool]) -> None:
    """Show a log's lines until the run has ended."""
    active = True
    while active:
        active = alive()
        for line in tail.lines():
            show(line)
        if active:
            time.sleep(_TICK_S)
    if tail.rest():
        show(tail.rest())


def show_steps(tail: Tail, live: LiveLine) -> list[Mapping[str, Any]]:
    """Show the newest steps of a metrics.jsonl and return them; other lines are skipped."""
    rows: list[Mapping[str, Any]] = []
    for line in deque(tail.lines(), maxlen=_SHOWN_STEPS):
        with suppress(ConfigError):
            raw = parse_json(line, where=NAMES.metrics.name)
            rows.append(asdict(build(StepMetrics, raw, where=NAMES.metrics.name)))
            live.step(rows[-1])
    return rows


def show_stragglers(
    rows: Iterable[Mapping[str, Any]], live: LiveLine, *, paths: RunPaths, news: StragglerNews
) -> None:
    """Report ranks that became slow or recovered in these steps."""
    for row in rows:
        for slow in news.add(row):
            live.say(straggler_line(slow, paths))


def read_progress(paths: RunPaths) -> RankProgress | None:
    """Return rank 0's last heartbeat; None if it is missing or unreadable."""
    try:
        return read_json(RankProgress, paths.rank_progress(0))
    except ConfigError:
        return None


def show_progress(paths: RunPaths, live: LiveLine, *, stale: RankProgress | None) -> None:
    """Show the activity of rank 0 if its heartbeat is newer than the start of this command."""
    progress = read_progress(paths)
    live.progress(None if progress == stale else progress)


def final_error(paths: RunPaths) -> str:
    """Return the error text that the run's result will show; empty if unknown."""
    try:
        state = read_json(RunState, paths.state)
    except ConfigError:
        return ""
    return (state.error or "") if state else ""


def show_state(paths: RunPaths, live: LiveLine, *, stopping: bool) -> None:
    """Show the state of the whole run, and the latest event."""
    try:
        state = read_json(RunState, paths.state)
    except ConfigError:
        state = None
    status = state.status if state else "starting"
    live.status("stopping" if stopping else status)
    live.cost(state.cost_usd if state else None)
    if state and state.note:
        live.news(state.note)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO | None]:
    """Open a regular file; yield None for other file types, because a pipe would block."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        yield None
        return
    with os.fdopen(descriptor, "rb") as file:
        yield file


def _inode(file: BinaryIO) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino


def _text(line: bytes) -> str:
    return printable(line.decode(errors="replace"))
