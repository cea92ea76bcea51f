"""The cost of watching a step: metrics, heartbeats, a tracker and the exporter together.

    python -m benchmarks.overhead [--preset gpt2] [--sequence-length 256] [--pairs 30] [--block 2]

One process takes a training step again and again, in pairs of blocks whose order alternates. In
the watched blocks it does what a rank does for its records (the clock around each part, the row of
metrics.jsonl, the heartbeat before a pass), the exporter is scraped, and a tracker follows the
rows; both are real processes. In the other blocks nothing is written, both are stopped (SIGSTOP).
A scrape comes every 5 s of watched time, as from our Prometheus. Two figures come out:

- paired: the median over the pairs of the watched block's time over the other's, less one;
- spent: the time within those calls, plus all processor time of the two processes, over the time of
  the watched steps. It counts even what runs while this process waits, so it is a bound.

The paired figure has the machine's noise in it, which is given as half the distance between its
quartiles. A table goes to stderr, one JSON object to stdout; exit code 1 says that `spent` is over
the goal.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import psutil
import torch

from benchmarks.machine import describe_machine
from benchmarks.tables import Table
from payload.config.launch_sections import TrackSection
from payload.config.run_config import RunConfig
from payload.config.training_sections import EngineSection, OptimizerSection
from payload.launch.environment import malloc_environment
from payload.models.gpt2.spec import PRESETS
from payload.run_record.metrics_log import StepMetrics
from payload.run_record.run_files import RunPaths, RunState, write_json
from payload.train.families.gpt2.model import GPT
from payload.train.optimizers.optimizer import build_optimizers
from payload.train.rank_output_files import Heartbeat, MetricsFile, rss_bytes
from payload.train.ranks.world import World
from payload.train.step_clock import StepClock
from payload.train.torch_engines import apply_engine

GOAL = 0.005
"""Share of the step's time."""


def main(argv: Sequence[str]) -> int:
    """Measure in turn, print; 1 when the goal was missed."""
    arguments = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        paths = _run_folder(Path(folder) / "runs" / "overhead", tracker=arguments.tracker)
        training = _Training(arguments, paths)
        stack.enter_context(training)
        watchers = stack.enter_context(_watchers(paths, scrape_s=arguments.scrape_every))
        training.block(watched=True)
        pairs = []
        for number in range(arguments.pairs):
            order = (True, False) if number % 2 else (False, True)
            pairs.append({watched: _block(training, watchers, watched) for watched in order})
    result = _result(pairs, training, watchers, arguments)
    table = Table("value", labels=_SHOWN)
    for key in _SHOWN:
        table.row(key, str(result[key]))
    print(json.dumps(result))
    return 0 if result["goal_reached"] else 1


_SHOWN = ("step_s", "paired", "paired_noise", "records_ms_a_step", "processes_ms_a_step", "spent")


def _block(training: _Training, watchers: _Watchers, watched: bool) -> float:
    with watchers.at_work() if watched else ExitStack():
        return training.block(watched=watched)


def _run_folder(root: Path, *, tracker: str) -> RunPaths:
    """Make a run's folder, with the records that exporter and tracker begin with."""
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
    """The trainer's step on one batch of random tokens, with or without what it records."""

    def __init__(self, arguments: argparse.Namespace, paths: RunPaths) -> None:
        torch.manual_seed(1)
        length = arguments.sequence_length
        shape = replace(PRESETS[arguments.preset], sequence_length=length)
        self._model = GPT(shape)
        self._optimizers = build_optimizers(self._model, OptimizerSection())
        world = World(rank=0, world_size=1, local_rank=0, local_world_size=1, node="here")
        apply_engine(self._model, self._optimizers, settings=EngineSection(), world=world)
        self._batch = torch.randint(shape.vocab_size, (1, length + 1))
        self._steps_a_block = arguments.block
        self._metrics = MetricsFile(paths, resumed_at_step=0)
        self._heartbeat = Heartbeat(paths, world)
        self._clock = StepClock(rank=0, world_size=1)
        self.steps = 0
        self.watched_steps = 0
        self.records_s = 0.0
        """Within the calls that record, over all watched steps."""
        self.watched_s = 0.0

    def __enter__(self) -> _Training:
        self._metrics.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.__exit__(None, None, None)

    def block(self, *, watched: bool) -> float:
        """Return the seconds of one block of steps."""
        began_s = time.perf_counter()
        for _ in range(self._steps_a_block):
            self.steps += 1
            if watched:
                self._watched_step()
            else:
                self._finish_step(self._pass())
        took_s = time.perf_counter() - began_s
        self.watched_s += took_s if watched else 0.0
        return took_s

    def _pass(self) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = self._model(self._batch[:, :-1], self._batch[:, 1:])
        torch.autograd.backward(loss)
        return loss

    def _finish_step(self, loss: torch.Tensor) -> float:
        self._optimizers.clip(1.0)
        self._optimizers.step()
        return loss.item()

    def _watched_step(self) -> None:
        began_s = time.perf_counter()
        self._heartbeat.report(step=self.steps, phase="step", micro_step=0, of=1)
        with self._clock.of("data"):
            pass
        with self._clock.of("forward"):
            pass
        recorded_s = time.perf_counter() - began_s
        with self._clock.of("backward"):
            loss = self._pass()
        value = self._finish_step(loss)
        again_s = time.perf_counter()
        self._heartbeat.report(step=self.steps, phase="step", micro_step=1, of=1)
        times = self._clock.add_step(self._clock.take())
        step_s = time.perf_counter() - began_s
        row = StepMetrics(
            step=self.steps,
            tokens=self._batch.numel() * self.steps,
            loss=value,
            lr=1e-3,
            grad_norm=1.0,
            step_time_s=step_s,
            tokens_per_s=self._batch.numel() / step_s,
            mfu=0.5,
            data_time_s=0.0,
            sync_time_s=0.0,
            rss_bytes=rss_bytes(),
            ranks=times,
        )
        self._metrics.append(row)
        self.watched_steps += 1
        self.records_s += recorded_s + time.perf_counter() - again_s


