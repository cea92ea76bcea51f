"""Checkpoints across strategies: each mesh writes one, and every mesh reads all of them.

    python -m benchmarks.cross_reading
    python -m benchmarks.cross_reading --only 1:replicate 2:shard 4:pipeline2+tensor2 --models llama
    python -m benchmarks.cross_reading --kills

Each mesh trains a small GPT-2 or Llama (those of `benchmarks.equality`) for 10 steps in fp32 with
AdamW and saves after 5. Every mesh reads each of these checkpoints and makes the next 5 steps. A
cell is the largest relative difference between the reader's losses and the writer's. In addition:

- Each rank compares its shard of weights and optimizer state with the file, bit by bit: a writer
  when it saves, a reader before its first step.
- If the reader has the writer's mesh, losses and the last checkpoint equal the writer's, bitwise.
- transformers loads each checkpoint to the same bits, without a missing or unknown tensor.

With `--kills` each mesh is killed (SIGKILL, all processes) at a random time of a run that saves
after every third step, and resumes to the same bits as an uninterrupted run. The exit status is 1
if a check fails. A table goes to stderr, one JSON object to stdout. `--runs FOLDER` keeps the runs,
and a later command trains only the missing ones.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Benchmark
from benchmarks.mesh_runs import (
    BOUND,
    MODELS,
    Layout,
    add_options,
    is_trained,
    join_world,
    largest_difference,
    overrides_of,
    prepare,
    read_tasks,
    started,
    train,
    train_here,
    values,
)
from payload.core.files import write_whole
from payload.run_record.run_files import RunPaths
from payload.train.__main__ import exit_now

LAYOUTS: Sequence[Layout] = (
    *((1, "replicate"), (2, "replicate"), (2, "shard"), (2, "zero3"), (2, "tensor2")),
    *((2, "pipeline2"), (4, "shard2"), (4, "tensor2"), (4, "pipeline2+shard")),
    *((4, "tensor2+shard"), (4, "pipeline2+tensor2")),
)
_STEPS, _SAVED = 10, 5
_WAIT_S = 1500
_KILL_STEPS, _KILL_WITHIN_S = 90, 2.0
_VERDICT = "differing.json"
"""File in a run's folder with the names of all tensors that differ from the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run of the trainer: from scratch, or from step 5 of another run."""

    model: str
    ranks: int
    mesh: str
    kind: str
    """`write`, `read`, `whole` or `killed`."""
    writer: Layout | None = None

    def folder(self, root: Path) -> Path:
        """Return the run's folder."""
        name = f"{self.model}-{self.kind}-{self.ranks}-{self.mesh}"
        return root / (name if self.writer is None else f"{name}-from-{_name(self.writer, '-')}")

    def overrides(self, root: Path) -> list[str]:
        """Return the settings that differ from the common run.toml."""
        is_long = self.kind in ("whole", "killed")
        settings: dict[str, object] = {"optimizer.lr": 1e-3, "optimizer.min_lr": 1e-3}
        settings |= {"train.steps": _KILL_STEPS if is_long else _STEPS, "train.eval_tokens": 64}
        settings |= {"train.checkpoint_every": 3 if is_long else _SAVED}
        return overrides_of(self.model, self.mesh, root, **settings)

    def checkpoint(self, root: Path) -> Path:
        """Return the checkpoint of step 5 in the run's folder."""
        return RunPaths(self.folder(root)).checkpoint(_SAVED)


def main(argv: Sequence[str]) -> int:
    """Measure, or run as one of the ranks."""
    benchmark = Benchmark("cross_reading", __doc__)
    add_options(benchmark.parser)
    add = benchmark.parser.add_argument
    add("--models", choices=MODELS, nargs="+", default=list(MODELS))
    add("--kills", action="store_true", help="kill a run of each mesh, then resume it")
    arguments = benchmark.parse(argv)
    if arguments.rank is not None:
        _train_all(arguments.rank, read_tasks(arguments.tasks))
        # Exit like a rank of a run: torch's threads can abort an exiting interpreter.
        exit_now(0)
    layouts = arguments.only or list(LAYOUTS)
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.runs or Path(folder)
        prepare(root, steps=_STEPS)
        measured = _kills if arguments.kills else _matrix
        rows = [
            each for model in arguments.models for each in measured(benchmark, model, layouts, root)
        ]
    benchmark.finish({"rows": rows})
    return 0 if all(row["holds"] for row in rows) else 1


