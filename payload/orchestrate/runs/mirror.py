"""Maintains the local copy of a run on a cluster. The copy is usable without a connection.

A node can change only its own files. A worker can change the logs and exit records of its ranks,
and the head can change the run's files. Symlinks are never followed.
"""

from __future__ import annotations

import base64
import fcntl
import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from payload.core.errors import AnswerError, ConfigError
from payload.core.files import require_file, write_whole
from payload.core.regular_files import open_regular, read_bytes
from payload.core.symlink_safety import no_follow
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build, check_schema
from payload.formats.checkpoint_listing import FOLDER_NAME
from payload.launch.ranks import load_ranks
from payload.orchestrate.ssh.remote_calls import Part, Piece, require_known
from payload.run_record.checkpoint_manifest_hashes import (
    HASHES_FILE,
    ManifestHashes,
    known_hashes,
    parse_hashes,
)
from payload.run_record.metrics_log import MOST_BYTES
from payload.run_record.run_files import NAMES, RankExit, RankProgress, RunPaths, RunState, Summary
from payload.run_record.run_files import (
    SCHEMA_VERSION as RESULTS_VERSION,
)
from payload.run_record.run_identity import (
    IDENTITY_FILE,
    RunIdentity,
    known_identity,
    parse_identity,
)
from payload.run_record.safe_copy_paths import path_in_copy, unwritable
from payload.run_record.suggested_run_commands import run_command
from payload.storage.records import log_room

SCHEMA_VERSION = 1
_END_BYTES = 256
_COLLECTED = re.compile(rf"|{FOLDER_NAME.pattern}")
_PATH = re.compile(r"[^\x00-\x1f\x7f]+")
_MOST_UNIX = 253402300799  # The year 9999, the last that a date can have.

_Record: TypeAlias = RunState | Summary | RankProgress | RankExit | RunIdentity | ManifestHashes
_RECORDS: Mapping[str, type[_Record]] = {
    IDENTITY_FILE: RunIdentity,
    HASHES_FILE: ManifestHashes,
    NAMES.state.name: RunState,
    NAMES.summary.name: Summary,
    NAMES.rank_progress(0).parent.name: RankProgress,
    NAMES.rank_exit(0).parent.name: RankExit,
}
"""Type of each small file, by the name of the file or of its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrored:
    """mirror.json: the state of the run when it was last reached."""

    alive: bool
    """True if a supervisor was running."""
    seen_unix: float = checked(low=0, high=_MOST_UNIX)
    ssh_key: str = checked(pattern=_PATH, wanted="a path", max_chars=4096)
    """Path of the SSH key that the nodes accept."""
    collected: str | None = checked(None, pattern=_COLLECTED, wanted="a checkpoint's name")
    """Name of the head's newest checkpoint when results were collected after the end of the run.
    Empty if the head had no checkpoint; None if results were not collected yet."""
    schema_version: int = SCHEMA_VERSION


def mirror_file(paths: RunPaths) -> Path:
    """Return the path of the file that records when and how the remote run was last reached."""
    return paths.root / "mirror.json"


def read_mirrored(paths: RunPaths) -> Mirrored | None:
    """Read mirror.json; return None for a run on this machine. Raises ConfigError."""
    path = mirror_file(paths)
    again = run_command("attach", paths, "--inventory", "FILE")
    fix = f"Write a new one with: {again}"
    try:
        raw = parse_json(read_bytes(path), where=str(path), fix=fix)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). {fix}") from None
    check_schema(raw, SCHEMA_VERSION, where=str(path), fix=fix)
    return build(Mirrored, raw, where=str(path), fix=fix)


def write_mirrored(paths: RunPaths, mirrored: Mirrored) -> None:
    """Replace mirror.json."""
    write_whole(mirror_file(paths), json.dumps(asdict(mirrored), indent=2) + "\n")


def record_contact(paths: RunPaths, *, alive: bool, ssh_key: Path) -> None:
    """Record that the run is on a cluster, how to reach it, and whether it is alive now.

    A damaged mirror.json is replaced.
    """
    with locked(paths, "mirror"):
        before = None
        if require_file(mirror_file(paths)) is None:
            with suppress(ConfigError):
                before = read_mirrored(paths)
        mirrored = Mirrored(
            alive=alive,
            seen_unix=time.time(),
            ssh_key=str(ssh_key),
            collected=None if before is None or alive else before.collected,
        )
        write_mirrored(paths, mirrored)


def record_collected(paths: RunPaths, checkpoint: Path | None) -> None:
    """If the run has ended, record that all results were collected, up to `checkpoint`."""
    with locked(paths, "mirror"):
        mirrored = read_mirrored(paths)
        if mirrored is not None and not mirrored.alive:
            name = "" if checkpoint is None else checkpoint.name
            write_mirrored(paths, replace(mirrored, collected=name))


@contextmanager
def locked(paths: RunPaths, what: str) -> Iterator[None]:
    """Prevent other commands on this machine from copying `what`; waits for the lock.

    Raises ConfigError if the copy cannot be written, also for such an error within the block.
    """
    lock_path = path_in_copy(paths, f".{what}.lock")
    try:
        require_file(lock_path)
        with open(lock_path, "w", opener=no_follow) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise unwritable(error, paths.root) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRequest:
    """The files of a run that are requested from one node."""

    node: str
    is_head: bool
    ranks: frozenset[int]
    """Ranks for which the node may add and remove exit records."""
    world_size: int
    whole: tuple[str, ...]
    """Small files, which are requested in full."""
    known: Mapping[str, tuple[int, str]]
    """For each growing file, the size of the local copy, and its last bytes as base64."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `read` in node/control.py."""
        return {"whole": self.whole, "known": self.known}


