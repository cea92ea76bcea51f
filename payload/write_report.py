"""CONTRACT: a run's report is written at its end, by a process of its own.

Whoever ends a run (orchestrate, or the supervisor of a detached one) may not import the report, and
whatever goes wrong with the page must not become the run's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from payload.results import RunPaths
from payload.untrusted import one_line

_TIMEOUT_S = 120.0


def write_report(paths: RunPaths, *, show: bool = False) -> str | None:
    """Write report.html into the run folder; return what went wrong, or None.

    With `show`, a browser opens it.
    """
    root = str(Path(__file__).resolve().parents[1])
    before = os.environ.get("PYTHONPATH")
    try:
        done = subprocess.run(
            # -P: a folder called payload where the user is does not come first.
            [sys.executable, "-P", "-m", "payload.report", str(paths.root)]
            + (["--open"] if show else []),
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([root, *([before] if before else [])]),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            start_new_session=True,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return one_line(error)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        return one_line(said[-1].removeprefix("error: "))
    return None