def _matrix(
    benchmark: Benchmark, model: str, layouts: Sequence[Layout], root: Path
) -> Iterator[dict[str, Any]]:
    """Train all writers, then all readers; yield a row per writer."""
    writers = [Task(model=model, ranks=n, mesh=mesh, kind="write") for n, mesh in layouts]
    _train(writers, root)
    readers = {
        (writer, reader): Task(
            model=model, ranks=reader[0], mesh=reader[1], kind="read", writer=writer
        )
        for writer in layouts
        for reader in layouts
    }
    _train(list(readers.values()), root)
    names = [_name(each) for each in layouts]
    heads = (*names, "saved bits", "read bits", "resumed bits", "transformers", "holds")
    table = benchmark.table(*heads, labels=[f"{model}, {name}" for name in names])
    for writer, task in zip(layouts, writers, strict=True):
        read = {each: readers[writer, each].folder(root) for each in layouts}
        own = task.folder(root)
        row: dict[str, Any] = {
            "model": model,
            "writer": _name(writer),
            "losses": {
                _name(each): largest_difference(path, own, "loss", after=_SAVED)
                for each, path in read.items()
            },
            "saved_bits": not _verdict(own),
            "read_bits": not any(map(_verdict, read.values())),
            "resumed_bits": _is_same_run(read[writer], own, step=_STEPS),
            "transformers": _transformers_loads(task.checkpoint(root)),
        }
        checks = ("saved_bits", "read_bits", "resumed_bits", "transformers")
        row["holds"] = max(row["losses"].values()) <= BOUND and all(row[key] for key in checks)
        losses = [f"{each:.0e}" for each in row["losses"].values()]
        cells = ["yes" if row[key] else "NO" for key in (*checks, "holds")]
        table.row(f"{model}, {_name(writer)}", *losses, *cells)
        yield row


def _kills(
    benchmark: Benchmark, model: str, layouts: Sequence[Layout], root: Path
) -> Iterator[dict[str, Any]]:
    """Kill and resume a run of each mesh; yield a row per mesh."""
    _train([Task(model=model, ranks=n, mesh=mesh, kind="whole") for n, mesh in layouts], root)
    labels = [f"{model}, {_name(each)}" for each in layouts]
    heads = ("killed after step", "resumed from", "losses, bits equal")
    table = benchmark.table(*heads, labels=labels)
    for label, (ranks, mesh) in zip(labels, layouts, strict=True):
        task = Task(model=model, ranks=ranks, mesh=mesh, kind="killed")
        own = task.folder(root)
        shutil.rmtree(own, ignore_errors=True)
        _start_and_kill(task, root)
        killed_after = max(values(own, "step"))
        _train([task], root)
        whole = Task(model=model, ranks=ranks, mesh=mesh, kind="whole").folder(root)
        is_same = _is_same_run(own, whole, step=_KILL_STEPS) and values(own, "loss") == values(
            whole, "loss"
        )
        resumed_at = json.loads((own / "began.json").read_text(encoding="utf-8"))["step"]
        is_cut = killed_after < _KILL_STEPS
        table.row(label, str(killed_after), str(resumed_at), "yes" if is_same else "NO")
        yield {
            "model": model,
            "mesh": _name((ranks, mesh)),
            "killed_after_step": killed_after,
            "went_on_from_step": resumed_at,
            "holds": is_same and is_cut and 0 < resumed_at <= killed_after,
        }


def _start_and_kill(task: Task, root: Path) -> None:
    """Start the run, and kill all its processes at a random time after its first checkpoint."""
    with started("cross_reading", [task], root) as processes:
        ends_s = time.monotonic() + _WAIT_S
        while not any(RunPaths(task.folder(root)).checkpoints.glob("step_*/manifest.json")):
            if not processes.is_running() or time.monotonic() > ends_s:
                raise SystemExit(f"error: {task.folder(root).name} wrote no checkpoint.")
            time.sleep(0.01)
        time.sleep(random.uniform(0, _KILL_WITHIN_S))


