"""The operator's machine, for runs on nodes that are real sshd."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from payload.results import RunPaths
from tests.data_folders import make_data_folder
from tests.launching import REPO
from tests.orchestrate.cluster.separate import SeparateNodes
from tests.waiting import wait_until

TIMEOUT_S = 180.0
SETTINGS = (
    "data.sequence_length=32",
    "model.preset=tiny",
    "model.n_layer=1",
    "model.n_head=2",
    "model.n_embd=16",
    "batch.global_batch_size=4",
    "batch.micro_batch_size=1",
    "precision.dtype=fp32",
    "launch.threads_per_rank=1",
)


class Operator:
    """A person's machine: a folder with data, runs and the cluster's key."""

    def __init__(self, folder: Path, nodes: SeparateNodes) -> None:
        self.folder = folder
        self.nodes = nodes
        self.inventory = nodes.write_inventory(folder / "inventory.json")
        self.data = make_data_folder(folder / "data", num_train_tokens=4000, num_val_tokens=200)

    def paths(self, run_id: str) -> RunPaths:
        """The copy of a run."""
        return RunPaths(self.folder / "runs" / run_id)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """An orchestrate command, on its own."""
        return subprocess.Popen(
            [*self.nodes.inside, sys.executable, "-m", "payload.orchestrate", *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": f"{REPO}:{os.environ.get('PYTHONPATH', '')}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def do(self, *arguments: str) -> tuple[int, str]:
        """An orchestrate command to its end: exit code, and all it said."""
        with self.start(*arguments) as process:
            try:
                out, err = process.communicate(timeout=TIMEOUT_S)
            finally:
                process.kill()
        return process.returncode, out + err

    def run_words(self, run_id: str, *settings: str) -> list[str]:
        """`run` on the cluster."""
        words = ["run", "--inventory", str(self.inventory), "--ssh-key", str(self.nodes.key)]
        words.append("--quick")
        return [*words, "--run-id", run_id, *self.set_words(*settings)]

    def set_words(self, *settings: str) -> list[str]:
        """The settings of every run here, and more."""
        chosen = (*SETTINGS, f"data.dir={self.data}", *settings)
        return [word for setting in chosen for word in ("--set", setting)]


def wait_for_nobody(operator: Operator) -> None:
    wait_until(lambda: not operator.nodes.processes(), what="all processes on the nodes to end")


def wait_for_a_step(operator: Operator, run_id: str = "one") -> None:
    """Until the copy of the run has one."""
    metrics = operator.paths(run_id).metrics
    wait_until(
        lambda: metrics.exists() and "tokens_per_s" in metrics.read_text(encoding="utf-8"),
        what="the first step",
        timeout_s=TIMEOUT_S,
    )
