"""The local copy of a run that is on a cluster: kept up to date, and good without a connection.

A node's answer changes what is that node's to tell, and nothing else: a worker its own ranks' logs
and exit records, the head the run's. Nothing is read or written through a symlink.
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
from payload.core.links import no_follow
from payload.core.regular_files import open_regular, read_bytes
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
from payload.run_record.safe_copy_paths import inside, unwritable
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
"""Type of a small file, by its folder or its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrored:
    """mirror.json: what was known of the run when it was last reached."""

    alive: bool
    """True if a supervisor held it."""
    seen_unix: float = checked(low=0, high=_MOST_UNIX)
    ssh_key: str = checked(pattern=_PATH, wanted="a path", max_chars=4096)
    """Path of the key that the nodes know."""
    collected: str | None = checked(None, pattern=_COLLECTED, wanted="a checkpoint's name")
    """Name of the newest checkpoint that the head had when it was brought here after the run's end,
    empty where it had none; None while that has not been done."""
    schema_version: int = SCHEMA_VERSION


def mirror_file(paths: RunPaths) -> Path:
    """Return where a copy keeps what was known of its run."""
    return paths.root / "mirror.json"


def read_mirrored(paths: RunPaths) -> Mirrored | None:
    """Read mirror.json; None when the run is this machine's own. Raises ConfigError."""
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


def note_seen(paths: RunPaths, *, alive: bool, ssh_key: Path) -> None:
    """Write down that this is a cluster's run, how to reach it, and whether it is alive now.

    A damaged mirror.json gives way to the new one.
    """
    with alone(paths, "mirror"):
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


def note_collected(paths: RunPaths, checkpoint: Path | None) -> None:
    """Write down that all is here with this checkpoint, if the run had ended when last seen."""
    with alone(paths, "mirror"):
        mirrored = read_mirrored(paths)
        if mirrored is not None and not mirrored.alive:
            name = "" if checkpoint is None else checkpoint.name
            write_mirrored(paths, replace(mirrored, collected=name))


@contextmanager
def alone(paths: RunPaths, what: str) -> Iterator[None]:
    """Keep other commands of this machine from bringing `what` of the run; waits for its turn.

    Raises ConfigError when the copy cannot be written, within it too.
    """
    place = inside(paths, f".{what}.lock")
    try:
        require_file(place)
        with open(place, "w", opener=no_follow) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise unwritable(error, paths.root) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Files of a run that one node owns and is asked for."""

    node: str
    is_head: bool
    ranks: frozenset[int]
    """Whose exit records it may tell, and take back."""
    world_size: int
    whole: tuple[str, ...]
    """Small files."""
    known: Mapping[str, tuple[int, str]]
    """Per growing file, the number of bytes here, and the last of them as base64."""

    def arguments(self) -> dict[str, Any]:
        """Return what `read` of node/control.py takes."""
        return {"whole": self.whole, "known": self.known}


_MOST_FOLLOWED = 64
"""Ranks whose heartbeats come every second. Of 512, writing them down took 0.6 s of each."""


def wanted_of(paths: RunPaths, node: str, *, is_head: bool, brief: bool = False) -> Wanted:
    """Return what `node` may tell, by its role. Raises ConfigError.

    `brief` leaves out other ranks' heartbeats than rank 0's where the run has many.
    """
    every = load_ranks(paths.ranks)
    mine = frozenset(rank.rank for rank in every if is_head or rank.node == node)
    whole = [paths.rank_exit(rank) for rank in sorted(mine)]
    logs = [paths.rank_log(rank) for rank in sorted(mine)]
    growing = []
    if is_head:
        shown = [0] if brief and len(mine) > _MOST_FOLLOWED else sorted(mine)
        whole += [paths.identity, paths.manifest_hashes, paths.state, paths.summary]
        whole += map(paths.rank_progress, shown)
        growing = [paths.metrics]
        logs = [paths.launcher_log, paths.supervisor_log, *logs]
    growing += logs if _log_room(paths) > 0 else []
    return Wanted(
        node=node,
        is_head=is_head,
        ranks=frozenset(rank.rank for rank in every if rank.node == node),
        world_size=len(every),
        whole=tuple(_name(paths, path) for path in whole),
        known={name: _end(paths, name) for name in (_name(paths, path) for path in growing)},
    )


def merge(paths: RunPaths, answer: Part, wanted: Wanted) -> list[str]:
    """Bring what a node answered into the local copy.

    Returns what is damaged there, of which the copy stays as it was. Raises AnswerError when the
    node names a file that is not its own, and ConfigError when the copy cannot be written.
    """
    require_known(answer.whole, wanted.whole, node=wanted.node, what="the file")
    require_known(answer.more, wanted.known, node=wanted.node, what="the file")
    pieces = {name: _content(wanted, name, piece) for name, piece in answer.more.items()}
    damaged = []
    _require_own(paths, answer.whole.get(IDENTITY_FILE), node=wanted.node)
    try:
        for stale in _ends_taken_back(paths, answer, wanted):
            stale.unlink(missing_ok=True)
        for name, text in answer.whole.items():
            if name == IDENTITY_FILE and known_identity(paths).identity is not None:
                continue  # made here, where the run was started
            problem = _problem(paths, name, text, wanted)
            if problem is not None:
                damaged.append(problem)
            elif _holds(inside(paths, name), text):
                continue
            elif name == HASHES_FILE:
                take_hashes(paths, parse_hashes(text, where=wanted.node))
            else:
                write_whole(inside(paths, name), text, durable=False)
        room = _log_room(paths)
        for name, (offset, content) in pieces.items():
            if name != paths.metrics.name:
                content = content[: max(0, room)]
                room -= len(content)
            with open(inside(paths, name), "ab", opener=no_follow) as file:
                file.truncate(offset)
                file.write(content)
    except OSError as error:
        raise unwritable(error, paths.root) from None
    if wanted.is_head and room <= 0:
        damaged.append(
            f"{paths.logs}: no more of the logs comes here: they have 4 GiB, or half of the free "
            "disk space. They go on there."
        )
    return damaged


def _log_room(paths: RunPaths) -> int:
    """Return how many bytes of logs may still come: a node decides how much its ranks print."""
    taken_bytes = 0
    for path in paths.logs.glob("*.log"):
        with suppress(OSError):
            taken_bytes += path.lstat().st_size
    return log_room(paths.root, taken_bytes=taken_bytes)


def take_hashes(paths: RunPaths, told: ManifestHashes) -> ManifestHashes:
    """Add the hashes that the head has to those that are here; return all. Raises OSError.

    Another head than the one before may have fewer.
    """
    known = known_hashes(paths)
    merged = known.merged(told.hashes)
    if merged != known:
        write_whole(inside(paths, HASHES_FILE), merged.to_json())
    return merged


def _require_own(paths: RunPaths, told: str | None, *, node: str) -> None:
    """Raise AnswerError where the head has another run of the copy's name."""
    there = parse_identity(told or "", where=node)
    own = known_identity(paths).identity
    if there is not None and None not in (own, there.identity) and own != there.identity:
        raise AnswerError(
            f"{node}: its run {paths.run_id} has identity {there.words()}, and the one in "
            f"{paths.root} has {own}: these are two runs of one name. Follow that one with "
            "--runs-dir DIR."
        )


