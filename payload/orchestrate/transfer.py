"""Files to and from a node: whole or absent, equal by sha256, continued where they broke off."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from payload.checkpoint_files import (
    MANIFEST_FILE,
    ManifestEntry,
    load_manifest,
    manifest_problems,
    sha256_of,
)
from payload.errors import AnswerError, CheckpointError, PreflightError, TileforgeError
from payload.orchestrate.mirror import inside, make_folder, set_aside_no_folder
from payload.orchestrate.ssh import Connection, SFTPClient
from payload.results import RunPaths, is_odd_file
from payload.untrusted import MAX_FILE_BYTES, no_follow, printable, shown

_CHUNK_BYTES = 256 * 2**10
_SETTLE_S = 120.0
_COPY_S = 600.0
_SLOWEST_BYTES_PER_S = 1e6
_PARTIAL = ".partial"
# Nothing that loading it would run.
_CHECKPOINT_FILE = re.compile(r"\w[\w.-]{0,120}\.(?:json|safetensors|txt|model|jinja)", re.ASCII)


def put(
    connection: Connection, source: Path, target: str, *, mode: int = 0o644, timeout_s: float
) -> None:
    """Copy a file to `target` on the node, a path from the login's home or an absolute one.

    Raises SshUnreachableError when the connection breaks (do it again: it goes on from there), and
    PreflightError when the node cannot store it.
    """
    digest = sha256_of(source)
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
    most_bytes: int = MAX_FILE_BYTES,
    timeout_s: float,
) -> None:
    """Copy the node's file `source` to `target` here; raises as `put` does.

    `sha256` is what its manifest says, and CheckpointError says that it is not; None asks the node.
    Never writes through a symlink, nor more than
    `most_bytes`.
    """
    partial = target.with_name(target.name + _PARTIAL)
    digest = sha256 or _remote_sha256(connection, source)
    error = CheckpointError if sha256 else PreflightError
    _equal_or_once_more(
        connection,
        what=f"{source} -> {target}",
        digest=digest,
        copy=lambda resume: _receive(
            connection,
            source,
            partial,
            resume=resume,
            most_bytes=most_bytes,
            timeout_s=timeout_s,
            error=error,
        ),
        digest_of_copy=lambda: sha256_of(partial),
        error=error,
    )
    partial.chmod(mode)
    partial.replace(target)


def fetch_checkpoint(connection: Connection, source: PurePosixPath, paths: RunPaths) -> Path:
    """Bring a checkpoint home, and return where it is.

    What lies there already counts only if it is what the node's manifest says. Raises as `get`
    does, and CheckpointError for a manifest that is none.
    """
    target = inside(paths, f"checkpoints/{source.name}")
    staging = inside(paths, f"checkpoints/.{source.name}.collecting")
    set_aside_no_folder(target)
    make_folder(staging)
    for odd in filter(is_odd_file, list(staging.iterdir())):
        _discard(odd)
    whole = staging / MANIFEST_FILE
    get(connection, str(source / MANIFEST_FILE), whole, timeout_s=_SETTLE_S)
    files = _manifest_of(staging, node=connection.node.name)
    if _is_copy(target, whole, files):
        shutil.rmtree(staging)
        return target
    for name, entry in files.items():
        here = staging / name
        if not (_is_plain(here) and sha256_of(here) == entry.sha256):
            get(
                connection,
                str(source / name),
                here,
                sha256=entry.sha256,
                most_bytes=entry.bytes,
                timeout_s=_COPY_S + entry.bytes / _SLOWEST_BYTES_PER_S,
            )
    for each in staging.iterdir():
        if each.name not in {*files, MANIFEST_FILE}:
            _discard(each)  # an earlier attempt's, of a checkpoint that was another one then
    if target.exists():
        shutil.rmtree(target)
    staging.replace(target)
    for stale in paths.checkpoints.glob(".step_*.collecting"):
        _discard(stale)  # of a checkpoint that is not the newest any more
    return target


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _manifest_of(folder: Path, *, node: str) -> Mapping[str, ManifestEntry]:
    """Return what a checkpoint consists of, if that is what checkpoints are made of."""
    files = load_manifest(folder).files
    odd = [name for name in files if not _CHECKPOINT_FILE.fullmatch(name) or name == MANIFEST_FILE]
    if odd:
        raise CheckpointError(
            f"{node}: a checkpoint's manifest names {shown(odd[0])}, which is no file of one."
        )
    size, free = sum(entry.bytes for entry in files.values()), shutil.disk_usage(folder).free
    if size > free:
        raise PreflightError(
            f"{node}: a checkpoint of {size:,} bytes does not fit here: {folder} has {free:,} free."
        )
    return files


def _is_copy(folder: Path, manifest: Path, files: Mapping[str, ManifestEntry]) -> bool:
    """Return whether `folder` has these files, as they should be."""
    return (
        all(_is_plain(folder / name) for name in (*files, MANIFEST_FILE))
        and (folder / MANIFEST_FILE).read_bytes() == manifest.read_bytes()
        and not manifest_problems(folder)
    )


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _equal_or_once_more(
    connection: Connection,
    *,
    what: str,
    digest: str,
    copy: Callable[[bool], None],
    digest_of_copy: Callable[[], str],
    error: type[TileforgeError] = PreflightError,
) -> None:
    """Copy on from what is there; if the whole then differs, it was of another file: copy anew."""
    for resume in (True, False):
        copy(resume)
        if digest_of_copy() == digest:
            return
    raise error(
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
        most_bytes = source.stat().st_size
        offset = _size(sftp, partial, most_bytes=most_bytes) if resume else 0
        with sftp.open(partial, "r+b" if offset else "wb") as writer:
            writer.chmod(mode)  # before there is anything to read
            writer.set_pipelined(True)
            reader.seek(offset)
            writer.seek(offset)
            while chunk := reader.read(_CHUNK_BYTES):
                writer.write(chunk)


def _size(sftp: SFTPClient, path: str, *, most_bytes: int) -> int:
    try:
        size = sftp.stat(path).st_size or 0
    except FileNotFoundError:
        return 0
    return size if size <= most_bytes else 0


def _receive(
    connection: Connection,
    source: str,
    partial: Path,
    *,
    resume: bool,
    most_bytes: int,
    timeout_s: float,
    error: type[TileforgeError],
) -> None:
    # tail streams; paramiko's own reads wait for each answer, or fetch ahead in a thread of theirs.
    with open(partial, "ab" if resume else "wb", opener=_private) as writer:
        done_bytes = writer.tell()
        argv = ["tail", "-c", f"+{done_bytes + 1}", "--", source]
        most_bytes = max(0, most_bytes - done_bytes)
        done = connection.run(argv, timeout_s=timeout_s, sink=writer, most_bytes=most_bytes)
    if done.status != 0:
        said = printable(done.stderr.decode(errors="replace")).strip()
        raise error(f"{connection.node.name}: reading {source}: {said}")


def _private(path: str, flags: int) -> int:
    descriptor = no_follow(path, flags)
    os.fchmod(descriptor, 0o600)
    return descriptor


def _remote_sha256(connection: Connection, path: str) -> str:
    line = connection.check_run(["sha256sum", "--", path], timeout_s=_SETTLE_S)
    # For a name with a line break or a backslash the line begins with a backslash.
    digest = line.lstrip(b"\\")[:64].decode("ascii", errors="replace")
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise AnswerError(f"{connection.node.name}: sha256sum printed {shown(digest)}.")
    return digest
