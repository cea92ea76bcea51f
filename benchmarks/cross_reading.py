"""Checkpoints between strategies: each is written, and read by every other one.

    python -m benchmarks.cross_reading
    python -m benchmarks.cross_reading --only 1:replicate 2:shard 4:pipeline2+tensor2 --models llama
    python -m benchmarks.cross_reading --kills

Each mesh trains a small GPT-2 or Llama (those of `benchmarks.equality`) for 10 steps in fp32 with
AdamW and saves after 5. Every mesh reads each of these checkpoints and makes the next 5 steps.
A cell is the largest relative difference of their losses from the writer's own. Besides:

- Each rank compares its part of weights and optimizer state with the file, bit by bit: the writer's
  as they were when it saved, the reader's before its first step.
- Where the reader has the writer's mesh, losses and the last checkpoint are the writer's, bitwise.
- transformers loads each checkpoint, without a missing or unknown tensor, to the same bits.

With `--kills` each mesh is killed (SIGKILL, all processes) at a random time of a run that saves
after every third step, and goes on to the same bits as a run that was not. The exit status is 1
where something does not hold. A table goes to stderr, one JSON object to stdout. With
`--runs FOLDER` the runs are kept, and a later command trains only what is missing there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.equality import MODELS, case, is_trained, overrides_of, prepare
from benchmarks.machine import describe_machine
from benchmarks.rank_processes import RankProcesses
from benchmarks.tables import Table
from payload.core.files import write_whole
from payload.run_record.metrics_log import read_metrics
from payload.run_record.run_files import RunPaths
from payload.train.__main__ import exit_now

LAYOUTS = (
    *((1, "replicate"), (2, "replicate"), (2, "shard"), (2, "zero3"), (2, "tensor2")),
    *((2, "pipeline2"), (4, "shard2"), (4, "tensor2"), (4, "pipeline2+shard")),
    *((4, "tensor2+shard"), (4, "pipeline2+tensor2")),
)
_STEPS, _SAVED = 10, 5
_BOUND = 1e-5
_WAIT_S = 1500
_KILL_STEPS, _KILL_WITHIN_S = 90, 2.0
_VERDICT = "differing.json"
"""In a run's folder: tensors that were not bitwise those of the checkpoint, over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run of the trainer: from the start, or from step 5 of another one."""

    model: str
    ranks: int
    mesh: str
    kind: str
    """`write`, `read`, `whole` or `killed`."""
    writer: tuple[int, str] | None = None

    def folder(self, root: Path) -> Path:
        """Return the run's folder."""
        name = f"{self.model}-{self.kind}-{self.ranks}-{self.mesh}"
        return root / (name if self.writer is None else f"{name}-from-{_name(self.writer, '-')}")

    def overrides(self, root: Path) -> list[str]:
        """Return what differs from the common run.toml."""
        is_long = self.kind in ("whole", "killed")
        settings: dict[str, object] = {"optimizer.lr": 1e-3, "optimizer.min_lr": 1e-3}
        settings |= {"train.steps": _KILL_STEPS if is_long else _STEPS, "train.eval_tokens": 64}
        settings |= {"train.checkpoint_every": 3 if is_long else _SAVED}
        return overrides_of(self.model, self.mesh, root, **settings)

    def checkpoint(self, root: Path) -> Path:
        """Return the checkpoint of step 5 in the run's folder."""
        return RunPaths(self.folder(root)).checkpoint(_SAVED)


def main(argv: Sequence[str]) -> int:
    """Measure and print, or be one of the ranks."""
    arguments = _parser().parse_args(argv)
    if arguments.rank is not None:
        _train_all(arguments.rank, json.loads(arguments.tasks.read_text(encoding="utf-8")))
        # As a rank of a run ends: torch's threads have been seen to abort a leaving interpreter.
        exit_now(0)
    layouts = arguments.only or list(LAYOUTS)
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.runs or Path(folder)
        prepare(root, steps=_STEPS)
        measured = _kills if arguments.kills else _matrix
        rows = [each for model in arguments.models for each in measured(model, layouts, root)]
    found = {"benchmark": "cross_reading", "wall_s": round(time.perf_counter() - began_s)}
    print(json.dumps(found | {"machine": describe_machine(), "rows": rows}))
    return 0 if all(row["holds"] for row in rows) else 1


