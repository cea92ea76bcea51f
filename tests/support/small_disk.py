"""A separate file system in memory that a test can fill."""

from __future__ import annotations

import contextlib
import errno
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

_SIZE_MB = 64


class SmallDisk:
    """A context manager that mounts the file system at `path`; needs root on Linux."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def __enter__(self) -> Self:
        self.path.mkdir()
        options = f"size={_SIZE_MB}m"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", self.path], check=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Lazily, as a failed test can leave a process with an open file.
        subprocess.run(["umount", "--lazy", self.path], check=True)

    def fill(self) -> None:
        """Fill all free blocks."""
        with self._filler.open("ab", buffering=0) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(2**16))
            try:
                while True:
                    file.write(bytes(1))
            except OSError as error:
                assert error.errno == errno.ENOSPC

    def free(self) -> None:
        """Free the blocks of `fill`."""
        self._filler.unlink()
