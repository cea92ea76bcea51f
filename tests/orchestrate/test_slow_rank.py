"""A rank with a part of its cores' time is named while the run goes on, and at its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from payload.metrics_log import read_metrics
from payload.results import RunPaths, Summary, read_json
from tests.supervise.planned import REPO, wait_for
from tests.support.data_folders import make_data_folder

pytestmark = pytest.mark.ranks
TIMEOUT_S = 120.0
SETTINGS = (
    *("model.preset=tiny", "model.n_layer=4", "model.n_head=4", "model.n_embd=128"),
    *("data.sequence_length=256", "batch.global_batch_size=8", "batch.micro_batch_size=4"),
    *("train.steps=2000", "train.eval_every=0", "precision.dtype=fp32"),
    *("launch.ranks_per_node=2", "launch.threads_per_rank=1"),
)
_RUNS_S, _STANDS_S = 0.01, 0.03
"""A rank that runs a quarter of the time is slow on a busy machine, too, where all ranks wait."""


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
            continue  # It has ended meanwhile.
        if b"payload.train" in words and os.fsencode(paths.root) in words and wanted & {*settings}:
            return int(folder.name)
    raise AssertionError(f"no process of rank {rank}")


@contextmanager
def slowed(process: int) -> Iterator[None]:
    """Stop a process again and again, so that it runs a quarter of the time."""
    ended = threading.Event()

    def turns() -> None:
        while not ended.wait(_RUNS_S):
            os.kill(process, signal.SIGSTOP)
            ended.wait(_STANDS_S)
            os.kill(process, signal.SIGCONT)

    thread = threading.Thread(target=turns)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_rank_with_a_quarter_of_its_time_is_named_within_20_steps(tmp_path: Path) -> None:
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

    def named() -> list[str]:
        return [line for line in lines if line.startswith("warning: rank 1 ")]

    try:
        wait_for(lambda: step_of(paths) >= 12, "12 steps", timeout_s=TIMEOUT_S)
        began = step_of(paths)
        with slowed(process_of(paths, rank=1)):
            wait_for(lambda: bool(named()), "the slow rank's name", timeout_s=TIMEOUT_S)
            seen = step_of(paths)
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(timeout=TIMEOUT_S)
        reader.join()
    assert seen <= began + 20
    found = re.search(r"on (\S+) is slow since step (\d+): .* Look at its log: (.*)", named()[0])
    assert found is not None and found[1] == os.uname().nodename
    assert began <= int(found[2]) <= began + 20
    assert " logs one " in found[3] and "--rank 1" in found[3]
    summary = read_json(Summary, paths.summary)
    assert summary is not None and 1 in {each.rank for each in summary.stragglers}
    after = lines[lines.index(named()[0]) + 1 :]
    assert any("rank 1 on" in line for line in after)  # again at the end
    page = paths.report.read_text(encoding="utf-8")
    assert "rank 1 was slow" in page or "rank 1 is slow" in page
    rows = [json.loads(line) for line in paths.metrics.read_text(encoding="utf-8").splitlines()]
    assert all(len(row["ranks"]["forward"]) == 2 for row in rows if "loss" in row)
