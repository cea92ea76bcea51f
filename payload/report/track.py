"""Sends the rows of a run to its trackers, during the run and after it."""

from __future__ import annotations

import fcntl
import json
import os
import select
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from payload.config.run_config import RunConfig
from payload.core.errors import ConfigError
from payload.core.files import write_whole
from payload.core.printable_text import one_line
from payload.core.regular_files import open_regular, read_bytes
from payload.core.suggested_commands import command
from payload.core.symlink_safety import links_out, no_follow
from payload.report.source import Run
from payload.report.trackers.base import About, Row, Tracker
from payload.report.trackers.registry import make_tracker
from payload.run_record.approved_settings import (
    SENDING_TRACKERS,
    settings_to_approve,
    unapproved_settings,
)
from payload.run_record.metrics_log import parse_row
from payload.run_record.tracker_process import installed_trackers

_EVERY_S = 5.0
_LOCK_S = 20.0


@dataclass
class Tracked:
    """One tracker, and the position up to which rows were sent to it."""

    name: str
    tracker: Tracker
    last: int
    """Position of the last row that was sent, as returned by `_order`."""
    place: Path
    """The file that stores `last` for the next process."""

    def start(self, about: About) -> None:
        """Open the tracker's run."""
        self.tracker.start(about)

    def end(self, summary: Mapping[str, Any], report: Path | None) -> None:
        """Close the tracker's run."""
        self.tracker.end(summary, report)

    def log(self, rows: Sequence[Row]) -> None:
        """Send the rows after `last`."""
        new = [row for row in rows if _order(row) > self.last]
        if new:
            self.tracker.log(new)
            self.last = max(map(_order, new))
            if not self.tracker.starts_over:
                write_whole(self.place, f"{self.last}\n", durable=False)


def track(run: Run, *, live: bool, say: Callable[[str], None], named: Collection[str] = ()) -> None:
    """Send all rows of the run to its trackers.

    With `live`, new rows are sent until stdin is closed. Otherwise the run has ended, and its
    results and report page are also sent. A failure is logged and disables only that tracker.
    Trackers that can upload the run are left out, except trackers that this user approved in
    `named` or at the start of the run. Raises ConfigError, for example if all trackers of an ended
    run are left out.
    """
    installed = installed_trackers(run.config.track.to)
    names = _allowed(run, installed, named=named, say=say)
    if installed and not names and not live:
        raise ConfigError(f"run {run.run_id} was not sent to any tracker. See the notes above.")
    for link in links_out(run.paths.track, home=run.paths.root):
        raise ConfigError(
            f"{link} is a link that leads out of the run's folder: trackers do not follow it. Move "
            "the link away."
        )
    with _alone(run.paths.track):
        tracked = list(_start(run, names, say))
        rows = _Rows(run.paths.metrics)
        while tracked:
            new = rows.new()
            tracked = [
                each for each in tracked if _guarded(each, partial(Tracked.log, rows=new), say)
            ]
            if not live or select.select([0], [], [], _EVERY_S)[0]:
                break
        summary = {} if live else _plain(run.summary)
        # If the page were a symlink, trackers could upload any file.
        has_page = run.paths.report.is_file() and not run.paths.report.is_symlink()
        page = run.paths.report if not live and has_page else None
        for each in tracked:
            _guarded(each, partial(Tracked.end, summary=summary, report=page), say)


def flat_config(config: RunConfig) -> dict[str, Any]:
    """Return all settings by `section.key`."""
    return {
        f"{section}.{key}": list(value) if isinstance(value, tuple) else value
        for section, values in asdict(config).items()
        for key, value in values.items()
    }


def _allowed(
    run: Run, names: Sequence[str], *, named: Collection[str], say: Callable[[str], None]
) -> list[str]:
    """Return the trackers that are approved or upload nothing; report the others with `say`."""
    is_named = not unapproved_settings(run.paths, settings_to_approve(run.config, of=["track.to"]))
    allowed = [name for name in names if is_named or name in named or name not in SENDING_TRACKERS]
    for name in names:
        if name not in allowed:
            say(
                f"note: the run was not sent to {name}, which is not enabled for this run on this "
                "machine. To send it: "
                + command("report", str(run.paths.root), "--track", "--to", name)
            )
    return allowed


def _start(run: Run, names: Sequence[str], say: Callable[[str], None]) -> Iterator[Tracked]:
    for name in names:
        place = run.paths.track / f"{name}.last"
        made = Tracked(name=name, tracker=make_tracker(name), last=-1, place=place)
        about = About(
            run_id=run.run_id,
            name=run.config.run.name,
            folder=run.paths.track / name,
            config=flat_config(run.config),
        )
        if not made.tracker.starts_over:
            with suppress(OSError, ValueError):
                made.last = int(read_bytes(place))
        if _guarded(made, partial(Tracked.start, about=about), say):
            yield made


def _guarded(each: Tracked, act: Callable[[Tracked], None], say: Callable[[str], None]) -> bool:
    """Return True if `act` succeeded; log any error of the tracker's package."""
    try:
        act(each)
    except Exception as error:
        say(
            f"note: track.to: {each.name} failed; the run continues without this tracker: "
            f"{one_line(error)}"
        )
        return False
    return True


class _Rows:
    """Reads the numbers from new complete rows of a metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[Row]:
        found: list[Row] = []
        with suppress(OSError), open_regular(self._path) as file:
            if file.seek(0, os.SEEK_END) < self._offset:
                self._offset = 0  # A resume truncated the file; step numbers show new rows.
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                row = parse_row(line)
                if row is not None:
                    found.append(_numbers(row))
        return found


def _order(row: Row) -> int:
    """Return the position of a row in the run; an evaluation comes after its step."""
    return 2 * int(row["step"]) + ("val_loss" in row)


def _numbers(row: Mapping[str, Any]) -> Row:
    numbers = {
        name: value
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {"time_unix": 0.0, **numbers}


def _plain(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary with JSON types only."""
    found: dict[str, Any] = json.loads(json.dumps(summary, default=lambda value: asdict(value)))
    return found


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Prevent other processes from sending this run within the block; wait for them up to 20 s."""
    folder.mkdir(exist_ok=True)
    with open(folder / ".lock", "w", opener=no_follow) as lock:
        ends = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.1)
        yield
