"""Copies of a run's newest checkpoint, made here while a command follows the run."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from payload.core.errors import SshUnreachableError, TileforgeError
from payload.orchestrate.runs.at_risk import COPY_EVERY_S
from payload.orchestrate.runs.remote_run import RemoteRun

_LOOK_S = 60.0
"""Time between two looks for a checkpoint where the last look found no new one."""
_LEAST_REST = 9.0
"""Times that a copy took until the next one may begin: it shares the way to the head."""
_END_S = 5.0


class CheckpointCopies:
    """Copies the newest checkpoint in a thread, over connections of its own.

    Its own older copies are removed, as each may have gigabytes. What it cannot copy is reported
    once and retried; `bring_home` copies at the run's end.
    """

    def __init__(
        self,
        run: RemoteRun,
        *,
        say: Callable[[str], None],
        look_s: float = _LOOK_S,
        every_s: float = COPY_EVERY_S,
    ) -> None:
        """Begin; the first look is after `look_s`, a copy at most every `every_s` seconds."""
        self._run = run.apart()
        self._say = say
        self._look_s = look_s
        self._every_s = every_s
        self._last: Path | None = None
        self._said: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._copy_until_ended, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End; a copy under way is broken off, and goes on from there at the next collect."""
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
                    pause_s = max(self._every_s, _LEAST_REST * took_s)
            except SshUnreachableError:
                self._run.close()  # the command that follows the run reports it
            except TileforgeError as error:
                self._tell(f"warning: no checkpoint is copied here for now: {error}")
            except OSError as error:
                self._tell(f"warning: no checkpoint is copied here for now: {error.strerror}")
        self._run.close()

    def _copied(self) -> bool:
        """Copy the newest checkpoint; return whether it is another one than before."""
        newest = self._run.newest_checkpoint_there()
        if newest is None or (self._last is not None and newest == self._last.name):
            return False
        was_here = {path.name for path in self._run.paths.checkpoints.glob("step_*")}
        found = self._run.collect_checkpoint(say=self._tell)
        if found is None or found == self._last:
            return False
        if found.name not in was_here:
            self._tell(f"checkpoint {found.name} is copied here")
        before, self._last = self._last, found
        if before is not None:
            self._remove(before)
        return True

    def _remove(self, checkpoint: Path) -> None:
        """Remove an older copy, first from sight: half a checkpoint must not look like one."""
        aside = checkpoint.with_name(f".{checkpoint.name}.collecting")
        checkpoint.rename(aside)
        shutil.rmtree(aside)

    def _tell(self, sentence: str) -> None:
        if sentence not in self._said and not self._ended.is_set():
            self._said.add(sentence)
            self._say(sentence)
