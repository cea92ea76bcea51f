"""Short runs of small models on meshes of this machine, for `equality` and `cross_reading`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.meshes import mesh_settings
from benchmarks.rank_processes import RankProcesses
from payload.core.files import write_whole
from payload.run_record.metrics_log import read_metrics
from payload.run_record.run_files import RunPaths
from tests.support.data_folders import make_data_folder

if TYPE_CHECKING:
    from payload.train.parts import Observer
    from payload.train.ranks.world import World

Layout = tuple[int, str]
"""Number of ranks, and the mesh."""
MODELS = ("gpt2", "llama")
BOUND = 1e-5
"""Limit on the relative difference of a loss, a gradient norm or an evaluation."""
_VOCAB = 512

_CONFIG = """
[data]
dir = "{data}"
sequence_length = 32
[batch]
global_batch_size = 8
micro_batch_size = 1
[schedule]
kind = "constant"
[train]
steps = {steps}
eval_every = 10
checkpoint_every = 0
sync_check_every = 5
[precision]
dtype = "fp32"
"""


class Task(Protocol):
    """One run of the trainer, a frozen dataclass."""

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""

    @property
    def mesh(self) -> str:
        """Return the mesh's short name."""

    def folder(self, root: Path) -> Path:
        """Return the run's folder."""

    def overrides(self, root: Path) -> list[str]:
        """Return the settings that differ from the common run.toml."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of both benchmarks, and the hidden ones of their ranks."""
    parser.add_argument("--only", type=layout, nargs="+", metavar="RANKS:MESH")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keep the runs in this folder")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tasks", type=Path, help=argparse.SUPPRESS)


def layout(text: str) -> Layout:
    """Return the number of ranks and the mesh in RANKS:MESH. Raises argparse.ArgumentTypeError."""
    ranks, _, mesh = text.partition(":")
    if not ranks.isdecimal() or int(ranks) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not RANKS:MESH")
    mesh_settings(mesh)
    return int(ranks), mesh


def prepare(root: Path, *, steps: int) -> None:
    """Make data, the Llama's weights and run.toml in `root`, unless `root` has the same
    run.toml."""
    from benchmarks.architecture_cases import CASES, make_folder

    text, path = _CONFIG.format(data=root.resolve() / "data", steps=steps), root / "run.toml"
    if path.exists():
        if path.read_text(encoding="utf-8") != text:
            raise SystemExit(f"error: {root} has runs of other settings. Choose another folder.")
        return
    make_data_folder(root / "data", vocab_size=_VOCAB)
    make_folder({**CASES["llama"], "vocab_size": _VOCAB}, root / "llama")
    path.write_text(text, encoding="utf-8")


def is_trained(run: Path, *, keep: bool = False) -> bool:
    """Return whether a run finished; an unfinished run is removed, except with `keep`."""
    path = RunPaths(run).summary
    if path.exists() and json.loads(path.read_text(encoding="utf-8"))["status"] == "finished":
        return True
    if not keep:
        shutil.rmtree(run, ignore_errors=True)
    return False


def overrides_of(model: str, mesh: str, root: Path, **settings: object) -> list[str]:
    """Return the settings that a model and a mesh add to `root`'s run.toml, and `settings`."""
    found: dict[str, object] = {**mesh_settings(mesh), **settings}
    if model == "llama":
        sizes = dict.fromkeys(("model.n_layer", "model.n_head", "model.n_embd"), "none")
        found |= {"model.init": root / "llama", **sizes}
    else:
        found |= {"model.preset": "tiny", "model.n_layer": 4, "model.n_embd": 64}
        found |= {"model.n_head": 4}
    return [f"{key}={value}" for key, value in found.items()]


def train(benchmark: str, tasks: Iterable[Any], root: Path, *, within_s: float) -> None:
    """Train the tasks; tasks with equal numbers of ranks share their processes, except tasks with
    DeepSpeed."""
    groups: dict[tuple[int, bool], list[Any]] = {}
    for task in tasks:
        groups.setdefault((task.ranks, task.mesh == "zero3"), []).append(task)
    for (ranks, _), group in groups.items():
        print(f"{ranks} rank(s): {len(group)} runs", file=sys.stderr, flush=True)
        with started(benchmark, group, root) as processes:
            processes.wait(within_s=within_s)


def started(benchmark: str, tasks: Sequence[Any], root: Path) -> RankProcesses:
    """Start ranks that train the tasks in turn."""
    path = root / "tasks.json"
    write_whole(path, json.dumps([asdict(each) for each in tasks]))
    program = ("-m", f"benchmarks.{benchmark}", "--rank", str(root), "--tasks", str(path))
    is_zero3 = any(each.mesh == "zero3" for each in tasks)
    return RankProcesses(tasks[0].ranks, *program, deepspeed=is_zero3)


def read_tasks(path: Path) -> list[dict[str, Any]]:
    """Return the fields of the tasks that `started` wrote."""
    tasks: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return tasks


def join_world() -> World:
    """Join the ranks of this process's environment."""
    from payload.config.launch_sections import DistributedSection
    from payload.train.ranks.world import World

    world = World.from_env(os.environ)
    world.join(DistributedSection(timeout_s=300))
    return world


def train_here(task: Task, root: Path, world: World, observer: Observer | None = None) -> None:
    """Train one task on this rank."""
    from payload.config.run_config import load_run_config
    from payload.train.parts import Observer
    from payload.train.session import train as train_session
    from payload.train.start_clock import StartClock

    train_session(
        load_run_config(root / "run.toml", overrides=task.overrides(root)),
        paths=RunPaths(task.folder(root)),
        world=world,
        stop_requested=lambda: False,
        clock=StartClock(),
        observer=observer or Observer(),
    )


def values(run: Path, key: str) -> dict[int, float]:
    """Return the values of a metric by step."""
    rows: list[Mapping[str, Any]] = list(read_metrics(RunPaths(run).metrics))
    return {row["step"]: row[key] for row in rows if key in row}


def largest_difference(ours: Path, reference: Path, key: str, *, after: int = -1) -> float:
    """Return the largest relative difference of a metric over the steps above `after`."""
    found, expected = (values(each, key) for each in (ours, reference))
    steps = [step for step in expected if step > after]
    assert steps and steps == [step for step in found if step > after], "both made the same steps"
    return max(abs(found[step] - expected[step]) / abs(expected[step]) for step in steps)
