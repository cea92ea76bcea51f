"""Runs the steps of a rehearsal within its budget, and the teardown."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from payload.config.run_config import load_run_config
from payload.core.errors import BudgetError, ExitCode, TileforgeError
from payload.core.python_processes import code_environment, module_command
from payload.launch.ranks import place_ranks
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.filestore_confirmation import filestore_name
from payload.orchestrate.clouds.gcp.removal import remove
from payload.orchestrate.clouds.gcp.removal_order import Resource
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.stack_outputs import StackOutputs, read_outputs
from payload.orchestrate.commands.rehearsal_page import Step

_STEPS = 10
_BOOT_MINUTES = "20"
_GRACE_S = 60.0


@dataclass(slots=True, kw_only=True)
class Rehearsal:
    """A rehearsal; `steps` lists the steps that ran so far."""

    name: str
    """Name of the stack, of the cluster and of the run."""
    pulumi: Pulumi
    google: Google
    env: Mapping[str, str]
    folder: Path
    """The cluster's folder, which also holds the logs and the page."""
    config: Path
    hourly_usd: float
    budget_usd: float
    engine: str
    """Pulumi's version."""
    talk: Console
    began_s: float = field(default_factory=time.monotonic)
    steps: list[Step] = field(default_factory=list)

    def run_steps(self) -> None:
        """Run every step up to the resumed run. Raises TileforgeError after a failed step."""
        up = ("up", "--yes", "--results-may-be-lost", "--stack", self.name)
        self._step("doctor", "doctor", "--stack", self.name)
        self._step("up", *up)
        outputs = self._checked_outputs()
        job = ("--inventory", f"stack:{self.name}", *self._config_arguments(outputs))
        preflight = ("preflight", *job, "--wait", _BOOT_MINUTES)
        self._step("preflight", *preflight)
        self._step(f"run of {_STEPS} steps", "run", *job, "--run-id", self.name)
        self._delete_last_node(outputs)
        self._step("up repairs it", *up)
        self._step("preflight again", *preflight)
        more = ("--set", f"train.steps={2 * _STEPS}")
        self._step("resume", "run", *job[:2], "--resume", self.name, *more)

    def take_down(self, *, collect: bool) -> bool:
        """Destroy the cluster and verify the removal; return True if no resource remains.

        Errors are recorded, not raised. If results cannot be collected, they are lost.
        """
        project = ("--project", self.google.project)
        data = ("--delete-filestore", filestore_name(self.name))
        down = ("down", "--yes", "--stack", self.name, *data, *project)
        gone = collect and self._succeeds("down", *down)
        gone = gone or self._succeeds("down, results lost", *down, "--without-collect")
        is_clean = self._succeeds("sweep", "sweep", "--cluster", self.name, *project)
        if gone and is_clean:
            with suppress(TileforgeError):
                self.pulumi.ask("stack", "rm", "--yes")
        return gone and is_clean

    def _succeeds(self, name: str, *arguments: str) -> bool:
        with suppress(TileforgeError):
            self._step(name, *arguments, limited=False)
        return self.steps[-1].is_good

    def _config_arguments(self, outputs: StackOutputs) -> list[str]:
        """Return config arguments with a batch size that is divisible by the number of ranks."""
        config = load_run_config(self.config)
        nodes = outputs.inventory.nodes
        ranks = place_ranks(nodes, config.launch, device=config.device).world_size
        per_pass = config.batch.per_pass(ranks)
        batch = -(-config.batch.global_batch_size // per_pass) * per_pass
        values = {"batch.global_batch_size": batch, "train.steps": _STEPS}
        sets = [each for key, value in values.items() for each in ("--set", f"{key}={value}")]
        return ["--config", str(self.config), *sets]

    def _checked_outputs(self) -> StackOutputs:
        outputs = read_outputs(self.pulumi)
        if outputs.hourly_usd is None:
            raise BudgetError(
                "the cluster's price is unknown, because the output hourly_usd is missing from the "
                f"stack; the estimate was ${self.hourly_usd:.4f}"
            )
        if outputs.hourly_usd > 1.1 * self.hourly_usd:
            raise BudgetError(
                f"the cluster costs ${outputs.hourly_usd} an hour; the estimate was "
                f"${self.hourly_usd:.4f}"
            )
        return outputs

    def _delete_last_node(self, outputs: StackOutputs) -> None:
        """Delete the last node through Google's API, as a preemption would."""
        victim, began_s = outputs.inventory.nodes[-1], time.monotonic()
        node = Resource(kind="instance", name=victim.name, location=victim.zone or "")
        failed = remove(self.google, [node])
        self._record_step(
            f"delete {victim.name}", ["DELETE", victim.name], int(bool(failed)), began_s
        )

    def _step(self, name: str, *arguments: str, limited: bool = True) -> None:
        """Run a command. Raises TileforgeError if it fails."""
        self.talk.print(f"+ {' '.join(arguments)}")
        began_s = time.monotonic()
        log = self.folder / f"{len(self.steps) + 1:02}-{arguments[0]}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                module_command("payload.orchestrate", *arguments),
                env=code_environment(self.env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # An interrupt is passed on to a limited step, and never reaches the teardown.
                start_new_session=True,
            )
            status = self._within_budget(process) if limited else self._wait(process)
        self._record_step(name, arguments, status, began_s, log=log)

    def _within_budget(self, process: subprocess.Popen[bytes]) -> int:
        """Return the exit code; interrupt the process when the budget is spent."""
        try:
            return process.wait(timeout=self._left_s())
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        try:
            process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return ExitCode.BUDGET

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the process, ignoring Ctrl-C, and return its exit code."""
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                self.talk.print(
                    "interrupted: destroying the cluster, which is billed until it is gone"
                )

    def _left_s(self) -> float:
        spent_s = time.monotonic() - self.began_s
        return max(1.0, self.budget_usd / self.hourly_usd * 3600 - spent_s)

    def _record_step(
        self,
        name: str,
        argv: Sequence[str],
        status: int,
        began_s: float,
        *,
        log: Path | None = None,
    ) -> None:
        took_s = time.monotonic() - began_s
        step = Step(name=name, argv=argv, status=status, took_s=took_s, log=log)
        self.steps.append(step)
        self.talk.print(f"  {name}: exit code {status} after {took_s:.1f} s")
        if not step.is_good:
            error = TileforgeError(f"step {name!r} failed with exit code {status}. Its log: {log}")
            error.exit_code = _exit_code(status)
            raise error


def _exit_code(status: int) -> ExitCode:
    with suppress(ValueError):
        return ExitCode(status)
    return ExitCode.TRAINING
