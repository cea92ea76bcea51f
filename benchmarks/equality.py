"""Losses, gradient norms and evaluations of every strategy, compared with the values of one rank.

    python -m benchmarks.equality
    python -m benchmarks.equality --only 2:shard 4:pipeline2+shard

A small GPT-2 and a small Llama train 20 steps in fp32 with AdamW and with SGD (momentum 0.9, which
replaces the run's optimizer), on one rank and on each mesh of 2 and 4 ranks of this machine. For
each number of ranks, the processes start once and train all its meshes in turn; DeepSpeed has its
own processes. `--runs FOLDER` keeps the runs, and a later command trains only the missing ones.

Each number is the largest relative difference from one rank, over all steps or evaluations. The
exit status is 1 if a difference is above 1e-5, or if ranks differ from each other. A table goes to
stderr, one JSON object to stdout.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Benchmark
from benchmarks.mesh_runs import (
    BOUND,
    MODELS,
    add_options,
    is_trained,
    join_world,
    largest_difference,
    overrides_of,
    prepare,
    read_tasks,
    train,
    train_here,
)
from payload.run_record.run_files import RunPaths
from payload.train.__main__ import exit_now

OPTIMIZERS = ("adamw", "sgd")
MESHES: Mapping[int, Sequence[str]] = {
    2: ("replicate", "shard", "tensor2", "pipeline2", "zero3"),
    4: (
        *("replicate", "shard", "shard2", "tensor2", "pipeline2"),
        *("pipeline2+shard", "tensor2+shard", "pipeline2+tensor2", "zero3"),
    ),
}
_METRICS = ("loss", "grad_norm", "val_loss")
_WAIT_S = 900
_LRS = {"adamw": 1e-3, "sgd": 3e-2}


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
        """Return the settings that differ from the common run.toml."""
        lr = _LRS[self.optimizer]
        settings = {"optimizer.lr": lr, "optimizer.min_lr": lr}
        return overrides_of(self.model, self.mesh, root, **settings)


def main(argv: Sequence[str]) -> int:
    """Measure, or run as one of the ranks."""
    benchmark = Benchmark("equality", __doc__)
    add_options(benchmark.parser)
    benchmark.parser.add_argument("--steps", type=int, default=20, metavar="STEPS")
    arguments = benchmark.parse(argv)
    if arguments.rank is not None:
        _train_all(arguments.rank, read_tasks(arguments.tasks))
        # Exit like a rank of a run: torch's threads can abort an exiting interpreter.
        exit_now(0)
    meshes = arguments.only or [(ranks, mesh) for ranks in MESHES for mesh in MESHES[ranks]]
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.runs or Path(folder)
        prepare(root, steps=arguments.steps)
        jobs = [
            Job(model=model, optimizer=optimizer, ranks=ranks, mesh=mesh)
            for ranks, mesh in dict.fromkeys([(1, "replicate"), *meshes])
            for model in MODELS
            for optimizer in OPTIMIZERS
        ]
        untrained = [job for job in jobs if not is_trained(job.folder(root))]
        train("equality", untrained, root, within_s=_WAIT_S)
        rows = [_compared(model, ranks, mesh, root) for model in MODELS for ranks, mesh in meshes]
    _add_table(benchmark, rows)
    benchmark.finish({"rows": rows})
    return 0 if all(row["holds"] for row in rows) else 1


def _train_all(root: Path, tasks: Sequence[dict[str, Any]]) -> None:
    """Train the tasks on this rank."""
    from payload.train.optimizers.optimizer import build_optimizers
    from payload.train.strategies import base, zero3

    world = join_world()
    for fields in tasks:
        job = Job(**fields)
        for module in (base, zero3):
            vars(module)["build_optimizers"] = _sgd if job.optimizer == "sgd" else build_optimizers
        train_here(job, root, world)
    world.leave()


def _sgd(model: Any, settings: Any, engine: Any = None, *, parts: Any = None) -> Any:
    """Return SGD, which replaces the run's optimizer: its updates keep the gradients' scale."""
    import torch

    from payload.train.models.base import trainable
    from payload.train.optimizers.optimizer import Optimizers
    from payload.train.optimizers.uncompiled import eager

    del engine
    trained = [each for _, each in (trainable(model) if parts is None else parts.items())]
    sgd = eager(torch.optim.SGD)(trained, lr=settings.lr, momentum=0.9)
    return Optimizers(model, (sgd,), parts=parts)


def _compared(model: str, ranks: int, mesh: str, root: Path) -> dict[str, Any]:
    """Return the differences between the runs of one mesh and the runs of one rank."""
    row: dict[str, Any] = {"model": model, "ranks": ranks, "mesh": mesh, "holds": True}
    for optimizer in OPTIMIZERS:
        ours = Job(model=model, optimizer=optimizer, ranks=ranks, mesh=mesh).folder(root)
        alone = Job(model=model, optimizer=optimizer, ranks=1, mesh="replicate").folder(root)
        found: dict[str, Any] = {key: largest_difference(ours, alone, key) for key in _METRICS}
        summary = json.loads(RunPaths(ours).summary.read_text(encoding="utf-8"))
        found["ranks_identical"] = summary["ranks_identical"]
        row[optimizer] = found
        largest = max(found[key] for key in _METRICS)
        row["holds"] &= largest <= BOUND and found["ranks_identical"] is True
    return row


def _add_table(benchmark: Benchmark, rows: Sequence[Mapping[str, Any]]) -> None:
    heads = [f"{optimizer} {key}" for optimizer in OPTIMIZERS for key in ("loss", "norm", "eval")]
    labels = [f"{row['model']}, {row['ranks']} ranks, {row['mesh']}" for row in rows]
    table = benchmark.table(*heads, "ranks equal", "within 1e-5", labels=labels)
    for label, row in zip(labels, rows, strict=True):
        cells = [f"{row[optimizer][key]:.1e}" for optimizer in OPTIMIZERS for key in _METRICS]
        equal = all(row[optimizer]["ranks_identical"] is True for optimizer in OPTIMIZERS)
        table.row(label, *cells, "yes" if equal else "NO", "yes" if row["holds"] else "NO")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
