"""Share of a step that metrics, heartbeats, a tracker and the exporter cost together.

    python -m benchmarks.overhead [--preset gpt2] [--sequence-length 256] [--steps 60]

One process trains and writes the records of a rank (the clock around each phase, the row of
metrics.jsonl, the heartbeats), while an exporter is scraped every 5 s, as by our Prometheus, and a
tracker follows the rows; both are real processes. The cost is the time within those writes plus the
CPU time of both processes, over the time of the steps. This cost counts work that overlaps with the
step, so it is an upper bound. A table goes to stderr, one JSON object to stdout; the exit status is
1 if the cost is over the goal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from benchmarks.harness import Benchmark, seconds_of, use_run_allocator
from payload.config.launch_sections import TrackSection
from payload.config.run_config import RunConfig
from payload.config.training_sections import EngineSection, OptimizerSection
from payload.models.gpt2.spec import PRESETS
from payload.run_record.metrics_log import StepMetrics
from payload.run_record.run_files import RunPaths, RunState, write_json
from payload.train.families.gpt2.model import GPT
from payload.train.optimizers.optimizer import build_optimizers
from payload.train.rank_metrics_and_heartbeat import Heartbeat, MetricsFile, rss_bytes
from payload.train.ranks.world import World
from payload.train.step_clock import StepClock
from payload.train.torch_engines import apply_engine

GOAL = 0.005
"""Limit on the cost of all records together, as a share of a step's time."""
_START_S = 5.0
"""Time for the tracker's imports, which a run pays once."""


def main(argv: Sequence[str]) -> int:
    """Measure; return 1 if the goal was missed."""
    benchmark = Benchmark("overhead", __doc__)
    add = benchmark.parser.add_argument
    add("--preset", choices=sorted(PRESETS), default="gpt2")
    add("--sequence-length", type=int, default=256, metavar="TOKENS")
    add("--steps", type=int, default=60, metavar="COUNT")
    add("--scrape-every", type=float, default=5.0, metavar="SECONDS")
    add("--tracker", default="csv", help="one of track.to")
    arguments = benchmark.parse(argv)
    use_run_allocator()
    with tempfile.TemporaryDirectory() as folder:
        paths = _run_folder(Path(folder) / "runs" / "overhead", tracker=arguments.tracker)
        with MetricsFile(paths, resumed_at_step=0) as metrics:
            training = _Training(arguments, paths, metrics)
            training.step()
            with _watchers(paths, scrape_s=arguments.scrape_every) as watchers:
                training.records_s, before_s = 0.0, watchers.cpu_s()
                took_s = sum(seconds_of(training.step) for _ in range(arguments.steps))
                processes_s = watchers.cpu_s() - before_s
    records_s = training.records_s / arguments.steps
    step_s = took_s / arguments.steps - records_s
    spent = (records_s + processes_s / arguments.steps) / step_s
    shown = {
        "step_s": round(step_s, 3),
        "records_ms_a_step": round(1000 * records_s, 3),
        "processes_ms_a_step": round(1000 * processes_s / arguments.steps, 3),
        "spent": round(spent, 5),
    }
    table = benchmark.table("value", labels=shown)
    for key, value in shown.items():
        table.row(key, str(value))
    goal = {"goal": GOAL, "goal_reached": spent < GOAL, "scrapes": watchers.scrapes}
    packages = ("torch", "prometheus-client")
    benchmark.finish({**shown, **goal, "threads": torch.get_num_threads()}, packages=packages)
    return 0 if spent < GOAL else 1


def _run_folder(root: Path, *, tracker: str) -> RunPaths:
    """Make a run's folder with the files that exporter and tracker read first."""
    paths = RunPaths(root)
    root.mkdir(parents=True)
    config = replace(RunConfig(), track=TrackSection(to=(tracker,)))
    paths.config.write_text(config.to_toml(), encoding="utf-8")
    now = time.time()
    state = RunState(
        run_id=paths.run_id, status="running", started_unix=now, updated_unix=now, node="here"
    )
    write_json(paths.state, state)
    rank = {
        "rank": 0,
        "node": "here",
        "local_rank": 0,
        "node_rank": 0,
        "numa_domain": 0,
        "cores": [0],
        "threads": 1,
    }
    paths.ranks.write_text(json.dumps({"schema_version": 1, "ranks": [rank]}), encoding="utf-8")
    return paths


