"""Every strategy trains as one rank does: losses, gradient norms, evaluations, equal ranks.

    python -m benchmarks.equality
    python -m benchmarks.equality --only 2:shard 4:pipeline2+shard

A small GPT-2 and a small Llama train 20 steps in fp32 with AdamW and with SGD (momentum 0.9, in the
optimizer's place), on one rank and on each mesh of 2 and 4 ranks of this machine. The ranks of one
number of them start once and train all of its meshes in turn; DeepSpeed's have processes of their
own. With `--runs FOLDER` the runs are kept, and a later command trains only what is missing there.

Each figure is the largest relative difference from one rank, over all steps or evaluations. The
exit status is 1 when one is above 1e-5, or ranks were found to differ. A table goes to stderr, one
JSON object to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.meshes import mesh_settings
from benchmarks.rank_processes import RankProcesses
from benchmarks.tables import Table
from payload.run_record.metrics_log import read_metrics
from payload.run_record.run_files import RunPaths
from payload.train.__main__ import exit_now
from tests.support.data_folders import make_data_folder

MODELS = ("gpt2", "llama")
OPTIMIZERS = ("adamw", "sgd")
MESHES: Mapping[int, Sequence[str]] = {
    2: ("replicate", "shard", "tensor2", "pipeline2", "zero3"),
    4: (
        *("replicate", "shard", "shard2", "tensor2", "pipeline2"),
        *("pipeline2+shard", "tensor2+shard", "pipeline2+tensor2", "zero3"),
    ),
}
_BOUND = 1e-5
_VOCAB = 512
_WAIT_S = 900
_LRS = {"adamw": 1e-3, "sgd": 3e-2}

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of the trainer."""

    model: str
    optimizer: str
    ranks: int
    mesh: str

    def folder(self, root: Path) -> Path:
        """Return the run's folder."""
        return root / f"{self.model}-{self.optimizer}-{self.ranks}-{self.mesh}"

    def overrides(self, root: Path) -> list[str]:
        """Return what differs from the common run.toml."""
        lr = _LRS[self.optimizer]
        settings = {"optimizer.lr": lr, "optimizer.min_lr": lr}
        return overrides_of(self.model, self.mesh, root, **settings)


def main(argv: Sequence[str]) -> int:
    """Measure and print, or be one of the ranks."""
    arguments = _parser().parse_args(argv)
    if arguments.rank is not None:
        _train_all(arguments.rank, json.loads(arguments.jobs))
        # As a rank of a run ends: torch's threads have been seen to abort a leaving interpreter.
        exit_now(0)
    wanted = arguments.only or [(ranks, mesh) for ranks in MESHES for mesh in MESHES[ranks]]
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.runs or Path(folder)
        prepare(root, steps=arguments.steps)
        for ranks, group in _groups(wanted):
            missing = [each for each in group if not is_trained(each.folder(root))]
            if missing:
                _start(ranks, missing, root)
        rows = [_compared(model, ranks, mesh, root) for model in MODELS for ranks, mesh in wanted]
    _print(rows)
    wall_s = round(time.perf_counter() - began_s)
    found = {"benchmark": "equality", "steps": arguments.steps, "wall_s": wall_s}
    print(json.dumps(found | {"machine": describe_machine(), "rows": rows}))
    return 0 if all(row["holds"] for row in rows) else 1


def prepare(root: Path, *, steps: int) -> None:
    """Make data, the Llama's weights and run.toml in `root`, which may have runs of the same."""
    from benchmarks.architecture_cases import CASES, make_folder

    text, path = _CONFIG.format(data=root.resolve() / "data", steps=steps), root / "run.toml"
    if path.exists():
        if path.read_text(encoding="utf-8") != text:
            raise SystemExit(f"error: {root} has runs of other settings. Name another folder.")
        return
    make_data_folder(root / "data", vocab_size=_VOCAB)
    make_folder({**CASES["llama"], "vocab_size": _VOCAB}, root / "llama")
    path.write_text(text, encoding="utf-8")


def is_trained(run: Path, *, keep: bool = False) -> bool:
    """Say whether a run came to its end; one that did not is removed, unless it is to `keep`."""
    path = RunPaths(run).summary
    if path.exists() and json.loads(path.read_text(encoding="utf-8"))["status"] == "finished":
        return True
    if not keep:
        shutil.rmtree(run, ignore_errors=True)
    return False


def overrides_of(model: str, mesh: str, root: Path, **settings: object) -> list[str]:
    """Return what a model on a mesh sets besides the run.toml of `root`, and `settings`."""
    found: dict[str, object] = {**mesh_settings(mesh), **settings}
    if model == "llama":
        sizes = dict.fromkeys(("model.n_layer", "model.n_head", "model.n_embd"), "none")
        found |= {"model.init": root / "llama", **sizes}
    else:
        found |= {"model.preset": "tiny", "model.n_layer": 4, "model.n_embd": 64}
        found |= {"model.n_head": 4}
    return [f"{key}={value}" for key, value in found.items()]


