"""CONTRACT: starts the processes that write a run's report and samples after the run.

`payload.orchestrate` and the supervisor must not import the report. An error in the report must not
fail the run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from payload.core.one_line import last_line
from payload.core.printable_text import one_line
from payload.core.python_processes import code_environment, module_command
from payload.run_record.run_files import RunPaths

_TIMEOUT_S = 120.0
_SAMPLES_TIMEOUT_S = 300.0


def write_report(
    paths: RunPaths, *, show: bool = False, is_started_here: bool = False
) -> str | None:
    """Write report.html into the run folder; return an error message, or None.

    With `show`, a browser opens the report. The run's supervisor sets `is_started_here`, because a
    head has no record of this user's approval of the data folder.
    """
    options = [*(["--open"] if show else []), *(["--started-here"] if is_started_here else [])]
    try:
        process = report_process([str(paths.root), *options])
    except OSError as error:
        return one_line(error)
    try:
        _, stderr = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"writing took longer than {_TIMEOUT_S:g} s."
    if process.returncode:
        return last_line(stderr, otherwise=f"it exited with code {process.returncode}")
    return None


def add_samples(paths: RunPaths, *, say: Callable[[str], None] = lambda _line: None) -> str | None:
    """Write samples.json and the report again; return an error message, or None.

    `say` receives a line for each model that generates. Ctrl-C stops only this work, and the
    message reports the interruption. The run itself has ended.
    """
    try:
        process = _start(
            "payload.finetune.samples_before_and_after", [str(paths.root)], stderr=subprocess.PIPE
        )
    except OSError as error:
        return one_line(error)
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        _kill(process)

    timer, lines = threading.Timer(_SAMPLES_TIMEOUT_S, give_up), [""]
    timer.start()
    try:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.rstrip())
            if not line.startswith("error: "):
                say(lines[-1])
        process.wait()
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        timer.cancel()
        _kill(process)
        process.communicate()
    if is_late.is_set():
        return f"generating took longer than {_SAMPLES_TIMEOUT_S:g} s."
    if process.returncode:
        return last_line("\n".join(lines), otherwise=f"it exited with code {process.returncode}")
    return write_report(paths)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process of `_start` with the processes that it has started."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def report_process(arguments: Sequence[str], *, is_live: bool = False) -> subprocess.Popen[str]:
    """Start `payload.report` with these arguments. Raises OSError.

    A live process runs until its stdin is closed, and its output is discarded.
    """
    return _start(
        "payload.report",
        arguments,
        stdin=subprocess.PIPE if is_live else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if is_live else subprocess.PIPE,
    )


def _start(
    program: str, arguments: Sequence[str], *, stderr: int, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        module_command(program, *arguments),
        env=code_environment(os.environ),
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        text=True,
        errors="replace",
        start_new_session=True,
    )
