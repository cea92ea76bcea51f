"""The payload's code on a node: sent as far as it changed; and the runs that the node has."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import payload
from payload.core.errors import (
    PreflightError,
)
from payload.core.printable_text import printable, shown
from payload.core.python_processes import module_words
from payload.core.validation.fields import checked
from payload.core.validation.names import RUN_ID, SHA256
from payload.formats.checkpoint_listing import (
    FOLDER_NAME,
)
from payload.orchestrate.ssh.connection import Connection
from payload.orchestrate.ssh.remote_calls import NODE_FOLDER, Finished, NodeLook, ask, require_known

_CHECKPOINT = re.compile(rf"({FOLDER_NAME.pattern})?")
_LOOK_S = 30.0
_PROGRAM = "look.py"
_UNPACK_S = 120.0
_BUILD_S = 300.0
_LEFT_OUT = ("__pycache__",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The payload package as it is on this machine."""

    root: Path
    """The folder that the package is in."""
    files: Mapping[str, str]
    """sha256 by path."""

    @property
    def digest(self) -> str:
        """Names the code: equal for equal files."""
        return hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()[:16]


def this_code() -> Code:
    """Return the package that this program is part of."""
    package = Path(payload.__file__).parent
    files = {
        str(path.relative_to(package.parent)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(package.rglob("*"))
        if path.is_file() and not set(_LEFT_OUT) & set(path.parts)
    }
    return Code(root=package.parent, files=files)


def look(
    connection: Connection,
    code: Code,
    *,
    venv: PurePosixPath,
    programs: Sequence[str] = (),
    wholes: Sequence[str] = (),
) -> NodeLook:
    """Return what the node has and lacks for a run; see node/look.py."""
    arguments = {"action": "look", "venv": str(venv), "programs": list(programs)}
    arguments |= {"wholes": list(wholes), **_files(code)}
    answer = ask(connection, _PROGRAM, NodeLook, arguments, timeout_s=_LOOK_S)
    # What it says it lacks is read here and sent to it.
    require_known(
        answer.missing or (), code.files, node=connection.node.name, what="missing: the file"
    )
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class RunThere:
    """Files of one run on a node."""

    run_id: str = checked(pattern=RUN_ID, wanted="a run's name")
    checkpoint: str = checked(pattern=_CHECKPOINT, wanted="a checkpoint's name, or empty")
    """The newest whole one; empty where there is none."""
    state: str | None = checked(pattern=SHA256, wanted="a sha256")
    """SHA-256 of state.json; None for a run that has never begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsThere:
    """Files of all runs on a node."""

    running: str | None = checked(pattern=RUN_ID, wanted="a run's name")
    """The run that is going on, whoever started it."""
    runs: tuple[RunThere, ...] = checked(max_items=10_000)


def runs_on(connection: Connection) -> RunsThere:
    """Return the run that is under way on the node, and its runs' files. Raises PreflightError."""
    return ask(connection, _PROGRAM, RunsThere, {"action": "running"}, timeout_s=_LOOK_S)


def send_code(
    connection: Connection, code: Code, missing: Sequence[str], *, home: PurePosixPath
) -> None:
    """Send the files that `look` called missing, and give the code its name there."""
    root = home / NODE_FOLDER
    if missing:
        content = archive({name: (code.root / name).read_bytes() for name in missing})
        unpack(connection, content, root / f".payload-{code.digest}")
    arguments = {"action": "finish", **_files(code)}
    wrong = ask(connection, _PROGRAM, Finished, arguments, timeout_s=_LOOK_S).wrong
    if wrong:
        raise PreflightError(
            f"{connection.node.name}: {len(wrong)} file(s) of the payload did not arrive whole, "
            f"the first is {shown(wrong[0])}",
            fix="Is its disk full? Try again.",
        )


def build_kernels(
    connection: Connection, code: Code, *, home: PurePosixPath, venv: PurePosixPath
) -> str | None:
    """Compile the kernels of this code on the node, as its ranks would at their start.

    Returns why there are none, or None: ranks train without them, only slower.
    """
    root = home / NODE_FOLDER / f"payload-{code.digest}"
    program = module_words("payload.kernels", python=str(venv / "bin" / "python"))
    try:
        done = connection.run(["env", f"PYTHONPATH={root}", *program], timeout_s=_BUILD_S)
    except PreflightError as error:
        return str(error)
    if done.status == 0:
        return None
    said = (done.stdout or done.stderr).decode(errors="replace").strip().rpartition("\n")[2]
    return said or f"status {done.status}"


def make_room_for(
    connection: Connection, run_dir: PurePosixPath, *, python: str, python_path: str
) -> list[str]:
    """Set aside what lies in the place of a run's files on the node.

    Returns a sentence for each. Raises PreflightError.
    """
    program = module_words("payload.run_record.run_repair", str(run_dir), python=python)
    argv = ["env", f"PYTHONPATH={python_path}", *program]
    said = connection.check_run(argv, timeout_s=_LOOK_S).decode(errors="replace")
    return printable(said).splitlines()


def archive(files: Mapping[str, bytes]) -> bytes:
    """Return a compressed tar of these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def unpack(connection: Connection, content: bytes, folder: PurePosixPath) -> None:
    """Put an archive's files in `folder` on the node, which is made if need be."""
    connection.check_run(["mkdir", "-p", "--", str(folder)], timeout_s=_LOOK_S)
    argv = ["tar", "-xzf", "-", "-C", str(folder), "--no-same-owner"]
    connection.check_run(argv, stdin=content, timeout_s=_UNPACK_S)


def _files(code: Code) -> dict[str, Any]:
    return {"digest": code.digest, "files": dict(code.files)}
