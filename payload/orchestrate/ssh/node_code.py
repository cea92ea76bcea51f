"""Uploads changed files of the payload's code to a node, and builds the kernels."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import payload
from payload.core.errors import (
    PreflightError,
)
from payload.core.printable_text import shown
from payload.core.python_processes import module_command
from payload.orchestrate.ssh.connection import Connection
from payload.orchestrate.ssh.remote_calls import (
    NODE_FOLDER,
    Finished,
    NodeState,
    ask,
    require_known,
)

_INSPECT_S = 30.0
_PROGRAM = "look.py"
_UNPACK_S = 120.0
_BUILD_S = 300.0
_EXCLUDED = ("__pycache__",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The payload package on this machine."""

    root: Path
    """The package's parent folder."""
    files: Mapping[str, str]
    """SHA-256 of each file by path."""

    @property
    def digest(self) -> str:
        """A name for this version of the code. Identical files have the same name."""
        return hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()[:16]


def this_code() -> Code:
    """Return the package of the running program."""
    package = Path(payload.__file__).parent
    files = {
        str(path.relative_to(package.parent)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(package.rglob("*"))
        if path.is_file() and not set(_EXCLUDED) & set(path.parts)
    }
    return Code(root=package.parent, files=files)


def inspect_node(
    connection: Connection,
    code: Code,
    *,
    venv: PurePosixPath,
    programs: Sequence[str] = (),
    wholes: Sequence[str] = (),
) -> NodeState:
    """Return the node's state before a run, such as missing files; see `act` in node/look.py."""
    arguments = {"action": "look", "venv": str(venv), "programs": list(programs)}
    arguments |= {"wholes": list(wholes), **_files(code)}
    answer = ask(connection, _PROGRAM, NodeState, arguments, timeout_s=_INSPECT_S)
    # Files that the node reports as missing are read from this machine and sent to the node.
    require_known(
        answer.missing or (), code.files, node=connection.node.name, what="missing: the file"
    )
    return answer


def send_code(
    connection: Connection, code: Code, missing: Sequence[str], *, home: PurePosixPath
) -> None:
    """Send the files that `inspect_node` reported as missing, then rename the staging folder."""
    root = home / NODE_FOLDER
    if missing:
        content = archive({name: (code.root / name).read_bytes() for name in missing})
        unpack(connection, content, root / f".payload-{code.digest}")
    arguments = {"action": "finish", **_files(code)}
    wrong = ask(connection, _PROGRAM, Finished, arguments, timeout_s=_INSPECT_S).wrong
    if wrong:
        raise PreflightError(
            f"{connection.node.name}: {len(wrong)} file(s) of the payload arrived damaged, first: "
            f"{shown(wrong[0])}",
            fix="Check its free disk space, then try again.",
        )


def build_kernels(
    connection: Connection, code: Code, *, home: PurePosixPath, venv: PurePosixPath
) -> str | None:
    """Compile the kernels of this code on the node, so that ranks do not compile at startup.

    Return the error, or None. An error is not fatal: without the kernels, ranks train more slowly.
    """
    root = home / NODE_FOLDER / f"payload-{code.digest}"
    program = module_command("payload.kernels", python=str(venv / "bin" / "python"))
    try:
        done = connection.run(["env", f"PYTHONPATH={root}", *program], timeout_s=_BUILD_S)
    except PreflightError as error:
        return str(error)
    if done.status == 0:
        return None
    message = (done.stdout or done.stderr).decode(errors="replace").strip().rpartition("\n")[2]
    return message or f"status {done.status}"


def archive(files: Mapping[str, bytes]) -> bytes:
    """Return a gzip-compressed tar archive of these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def unpack(connection: Connection, content: bytes, folder: PurePosixPath) -> None:
    """Extract an archive into `folder` on the node, and create the folder if needed."""
    connection.check_run(["mkdir", "-p", "--", str(folder)], timeout_s=_INSPECT_S)
    argv = ["tar", "-xzf", "-", "-C", str(folder), "--no-same-owner"]
    connection.check_run(argv, stdin=content, timeout_s=_UNPACK_S)


def _files(code: Code) -> dict[str, Any]:
    return {"digest": code.digest, "files": dict(code.files)}