class _Training:
    """The trainer's step on one batch of random tokens, with its records."""

    def __init__(
        self, arguments: argparse.Namespace, paths: RunPaths, metrics: MetricsFile
    ) -> None:
        torch.manual_seed(1)
        length = arguments.sequence_length
        spec = replace(PRESETS[arguments.preset], sequence_length=length)
        self._model = GPT(spec)
        self._optimizers = build_optimizers(self._model, OptimizerSection())
        world = World(rank=0, world_size=1, local_rank=0, local_world_size=1, node="here")
        apply_engine(self._model, self._optimizers, settings=EngineSection(), world=world)
        self._batch = torch.randint(spec.vocab_size, (1, length + 1))
        self._metrics = metrics
        self._heartbeat = Heartbeat(paths, world)
        self._clock = StepClock(rank=0, world_size=1)
        self._steps = 0
        self.records_s = 0.0
        """Time spent in the calls that write records."""

    def step(self) -> None:
        """Take one step and write its records."""
        self._steps += 1
        began_s = time.perf_counter()
        self._heartbeat.report(step=self._steps, phase="step", micro_step=0, of=1)
        with self._clock.of("data"):
            pass
        with self._clock.of("forward"):
            pass
        self.records_s += time.perf_counter() - began_s
        with self._clock.of("backward"):
            with torch.autocast("cpu", torch.bfloat16):
                loss: torch.Tensor = self._model(self._batch[:, :-1], self._batch[:, 1:])
            torch.autograd.backward(loss)
        self._optimizers.clip(1.0)
        self._optimizers.step()
        value, trained_s = loss.item(), time.perf_counter()
        self._heartbeat.report(step=self._steps, phase="step", micro_step=1, of=1)
        step_s = time.perf_counter() - began_s
        row = StepMetrics(
            step=self._steps,
            tokens=self._batch.numel() * self._steps,
            loss=value,
            lr=1e-3,
            grad_norm=1.0,
            step_time_s=step_s,
            tokens_per_s=self._batch.numel() / step_s,
            mfu=0.5,
            data_time_s=0.0,
            sync_time_s=0.0,
            rss_bytes=rss_bytes(),
            ranks=self._clock.add_step(self._clock.take()),
        )
        self._metrics.append(row)
        self.records_s += time.perf_counter() - trained_s


class _Watchers:
    """The tracker, and the exporter, which a thread scrapes."""

    def __init__(
        self, processes: Sequence[subprocess.Popen[str]], url: str, *, scrape_s: float
    ) -> None:
        self._processes, self._url, self._scrape_s = processes, url, scrape_s
        self._ended = threading.Event()
        self.scrapes = 0
        self._thread = threading.Thread(target=self._scrape, daemon=True)
        self._thread.start()

    def cpu_s(self) -> float:
        """Return the CPU time that both processes have used so far."""
        times = [psutil.Process(process.pid).cpu_times() for process in self._processes]
        return sum(each.user + each.system for each in times)

    def end(self) -> None:
        """Stop scraping."""
        self._ended.set()
        self._thread.join()

    def _scrape(self) -> None:
        while not self._ended.wait(self._scrape_s):
            with urllib.request.urlopen(self._url, timeout=60) as answer:
                answer.read()
            self.scrapes += 1


@contextmanager
def _watchers(paths: RunPaths, *, scrape_s: float) -> Iterator[_Watchers]:
    commands = (
        [sys.executable, "-m", "payload.monitor.exporter", "--run-dir", str(paths.root)],
        [sys.executable, "-m", "payload.report", str(paths.root), "--track", "--live"],
    )
    processes = [
        subprocess.Popen(each, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for each in commands
    ]
    assert processes[0].stdout is not None
    url = processes[0].stdout.readline().strip()
    time.sleep(_START_S)
    watchers = _Watchers(processes, url, scrape_s=scrape_s)
    try:
        yield watchers
    finally:
        watchers.end()
        for process in processes:
            process.communicate(timeout=60)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
