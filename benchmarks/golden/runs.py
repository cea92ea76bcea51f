"""Trains cases with the code of one folder, and reads the results."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.golden.cases import CONFIG, HALF, STEPS, Case
from benchmarks.rank_processes import RankProcesses

SERIES = ("loss", "grad_norm", "val_loss")
_DRIVER = Path(__file__).with_name("driver.py")
_SAVED = (HALF, STEPS)
_WAIT_S = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The results of a run."""

    series: Mapping[str, Mapping[int, float]]
    """For each name in `SERIES`, the number at each step."""
    weights: Mapping[int, str]
    """SHA-256 of the weights of each checkpoint, by step."""


def train_cases(
    cases: Sequence[Case], *, code: Path, inputs: Path, root: Path, label: str
) -> dict[str, Run]:
    """Train the cases with the trainer in `code`; return their results by name.

    Cases with the same number of ranks share their processes. `label` names the code in the
    progress output. Raises SystemExit if a run fails.
    """
    root.mkdir()
    (root / "run.toml").write_text(CONFIG, encoding="utf-8")
    groups: dict[tuple[int, bool], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.ranks, case.is_zero3()), []).append(case)
    for (ranks, is_zero3), group in groups.items():
        began_s = time.perf_counter()
        print(f"{label}: {len(group)} runs on {ranks} rank(s)", end="", file=sys.stderr, flush=True)
        jobs = root / f"jobs-{ranks}{'-zero3' if is_zero3 else ''}.json"
        jobs.write_text(json.dumps(_jobs(group, inputs=inputs, root=root)), encoding="utf-8")
        # -P: a commit must not import modules from the driver's folder.
        program = ("-P", str(_DRIVER), str(code), str(jobs))
        with RankProcesses(ranks, *program, code=code, deepspeed=is_zero3) as processes:
            processes.wait(within_s=_WAIT_S)
        print(f", {time.perf_counter() - began_s:.0f} s", file=sys.stderr, flush=True)
    return {case.name: read_run(_folder(root, case)) for case in cases}


def _jobs(cases: Sequence[Case], *, inputs: Path, root: Path) -> list[list[str]]:
    """Return the trainer's arguments for every start of the cases."""
    jobs = []
    for case in cases:
        data = root / "data" / case.name
        # A copy per case, as a run on preference pairs writes its reference into the folder.
        shutil.copytree(inputs / case.task, data)
        for steps in case.starts():
            settings = [f"train.steps={steps}", *case.settings(data=data, models=inputs)]
            argv = ["--config", str(root / "run.toml"), "--run-dir", str(_folder(root, case))]
            argv += [each for setting in settings for each in ("--set", setting)]
            jobs.append(argv)
    return jobs


def _folder(root: Path, case: Case) -> Path:
    """Return the case's run folder, whose name must be a valid run id."""
    return root / "runs" / case.name.replace("+", ".")


def read_run(folder: Path) -> Run:
    """Return the results of a run. Raises SystemExit if a step or a checkpoint is missing."""
    series: dict[str, dict[int, float]] = {key: {} for key in SERIES}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for key in SERIES:
            if key in row:
                series[key][row["step"]] = row[key]
    weights = {step: _weights_sha256(folder / f"checkpoints/step_{step:08}") for step in _SAVED}
    evaluated, trained = [0, *_SAVED], list(range(1, STEPS + 1))
    for key in SERIES:
        if sorted(series[key]) != (evaluated if key == "val_loss" else trained):
            raise SystemExit(f"error: {folder.name}: only steps {sorted(series[key])} have {key}.")
    return Run(series=series, weights=weights)


def _weights_sha256(checkpoint: Path) -> str:
    """Return the sha256 of names, types, shapes and bytes of a checkpoint's weights.

    Raises SystemExit if it has no weights.
    """
    import safetensors

    deserialize: Any = safetensors.deserialize  # has no types
    tensors = [
        tensor
        for path in sorted(checkpoint.glob("*.safetensors"))
        if not path.name.startswith("optimizer")
        for tensor in deserialize(path.read_bytes())
    ]
    if not tensors:
        raise SystemExit(f"error: {checkpoint} has no weights.")
    digest = hashlib.sha256()
    for name, content in sorted(tensors, key=lambda each: each[0]):
        digest.update(f"{name} {content['dtype']} {content['shape']} ".encode())
        digest.update(content["data"])
    return digest.hexdigest()
