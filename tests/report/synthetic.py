"""Synthetic run folders: with hostile text, and with any number of steps."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

from payload.run_record.run_files import RunPaths
from payload.run_record.run_samples import Sample, write_samples

HOSTILE = (
    '"><script>window.hacked = 1</script>',
    "</script><script>window.hacked = 2</script>",
    "<img src=x onerror='window.hacked = 3'>",
    "<!--<script>",
    "javascript:window.hacked = 4",
)


def make_hostile(source: Path, target: Path) -> None:
    """Copy a run and replace every text in it with markup."""
    shutil.copytree(source, target)
    paths = RunPaths(target)
    text = " ".join(HOSTILE)
    samples = [Sample(prompt=each, before=each, after=text) for each in HOSTILE]
    write_samples(paths.samples, samples)
    state = json.loads(paths.state.read_text(encoding="utf-8"))
    for event in state["events"]:
        event["text"] = text
    paths.state.write_text(
        json.dumps({**state, "run_id": "hostile", "status": "failed", "error": text}),
        encoding="utf-8",
    )
    summary = json.loads(paths.summary.read_text(encoding="utf-8"))
    summary |= {"run_id": "hostile", "versions": {each: each for each in HOSTILE}, "error": text}
    paths.summary.write_text(json.dumps(summary), encoding="utf-8")
    plan = json.loads(paths.plan.read_text(encoding="utf-8"))
    plan |= {"run_id": "hostile", "work_dir": text, "launcher": HOSTILE[2], "argv": [text]}
    paths.plan.write_text(json.dumps(plan), encoding="utf-8")
    lines = paths.config.read_text(encoding="utf-8").splitlines()
    hostile = text.replace('"', '\\"')
    changed = [f'init = "{hostile}"' if line.startswith("init = ") else line for line in lines]
    paths.config.write_text("\n".join(changed), encoding="utf-8")


def make_long(source: Path, target: Path, *, steps: int, ranks: int) -> None:
    """Copy a run and give it `steps` steps on `ranks` ranks."""
    shutil.copytree(source, target)
    paths = RunPaths(target)
    for path in (paths.state, paths.summary, paths.plan):
        values = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**values, "run_id": paths.run_id}), encoding="utf-8")
    with paths.metrics.open("w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            noise = math.sin(step * 12.9898) * 43758.5453 % 1
            row = {
                "step": step,
                "tokens": 2048 * step,
                "loss": 3 + 7 * math.exp(-step / steps * 8) + 0.3 * noise,
                "lr": 1e-3 * (1 - step / (steps + 1)),
                "grad_norm": 1 + noise,
                "step_time_s": 0.5 + 0.1 * noise,
                "tokens_per_s": 2048 / (0.5 + 0.1 * noise),
                "mfu": 0.4 - 0.05 * noise,
                "data_time_s": 0.001,
                "sync_time_s": 0.01 + 0.02 * noise,
                "rss_bytes": 2**30 + step,
                "time_unix": 1_790_000_000 + 0.56 * step,
                "ranks": {
                    "steps": 1,
                    "data": [0.001] * ranks,
                    "forward": [0.2] * ranks,
                    "backward": [0.3] * ranks,
                    "wait": [round(0.01 * rank * noise, 4) for rank in range(ranks)],
                    "checkpoint": [0.0] * ranks,
                },
            }
            file.write(json.dumps(row) + "\n")
            if step % 100 == 0:
                evaluation = {"step": step, "val_loss": 3.1 + 100 / step, "val_tokens": 999}
                file.write(json.dumps({**evaluation, "time_unix": row["time_unix"]}) + "\n")
