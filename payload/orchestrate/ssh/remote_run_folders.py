"""Reads the runs on a node and their newest checkpoints, and repairs run folders."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from payload.core.printable_text import printable
from payload.core.python_processes import module_command
from payload.core.validation.fields import checked
from payload.core.validation.names import RUN_ID, SHA256
from payload.formats.checkpoint_listing import FOLDER_NAME
from payload.orchestrate.ssh.connection import Connection
from payload.orchestrate.ssh.remote_calls import ask

_CHECKPOINT = re.compile(rf"({FOLDER_NAME.pattern})?")
_TIMEOUT_S = 30.0
_PROGRAM = "look.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRun:
    """Files of one run on a node."""

    run_id: str = checked(pattern=RUN_ID, wanted="a run's name")
    checkpoint: str = checked(pattern=_CHECKPOINT, wanted="a checkpoint's name, or empty")
    """The newest complete checkpoint; empty if no checkpoint is complete."""
    state: str | None = checked(pattern=SHA256, wanted="a sha256")
    """SHA-256 of state.json; None for a run that never started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRuns:
    """Files of all runs on a node."""

    running: str | None = checked(pattern=RUN_ID, wanted="a run's name")
    """The run in progress, of any operator; None if no run is in progress."""
    runs: tuple[NodeRun, ...] = checked(max_items=10_000)


def runs_on(connection: Connection) -> NodeRuns:
    """Return the run in progress on the node, and the files of all runs. Raises PreflightError."""
    return ask(connection, _PROGRAM, NodeRuns, {"action": "running"}, timeout_s=_TIMEOUT_S)


def make_room_for(
    connection: Connection, run_dir: PurePosixPath, *, python: str, python_path: str
) -> list[str]:
    """Move unexpected files out of the way of a run's files on the node.

    Return a message for each moved file. Raises PreflightError.
    """
    program = module_command("payload.run_record.run_repair", str(run_dir), python=python)
    argv = ["env", f"PYTHONPATH={python_path}", *program]
    output = connection.check_run(argv, timeout_s=_TIMEOUT_S).decode(errors="replace")
    return printable(output).splitlines()
