"""CONTRACT: a run's report and samples are written at its end, by processes of their own.

Whoever ends a run (orchestrate, or the supervisor of a detached one) may not import the report, and
whatever goes wrong with the page must not become the run's.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence

from payload.core.one_line import last_line
from payload.core.printable_text import one_line
from payload.core.python_processes import code_environment, module_words
from payload.run_record.run_files import RunPaths

_TIMEOUT_S = 120.0
_SAMPLES_TIMEOUT_S = 300.0


def write_report(
    paths: RunPaths, *, show: bool = False, is_started_here: bool = False
) -> str | None:
    """Write report.html into the run folder; return what went wrong, or None.

    With `show`, a browser opens it. `is_started_here` is for the run's own supervisor, on a machine
    where nobody has named the data.
    """
    words = [*(["--open"] if show else []), *(["--started-here"] if is_started_here else [])]
    try:
        process = report_process([str(paths.root), *words])
    except OSError as error:
        return one_line(error)
    try:
        _, said = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"it took longer than {_TIMEOUT_S:g} s."
    if process.returncode:
        return last_line(said, otherwise=f"it ended with {process.returncode}")
    return None


def add_samples(paths: RunPaths) -> str | None:
    """Write samples.json and the report again; return what went wrong, or None.

    An interrupt ends it and is what went wrong: the run itself is over.
    """
    try:
        process = _start(
            "payload.finetune.samples_before_and_after", [str(paths.root)], stderr=subprocess.PIPE
        )
    except OSError as error:
        return one_line(error)
    try:
        _, said = process.communicate(timeout=_SAMPLES_TIMEOUT_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt):
            return "interrupted"
        return f"it took longer than {_SAMPLES_TIMEOUT_S:g} s."
    finally:
        if process.poll() is None:
            # The models' processes are in its session.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        return last_line(said, otherwise=f"it ended with {process.returncode}")
    return write_report(paths)


def report_process(words: Sequence[str], *, is_live: bool = False) -> subprocess.Popen[str]:
    """Start `payload.report` with these words. Raises OSError.

    A live one goes on until its stdin is closed, and nobody reads what it says.
    """
    return _start(
        "payload.report",
        words,
        stdin=subprocess.PIPE if is_live else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if is_live else subprocess.PIPE,
    )


def _start(
    program: str, words: Sequence[str], *, stderr: int, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        module_words(program, *words),
        env=code_environment(os.environ),
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        text=True,
        errors="replace",
        start_new_session=True,
    )
