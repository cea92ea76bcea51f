"""A rank with half its core is reported while the run trains, and in its result."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from payload.run_record.metrics_log import MetricsTail, rank_times, read_metrics
from payload.run_record.run_files import RunPaths, Summary, read_json
from payload.run_record.stragglers import StragglerWatch
from tests.supervise.planned import REPO, wait_for
from tests.support.data_folders import make_data_folder
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.ranks
SETTINGS = (
    *("model.preset=tiny", "model.n_layer=4", "model.n_head=4", "model.n_embd=128"),
    *("data.sequence_length=256", "batch.global_batch_size=8", "batch.micro_batch_size=4"),
    *("train.steps=2000", "train.eval_every=0", "precision.dtype=fp32"),
    *("launch.ranks_per_node=2", "launch.threads_per_rank=1"),
)
_STEPS = 20
_NAMED = re.compile(
    r"warning: rank 1 on (\S+) has been slow since step (\d+).*: .* See the rank's log: (.*)"
)
_PERIOD_S, _LOOK_S = 0.2, 0.005


def step_of(paths: RunPaths) -> int:
    rows = read_metrics(paths.metrics)
    return max((row["step"] for row in rows if "loss" in row), default=0)


def process_of(paths: RunPaths, *, rank: int) -> int:
    """Return the process of a rank's trainer."""
    wanted = {f"{name}={rank}".encode() for name in ("RANK", "PMI_RANK")}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            settings = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # It may have ended in between.
        if b"payload.train" in words and os.fsencode(paths.root) in words and wanted & {*settings}:
            return int(folder.name)
    raise AssertionError(f"no process of rank {rank}")


def cpu_s(process: int) -> float:
    """Return the processor time that all threads of a process have had."""
    spent_ns = 0
    for thread in Path(f"/proc/{process}/task").glob("*/schedstat"):
        with suppress(OSError):  # A thread may end in between.
            spent_ns += int(thread.read_text(encoding="ascii").split()[0])
    return spent_ns / 1e9


def share_of(paths: RunPaths, process: int, *, steps: int) -> float:
    """Return the part of a core that a process uses over `steps` steps."""
    began, began_s, before_s = step_of(paths), time.monotonic(), cpu_s(process)
    wait_for(lambda: step_of(paths) >= began + steps, "more steps")
    return (cpu_s(process) - before_s) / (time.monotonic() - began_s)


def wait_for_even_ranks(paths: RunPaths) -> None:
    """Return once no rank is slow, and none was in the last rows.

    Other programs take a core from a rank at any time, and such a rank is named with good reason.
    """
    watch, tail = StragglerWatch(), MetricsTail(paths.metrics)
    evenness: deque[bool] = deque(maxlen=3)

    def are_even() -> bool:
        for row in tail.new_rows():
            if (times := rank_times(row)) is not None and "loss" in row:
                watch.add(row)
                evenness.append(max(times.work()) < 1.2 * min(times.work()))
        return not watch.slow() and len(evenness) == 3 and all(evenness)

    ends = time.monotonic() + DEADLINE_S
    while not are_even():
        assert time.monotonic() < ends, f"ranks were not equally fast within {DEADLINE_S:g} s"
        time.sleep(0.2)


def slow_after(paths: RunPaths, step: int) -> tuple[int, int] | None:
    """Return the first step after this one at which later rows show that rank 1 is slow.

    With it comes how many of those rows rank 1 took longer in: on a busy machine other programs
    take a core from rank 0, too, and a step in which both wait shows nothing.
    """
    watch, longer = StragglerWatch(), 0
    for row in read_metrics(paths.metrics):
        if "loss" in row and row["step"] > step and (times := rank_times(row)) is not None:
            watch.add(row)
            longer += times.work()[1] >= 1.25 * times.work()[0]
            if watch.is_slow(1):
                return int(row["step"]), longer
    return None


@contextmanager
def limited(process: int, *, share: float) -> Iterator[None]:
    """Let a process have at most this part of a core in each period, as cgroups' cpu.max does.

    Of what it had before, so that it is half as fast on a busy machine, too.
    """
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            ends_s, base_s = time.monotonic() + _PERIOD_S, cpu_s(process)
            os.kill(process, signal.SIGCONT)
            while time.monotonic() < ends_s and not ended.wait(_LOOK_S):
                if cpu_s(process) - base_s >= share * _PERIOD_S:
                    os.kill(process, signal.SIGSTOP)
                    ended.wait(max(0.0, ends_s - time.monotonic()))
        os.kill(process, signal.SIGCONT)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.slow
def test_a_rank_with_half_its_core_is_named_within_20_slow_steps(tmp_path: Path) -> None:
    data = make_data_folder(tmp_path / "data", vocab_size=512)
    paths = RunPaths(tmp_path / "runs" / "one")
    words = [word for each in (*SETTINGS, f"data.dir={data}") for word in ("--set", each)]
    run = subprocess.Popen(
        [
            *(sys.executable, "-m", "payload.orchestrate", "run", "--run-id", "one"),
            *("--inventory", "local", "--runs-dir", str(tmp_path / "runs"), *words),
        ],
        cwd=REPO,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: list[str] = []
    assert run.stderr is not None
    reader = threading.Thread(target=lines.extend, args=[run.stderr])
    reader.start()

    def named() -> re.Match[str] | None:
        """Return the last line on rank 1 if it reports a slow rank.

        Other programs may have made it slow before, too; then that line still stands.
        """
        found = [line for line in lines if re.match(r"(warning|note): rank 1 on ", line)]
        return _NAMED.match(found[-1]) if found else None

    try:
        wait_for(lambda: step_of(paths) >= 12, "12 steps")
        process = process_of(paths, rank=1)
        share = share_of(paths, process, steps=10)
        wait_for_even_ranks(paths)
        began = step_of(paths)
        with limited(process, share=share / 2):
            wait_for(
                # The line may be of an earlier slowness that is not over yet, the rows may not.
                lambda: slow_after(paths, began) is not None and named() is not None,
                "the slow rank's name",
            )
            found = next(match for line in reversed(lines) if (match := _NAMED.match(line)))
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(timeout=DEADLINE_S)
        reader.join()
    shown = slow_after(paths, began)
    assert shown is not None and shown[1] <= _STEPS
    assert found[1] == os.uname().nodename
    assert int(found[2]) <= shown[0]
    assert " logs one " in found[3] and "--rank 1" in found[3]
    summary = read_json(Summary, paths.summary)
    assert summary is not None and 1 in {each.rank for each in summary.stragglers}
    after = lines[lines.index(found.string) + 1 :]
    assert any("rank 1 on" in line for line in after)  # again at the end
    page = paths.report.read_text(encoding="utf-8")
    assert "rank 1 was slow" in page or "rank 1 has been slow" in page
    rows = [json.loads(line) for line in paths.metrics.read_text(encoding="utf-8").splitlines()]
    assert all(len(row["ranks"]["forward"]) == 2 for row in rows if "loss" in row)
