"""Real runs of a tiny model on two ranks, each with a different end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from payload.orchestrate.inventories.chosen import load_cluster
from payload.run_record.run_files import RunPaths
from tests.supervise.planned import REPO, wait_for_steps
from tests.support.data_folders import make_data_folder
from tests.support.launching import TINY_RUN, metrics
from tests.support.waiting import DEADLINE_S

HOURLY_USD = 3.6


STEPS = 400
"""Steps of the finished run, which is stopped at about step 20 and loses a rank at about 40.

It continues for seconds after that, because on a busy machine the rank is killed late.
"""
TRACKERS = '["csv", "mlflow"]'
"""Trackers of the finished run."""


def make_runs(folder: Path) -> Path:
    """Return a runs folder with the runs `stopped` and `resumed`, which have trackers."""
    data = make_data_folder(folder / "data", vocab_size=512)
    config = folder / "run.toml"
    config.write_text(TINY_RUN.format(data=data), encoding="utf-8")
    inventory = folder / "inventory.json"
    inventory.write_text(_priced_inventory(), encoding="utf-8")
    runs = folder / "runs"
    _stop_and_resume(runs, config, inventory)
    return runs


def make_failed_run(runs: Path) -> None:
    """Add the run `failed` to the folder of `make_runs`."""
    argv = _argv(runs, runs.parent / "run.toml", runs.parent / "inventory.json")
    failing = [*argv, "--run-id", "failed", "--set", "optimizer.lr=1e30"]
    done = subprocess.run(failing, cwd=REPO, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 40, done.stderr
    assert done.stderr.splitlines()[-1] == f"report: {RunPaths(runs / 'failed').report}"


def _stop_and_resume(runs: Path, config: Path, inventory: Path) -> None:
    paths = RunPaths(runs / "resumed")
    settings = (
        "train.profile_step=5",
        f"train.steps={STEPS}",
        "train.eval_every=25",
        "train.checkpoint_every=20",
        "batch.micro_batch_size=4",
        f"track.to={TRACKERS}",
        f"storage.results={runs.parent / 'store'}",
    )
    argv = _argv(runs, config, inventory, *settings)
    first = subprocess.Popen([*argv, "--run-id", "resumed"], cwd=REPO, stderr=subprocess.PIPE)
    before = wait_for_steps(paths, step=10)
    first.send_signal(signal.SIGINT)
    _, stderr = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 130, stderr.decode()
    printed(runs / "stopped").write_bytes(stderr)
    shutil.copytree(paths.root, runs / "stopped")
    _rename(RunPaths(runs / "stopped"))
    reached = max(row["step"] for row in metrics(paths.root))
    second = subprocess.Popen([*argv, "--resume", "resumed"], cwd=REPO, stderr=subprocess.PIPE)
    # Only a run that completes steps is restarted; a fast machine has stopped far beyond step 10.
    pids = wait_for_steps(paths, step=reached + 30, after=before)
    os.kill(pids[1], signal.SIGKILL)
    _, stderr = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 0, stderr.decode()
    assert stderr.decode().splitlines()[-1] == f"report: {paths.report}"
    printed(paths.root).write_bytes(stderr)


def printed(run: Path) -> Path:
    """Return the file with the stderr of a run's command."""
    return run.parent.with_name(f"{run.name}.stderr")


def _rename(paths: RunPaths) -> None:
    """Set the id of a copied run to its folder's name."""
    for path in (paths.state, paths.summary, paths.plan):
        values = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**values, "run_id": paths.run_id}), encoding="utf-8")


def _priced_inventory() -> str:
    local = load_cluster("local", env={}).inventory
    nodes = tuple(replace(node, hourly_usd=HOURLY_USD) for node in local.nodes)
    return replace(local, nodes=nodes).to_json()


def _argv(runs: Path, config: Path, inventory: Path, *settings: str) -> list[str]:
    return [
        *(sys.executable, "-m", "payload.orchestrate", "run", "--config", str(config)),
        *("--inventory", str(inventory), "--runs-dir", str(runs)),
        *(w for each in ("launch.ranks_per_node=2", *settings) for w in ("--set", each)),
    ]