def _holds(path: Path, text: str) -> bool:
    """Tell whether the file has this text; reading is much faster than replacing."""
    try:
        return read_bytes(path) == text.encode()
    except OSError:
        return False


def _content(wanted: Wanted, name: str, piece: Piece) -> tuple[int, bytes]:
    """Return where a piece goes and what it is: the file goes on, or comes from its start."""
    if piece.offset not in (0, wanted.known[name][0]):
        raise AnswerError(f"{wanted.node}: its answer: {name} goes on at byte {piece.offset}.")
    try:
        return piece.offset, base64.b64decode(piece.content, validate=True)
    except ValueError:
        raise AnswerError(f"{wanted.node}: its answer: {name} is not base64.") from None


def _problem(paths: RunPaths, name: str, text: str, wanted: Wanted) -> str | None:
    """Return what keeps a small file from replacing the one that is here."""
    where = f"{wanted.node}: {name}"
    folder, _, file = name.rpartition("/")
    cls = _RECORDS[folder or file]
    try:
        raw = parse_json(text, where=where)
        check_schema(raw, RESULTS_VERSION, where=where)
        record = build(cls, raw, where=where)
    except ConfigError as error:
        return f"{error} The copy here stays as it was."
    if isinstance(record, RankProgress | RankExit):
        rank = int(PurePosixPath(file).stem.partition("_")[2])
        is_own = record.rank == rank and (wanted.is_head or record.node == wanted.node)
    elif isinstance(record, RunIdentity | ManifestHashes):
        is_own = True  # it names no run
    else:
        is_own = record.run_id == paths.run_id
    return None if is_own else f"{where}: it is of another rank, node or run."


def _ends_taken_back(paths: RunPaths, answer: Part, wanted: Wanted) -> Iterator[Path]:
    """List records of ranks' ends that the node has no more, as the ranks were started again.

    A worker knows of its own ranks alone, a living supervisor of all. A node that was made from
    scratch knows nothing of the run.
    """
    if not answer.begun:
        return
    of_all = wanted.is_head and answer.alive
    for rank in range(wanted.world_size) if of_all else sorted(wanted.ranks):
        path = paths.rank_exit(rank)
        if _name(paths, path) not in answer.whole:
            yield path


def _name(paths: RunPaths, path: Path) -> str:
    return str(path.relative_to(paths.root))


def _end(paths: RunPaths, name: str) -> tuple[int, str]:
    path = inside(paths, name)
    try:
        with open_regular(path, follows=False) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _END_BYTES))
            return size, base64.b64encode(file.read()).decode()
    except FileNotFoundError:
        return 0, ""
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). Move it away.") from None
