"""Copies files to and from a node, atomically and verified by SHA-256.

An interrupted transfer resumes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from payload.core.errors import (
    AnswerError,
    CheckpointError,
    ConfigError,
    PreflightError,
    TileforgeError,
)
from payload.core.file_hash import sha256_of
from payload.core.files import is_not_regular
from payload.core.printable_text import printable, shown
from payload.core.regular_files import MAX_FILE_BYTES
from payload.core.symlink_safety import no_follow
from payload.core.validation.names import SHA256
from payload.formats.checkpoint_download import (
    complete_copy,
    discard_any,
    is_plain,
    load_foreign_manifest,
)
from payload.formats.checkpoint_listing import (
    CHECKPOINTS_NAME,
    MANIFEST_FILE,
    ManifestEntry,
    manifest_problems,
)
from payload.orchestrate.ssh.connection import Connection
from payload.orchestrate.ssh.paramiko_transport import SFTPClient
from payload.run_record.run_files import RunPaths
from payload.run_record.safe_copy_paths import make_folder, move_aside_non_folder, path_in_copy

_CHUNK_BYTES = 256 * 2**10
_SETTLE_S = 120.0
_MKDIR_S = 30.0
_COPY_S = 600.0
_SLOWEST_BYTES_PER_S = 1e6
_PARTIAL = ".partial"


def put(
    connection: Connection,
    source: Path,
    target: str,
    *,
    sha256: str | None = None,
    mode: int = 0o644,
    timeout_s: float,
) -> None:
    """Copy a file to `target` on the node: an absolute path, or relative to the login's home.

    `sha256` is the expected checksum of `source`. The check detects a file that was replaced by a
    link to a private file. Raises ConfigError if the checksum differs, and PreflightError if the
    node cannot store the file. Raises SshUnreachableError if the connection breaks; the next call
    then resumes the transfer.
    """
    digest = sha256_of(source)
    if sha256 not in (None, digest):
        raise ConfigError(
            f"{source}: its sha256 differs from the one recorded in its folder, so it is not sent. "
            "Copy or prepare the folder again."
        )
    _copy_verified(
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
    """Copy the node's file `source` to the local path `target`. Raises the errors of `put`.

    `sha256` is the checksum that the manifest lists for the file; raises CheckpointError if the
    copied file has a different checksum. Without `sha256`, the node computes the checksum. Never
    writes through a symlink, and never writes more than `most_bytes`.
    """
    partial = target.with_name(target.name + _PARTIAL)
    digest = sha256 or _remote_sha256(connection, source)
    error = CheckpointError if sha256 else PreflightError
    _copy_verified(
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
    """Download a checkpoint and return its local folder.

    Existing files are kept only if they match the node's manifest. Raises the errors of `get`, and
    CheckpointError for an invalid manifest.
    """
    target = path_in_copy(paths, f"{CHECKPOINTS_NAME}/{source.name}")
    staging = path_in_copy(paths, f"{CHECKPOINTS_NAME}/.{source.name}.collecting")
    move_aside_non_folder(target)
    make_folder(staging)
    for odd in filter(is_not_regular, list(staging.iterdir())):
        discard_any(odd)
    manifest_file = staging / MANIFEST_FILE
    get(connection, str(source / MANIFEST_FILE), manifest_file, timeout_s=_SETTLE_S)
    node = connection.node.name
    manifest = load_foreign_manifest(staging, where=f"{node}: {source / MANIFEST_FILE}")
    size = sum(entry.bytes for entry in manifest.files.values())
    free = shutil.disk_usage(staging).free
    if size > free:
        raise PreflightError(
            f"{node}: a checkpoint of {size:,} bytes does not fit in {staging}, which has {free:,} "
            "bytes free. Free some space, then repeat the command."
        )
    if _is_copy(target, manifest_file, manifest.files):
        shutil.rmtree(staging)
        return target

    def download(local: Path, entry: ManifestEntry) -> None:
        get(
            connection,
            str(source / local.name),
            local,
            sha256=entry.sha256,
            most_bytes=entry.bytes,
            timeout_s=_COPY_S + entry.bytes / _SLOWEST_BYTES_PER_S,
        )

    complete_copy(staging, target, manifest, bring=download)
    for stale in paths.checkpoints.glob(".step_*.collecting"):
        discard_any(stale)  # staging folders of older checkpoints
    return target


def _is_copy(folder: Path, manifest: Path, files: Mapping[str, ManifestEntry]) -> bool:
    """Return whether `folder` has all files of the manifest, with matching checksums."""
    return (
        all(is_plain(folder / name) for name in (*files, MANIFEST_FILE))
        and (folder / MANIFEST_FILE).read_bytes() == manifest.read_bytes()
        and not manifest_problems(folder)
    )


def _copy_verified(
    connection: Connection,
    *,
    what: str,
    digest: str,
    copy: Callable[[bool], None],
    digest_of_copy: Callable[[], str],
    error: type[TileforgeError] = PreflightError,
) -> None:
    """Resume a partial copy; if the result differs from the original, copy from scratch."""
    for resume in (True, False):
        copy(resume)
        if digest_of_copy() == digest:
            return
    raise error(
        f"{connection.node.name}: {what}: two copies were made, and the sha256 of both differs "
        "from the original's. Check that no program writes to the file, then try again."
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
            writer.chmod(mode)  # set before any content is written
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
    # `tail` streams. paramiko's own reads either wait for each response, or prefetch in a thread.
    with open(partial, "ab" if resume else "wb", opener=_private) as writer:
        done_bytes = writer.tell()
        argv = ["tail", "-c", f"+{done_bytes + 1}", "--", source]
        most_bytes = max(0, most_bytes - done_bytes)
        done = connection.run(argv, timeout_s=timeout_s, sink=writer, most_bytes=most_bytes)
    if done.status != 0:
        message = printable(done.stderr.decode(errors="replace")).strip()
        raise error(f"{connection.node.name}: reading {source}: {message}")


def _private(path: str, flags: int) -> int:
    descriptor = no_follow(path, flags)
    os.fchmod(descriptor, 0o600)
    return descriptor


def _remote_sha256(connection: Connection, path: str) -> str:
    line = connection.check_run(["sha256sum", "--", path], timeout_s=_SETTLE_S)
    # If the file's name has a line break or a backslash, the line begins with a backslash.
    digest = line.lstrip(b"\\")[:64].decode("ascii", errors="replace")
    if not SHA256.fullmatch(digest):
        raise AnswerError(f"{connection.node.name}: sha256sum printed {shown(digest)}.")
    return digest


def send_files(
    connection: Connection, source: Path, target: PurePosixPath, files: Mapping[str, str | None]
) -> None:
    """Copy files of a folder to the node, except files that the node already has.

    `files` maps names to sha256 checksums, or to None if unknown. The existence of the last file
    marks the folder as complete.
    """
    connection.check_run(["mkdir", "-p", "--", str(target)], timeout_s=_MKDIR_S)
    for name, sha256 in files.items():
        timeout_s = _COPY_S + (source / name).stat().st_size / _SLOWEST_BYTES_PER_S
        if not _has(connection, target / name, sha256, timeout_s=timeout_s):
            put(connection, source / name, str(target / name), sha256=sha256, timeout_s=timeout_s)


def _has(
    connection: Connection, path: PurePosixPath, sha256: str | None, *, timeout_s: float
) -> bool:
    done = connection.run(["sha256sum", "--", str(path)], timeout_s=timeout_s)
    return sha256 is not None and done.stdout.startswith(sha256.encode())
