"""Files to and from a node: whole or absent, equal by sha256, continued where they broke off."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from payload.errors import PreflightError
from payload.orchestrate.ssh import Connection, SFTPClient

_CHUNK_BYTES = 256 * 2**10
_SETTLE_S = 120.0
_PARTIAL = ".partial"


def put(
    connection: Connection, source: Path, target: str, *, mode: int = 0o644, timeout_s: float
) -> None:
    """Copy a file to `target` on the node, a path from the login's home or an absolute one.

    Raises SshUnreachableError when the connection breaks (do it again: it goes on from there), and
    PreflightError when the node cannot store it.
    """
    digest = local_sha256(source)
    _equal_or_once_more(
        connection,
        what=f"{source} -> {target}",
        digest=digest,
        copy=lambda resume: _send(
            connection, source, target, mode=mode, resume=resume, timeout_s=timeout_s
        ),
        digest_of_copy=lambda: _remote_sha256(connection, target + _PARTIAL),
    )
    connection.check_run(["sync", "--", target + _PARTIAL], timeout_s=_SETTLE_S)
    with (
        connection.guard(f"writing {target}", timeout_s=_SETTLE_S),
        connection.open_sftp() as sftp,
    ):
        sftp.posix_rename(target + _PARTIAL, target)


def get(
    connection: Connection,
    source: str,
    target: Path,
    *,
    sha256: str | None = None,
    mode: int = 0o644,
    timeout_s: float,
) -> None:
    """Copy the node's file `source` to `target` here; raises as `put` does.

    `sha256` is what it must have; None asks the node.
    """
    partial = target.with_name(target.name + _PARTIAL)
    digest = sha256 or _remote_sha256(connection, source)
    _equal_or_once_more(
        connection,
        what=f"{source} -> {target}",
        digest=digest,
        copy=lambda resume: _receive(
            connection, source, partial, resume=resume, timeout_s=timeout_s
        ),
        digest_of_copy=lambda: local_sha256(partial),
    )
    partial.chmod(mode)
    partial.replace(target)


def _equal_or_once_more(
    connection: Connection,
    *,
    what: str,
    digest: str,
    copy: Callable[[bool], None],
    digest_of_copy: Callable[[], str],
) -> None:
    """Copy on from what is there; if the whole then differs, it was of another file: copy anew."""
    for resume in (True, False):
        copy(resume)
        if digest_of_copy() == digest:
            return
    raise PreflightError(
        f"{connection.node.name}: {what}: the copy's sha256 is not the original's, twice. Does "
        "something write to it? Try again when it does not."
    )


def _send(
    connection: Connection, source: Path, target: str, *, mode: int, resume: bool, timeout_s: float
) -> None:
    partial = target + _PARTIAL
    with (
        source.open("rb") as reader,
        connection.guard(f"writing {target}", timeout_s=timeout_s),
        connection.open_sftp() as sftp,
    ):
        offset = _size(sftp, partial) if resume else 0
        with sftp.open(partial, "r+b" if offset else "wb") as writer:
            writer.chmod(mode)  # before there is anything to read
            writer.set_pipelined(True)
            reader.seek(offset)
            writer.seek(offset)
            while chunk := reader.read(_CHUNK_BYTES):
                writer.write(chunk)


def _size(sftp: SFTPClient, path: str) -> int:
    try:
        return sftp.stat(path).st_size or 0
    except FileNotFoundError:
        return 0


def _receive(
    connection: Connection, source: str, partial: Path, *, resume: bool, timeout_s: float
) -> None:
    partial.touch(mode=0o600)
    # tail streams; paramiko's own reads wait for each answer, or fetch ahead in a thread of theirs.
    with partial.open("ab" if resume else "wb") as writer:
        argv = ["tail", "-c", f"+{writer.tell() + 1}", "--", source]
        done = connection.run(argv, timeout_s=timeout_s, sink=writer)
    if done.status != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise PreflightError(f"{connection.node.name}: reading {source}: {said}")


def _remote_sha256(connection: Connection, path: str) -> str:
    line = connection.check_run(["sha256sum", "--", path], timeout_s=_SETTLE_S)
    # For a name with a line break or a backslash the line begins with a backslash.
    return line.lstrip(b"\\")[:64].decode("ascii")


def local_sha256(path: Path) -> str:
    """Of a file here."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