def _matrix(model: str, layouts: Sequence[tuple[int, str]], root: Path) -> Iterator[dict[str, Any]]:
    """Train all writers, then all readers; yield a row for each writer."""
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
    table = Table(*heads, labels=[f"{model}, {name}" for name in names])
    for writer, task in zip(layouts, writers, strict=True):
        read = {each: readers[writer, each].folder(root) for each in layouts}
        own = task.folder(root)
        row: dict[str, Any] = {
            "model": model,
            "writer": _name(writer),
            "losses": {_name(each): _loss_difference(path, own) for each, path in read.items()},
            "saved_bits": not _verdict(own),
            "read_bits": not any(map(_verdict, read.values())),
            "resumed_bits": _is_same_run(read[writer], own, step=_STEPS),
            "transformers": _transformers_loads(task.checkpoint(root)),
        }
        checks = ("saved_bits", "read_bits", "resumed_bits", "transformers")
        row["holds"] = max(row["losses"].values()) <= _BOUND and all(row[key] for key in checks)
        losses = [f"{each:.0e}" for each in row["losses"].values()]
        words = ["yes" if row[key] else "NO" for key in (*checks, "holds")]
        table.row(f"{model}, {_name(writer)}", *losses, *words)
        yield row


def _kills(model: str, layouts: Sequence[tuple[int, str]], root: Path) -> Iterator[dict[str, Any]]:
    """Kill a run of each mesh and go on with it; yield a row for each."""
    _train([Task(model=model, ranks=n, mesh=mesh, kind="whole") for n, mesh in layouts], root)
    labels = [f"{model}, {_name(each)}" for each in layouts]
    table = Table("killed after step", "went on from", "losses, bits equal", labels=labels)
    for label, (ranks, mesh) in zip(labels, layouts, strict=True):
        task = Task(model=model, ranks=ranks, mesh=mesh, kind="killed")
        own = task.folder(root)
        shutil.rmtree(own, ignore_errors=True)
        _start_and_kill(task, root)
        killed_after = max(row["step"] for row in read_metrics(RunPaths(own).metrics))
        _train([task], root)
        whole = Task(model=model, ranks=ranks, mesh=mesh, kind="whole").folder(root)
        is_same = _is_same_run(own, whole, step=_KILL_STEPS) and _losses(own) == _losses(whole)
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
    """Start the run, and kill all of its processes some time after its first checkpoint."""
    with _started([task], root) as processes:
        ends_s = time.monotonic() + _WAIT_S
        while not any(RunPaths(task.folder(root)).checkpoints.glob("step_*/manifest.json")):
            if not processes.is_running() or time.monotonic() > ends_s:
                raise SystemExit(f"error: {task} made no checkpoint.")
            time.sleep(0.01)
        time.sleep(random.uniform(0, _KILL_WITHIN_S))


def _train(tasks: Sequence[Task], root: Path) -> None:
    """Train what is not trained yet; tasks of one number of ranks share their processes."""
    for task in tasks:
        if not is_trained(task.folder(root), keep=task.kind == "killed") and task.writer:
            ranks, mesh = task.writer
            writer = Task(model=task.model, ranks=ranks, mesh=mesh, kind="write")
            shutil.copytree(writer.checkpoint(root), task.checkpoint(root))
    missing = [each for each in tasks if not is_trained(each.folder(root), keep=True)]
    groups: dict[tuple[int, bool], list[Task]] = {}
    for task in missing:
        groups.setdefault((task.ranks, task.mesh == "zero3"), []).append(task)
    for (ranks, _), group in groups.items():
        print(f"{ranks} rank(s): {len(group)} runs", file=sys.stderr, flush=True)
        with _started(group, root) as processes:
            processes.wait(within_s=_WAIT_S)


def _started(tasks: Sequence[Task], root: Path) -> RankProcesses:
    path = root / "tasks.json"
    write_whole(path, json.dumps([asdict(each) for each in tasks]))
    words = ("-m", "benchmarks.cross_reading", "--rank", str(root), "--tasks", str(path))
    is_zero3 = any(each.mesh == "zero3" for each in tasks)
    return RankProcesses(tasks[0].ranks, *words, deepspeed=is_zero3)


