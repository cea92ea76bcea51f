"""Downloads a run's newest checkpoint regularly while a command follows the run."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from payload.core.errors import SshUnreachableError, TileforgeError
from payload.orchestrate.runs.at_risk import COPY_EVERY_S
from payload.orchestrate.runs.remote_run import RemoteRun

_CHECK_S = 60.0
"""Seconds until the next check for a checkpoint if the last check found no new checkpoint."""
_MIN_PAUSE_RATIO = 9.0
"""Minimum pause after a copy, as a multiple of the copy's duration: the ranks need the network."""
_END_S = 5.0


class CheckpointCopies:
    """Copies the newest checkpoint regularly in a thread, over separate connections.

    The thread removes its older copies, because each may take gigabytes. A failed copy is reported
    once and retried. At the end of the run, `collect_results` copies the last checkpoint.
    """

    def __init__(
        self,
        run: RemoteRun,
        *,
        say: Callable[[str], None],
        check_s: float = _CHECK_S,
        every_s: float = COPY_EVERY_S,
    ) -> None:
        """Start a thread that first checks after `check_s` and copies at most every `every_s`."""
        self._run = run.apart()
        self._say = say
        self._look_s = check_s
        self._every_s = every_s
        self._last: Path | None = None
        self._reported: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._copy_until_ended, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; the next `collect` resumes an interrupted copy."""
        self._ended.set()
        self._run.close()
        self._thread.join(_END_S)

    def _copy_until_ended(self) -> None:
        pause_s = self._look_s
        while not self._ended.wait(pause_s):
            began_s, pause_s = time.monotonic(), self._look_s
            try:
                if self._copied():
                    took_s = time.monotonic() - began_s
                    pause_s = max(self._every_s, _MIN_PAUSE_RATIO * took_s)
            except SshUnreachableError:
                self._run.close()  # the command that follows the run reports it
            except TileforgeError as error:
                self._report(
                    f"warning: checkpoints are not copied to this machine for now: {error}"
                )
            except OSError as error:
                self._report(
                    f"warning: checkpoints are not copied to this machine for now: {error.strerror}"
                )
        self._run.close()

    def _copied(self) -> bool:
        """Copy the newest checkpoint; return False if it was already copied."""
        newest = self._run.newest_remote_checkpoint()
        if newest is None or (self._last is not None and newest == self._last.name):
            return False
        existed = {path.name for path in self._run.paths.checkpoints.glob("step_*")}
        found = self._run.collect_checkpoint(say=self._report)
        if found is None or found == self._last:
            return False
        if found.name not in existed:
            self._report(f"checkpoint {found.name} was copied to this machine")
        before, self._last = self._last, found
        if before is not None:
            self._remove(before)
        return True

    def _remove(self, checkpoint: Path) -> None:
        """Rename an older copy before deletion, so that no partial copy looks like a checkpoint."""
        aside = checkpoint.with_name(f".{checkpoint.name}.collecting")
        checkpoint.rename(aside)
        shutil.rmtree(aside)

    def _report(self, sentence: str) -> None:
        if sentence not in self._reported and not self._ended.is_set():
            self._reported.add(sentence)
            self._say(sentence)