def _groups(wanted: Sequence[tuple[int, str]]) -> list[tuple[int, list[Job]]]:
    """Return the runs that share their ranks' processes, one rank's first."""
    chosen: dict[tuple[int, bool], list[str]] = {(1, False): ["replicate"]}
    for ranks, mesh in wanted:
        group = chosen.setdefault((ranks, mesh == "zero3"), [])
        if mesh not in group:
            group.append(mesh)
    return [
        (
            ranks,
            [
                Job(model=model, optimizer=optimizer, ranks=ranks, mesh=mesh)
                for mesh in meshes
                for model in MODELS
                for optimizer in OPTIMIZERS
            ],
        )
        for (ranks, _), meshes in chosen.items()
    ]


def _start(ranks: int, jobs: Sequence[Job], root: Path) -> None:
    """Train the jobs in turn on so many ranks."""
    words = [[each.model, each.optimizer, each.mesh] for each in jobs]
    program = ["-m", "benchmarks.equality", "--rank", str(root), "--jobs", json.dumps(words)]
    print(f"{ranks} rank(s): {len(jobs)} runs", file=sys.stderr, flush=True)
    is_zero3 = any(each.mesh == "zero3" for each in jobs)
    with RankProcesses(ranks, *program, deepspeed=is_zero3) as processes:
        processes.wait(within_s=_WAIT_S)


def _train_all(root: Path, jobs: Sequence[tuple[str, str, str]]) -> None:
    """Train the jobs on this rank."""
    from payload.config.launch_sections import DistributedSection
    from payload.config.run_config import load_run_config
    from payload.train.optimizers.optimizer import build_optimizers
    from payload.train.ranks.world import World
    from payload.train.session import train
    from payload.train.start_clock import StartClock
    from payload.train.strategies import base, zero3

    world = World.from_env(os.environ)
    world.join(DistributedSection(timeout_s=300))
    for model, optimizer, mesh in jobs:
        job = Job(model=model, optimizer=optimizer, ranks=world.world_size, mesh=mesh)
        for place in (base, zero3):
            vars(place)["build_optimizers"] = _sgd if optimizer == "sgd" else build_optimizers
        train(
            load_run_config(root / "run.toml", overrides=job.overrides(root)),
            paths=RunPaths(job.folder(root)),
            world=world,
            stop_requested=lambda: False,
            clock=StartClock(),
        )
    world.leave()


def _sgd(model: Any, settings: Any, engine: Any = None, *, parts: Any = None) -> Any:
    """Return SGD in the place of the run's optimizer: its updates keep the gradients' scale."""
    import torch

    from payload.train.models.base import trainable
    from payload.train.optimizers.optimizer import Optimizers
    from payload.train.optimizers.uncompiled import eager

    del engine
    trained = [each for _, each in (trainable(model) if parts is None else parts.items())]
    sgd = eager(torch.optim.SGD)(trained, lr=settings.lr, momentum=0.9)
    return Optimizers(model, (sgd,), parts=parts)


def _compared(model: str, ranks: int, mesh: str, root: Path) -> dict[str, Any]:
    """Return how far the runs of one mesh are from those of one rank."""
    row: dict[str, Any] = {"model": model, "ranks": ranks, "mesh": mesh, "holds": True}
    for optimizer in OPTIMIZERS:
        ours = Job(model=model, optimizer=optimizer, ranks=ranks, mesh=mesh).folder(root)
        alone = Job(model=model, optimizer=optimizer, ranks=1, mesh="replicate").folder(root)
        found: dict[str, Any] = {
            key: _largest_difference(ours, alone, key) for key in ("loss", "grad_norm", "val_loss")
        }
        summary = json.loads(RunPaths(ours).summary.read_text(encoding="utf-8"))
        found["ranks_identical"] = summary["ranks_identical"]
        row[optimizer] = found
        differences = [found[key] for key in ("loss", "grad_norm", "val_loss")]
        row["holds"] &= max(differences) <= _BOUND and found["ranks_identical"] is True
    return row


def _largest_difference(ours: Path, theirs: Path, key: str) -> float:
    found, wanted = (
        [row[key] for row in read_metrics(RunPaths(each).metrics) if key in row]
        for each in (ours, theirs)
    )
    return float(
        max(abs(one - other) / abs(other) for one, other in zip(found, wanted, strict=True))
    )


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    heads = [f"{optimizer} {key}" for optimizer in OPTIMIZERS for key in ("loss", "norm", "eval")]
    labels = [f"{row['model']}, {row['ranks']} ranks, {row['mesh']}" for row in rows]
    table = Table(*heads, "ranks equal", "within 1e-5", labels=labels)
    for label, row in zip(labels, rows, strict=True):
        cells = [
            f"{row[optimizer][key]:.1e}"
            for optimizer in OPTIMIZERS
            for key in ("loss", "grad_norm", "val_loss")
        ]
        equal = all(row[optimizer]["ranks_identical"] is True for optimizer in OPTIMIZERS)
        table.row(label, *cells, "yes" if equal else "NO", "yes" if row["holds"] else "NO")


def case(text: str) -> tuple[int, str]:
    """Return the number of ranks and the mesh in RANKS:MESH. Raises argparse.ArgumentTypeError."""
    ranks, _, mesh = text.partition(":")
    if not ranks.isdecimal() or int(ranks) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not RANKS:MESH")
    mesh_settings(mesh)
    return int(ranks), mesh


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.equality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=20, metavar="STEPS")
    parser.add_argument("--only", type=case, nargs="+", metavar="RANKS:MESH")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keep the runs there")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--jobs", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