def _train_all(root: Path, tasks: Sequence[Mapping[str, Any]]) -> None:
    """Train the tasks on this rank, and note which tensors are not the checkpoint's."""
    import torch

    from payload.config.launch_sections import DistributedSection
    from payload.config.run_config import load_run_config
    from payload.train.parts import Observer, TrainContext
    from payload.train.ranks.world import World
    from payload.train.session import train
    from payload.train.start_clock import StartClock

    class Held(Observer):
        """Keeps what this rank held when the checkpoint of step 5 was made, or was read."""

        def ready(self, context: TrainContext) -> None:
            self.parts, self.held = context, _held(context)

        def before_update(self, step: int) -> None:
            # No update came since the checkpoint of that step was begun.
            if step == _SAVED:
                self.held = _held(self.parts)

    world = World.from_env(os.environ)
    world.join(DistributedSection(timeout_s=300))
    for given in tasks:
        writer = given["writer"]
        task = Task(**{**given, "writer": None if writer is None else (writer[0], writer[1])})
        paths, observer = RunPaths(task.folder(root)), Held()
        before = max((int(each.name[-8:]) for each in _checkpoints(paths)), default=0)
        train(
            load_run_config(root / "run.toml", overrides=task.overrides(root)),
            paths=paths,
            world=world,
            stop_requested=lambda: False,
            clock=StartClock(),
            observer=observer,
        )
        bad: list[str] = []
        if task.kind in ("write", "read"):
            bad = _differing(observer.parts, observer.held, task.checkpoint(root))
        count = world.sum(torch.tensor(float(len(bad))))
        if world.is_main:
            found = {"tensors": int(count), "first": bad[:3]}
            write_whole(paths.root / _VERDICT, json.dumps(found))
            write_whole(paths.root / "began.json", json.dumps({"step": before}))
    world.leave()


def _checkpoints(paths: RunPaths) -> list[Path]:
    from payload.formats.checkpoint_listing import checkpoint_folders

    return checkpoint_folders(paths.checkpoints)


def _held(parts: Any) -> dict[str, Any]:
    """Return copies of this rank's parts of the weights, and of their optimizer state."""
    of_weights = parts.optimizers.trained().items()
    found = {f"weight.{name}": each.detach().clone() for name, each in of_weights}
    state = parts.optimizers.state_tensors().items()
    return found | {name: each.clone() for name, each in state}


def _differing(parts: Any, held: Mapping[str, Any], checkpoint: Path) -> list[str]:
    """Return the names of what is not, bitwise, this rank's part of a checkpoint's tensors."""
    from payload.train.checkpoints.checkpoint import optimizer_tensors
    from payload.train.models.loading import load

    weights = load(checkpoint).named_parameters()
    whole = {f"weight.{name}": each.detach() for name, each in weights}
    whole |= optimizer_tensors(checkpoint)
    found = []
    for full_name, own in held.items():
        wanted = whole[full_name]
        if wanted.dim():
            wanted = parts.strategy.own_part(full_name.partition(".")[2], wanted)
        if not own.flatten().equal(wanted.flatten()):
            found.append(full_name)
    return found


def _loss_difference(ours: Path, theirs: Path) -> float:
    """Return the largest relative difference of the losses after step 5."""
    found, wanted = (
        [loss for step, loss in _losses(each).items() if step > _SAVED] for each in (ours, theirs)
    )
    assert len(found) == _STEPS - _SAVED, "every reader makes the next steps"
    return max(abs(one - other) / abs(other) for one, other in zip(found, wanted, strict=True))


def _losses(run: Path) -> dict[int, float]:
    rows = read_metrics(RunPaths(run).metrics)
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def _verdict(run: Path) -> int:
    """Return how many tensors of all ranks were not those of the checkpoint."""
    return int(json.loads((run / _VERDICT).read_text(encoding="utf-8"))["tensors"])


def _is_same_run(ours: Path, theirs: Path, *, step: int) -> bool:
    """Say whether the checkpoints of two runs after a step have the same bits."""
    one, other = (RunPaths(each).checkpoint(step) for each in (ours, theirs))
    return all(
        (one / name).read_bytes() == (other / name).read_bytes()
        for name in ("model.safetensors", "optimizer.safetensors")
    )


def _transformers_loads(checkpoint: Path) -> bool:
    """Say whether transformers has the checkpoint's own tensors after it loaded them."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    model, problems = loaded
    saved = load_file(checkpoint / "model.safetensors")
    is_clean = not problems["missing_keys"] and not problems["unexpected_keys"]
    parameters = dict(model.named_parameters())
    return is_clean and all(each.equal(saved[name]) for name, each in parameters.items())


def _name(layout: tuple[int, str], between: str = ":") -> str:
    return f"{layout[0]}{between}{layout[1]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cross_reading",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--only", type=case, nargs="+", metavar="RANKS:MESH")
    parser.add_argument("--kills", action="store_true", help="kill each mesh instead")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keep the runs there")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tasks", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
