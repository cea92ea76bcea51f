"""Writes checkpoints in a thread while training continues."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from payload.core.errors import TrainingError
from payload.formats.checkpoint_listing import best_checkpoints
from payload.train.checkpoints.checkpoint import (
    TrainerState,
    point_to_best,
    remove_old_checkpoints,
    save_checkpoint,
)
from payload.train.checkpoints.snapshot import Snapshot
from payload.train.models.base import CausalLM
from payload.train.tensors.copied_parts import CopiedParts

log = logging.getLogger(__name__)

_THREAD_CHECK_S = 1.0
_NO_THREAD = "the checkpoint was not written: its thread could not start or ended early"
_FREE_MEMORY = (
    "Free memory or lower batch.micro_batch_size, then resume from the previous checkpoint."
)


class Saving:
    """Writes one checkpoint at a time without copying tensors. An update waits for the reads.

    A failed write is raised as TrainingError by the next call of any method.
    """

    def __init__(
        self,
        checkpoints: Path,
        *,
        keep: int,
        tokenizer: Mapping[str, bytes],
        copied: CopiedParts | None = None,
        val_losses: Mapping[int, float] | None = None,
        waiting: Callable[[], None],
    ) -> None:
        """`tokenizer` maps the names of the tokenizer's files to their contents.

        `copied` are the parts of a multimodal model that are copied unchanged to each checkpoint.
        `val_losses` maps steps to the losses of earlier evaluations; see `evaluated`. `waiting` is
        called when a wait begins, and whenever the write progresses during a wait.
        """
        self.checkpoints = checkpoints
        self._keep = keep
        self._tokenizer = tokenizer
        self._copied = copied
        self._val_losses = dict(val_losses or {})
        self._waiting = waiting
        self._write: _Write | None = None

    def begin(
        self, folder: Path, *, model: CausalLM, snapshot: Snapshot, state: TrainerState
    ) -> None:
        """Wait for the previous checkpoint, then begin to write `folder`."""
        self.finish()
        val_losses = dict(self._val_losses)  # an evaluation can end while the thread reads them

        def work(progressed: Callable[[], None], tensors_read: Callable[[], None]) -> None:
            try:
                save_checkpoint(
                    folder,
                    model=model,
                    snapshot=snapshot,
                    state=state,
                    tokenizer=self._tokenizer,
                    copied=self._copied,
                    progressed=progressed,
                    tensors_read=tensors_read,
                )
            finally:
                # Even after a failed write, the other ranks wait to send their shards.
                snapshot.finish()
            best = best_checkpoints(self.checkpoints, val_losses)
            keep = self._keep
            removed = remove_old_checkpoints(self.checkpoints, keep=keep, newest=folder, best=best)
            # The log has named the removed folders before.
            names = ", ".join(each.name for each in removed)
            more = f"; removed {names} (train.keep_checkpoints = {keep})" if removed else ""
            log.info(f"step {state.step}: checkpoint {folder}{more}")

        self._write = _Write(work)

    def send(self, snapshot: Snapshot) -> None:
        """Begin to send this rank's shards of a checkpoint that rank 0 writes."""
        self.finish()
        self._write = _Write(lambda _progressed, _tensors_read: snapshot.finish())

    def evaluated(self, step: int, *, val_loss: float) -> None:
        """Record the validation loss at `step`, so that the best checkpoint is never removed."""
        self._val_losses[step] = val_loss

    def before_update(self) -> None:
        """Wait until all tensors are read, so that model and optimizer may change."""
        if self._write is not None:
            self._write.wait(self._write.is_read, self._waiting)

    def finish(self) -> None:
        """Wait until the last checkpoint is complete on disk."""
        if self._write is not None:
            self._write.wait(self._write.is_whole, self._waiting)
            self._write = None
        best = best_checkpoints(self.checkpoints, self._val_losses)
        if best:
            point_to_best(self.checkpoints, best[0])


class _Write:
    """A thread that writes one checkpoint."""

    def __init__(self, work: Callable[[Callable[[], None], Callable[[], None]], None]) -> None:
        """Start a thread that calls `work`.

        `work` receives two functions. It calls the first function on progress, and the second
        function once all tensors are read.
        """
        self._work = work
        self._changed = threading.Condition()
        self._is_read = False
        self._is_whole = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:
            raise TrainingError(f"{_NO_THREAD} ({error}). {_FREE_MEMORY}") from None

    def is_read(self) -> bool:
        """Return whether all tensors are read or the write has failed."""
        return self._is_read or self._is_whole

    def is_whole(self) -> bool:
        """Return whether the checkpoint is complete or the write has failed."""
        return self._is_whole

    def wait(self, is_done: Callable[[], bool], waiting: Callable[[], None]) -> None:
        """Wait until `is_done` returns True; raise the thread's error, if any."""
        with self._changed:
            while not is_done():
                waiting()
                # No heartbeat in this loop: the watchdog must be able to detect a hung disk.
                while not self._changed.wait(_THREAD_CHECK_S) and not is_done():
                    if not self._thread.is_alive():
                        raise TrainingError(f"{_NO_THREAD}. {_FREE_MEMORY}")
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work(self._notify, self._notify_read)
        except BaseException as error:
            self._error = error
        with self._changed:
            self._is_whole = True
            self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _notify_read(self) -> None:
        with self._changed:
            self._is_read = True
            self._changed.notify_all()
