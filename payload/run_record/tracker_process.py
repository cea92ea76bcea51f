"""CONTRACT: starts a separate process that sends a run to its trackers.

Trackers must not slow down a step or end a run. Their failures are reported as notes.
"""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from payload.config.launch_sections import AUTO_TRACKER
from payload.config.run_config import RunConfig
from payload.core.printable_text import one_line
from payload.run_record.report_and_samples_process import report_process
from payload.run_record.run_files import RunPaths

_END_S = 120.0
_LEAVE_S = 10.0


def wanted_trackers(to: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the requested trackers; `auto` selects trackio if it is installed."""
    auto = (AUTO_TRACKER,) if _is_installed(AUTO_TRACKER) else ()
    names = [name for each in to for name in (auto if each == "auto" else (each,))]
    return tuple(dict.fromkeys(names))


def installed_trackers(to: Sequence[str]) -> tuple[str, ...]:
    """Return the requested trackers that have installed packages."""
    return tuple(name for name in wanted_trackers(to) if _is_installed(name))


def missing_notes(config: RunConfig) -> list[str]:
    """Return a line for each tracker without its package."""
    missing = set(wanted_trackers(config.track.to)) - set(installed_trackers(config.track.to))
    return [
        f"note: track.to = {name}: its package is not installed, so the run continues without it. "
        f"Install it with: pip install {name}"
        for name in sorted(missing)
    ]


@contextmanager
def tracked(paths: RunPaths, config: RunConfig) -> Iterator[None]:
    """Send new rows of the run to its trackers within the block."""
    process = None
    if installed_trackers(config.track.to):
        with suppress(OSError):
            process = report_process([str(paths.root), "--track", "--live"], is_live=True)
    try:
        yield
    finally:
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def send_to_trackers(paths: RunPaths, config: RunConfig) -> list[str]:
    """Send an ended run to its trackers; return a note for each failure."""
    if not installed_trackers(config.track.to):
        return []
    try:
        process = report_process([str(paths.root), "--track"])
    except OSError as error:
        return [f"note: the trackers cannot be started: {one_line(error)}"]
    try:
        _, stderr = process.communicate(timeout=_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return [f"note: the trackers took longer than {_END_S:g} s and were killed"]
    lines = stderr.splitlines()
    earlier = missing_notes(config)
    notes = [line for line in lines if line.startswith("note: ") and line not in earlier]
    if process.returncode and not notes:
        notes = [
            f"note: the trackers failed: {one_line(lines[-1] if lines else 'no reason given')}"
        ]
    return notes


def _is_installed(name: str) -> bool:
    with suppress(ImportError, ValueError):
        found = importlib.util.find_spec(name)
        # A folder with that name in the current folder, such as `wandb`, is not a package.
        return found is not None and found.origin is not None
    return False