def _train(tasks: Sequence[Task], root: Path) -> None:
    """Train the tasks that are not finished; a reader gets a copy of the writer's checkpoint."""
    for task in tasks:
        if not is_trained(task.folder(root), keep=task.kind == "killed") and task.writer:
            ranks, mesh = task.writer
            writer = Task(model=task.model, ranks=ranks, mesh=mesh, kind="write")
            shutil.copytree(writer.checkpoint(root), task.checkpoint(root))
    missing = [each for each in tasks if not is_trained(each.folder(root), keep=True)]
    train("cross_reading", missing, root, within_s=_WAIT_S)


def _train_all(root: Path, tasks: Sequence[Mapping[str, Any]]) -> None:
    """Train the tasks on this rank, and record the tensors that differ from the checkpoint."""
    import torch

    from payload.formats.checkpoint_listing import checkpoint_folders
    from payload.train.parts import Observer, TrainContext

    class Held(Observer):
        """Copies this rank's tensors when the checkpoint of step 5 was written or read."""

        def ready(self, context: TrainContext) -> None:
            self.parts, self.held = context, _held(context)

        def before_update(self, step: int) -> None:
            # There was no update since the checkpoint of that step began.
            if step == _SAVED:
                self.held = _held(self.parts)

    world = join_world()
    for given in tasks:
        writer = given["writer"]
        task = Task(**{**given, "writer": None if writer is None else (writer[0], writer[1])})
        paths, observer = RunPaths(task.folder(root)), Held()
        saved = checkpoint_folders(paths.checkpoints)
        before = max((int(each.name[-8:]) for each in saved), default=0)
        train_here(task, root, world, observer)
        differing: list[str] = []
        if task.kind in ("write", "read"):
            differing = _differing(observer.parts, observer.held, task.checkpoint(root))
        count = world.sum(torch.tensor(float(len(differing))))
        if world.is_main:
            found = {"tensors": int(count), "first": differing[:3]}
            write_whole(paths.root / _VERDICT, json.dumps(found))
            write_whole(paths.root / "began.json", json.dumps({"step": before}))
    world.leave()


def _held(parts: Any) -> dict[str, Any]:
    """Return copies of this rank's shards of the weights and their optimizer state."""
    of_weights = parts.optimizers.trained().items()
    found = {f"weight.{name}": each.detach().clone() for name, each in of_weights}
    state = parts.optimizers.state_tensors().items()
    return found | {name: each.clone() for name, each in state}


def _differing(parts: Any, held: Mapping[str, Any], checkpoint: Path) -> list[str]:
    """Return the names of tensors that differ bitwise from this rank's shard of a checkpoint."""
    from payload.train.checkpoints.checkpoint import optimizer_tensors
    from payload.train.models.loading import load

    weights = load(checkpoint).named_parameters()
    whole = {f"weight.{name}": each.detach() for name, each in weights}
    whole |= optimizer_tensors(checkpoint)
    found = []
    for full_name, own in held.items():
        expected = whole[full_name]
        if expected.dim():
            expected = parts.strategy.own_part(full_name.partition(".")[2], expected)
        if not own.flatten().equal(expected.flatten()):
            found.append(full_name)
    return found


def _verdict(run: Path) -> int:
    """Return the number of tensors of all ranks that differ from the checkpoint."""
    return int(json.loads((run / _VERDICT).read_text(encoding="utf-8"))["tensors"])


def _is_same_run(ours: Path, theirs: Path, *, step: int) -> bool:
    """Return whether the checkpoints of two runs after a step have the same bits."""
    one, other = (RunPaths(each).checkpoint(step) for each in (ours, theirs))
    return all(
        (one / name).read_bytes() == (other / name).read_bytes()
        for name in ("model.safetensors", "optimizer.safetensors")
    )


def _transformers_loads(checkpoint: Path) -> bool:
    """Return whether transformers loads exactly the checkpoint's tensors."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    model, problems = loaded
    saved = load_file(checkpoint / "model.safetensors")
    is_clean = not problems["missing_keys"] and not problems["unexpected_keys"]
    parameters = dict(model.named_parameters())
    return is_clean and all(each.equal(saved[name]) for name, each in parameters.items())


def _name(layout: Layout, between: str = ":") -> str:
    return f"{layout[0]}{between}{layout[1]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
