"""A terminal with a given width, for commands that draw differently on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.waiting import DEADLINE_S

_CSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command whose stdin, stdout and stderr are a pseudo-terminal."""

    def __init__(self, command: Sequence[str], *, columns: int, cwd: Path) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment | {"TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self._ours = ours
        self._raw = b""

    def wait(self) -> int:
        """Read until the command has ended; return its exit code."""
        self.read_until(None)
        return self.process.wait(timeout=DEADLINE_S)

    def read_until(self, text: str | None, *, after: int = 0) -> str:
        """Read until `text` was printed after the first `after` characters, or the command ended.

        With None, read until the command ends. Returns everything that was printed so far.
        """
        ends = time.monotonic() + DEADLINE_S
        while text is None or text not in self.raw()[after:]:
            assert time.monotonic() < ends, f"no end in {DEADLINE_S:g} s: {self.raw()[-2000:]!r}"
            if not select.select([self._ours], [], [], 0.1)[0]:
                continue
            try:
                content = os.read(self._ours, 65536)
            except OSError:  # end of file on Linux: the command and all its children have ended
                break
            self._raw += content
        return self.raw()

    def press(self, keys: str) -> None:
        """Send the characters of these keys."""
        os.write(self._ours, keys.encode())

    def press_ctrl_c(self) -> None:
        """Send the key's sequence."""
        self.press("\x03")

    def raw(self) -> str:
        """Return everything that was printed, with control sequences."""
        return self._raw.decode(errors="replace")

    def drawn(self) -> list[str]:
        """Return every line and every redrawn line, without control sequences."""
        return [line for line in re.split(r"[\r\n]+", _CSI.sub("\n", self.raw())) if line.strip()]

    def close(self) -> None:
        """End the command if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._ours)
