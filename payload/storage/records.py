"""Upload and download a run's records: all its files except checkpoints."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from payload.core.errors import PreflightError
from payload.core.files import free_bytes
from payload.core.regular_files import open_regular
from payload.core.symlink_safety import is_own_folder, no_follow
from payload.run_record.run_files import NAMES, RunPaths
from payload.storage.objects import (
    ABSENT,
    ConflictError,
    MissingObjectError,
    ObjectStore,
    StoredObject,
    StoreReader,
    TooLargeError,
)

EVERY_S = 30.0
BYTES_PER_TURN = 8 * 2**20
"""Files above this size are uploaded less often, because an object must be replaced as a whole."""
_MOST_BYTES = 2**30
_MOST_LOG_BYTES = 4 * 2**30
_MOST_LOGS = 20_000
"""Highest number of logs and profiles in a downloaded run."""


class Records:
    """Uploads a run's settings, metrics and logs when they have changed."""

    def __init__(self, paths: RunPaths, *, say: Callable[[str], None] = lambda line: None) -> None:
        """`say` receives log lines."""
        self.too_large: set[str] = set()
        """Names of files that are too large, so that they are not uploaded."""
        self._paths = paths
        self._say = say
        self._generations: dict[str, int] | None = None
        """Generations of the objects in the store; None if they must be listed first."""
        self._sent: dict[str, tuple[int, int]] = {}
        """Size and modification time of the uploaded files."""
        self._sent_s: dict[str, float] = {}

    def send(self, store: ObjectStore, *, all_of_them: bool = False) -> int:
        """Upload the changed files that are due, or all changed files with `all_of_them`.

        Returns the number of bytes sent.
        """
        files = list(_files(self._paths))
        return sum(self._send_file(store, path, at_once=all_of_them) for path in files)

    def send_for_checkpoint(self, store: ObjectStore) -> int:
        """Upload the changed records that a resume from a checkpoint needs.

        Returns the number of bytes sent.
        """
        paths = self._paths
        files = (paths.identity, paths.config, paths.plan, paths.metrics, paths.state)
        return sum(self._send_file(store, path, at_once=True) for path in files)

    def _send_file(self, store: ObjectStore, path: Path, *, at_once: bool) -> int:
        name = path.relative_to(self._paths.root).as_posix()
        with suppress(OSError), open_regular(path, follows=False) as file:
            stat = os.fstat(file.fileno())
            mark = (stat.st_size, stat.st_mtime_ns)
            pause_s = EVERY_S * (1 + stat.st_size // BYTES_PER_TURN)
            waited_s = time.monotonic() - self._sent_s.get(name, -pause_s)
            if mark == self._sent.get(name) or (not at_once and waited_s < pause_s):
                return 0
            if stat.st_size > _MOST_BYTES:
                if name not in self.too_large:
                    self._say(f"warning: {name} is no longer uploaded: the file is over 1 GiB")
                self.too_large.add(name)
                return 0
            # Only the current size is read, because the file may grow during the upload.
            content = io.BytesIO(file.read(stat.st_size))
            self._put(store, name, content)
            self._sent[name], self._sent_s[name] = mark, time.monotonic()
            return stat.st_size
        return 0

    def _put(self, store: ObjectStore, name: str, content: io.BytesIO) -> None:
        """Write an object.

        An existing object is overwritten only if this machine knows its generation.
        """
        if self._generations is None:
            self._generations = {each.name: each.generation for each in store.entries()}
        generation = self._generations.get(name, ABSENT)
        size = len(content.getbuffer())
        try:
            put = store.put(name, content, size=size, generation=generation)
        except ConflictError:
            self._generations = None  # from another machine, or an own write whose answer was lost
            raise
        self._generations[name] = put.generation


def fetch_records(
    store: StoreReader,
    root: Path,
    *,
    names: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Download the run's records, or only `names`, to the folder `root`; return their names.

    Logs and profiles can use half of the free disk space, at most 4 GiB: a manipulated store could
    list huge files. `say` receives a line about skipped files. Raises PreflightError if a file
    cannot be written.
    """
    chosen = set(names)
    found = [
        each
        for each in store.entries()
        if _is_record(each.name) and (not chosen or each.name in chosen)
    ]
    logs = [each for each in found if each.name not in _NAMES]
    fetched = []
    for entry in found:
        if entry.name in _NAMES and _download(store, entry, root, most_bytes=_MOST_BYTES, say=say):
            fetched.append(entry.name)
    room = log_room(root) if logs else 0
    left_out = logs[_MOST_LOGS:]
    for entry in logs[:_MOST_LOGS]:
        if room < entry.bytes <= _MOST_BYTES:
            left_out.append(entry)
        elif _download(store, entry, root, most_bytes=min(room, _MOST_BYTES), say=say):
            fetched.append(entry.name)
            room -= (root / entry.name).stat().st_size
    if left_out:
        say(
            f"warning: {len(left_out)} log(s) or profile(s) are not downloaded (first: "
            f"{left_out[0].name}), because the run's logs exceed {_MOST_LOG_BYTES // 2**30} GiB, "
            f"half of the free disk space, or {_MOST_LOGS:,} files"
        )
    return fetched


def log_room(folder: Path, *, taken_bytes: int = 0) -> int:
    """Return the bytes of logs that can still be added to the existing `taken_bytes` of a run.

    All logs together can use 4 GiB, but at most half of the disk space that would be free without
    them.
    """
    return min(_MOST_LOG_BYTES, (free_bytes(folder) + taken_bytes) // 2) - taken_bytes


def _download(
    store: StoreReader,
    entry: StoredObject,
    root: Path,
    *,
    most_bytes: int,
    say: Callable[[str], None],
) -> bool:
    """Download one file and return True; `say` receives a line about a file that is too large."""
    name, path = entry.name, root / entry.name
    try:
        if entry.bytes <= _MOST_BYTES:
            _fetch(store, name, path, most_bytes=most_bytes)
            return True
        say(f"warning: {name} is not downloaded: the file is over 1 GiB")
    except TooLargeError:
        say(f"warning: {name} is not downloaded: the file is larger than the store's list says")
    except MissingObjectError:
        pass
    except OSError as error:
        raise PreflightError(
            f"{path}: cannot be written ({error.strerror}). Free disk space."
        ) from None
    return False


def _fetch(store: StoreReader, name: str, path: Path, *, most_bytes: int) -> None:
    """Download one file to a temporary name, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb", opener=no_follow) as file:
            store.fetch(name, file, most_bytes=most_bytes, progressed=lambda: None)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _files(paths: RunPaths) -> Iterator[Path]:
    """Yield the existing files, with the metrics before the results that refer to them.

    Linked folders are skipped, because a link could lead to any folder of this user.
    """
    yield from _settings(paths)
    yield paths.report
    if is_own_folder(paths.logs):
        yield from sorted(paths.logs.glob("*.log"))
    if is_own_folder(paths.profile):
        yield from sorted(path for path in paths.profile.iterdir() if path.is_file())
    yield from _results(paths)


def _settings(paths: RunPaths) -> Sequence[Path]:
    begin = (paths.identity, paths.config, paths.inventory, paths.hosts, paths.ranks, paths.plan)
    return (*begin, paths.metrics, paths.deepspeed_config)


def _results(paths: RunPaths) -> Sequence[Path]:
    return (paths.samples, paths.summary, paths.state)


_NAMES = frozenset(path.name for path in (*_settings(NAMES), *_results(NAMES)))
"""Names of the records that are accepted from a store.

Another user with write access could add files to the store, such as a file that a command reads
(job.json, mirror.json) or a page with a script. The report is not downloaded, but generated from
the records.
"""
_IN_FOLDERS = re.compile(
    r"logs/[A-Za-z0-9_.-]{1,100}\.log"
    r"|profile/(operators\.json|step_\d{1,18}_rank_\d{1,9}\.json\.gz)"
)


def _is_record(name: str) -> bool:
    """Return True if an object is a record that is accepted from a store."""
    if name in _NAMES:
        return True
    return bool(_IN_FOLDERS.fullmatch(name)) and not PurePosixPath(name).name.startswith(".")
