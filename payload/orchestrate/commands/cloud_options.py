"""Options of the cloud commands, from which parsers, help and completion are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import payload
from payload.core.command_line import option
from payload.orchestrate.commands.run_commands_options import runs_dir_option

StoppedChoice = Literal["start", "replace", "leave"]
QUICKSTART = Path(payload.__file__).parent / "configs" / "quickstart.toml"
_CLUSTER, _RESULTS = "requirements of the cluster (default: the stack's config)", "results and data"


def _stack() -> str | None:
    name: str | None = option("Pulumi stack (default: the selected one)", metavar="NAME")
    return name


def _project(*, of_stack: bool) -> str | None:
    """Return the option for the project; `of_stack` is True if the command reads a stack."""
    stack = "the stack's project, otherwise " if of_stack else ""
    project: str | None = option(
        f"Google Cloud project (default: {stack}GOOGLE_CLOUD_PROJECT, otherwise the project that "
        "is recorded in this folder)",
        metavar="ID",
    )
    return project


def _delete_filestore() -> list[str]:
    names: list[str] = option(
        "delete this Filestore instance and its data without prompting for its name; can be "
        "repeated. --yes alone does not delete an instance",
        metavar="NAME",
        group=_RESULTS,
    )
    return names


def _yes() -> bool:
    yes: bool = option("answer every yes/no question with yes")
    return yes


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Options of `doctor`, in addition to the stack's settings."""

    stack: str | None = _stack()
    project: str | None = _project(of_stack=True)
    machine_type: str | None = option("machine type of every node", metavar="TYPE", group=_CLUSTER)
    node_count: int | None = option("number of nodes", metavar="COUNT", group=_CLUSTER)
    region: str | None = option("region of the cluster", metavar="REGION", group=_CLUSTER)
    zone: list[str] | None = option(
        "zone to check; can be repeated", default=None, metavar="ZONE", group=_CLUSTER
    )
    spot: bool = option("check spot machines", group=_CLUSTER)
    disk_type: str | None = option("disk type of every node", metavar="TYPE", group=_CLUSTER)
    disk_gb: int | None = option("disk size of every node", metavar="GIB", group=_CLUSTER)
    json: bool = option("print the checks as JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Options of `up`."""

    stack: str | None = _stack()
    runs_dir: Path = runs_dir_option()
    next_zone: bool = option(
        "if a zone has no capacity, try the other zones in the config, and write the new zone "
        "into the config"
    )
    keep_on_failure: bool = option(
        "if the build fails, keep the resources that were built; they are billed"
    )
    without_collect: bool = option(
        "replace machines even if their results are not collected", group=_RESULTS
    )
    take_over: str | None = option(
        "first remove the other cluster of the same name, after a prompt for the cluster's "
        "name. ID is the identity of that cluster, or `none` if it has no identity",
        metavar="ID",
        advanced=True,
    )
    delete_filestore: list[str] = _delete_filestore()
    stopped: StoppedChoice | None = option(
        "start stopped machines, replace them and their disks, or leave them stopped (default: "
        "prompt; with --yes: start the machines that Google stopped)",
        default=None,
    )
    results_may_be_lost: bool = option(
        "build spot machines even if there is no bucket for results; if a machine is "
        "preempted, its checkpoints are lost",
        group=_RESULTS,
    )
    dry_run: bool = option("show the preview only")
    yes: bool = _yes()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Options of `sweep`."""

    cluster: str | None = option(
        "name of the cluster (default: all clusters whose lifetime has ended)", metavar="NAME"
    )
    project: str | None = _project(of_stack=False)
    identity: str | None = option(
        "choose the cluster with this identity, even if another folder built it. ID is `none` "
        "for resources without an identity. With --delete, the command prompts for the "
        "cluster's name",
        metavar="ID",
        advanced=True,
    )
    keep_buckets: bool = option("do not count buckets as leftover resources", group=_RESULTS)
    delete: bool = option(
        "after confirmation, delete the leftover resources of this folder's cluster, except buckets"
    )
    delete_filestore: list[str] = _delete_filestore()
    json: bool = option("print the resources as JSON")
    yes: bool = _yes()


@dataclass(frozen=True, slots=True, kw_only=True)
class DownOptions:
    """Options of `down`."""

    stack: str | None = _stack()
    cluster: str | None = option("name of the cluster, if the stack has no outputs", metavar="NAME")
    project: str | None = _project(of_stack=True)
    runs_dir: Path = runs_dir_option()
    without_collect: bool = option("also destroy results that are not collected", group=_RESULTS)
    delete_bucket: str | None = option(
        "also delete this results bucket and its contents. Even with --yes, the command "
        "prompts for the bucket's name",
        metavar="NAME",
        group=_RESULTS,
    )
    delete_filestore: list[str] = _delete_filestore()
    dry_run: bool = option("print the steps, but do nothing")
    yes: bool = _yes()


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearseOptions:
    """Options of `rehearse`."""

    budget_usd: float = option("maximum cost (default: %(default)g)", default=1.0, metavar="USD")
    project: str | None = _project(of_stack=False)
    config: Path = option(
        "config of the run (default: the shipped quickstart.toml)",
        default=QUICKSTART,
        metavar="FILE",
    )
    settings: list[str] = option(
        "override one setting of the cluster, such as region=europe-west4; can be repeated",
        "--set",
        metavar="KEY=VALUE",
    )
    yes: bool = _yes()
