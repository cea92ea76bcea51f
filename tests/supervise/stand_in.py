"""A small program that behaves as a training rank does, without torch.

stand_in.py RUN_DIR [--steps N] [--fail RANK:CODE] [--crash RANK] [--deaf] [--stray] [--lockstep]
            [--loads] [--save-s SECONDS] [--says TEXT]
            [--stays PHASE] [--reads FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from payload.run_record.metrics_log import StepMetrics, to_json_line
from payload.run_record.reserved_space import write_record
from payload.run_record.run_files import (
    RankExit,
    RankProgress,
    RunPaths,
    RunStatus,
    Summary,
    last_record,
)

STEP_S = 0.05


class StandIn:
    """One rank: trains steps, stops when any rank gets a signal, notices when another is gone."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.paths = RunPaths(arguments.run_dir)
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.node = os.environ["TILEFORGE_NODE"]
        self.stop_file = self.paths.root / "stand_in_stop"

    def run(self) -> int:
        told = signal.SIG_IGN if self.arguments.deaf else lambda *_: self.stop_file.touch()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, told)
        _say(f"rank {self.rank} begins{self.arguments.says}")
        self._describe()
        if self.arguments.stray and self.rank == 0:
            subprocess.Popen(["sleep", "600"], start_new_session=True)
        while self.arguments.loads:
            self._progress(0, "load")
            time.sleep(STEP_S)
        while self.arguments.stays and not self.stop_file.exists():
            self._progress(0, self.arguments.stays)
            time.sleep(STEP_S)
        for step in range(1, self.arguments.steps + 1):
            self._progress(step)
            time.sleep(STEP_S)
            if self.arguments.reads:
                os.statvfs(self.arguments.reads)
            self._fail_if_told(step)
            while self.arguments.lockstep and self._someone_is_behind(step):
                time.sleep(STEP_S)
            if self._peer_is_gone():
                self._save(step)
                return self._exit(41, f"rank {self.rank} lost contact with another rank")
            if self.stop_file.exists():
                return self._end(step, "stopped")
        return self._end(self.arguments.steps, "finished")

    def _describe(self) -> None:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        text = json.dumps({"env": dict(os.environ), "cores": cores, "cwd": str(Path.cwd())})
        (self.paths.root / f"stand_in_{self.rank}.json").write_text(text, encoding="utf-8")

    def _progress(self, step: int, phase: str = "step") -> None:
        progress = RankProgress(
            rank=self.rank,
            node=self.node,
            pid=os.getpid(),
            step=step,
            phase=phase,
            time_unix=time.time(),
        )
        with contextlib.suppress(FileNotFoundError):
            write_record(self.paths.rank_progress(self.rank), progress, durable=False)
        if self.rank == 0 and phase == "step":
            row = StepMetrics(
                step=step, tokens=step, loss=5.0 - step / 100, lr=0.1, grad_norm=1.0,
                step_time_s=STEP_S, tokens_per_s=20.0, mfu=0.25, data_time_s=0.0, sync_time_s=0.0,
                rss_bytes=1,
            )  # fmt: skip
            with self.paths.metrics.open("a", encoding="utf-8") as file:
                file.write(to_json_line(row))

    def _fail_if_told(self, step: int) -> None:
        if step < 3:
            return
        if self.arguments.fail:
            rank, code = map(int, self.arguments.fail.split(":"))
            if rank == self.rank:
                sys.exit(self._exit(code, "the loss is nan"))
        if self.arguments.crash == self.rank:
            raise RuntimeError("unforeseen")

    def _someone_is_behind(self, step: int) -> bool:
        """Wait like the exchange of gradients, in which no rank continues alone."""
        if self._peer_is_gone() or self.stop_file.exists():
            return False
        found = [
            last_record(RankProgress, self.paths.rank_progress(i)) for i in range(self.world_size)
        ]
        return any(entry is None or entry.step < step for entry in found)

    def _peer_is_gone(self) -> bool:
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        for path in map(self.paths.rank_progress, others):
            progress = last_record(RankProgress, path)
            if progress is not None and not _is_alive(progress.pid):
                # Read again: its last record may have been written since.
                last = last_record(RankProgress, path)
                return last is not None and last.phase != "end"
        return False

    def _exit(self, code: int, error: str) -> int:
        _say(f"error: {error}")
        record = RankExit(
            rank=self.rank, node=self.node, exit_code=code, error=error, time_unix=time.time()
        )
        write_record(self.paths.rank_exit(self.rank), record)
        return code

    def _save(self, step: int) -> None:
        ends = time.monotonic() + (self.arguments.save_s if self.rank == 0 else 0.0)
        while time.monotonic() < ends:
            self._progress(step, "checkpoint")
            time.sleep(STEP_S)

    def _end(self, step: int, status: RunStatus) -> int:
        self._save(step)
        self._progress(step, "end")
        if self.rank == 0:
            summary = Summary(
                run_id=self.paths.run_id,
                status=status,
                exit_class="ok",
                world_size=self.world_size,
                nodes=1,
                steps=step,
                tokens=step,
                ranks_identical=True,
            )
            write_record(self.paths.summary, summary)
        _say(f"rank {self.rank} {status}")
        return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--fail")
    parser.add_argument("--crash", type=int)
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--stray", action="store_true")
    parser.add_argument("--lockstep", action="store_true")
    parser.add_argument("--loads", action="store_true")
    parser.add_argument("--says", default="")
    parser.add_argument("--stays")
    parser.add_argument("--reads")
    parser.add_argument("--save-s", type=float, default=0.0)
    return StandIn(parser.parse_args()).run()


if __name__ == "__main__":
    sys.exit(main())