_MOST_FOLLOWED = 64
"""Maximum number of ranks for which heartbeats are copied every second. With 512 ranks, writing
them took 0.6 s."""


def file_request(paths: RunPaths, node: str, *, is_head: bool, brief: bool = False) -> FileRequest:
    """Return the files that `node` may send as the head or a worker. Raises ConfigError.

    If the run has many ranks, `brief` requests only the heartbeats of rank 0.
    """
    every = load_ranks(paths.ranks)
    own_ranks = frozenset(rank.rank for rank in every if is_head or rank.node == node)
    whole = [paths.rank_exit(rank) for rank in sorted(own_ranks)]
    logs = [paths.rank_log(rank) for rank in sorted(own_ranks)]
    growing = []
    if is_head:
        ranks = [0] if brief and len(own_ranks) > _MOST_FOLLOWED else sorted(own_ranks)
        whole += [paths.identity, paths.manifest_hashes, paths.state, paths.summary]
        whole += map(paths.rank_progress, ranks)
        growing = [paths.metrics]
        logs = [paths.launcher_log, paths.supervisor_log, *logs]
    growing += logs if _log_room(paths) > 0 else []
    return FileRequest(
        node=node,
        is_head=is_head,
        ranks=frozenset(rank.rank for rank in every if rank.node == node),
        world_size=len(every),
        whole=tuple(_name(paths, path) for path in whole),
        known={name: _end(paths, name) for name in (_name(paths, path) for path in growing)},
    )


def merge(paths: RunPaths, answer: Part, request: FileRequest) -> list[str]:
    """Merge a node's answer into the local copy.

    Returns a message for each damaged file; the local copies of these files stay unchanged. Raises
    AnswerError if the node sends a file of another node, and ConfigError if the copy cannot be
    written.
    """
    require_known(answer.whole, request.whole, node=request.node, what="the file")
    require_known(answer.more, request.known, node=request.node, what="the file")
    pieces = {name: _content(request, name, piece) for name, piece in answer.more.items()}
    damaged = []
    _require_own(paths, answer.whole.get(IDENTITY_FILE), node=request.node)
    try:
        for stale in _removed_exits(paths, answer, request):
            stale.unlink(missing_ok=True)
        for name, text in answer.whole.items():
            if name == IDENTITY_FILE and known_identity(paths).identity is not None:
                continue  # created on this machine, where the run was started
            problem = _problem(paths, name, text, request)
            if problem is not None:
                damaged.append(problem)
            elif _holds(path_in_copy(paths, name), text):
                continue
            elif name == HASHES_FILE:
                merge_hashes(paths, parse_hashes(text, where=request.node))
            else:
                write_whole(path_in_copy(paths, name), text, durable=False)
        room = _log_room(paths)
        for name, (offset, content) in pieces.items():
            if name == paths.metrics.name:
                content = content[: max(0, MOST_BYTES - offset)]
            else:
                content = content[: max(0, room)]
                room -= len(content)
            with open(path_in_copy(paths, name), "ab", opener=no_follow) as file:
                file.truncate(offset)
                file.write(content)
    except OSError as error:
        raise unwritable(error, paths.root) from None
    if request.is_head and room <= 0:
        damaged.append(
            f"{paths.logs}: the logs are no longer copied: they have reached 4 GiB, or half of "
            "the free disk space. The complete logs are on the node."
        )
    return damaged


