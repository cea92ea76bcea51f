"""A person's machine: a folder with data, runs and an inventory; and the commands typed there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from payload.machines.inventory import ClusterInventory
from payload.run_record.run_files import RunPaths
from tests.support.data_folders import make_data_folder
from tests.support.launching import REPO
from tests.support.waiting import DEADLINE_S, wait_until

SETTINGS = (
    "data.sequence_length=32",
    "model.preset=tiny",
    "model.n_layer=1",
    "model.n_head=2",
    "model.n_embd=16",
    "batch.global_batch_size=6",
    "batch.micro_batch_size=1",
    "precision.dtype=fp32",
    "launch.threads_per_rank=1",
)


class Operator:
    """Types `python -m payload.orchestrate ...` in `folder`."""

    def __init__(
        self,
        folder: Path,
        inventory: ClusterInventory,
        *,
        key: Path | None = None,
        around: Callable[[Sequence[str]], list[str]] = list,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        """`around` puts the command where the nodes can be reached.

        `key` None is the cluster's own key under the folder; `secrets` are in the environment.
        """
        self.folder = folder
        self.inventory = folder / "inventory.json"
        self.write_inventory(inventory)
        self.data = make_data_folder(
            folder / "data", num_train_tokens=4000, num_val_tokens=200, vocab_size=512
        )
        self._key = [] if key is None else ["--ssh-key", str(key)]
        self._around = around
        self._secrets = secrets or {}

    def write_inventory(self, inventory: ClusterInventory) -> None:
        """The file that every command here names."""
        self.inventory.write_text(inventory.to_json(), encoding="utf-8")

    def paths(self, run_id: str) -> RunPaths:
        """The copy of a run."""
        return RunPaths(self.folder / "runs" / run_id)

    def start(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """An orchestrate command, on its own; `env` is added to this process's."""
        python_path = f"{REPO}:{os.environ.get('PYTHONPATH', '')}"
        return subprocess.Popen(
            self._around([sys.executable, "-m", "payload.orchestrate", *arguments]),
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": python_path, **self._secrets, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # As a shell's foreground job is: a terminal's Ctrl-C goes to the group.
            start_new_session=True,
        )

    def do(
        self, *arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = DEADLINE_S
    ) -> tuple[int, str]:
        """Run an orchestrate command; return its exit code and its output."""
        return finish(self.start(*arguments, env=env), timeout_s=timeout_s)

    def on_cluster(self, command: str) -> list[str]:
        """A command's first words, with the cluster that it is for."""
        return [command, "--inventory", str(self.inventory), *self._key]

    def run_words(self, run_id: str, *settings: str) -> list[str]:
        """`run` on the cluster."""
        return [*self.on_cluster("run"), "--run-id", run_id, *self.set_words(*settings)]

    def local_words(self, run_id: str, *settings: str) -> list[str]:
        """`run` on this machine."""
        words = ["run", "--inventory", "local", "--run-id", run_id]
        return [*words, *self.set_words(*settings)]

    def set_words(self, *settings: str) -> list[str]:
        """The settings of every run here, and more."""
        chosen = (*SETTINGS, f"data.dir={self.data}", *settings)
        return [word for setting in chosen for word in ("--set", setting)]

    def wait_for_a_step(self, run_id: str = "one") -> None:
        """Until the copy of the run has one."""
        metrics = self.paths(run_id).metrics
        wait_until(
            lambda: metrics.exists() and "tokens_per_s" in metrics.read_text(encoding="utf-8"),
            what=f"the first step of {run_id}",
        )


def finish(process: subprocess.Popen[str], *, timeout_s: float = DEADLINE_S) -> tuple[int, str]:
    """Wait until a command has ended; return its exit code and its output."""
    with process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
    return process.returncode, out + err
