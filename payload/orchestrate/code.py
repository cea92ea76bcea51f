"""The payload's code on the nodes: the same as here, by its hash; only what changed travels."""

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
from payload.errors import PreflightError
from payload.orchestrate.remote_programs import Finished, NodeLook, ask, require_known
from payload.orchestrate.ssh import Connection
from payload.orchestrate.transfer import put
from payload.untrusted import RUN_ID, checked, printable, shown

_CHECKPOINT = re.compile(r"(step_[0-9]{1,20})?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LOOK_S = 30.0
_PROGRAM = "place.py"
_UNPACK_S = 120.0
_COPY_S = 600.0
_BUILD_S = 300.0
_SLOWEST_BYTES_PER_S = 1e6
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
    """The package that this program is part of."""
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
    """Return what the node has and lacks for a run; see remote/place.py."""
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
    """What a node has of one run."""

    run_id: str = checked(pattern=RUN_ID, wanted="a run's name")
    checkpoint: str = checked(pattern=_CHECKPOINT, wanted="a checkpoint's name, or empty")
    """The newest whole one; empty where there is none."""
    state: str | None = checked(pattern=_SHA256, wanted="a sha256")
    """Of state.json; None for a run that has never begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsThere:
    """What a node has of all runs."""

    running: str | None = checked(pattern=RUN_ID, wanted="a run's name")
    """The run that is going on, whoever started it."""
    runs: tuple[RunThere, ...] = checked(max_items=10_000)


def runs_on(connection: Connection) -> RunsThere:
    """What is going on on the node, and what its runs have. Raises PreflightError."""
    return ask(connection, _PROGRAM, RunsThere, {"action": "running"}, timeout_s=_LOOK_S)


def send_code(
    connection: Connection, code: Code, missing: Sequence[str], *, home: PurePosixPath
) -> None:
    """Send the files that `look` called missing, and give the code its name there."""
    root = home / "tileforge"
    if missing:
        content = archive({name: (code.root / name).read_bytes() for name in missing})
        unpack(connection, content, root / f".payload-{code.digest}")
    arguments = {"action": "finish", **_files(code)}
    wrong = ask(connection, _PROGRAM, Finished, arguments, timeout_s=_LOOK_S).wrong
    if wrong:
        raise PreflightError(
            f"{connection.node.name}: {len(wrong)} file(s) of the payload did not arrive whole, "
            f"the first is {shown(wrong[0])}. Is its disk full? Try again."
        )


def build_kernels(
    connection: Connection, code: Code, *, home: PurePosixPath, venv: PurePosixPath
) -> str | None:
    """Compile the kernels of this code on the node, as its ranks would at their start.

    Returns why there are none, or None: ranks train without them, only slower.
    """
    root = home / "tileforge" / f"payload-{code.digest}"
    argv = [
        "env",
        f"PYTHONPATH={root}",
        str(venv / "bin" / "python"),
        "-m",
        "payload.train.kernels",
    ]
    try:
        done = connection.run(argv, timeout_s=_BUILD_S)
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
    argv = ["env", f"PYTHONPATH={python_path}", python, "-m", "payload.run_repair", str(run_dir)]
    said = connection.check_run(argv, timeout_s=_LOOK_S).decode(errors="replace")
    return printable(said).splitlines()


def archive(files: Mapping[str, bytes]) -> bytes:
    """A compressed tar of these files."""
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


def send_files(
    connection: Connection, source: Path, target: PurePosixPath, files: Mapping[str, str | None]
) -> None:
    """Copy files of a folder to the node; what an attempt has copied, the next one keeps.

    `files` has the sha256 by name, as far as it is known. The last one marks a folder as whole.
    """
    connection.check_run(["mkdir", "-p", "--", str(target)], timeout_s=_LOOK_S)
    for name, sha256 in files.items():
        timeout_s = _COPY_S + (source / name).stat().st_size / _SLOWEST_BYTES_PER_S
        if not _has(connection, target / name, sha256, timeout_s=timeout_s):
            put(connection, source / name, str(target / name), timeout_s=timeout_s)


def _has(
    connection: Connection, path: PurePosixPath, sha256: str | None, *, timeout_s: float
) -> bool:
    done = connection.run(["sha256sum", "--", str(path)], timeout_s=timeout_s)
    return sha256 is not None and done.stdout.startswith(sha256.encode())


def _files(code: Code) -> dict[str, Any]:
    return {"digest": code.digest, "files": dict(code.files)}