def _log_room(paths: RunPaths) -> int:
    """Return how many more bytes of logs may be copied; nodes could send any amount."""
    taken_bytes = 0
    for path in paths.logs.glob("*.log"):
        with suppress(OSError):
            taken_bytes += path.lstat().st_size
    return log_room(paths.root, taken_bytes=taken_bytes)


def merge_hashes(paths: RunPaths, of_head: ManifestHashes) -> ManifestHashes:
    """Merge the head's manifest hashes into the local record; return the result. Raises OSError.

    If the head was replaced, it may have fewer hashes than the local record.
    """
    known = known_hashes(paths)
    merged = known.merged(of_head.hashes)
    if merged != known:
        write_whole(path_in_copy(paths, HASHES_FILE), merged.to_json())
    return merged


def _require_own(paths: RunPaths, text: str | None, *, node: str) -> None:
    """Raise AnswerError if the run on the head is a different run with the same id."""
    found = parse_identity(text or "", where=node)
    own = known_identity(paths).identity
    if found is not None and None not in (own, found.identity) and own != found.identity:
        raise AnswerError(
            f"{node}: run {paths.run_id} on this node has identity {found.words()}, but the run "
            f"in {paths.root} has {own}: these are two runs with the same name. Follow the node's "
            "run with another --runs-dir."
        )


def _holds(path: Path, text: str) -> bool:
    """Return whether the file already has this text; comparing is much faster than replacing."""
    try:
        return read_bytes(path) == text.encode()
    except OSError:
        return False


def _content(request: FileRequest, name: str, piece: Piece) -> tuple[int, bytes]:
    """Return the offset and bytes of a piece that continues the file or restarts it."""
    if piece.offset not in (0, request.known[name][0]):
        raise AnswerError(f"{request.node}: response: {name} continues at byte {piece.offset}.")
    try:
        return piece.offset, base64.b64decode(piece.content, validate=True)
    except ValueError:
        raise AnswerError(f"{request.node}: response: {name} is not base64.") from None


def _problem(paths: RunPaths, name: str, text: str, request: FileRequest) -> str | None:
    """Return the reason why a small file cannot replace the local file, or None."""
    where = f"{request.node}: {name}"
    folder, _, file = name.rpartition("/")
    cls = _RECORDS[folder or file]
    try:
        raw = parse_json(text, where=where)
        check_schema(raw, RESULTS_VERSION, where=where)
        record = build(cls, raw, where=where)
    except ConfigError as error:
        return f"{error} The local copy is unchanged."
    if isinstance(record, RankProgress | RankExit):
        rank = int(PurePosixPath(file).stem.partition("_")[2])
        is_own = record.rank == rank and (request.is_head or record.node == request.node)
    elif isinstance(record, RunIdentity | ManifestHashes):
        is_own = True  # it contains no run id
    else:
        is_own = record.run_id == paths.run_id
    return None if is_own else f"{where}: belongs to another rank, node or run."


def _removed_exits(paths: RunPaths, answer: Part, request: FileRequest) -> Iterator[Path]:
    """Yield local exit records that the node no longer has, because the ranks were restarted.

    A worker has the records of the ranks on that worker; a running supervisor has the records of
    all ranks. A node that was recreated has no records of the run.
    """
    if not answer.begun:
        return
    of_all = request.is_head and answer.alive
    for rank in range(request.world_size) if of_all else sorted(request.ranks):
        path = paths.rank_exit(rank)
        if _name(paths, path) not in answer.whole:
            yield path


def _name(paths: RunPaths, path: Path) -> str:
    return str(path.relative_to(paths.root))


def _end(paths: RunPaths, name: str) -> tuple[int, str]:
    path = path_in_copy(paths, name)
    try:
        with open_regular(path, follows=False) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _END_BYTES))
            return size, base64.b64encode(file.read()).decode()
    except FileNotFoundError:
        return 0, ""
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}). Move the file away."
        ) from None
