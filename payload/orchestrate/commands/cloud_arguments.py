"""The cloud's commands for the command line: up, doctor, sweep, down."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import payload
from payload.orchestrate.machine_profiles.local_profile import LocalAccess

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_T = TypeVar("_T", bound="DataclassInstance")
QUICKSTART = Path(payload.__file__).parent / "configs" / "quickstart.toml"


def add_cloud_commands(commands: Commands) -> None:
    """Add them to the others."""
    _add_doctor(commands)
    _add_up(commands)
    _add_sweep(commands)
    _add_down(commands)
    _add_rehearse(commands)


def _add_up(commands: Commands) -> None:
    parser = commands.add_parser(
        "up",
        help="build the cluster with Pulumi",
        description="`pulumi preview` with its price, a question, `pulumi up`. Where that replaces "
        "or removes machines, it first collects what is missing here of the cluster's "
        "runs; nothing is built when a run cannot be collected, or the head says that one goes on. "
        "When it fails, the exit code says why: 11 quota, 12 no capacity, 13 credentials or "
        "permission; if there was no machine before, what it has built is removed again, or exit "
        "code 60 says that something is left.",
    )
    parser.set_defaults(command=_up)
    _add_stack(parser)
    _add_delete_filestore(parser)
    parser.add_argument(
        "--next-zone",
        action="store_true",
        help="without capacity, try the config's other zones in turn, and change the config",
    )
    parser.add_argument(
        "--keep-on-failure",
        action="store_true",
        help="keep what was built before a failure, to go on from there; it is billed",
    )
    parser.add_argument(
        "--without-collect",
        action="store_true",
        help="replace machines even if results on them are not here",
    )
    parser.add_argument(
        "--take-over",
        metavar="ID",
        help="remove what another cluster of the same name and of this identity has, after its "
        "name was typed; `none` for what has no identity",
    )
    parser.add_argument(
        "--stopped",
        choices=("start", "replace", "leave"),
        help="machines that were stopped: start them, replace them with their disks, or leave them "
        "(default: ask; with --yes, start those that Google itself has stopped)",
    )
    parser.add_argument(
        "--results-may-be-lost",
        action="store_true",
        help="build spot machines without a bucket, too, whose checkpoints are lost with them",
    )
    parser.add_argument("--dry-run", action="store_true", help="only the preview")
    add_runs_dir(parser)
    _add_yes(parser)


def _up(arguments: argparse.Namespace, access: LocalAccess) -> int:
    from payload.orchestrate.commands.up import UpOptions, up

    return up(typed(UpOptions, arguments), access.environment())


def _add_doctor(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check whether the project can hold the cluster",
        description="Credentials, enabled APIs, quotas against need, machine type with its GPUs "
        "and disk type in the zones, organization policies: a table, and each fault with its fix. "
        "What the cluster needs comes from the stack's config; flags go before it. Exit code 11 "
        "when a quota is too small, 13 when something is not permitted or not enabled, 10 when a "
        "type is not offered, or is sold only as spot, 31 when a firewall rule of the cluster is "
        "not as its program has it, or a machine of it is stopped.",
    )
    parser.set_defaults(command=_doctor)
    _add_stack(parser)
    _add_project(parser)
    parser.add_argument("--machine-type", metavar="TYPE", help="of every node")
    parser.add_argument("--node-count", type=int, metavar="COUNT", help="how many nodes")
    parser.add_argument("--region", metavar="REGION")
    parser.add_argument("--zone", action="append", metavar="ZONE", help="may be repeated")
    parser.add_argument("--spot", action="store_true", help="spot machines")
    parser.add_argument("--disk-type", metavar="TYPE", help="of every node's disk")
    parser.add_argument("--disk-gb", type=int, metavar="GIB", help="size of every node's disk")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _doctor(arguments: argparse.Namespace, access: LocalAccess) -> int:
    from payload.orchestrate.commands.doctor import DoctorOptions, doctor

    return doctor(typed(DoctorOptions, arguments), access.environment())


def _add_sweep(commands: Commands) -> None:
    parser = commands.add_parser(
        "sweep",
        help="look whether anything is left in the cloud",
        description="List what a cluster has in the project, in all zones and regions: machines, "
        "disks, snapshots, images, addresses, forwarding rules, policies, routers, firewall rules, "
        "networks, DNS zones, service accounts, buckets, but those with results that Pulumi keeps "
        "on purpose. "
        "Exit code 60 and the commands that remove it when something is there. Without --cluster, "
        "what is left of clusters whose lifetime is over.",
    )
    parser.set_defaults(command=_sweep)
    parser.add_argument("--cluster", metavar="NAME", help="(default: every expired cluster)")
    _add_project(parser)
    parser.add_argument(
        "--identity",
        metavar="ID",
        help="act on what carries this identity, of another folder's cluster, after its name was "
        "typed; `none` for what has no identity",
    )
    parser.add_argument(
        "--keep-buckets",
        action="store_true",
        help="no bucket counts as left, not only those that Pulumi keeps on purpose",
    )
    parser.add_argument(
        "--delete",
        action="store_true",
        help="remove what is left and carries the identity of this folder's cluster, but no "
        "bucket, after a question",
    )
    _add_delete_filestore(parser)
    _add_yes(parser)
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def _sweep(arguments: argparse.Namespace, access: LocalAccess) -> int:
    from payload.orchestrate.commands.sweep import SweepOptions, sweep

    return sweep(typed(SweepOptions, arguments), access.environment())


def _add_down(commands: Commands) -> None:
    parser = commands.add_parser(
        "down",
        help="bring results home, destroy the cluster, look that nothing is left",
        description="Collect what is missing here of the cluster's runs, `pulumi destroy`, sweep. "
        "Nothing is destroyed when a run cannot be collected, or the head says that one goes on. "
        "A stopped head is started for that, after a question. "
        "A results bucket stays without --delete-bucket. A Filestore instance goes after its name "
        "was typed, or with --delete-filestore; else nothing is destroyed. "
        "Exit code 60 when something is left.",
    )
    parser.set_defaults(command=_down)
    _add_stack(parser)
    parser.add_argument("--cluster", metavar="NAME", help="for a stack without outputs")
    _add_project(parser)
    parser.add_argument(
        "--without-collect", action="store_true", help="destroy results that are not here, too"
    )
    parser.add_argument(
        "--delete-bucket",
        metavar="NAME",
        help="delete this results bucket of the cluster, too, with all that is in it; asks for its "
        "name, which --yes does not answer",
    )
    _add_delete_filestore(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    add_runs_dir(parser)
    _add_yes(parser)


def _down(arguments: argparse.Namespace, access: LocalAccess) -> int:
    from payload.orchestrate.commands.down import DownOptions, down

    return down(typed(DownOptions, arguments), access.environment())


def _add_rehearse(commands: Commands) -> None:
    parser = commands.add_parser(
        "rehearse",
        help="take the smallest cluster through everything once, within a budget",
        description="In a stack of its own: doctor, up, preflight, a run of ten steps, a node that "
        "is deleted through Google's API and built again, down, sweep. It asks before it spends, "
        "takes everything down on any failure, and prints one page: how long each step, resource "
        "and request took, and what was refused, ready for a bug report.",
    )
    parser.set_defaults(command=_rehearse)
    parser.add_argument(
        "--budget-usd", type=float, default=1.0, metavar="USD", help="(default: %(default)g)"
    )
    _add_project(parser)
    parser.add_argument(
        "--config", type=Path, default=QUICKSTART, metavar="FILE", help="(default: the quickstart)"
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one of the cluster's settings, such as region=europe-west4; may be repeated",
    )
    _add_yes(parser)


def _rehearse(arguments: argparse.Namespace, access: LocalAccess) -> int:
    from payload.orchestrate.commands.rehearse import RehearseOptions, rehearse

    return rehearse(typed(RehearseOptions, arguments), access.environment())


def _add_stack(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stack", metavar="NAME", help="(default: the selected Pulumi stack)")


def _add_project(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--project",
        metavar="ID",
        help="(default: the cluster's, as far as this folder knows it, or GOOGLE_CLOUD_PROJECT)",
    )


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    """Add the option that says where runs are kept."""
    parser.add_argument("--runs-dir", metavar="DIR", help="where runs are kept (default: runs)")


def _add_delete_filestore(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--delete-filestore",
        action="append",
        default=[],
        metavar="NAME",
        help="this Filestore instance may be deleted with the data on it, in place of its name "
        "being typed, which --yes does not answer; may be repeated",
    )


def _add_yes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="do not ask")


def typed(kind: type[_T], arguments: argparse.Namespace) -> _T:
    """Return the options of a command from what was parsed under the same names."""
    return kind(**{each.name: getattr(arguments, each.name) for each in fields(kind)})
