"""Monitors the network folders that a run reads, and reports folders that do not answer.

`python -m payload.supervise.shared_folders FOLDER` prints a line after each check. A check of a
mount may never return if the file server is gone, so each folder has its own process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from payload.config.run_config import RunConfig
from payload.core.one_line import joined_lines
from payload.core.python_processes import code_environment, module_command
from payload.machines.inventory import SHARED_FOLDER

SILENT_S = 10.0
"""A folder is reported after this time without an answer."""
_EVERY_S = 2.0
_RESTART_S = 30.0
_END_S = 0.2
_MOST_CHARS = 200
_NETWORK = re.compile(r"nfs4?|cifs|smb3|ceph|lustre|beegfs|gpfs|9p|afs|glusterfs|fuse\..+")
_ESCAPED = re.compile(r"\\([0-7]{3})")


def folders_of(config: RunConfig, *, work_dir: str) -> list[str]:
    """Return the folders that a run may read from a file server.

    These are the shared folder of the cluster, the data folder and the initial weights.

    A relative `data.dir` refers to `work_dir`, the working folder of the ranks. A relative
    `model.init` may be a model name on the hub and is left out.
    """
    data, init = str(Path(work_dir) / config.data.folder()), config.model.init
    return [SHARED_FOLDER, data, *([init] if init.startswith("/") else [])]


def network_mounts(paths: Iterable[str], *, mounts: Path = Path("/proc/self/mounts")) -> list[str]:
    """Return the mount points of network file systems that contain one of `paths`.

    The mount points are read from the kernel's table, because accessing a folder may hang.
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    rows = [line.split(" ") for line in lines]
    kinds = {_ESCAPED.sub(lambda m: chr(int(m[1], 8)), row[1]): row[2] for row in rows}
    found = set()
    for path in paths:
        here = Path(os.path.normpath(path))
        point = next((str(each) for each in (here, *here.parents) if str(each) in kinds), None)
        if point is not None and _NETWORK.fullmatch(kinds[point]):
            found.add(point)
    return sorted(found)


class FolderWatch:
    """Checks the network folders among `paths`, each in a separate process."""

    def __init__(self, paths: Iterable[str], *, env: Mapping[str, str]) -> None:
        """Start the processes with the environment `env`."""
        self._probes = [_FolderProbe(folder, env) for folder in network_mounts(paths)]

    def troubles(self) -> dict[str, str]:
        """Return a description of the problem for each folder that fails or does not answer."""
        found = {probe.folder: probe.trouble() for probe in self._probes}
        return {folder: problem for folder, problem in found.items() if problem}

    def processes(self) -> list[int]:
        """Return the ids of the processes."""
        return [probe.pid for probe in self._probes if probe.pid is not None]

    def close(self) -> None:
        """End the processes; a process that hangs in the kernel stays until its mount answers."""
        for probe in self._probes:
            probe.close()


class _FolderProbe:
    """The process that checks one folder, and the last answer of that process."""

    def __init__(self, folder: str, env: Mapping[str, str]) -> None:
        self.folder = folder
        self._env = code_environment(env)
        self._answered_s = time.monotonic()
        self._error = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def trouble(self) -> str:
        """Return a description of the folder's problem; empty if it answers."""
        self._read_answer()
        silent_s = time.monotonic() - self._answered_s
        if silent_s >= SILENT_S:
            return f"has not answered for {silent_s:.0f} s"
        return f"answers with an error: {self._error}" if self._error else ""

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        if process.stdout is not None:
            process.stdout.close()

    def _start(self) -> None:
        self._started_s = time.monotonic()
        # If memory is too low to start the process, the state is unknown, but the run continues.
        with suppress(OSError):
            self._process = subprocess.Popen(
                module_command("payload.supervise.shared_folders", self.folder),
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            assert self._process.stdout is not None
            os.set_blocking(self._process.stdout.fileno(), False)

    def _read_answer(self) -> None:
        process = self._process
        if process is not None:
            assert process.stdout is not None
            with suppress(BlockingIOError):
                output = os.read(process.stdout.fileno(), 65536)
                if output:
                    self._answered_s = time.monotonic()
                    last = output.decode(errors="replace").rstrip("\n").rpartition("\n")[2]
                    self._error = short(last)
            if process.poll() is None:
                return
        # A missing or killed process shows nothing about the folder.
        self._answered_s, self._error = time.monotonic(), ""
        if self._answered_s - self._started_s >= _RESTART_S:
            self.close()
            self._start()


def short(text: str) -> str:
    """Return a message of another program as one short line for a note."""
    return joined_lines(text, longest=_MOST_CHARS)


def describe(node: str, troubles: Mapping[str, str]) -> str:
    """Return a message about the problems of a node's folders."""
    return ", ".join(
        f"the shared folder {folder} on {node} {problem}" for folder, problem in troubles.items()
    )


def main(argv: Sequence[str]) -> int:
    """Check the folder regularly until the reader of the output is gone."""
    (folder,) = argv
    while True:
        answer = ""
        try:
            # A file's attributes may come from NFS's cache; statvfs always queries the server.
            os.statvfs(folder)
        except OSError as error:
            answer = error.strerror or str(error)
        try:
            sys.stdout.write(f"{answer}\n")
            sys.stdout.flush()
        except OSError:
            return 0
        time.sleep(_EVERY_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
