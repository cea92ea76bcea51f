"""The commands of `python -m payload.orchestrate`, each with its help, options and program."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from payload.orchestrate.commands import cloud_options as cloud
from payload.orchestrate.commands import run_commands_options as runs

Program = Callable[[Any, Any], int]
"""A function that takes a command's options, and either a LocalAccess or the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrchestrateCommand:
    """One command."""

    summary: str
    """Summary of the command, for the list of commands."""
    description: str
    example: str
    """Arguments of the example in the command's help."""
    options: type[Any]
    program: str
    """`module:function` in this package, imported only when the command runs."""
    takes_env: bool = False
    """True if the function takes the environment instead of a LocalAccess."""
    takes_address: tuple[str, ...] = ()
    """Options that accept the address of a run in a store instead of the run's ID."""

    def load(self) -> Program:
        """Import and return the function that runs the command."""
        module, _, function = self.program.partition(":")
        return cast(Program, getattr(importlib.import_module(f"{__package__}.{module}"), function))


_QUICKSTART = "payload/configs/quickstart.toml"
COMMANDS: Mapping[str, OrchestrateCommand] = {
    "plan": OrchestrateCommand(
        summary="show ranks, memory and time of a run without starting it",
        description="Show where the ranks of a run would be placed, how much memory they need and "
        "how long the run takes. Nothing is started.",
        example=f"{_QUICKSTART} --set train.steps=100",
        options=runs.PlanOptions,
        program="plan_and_run:plan",
    ),
    "preflight": OrchestrateCommand(
        summary="check every node of a cluster",
        description="Check in parallel whether all nodes can run a job: SSH, bootstrap, payload, "
        "processor, memory, disk, GPUs if the run uses them, clock, host name, route, and the "
        "ports between each pair of nodes. Then start a small program on all nodes with mpirun, "
        "and measure matmuls and the all-reduce of gradients.",
        example="--inventory cluster.json --wait 10",
        options=runs.PreflightOptions,
        program="preflight:preflight",
    ),
    "run": OrchestrateCommand(
        summary="start a run and follow it",
        description="Start a run and follow it until it ends. On this machine Ctrl-C saves a "
        "checkpoint and stops; a second Ctrl-C stops immediately. On a cluster Ctrl-C detaches; a "
        "second one within 3 s saves a checkpoint and stops.",
        example=f"{_QUICKSTART} --inventory local",
        options=runs.RunOptions,
        program="plan_and_run:run",
        takes_address=("resume",),
    ),
    "status": OrchestrateCommand(
        summary="show a run and its ranks",
        description="Show the state, step, loss and speed of a run, and the state of each rank.",
        example="--json",
        options=runs.StatusOptions,
        program="status:status",
    ),
    "logs": OrchestrateCommand(
        summary="print the log of a rank or the launcher",
        description="Print the log of a rank, or of the launcher.",
        example="--rank 1 --follow",
        options=runs.LogsOptions,
        program="logs:logs",
    ),
    "list": OrchestrateCommand(
        summary="list all runs, newest first",
        description="List all runs with status, step and loss, newest first.",
        example="--json",
        options=runs.ListOptions,
        program="run_list:list_runs",
        takes_env=True,
    ),
    "attach": OrchestrateCommand(
        summary="follow a cluster run until it ends",
        description="Follow a run on a cluster until it ends, from any terminal. With --inventory "
        "this includes runs that were started from another machine. Ctrl-C detaches.",
        example="--inventory cluster.json",
        options=runs.AttachOptions,
        program="attach:attach",
    ),
    "dashboard": OrchestrateCommand(
        summary="show a run's metrics in the browser",
        description="Print the address of the Grafana dashboards, and serve them until Ctrl-C. A "
        "cluster with `monitoring: prometheus` serves them through an SSH tunnel. For a run on "
        "this machine the command starts Prometheus, and Grafana if it is installed.",
        example="--open",
        options=runs.DashboardOptions,
        program="dashboard:dashboard",
    ),
    "stop": OrchestrateCommand(
        summary="stop a run with a checkpoint",
        description="Save a checkpoint and stop a run. With --inventory this includes runs on the "
        "cluster that were started from another machine.",
        example="--grace 60",
        options=runs.StopOptions,
        program="stop:stop",
    ),
    "collect": OrchestrateCommand(
        summary="fetch a cluster run's results",
        description="Fetch a cluster run's logs, metrics and newest checkpoint. RUN can also be "
        "the run's address in a store, gs://BUCKET/PREFIX/RUN.",
        example="--runs-dir runs",
        options=runs.RunChoice,
        program="collect:collect",
        takes_address=("run",),
    ),
    "remove": OrchestrateCommand(
        summary="delete old runs with their checkpoints",
        description="Move runs and their checkpoints to the folder .trash in the folder of all "
        "runs. The first `remove` after a day deletes them; only then is their space freed. "
        "Active runs are never removed. Cluster runs that are not collected, and runs with "
        "weights that another run's adapter needs, are removed only with --force.",
        example="--keep 3 --dry-run",
        options=runs.RemoveOptions,
        program="remove:remove",
    ),
    "doctor": OrchestrateCommand(
        summary="check a project's access, quotas and price",
        description="Check whether the Google Cloud project can hold the cluster: credentials, "
        "enabled APIs, quotas, organization policies, and the types of machines, GPUs and "
        "disks in the zones. Prints a table, and a fix for each failed check. The options "
        "override the stack's config. Exit codes: 11 quota too small; 13 permission missing or "
        "API disabled; 10 type not offered, or only as spot; 31 firewall rule changed, or "
        "machine stopped.",
        example="--stack dev",
        options=cloud.DoctorOptions,
        program="doctor:doctor",
        takes_env=True,
    ),
    "up": OrchestrateCommand(
        summary="build the cluster with Pulumi",
        description="Show `pulumi preview` with the price, and after confirmation build the "
        "cluster. Before a machine is replaced or removed, results without another copy are "
        "collected from it. Nothing is built while a run is active, or if results cannot be "
        "collected. If the first build fails, the resources that it created are removed. Exit "
        "codes: 11 quota; 12 no capacity; 13 credentials or permission; 60 resources of the "
        "failed build could not be removed.",
        example="--stack dev --next-zone",
        options=cloud.UpOptions,
        program="up:up",
        takes_env=True,
    ),
    "sweep": OrchestrateCommand(
        summary="list and delete leftover cloud resources",
        description="List a cluster's resources in all zones and regions of the project, except "
        "results buckets that Pulumi keeps on purpose. Without --cluster, list "
        "the resources of all clusters whose lifetime has ended. If there are any resources, the "
        "exit code is 60, and the commands that delete these resources are printed.",
        example="--json",
        options=cloud.SweepOptions,
        program="sweep:sweep",
        takes_env=True,
    ),
    "down": OrchestrateCommand(
        summary="collect results and destroy the cluster",
        description="Collect results that only the cluster has, destroy the cluster with Pulumi, "
        "and verify that no resource remains. Nothing is destroyed while a run is "
        "active, or if results cannot be collected. If the head is stopped, it is started "
        "first, after confirmation. The results bucket is kept unless --delete-bucket is given. "
        "A Filestore instance is deleted only with --delete-filestore, or after its name is "
        "typed. If some resources remain, the exit code is 60.",
        example="--stack dev",
        options=cloud.DownOptions,
        program="down:down",
        takes_env=True,
    ),
    "rehearse": OrchestrateCommand(
        summary="test a complete cluster life cycle within a budget",
        description="Test the smallest cluster in its own stack: doctor, up, preflight, a run of "
        "ten steps, repair of a deleted node, down, sweep. The command requires confirmation "
        "before it spends money, and removes everything after a failure. The command prints a "
        "page for bug reports: the time of each step, resource and request, and all errors.",
        example="--budget-usd 1",
        options=cloud.RehearseOptions,
        program="rehearse:rehearse",
        takes_env=True,
    ),
}
