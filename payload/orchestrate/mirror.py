"""The local copy of a run that is on a cluster: kept up to date, and good without a connection."""

from __future__ import annotations

import base64
import fcntl
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from payload.errors import ConfigError, UsageError
from payload.results import RankExit, RunPaths, read_json, write_whole

SCHEMA_VERSION = 1
_END_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrored:
    """mirror.json: what was known of the run when it was last reached."""

    alive: bool
    """Whether a supervisor held it."""
    seen_unix: float
    ssh_key: str
    """Path of the key that the nodes know."""
    collected: str | None = None
    """Name of the newest checkpoint that the head had when it was brought here after the run's end,
    empty where it had none; None while that has not been done."""
    schema_version: int = SCHEMA_VERSION


def read_mirrored(paths: RunPaths) -> Mirrored | None:
    """None when the run is this machine's own. Raises ConfigError."""
    path = paths.root / "mirror.json"
    try:
        return Mirrored(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}). Remove it, then attach.") from None


def write_mirrored(paths: RunPaths, mirrored: Mirrored) -> None:
    """Replace mirror.json."""
    write_whole(paths.root / "mirror.json", json.dumps(asdict(mirrored), indent=2) + "\n")


def note_seen(paths: RunPaths, *, alive: bool, ssh_key: Path) -> None:
    """Write down that this is a cluster's run, how to reach it, and whether it is alive now."""
    with alone(paths, "mirror"):
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
    """Within it no other command of this machine brings `what` of the run here; waits for it."""
    try:
        lock = (paths.root / f".{what}.lock").open("w")
    except FileNotFoundError:
        raise UsageError(
            f"{paths.root}, the copy of the run, was removed. Make it again: attach to the run "
            "with --inventory."
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def known_ends(paths: RunPaths) -> dict[str, tuple[int, str]]:
    """Of each growing file: how many bytes are here, and the last of them as base64."""
    return {str(path.relative_to(paths.root)): _end(path) for path in _growing(paths)}


def merge(paths: RunPaths, answer: Mapping[str, Any], *, node: str) -> None:
    """Bring what a node answered into the local copy."""
    for stale in _ends_taken_back(paths, answer, node=node):
        stale.unlink(missing_ok=True)
    for name, text in answer["whole"].items():
        write_whole(_inside(paths, name), text, durable=False)
    for name, (offset, content) in answer["more"].items():
        target = _inside(paths, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab") as file:
            file.truncate(offset)
            file.write(base64.b64decode(content))


def _ends_taken_back(paths: RunPaths, answer: Mapping[str, Any], *, node: str) -> Iterator[Path]:
    """Records of ranks' ends that the node has no more, as the ranks were started again.

    A worker knows of its own ranks alone, a living supervisor of all.
    """
    if not answer["whole"]:
        return  # it was made anew, and knows nothing of the run
    for path in paths.rank_exit(0).parent.glob("rank_*.json"):
        if str(path.relative_to(paths.root)) in answer["whole"]:
            continue
        ended = read_json(RankExit, path)
        if ended is not None and (ended.node == node or answer["alive"]):
            yield path


def _growing(paths: RunPaths) -> Iterable[Path]:
    return [path for path in (paths.metrics, *paths.logs.glob("*.log")) if path.exists()]


def _end(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _END_BYTES))
        return size, base64.b64encode(file.read()).decode()


def _inside(paths: RunPaths, name: str) -> Path:
    target = (paths.root / name).resolve()
    if not target.is_relative_to(paths.root.resolve()):
        raise ConfigError(f"the head names a file outside of the run folder: {name!r}.")
    return target