class _Watchers:
    """The exporter, scraped again and again, and the tracker; stopped unless they are at work."""

    def __init__(
        self, processes: Sequence[subprocess.Popen[str]], url: str, *, scrape_s: float
    ) -> None:
        self._processes = processes
        self._url = url
        self._scrape_s = scrape_s
        self._working = threading.Event()
        self._ended = threading.Event()
        self.scrapes = 0
        self.cpu_s = 0.0
        """Processor time of both while they were at work."""
        self._thread = threading.Thread(target=self._scrape, daemon=True)
        self._thread.start()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let both go on within the block."""
        before_s = self._cpu_s()
        self.send(signal.SIGCONT)
        self._working.set()
        yield
        self._working.clear()
        self.send(signal.SIGSTOP)
        self.cpu_s += self._cpu_s() - before_s

    def end(self) -> None:
        """Stop scraping."""
        self._ended.set()
        self.send(signal.SIGCONT)
        self._thread.join()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to both."""
        for process in self._processes:
            process.send_signal(number)

    def _cpu_s(self) -> float:
        times = [psutil.Process(process.pid).cpu_times() for process in self._processes]
        return sum(each.user + each.system for each in times)

    def _scrape(self) -> None:
        """Scrape at the start of the watched time, and after every so many seconds of it."""
        left_s, last_s = 0.0, time.monotonic()
        while not self._ended.is_set():
            working = self._working.wait(0.01)
            now_s = time.monotonic()
            left_s, last_s = left_s - (now_s - last_s if working else 0.0), now_s
            if not working or left_s > 0.0:
                time.sleep(0.01)
                continue
            left_s += self._scrape_s
            # It may be stopped meanwhile, and answers when it goes on.
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
    watchers = _Watchers(processes, processes[0].stdout.readline().strip(), scrape_s=scrape_s)
    # Else the tracker's imports would be counted, which a run pays once.
    time.sleep(5.0)
    watchers.send(signal.SIGSTOP)
    try:
        yield watchers
    finally:
        watchers.end()
        for process in processes:
            process.communicate(timeout=60)


def _result(
    pairs: Sequence[dict[bool, float]],
    training: _Training,
    watchers: _Watchers,
    arguments: argparse.Namespace,
) -> dict[str, object]:
    ratios = [pair[True] / pair[False] - 1 for pair in pairs]
    low, _, high = statistics.quantiles(ratios, n=4)
    # The first block was without the processes.
    steps = len(pairs) * arguments.block
    records_s = training.records_s / training.watched_steps
    processes_s = watchers.cpu_s / steps
    step_s = statistics.median(pair[False] for pair in pairs) / arguments.block
    spent = (records_s + processes_s) / step_s
    return {
        "benchmark": "overhead",
        "preset": arguments.preset,
        "sequence_length": arguments.sequence_length,
        "tracker": arguments.tracker,
        "pairs": len(pairs),
        "steps_a_block": arguments.block,
        "scrapes": watchers.scrapes,
        "scrape_every_s": arguments.scrape_every,
        "step_s": round(step_s, 3),
        "paired": round(statistics.median(ratios), 5),
        "paired_noise": round((high - low) / 2, 5),
        "records_ms_a_step": round(1000 * records_s, 3),
        "processes_ms_a_step": round(1000 * processes_s, 3),
        "spent": round(spent, 5),
        "goal": GOAL,
        "goal_reached": spent < GOAL,
        "versions": {name: version(name) for name in ("torch", "prometheus-client")},
        "threads": torch.get_num_threads(),
        "machine": describe_machine(),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="gpt2")
    parser.add_argument("--sequence-length", type=int, default=256, metavar="TOKENS")
    parser.add_argument("--block", type=int, default=2, metavar="STEPS")
    parser.add_argument("--pairs", type=int, default=30, metavar="COUNT")
    parser.add_argument("--scrape-every", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--tracker", default="csv", help="one of track.to")
    return parser


if __name__ == "__main__":
    tuned = malloc_environment("tuned")
    if not tuned.items() <= os.environ.items():
        # The allocator's settings of a run, which it reads when a process begins.
        command = [sys.executable, "-m", "benchmarks.overhead", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | tuned)
    sys.exit(main(sys.argv[1:]))
