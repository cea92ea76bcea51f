"""Refusals of Compute Engine that the cluster program can meet. Pure.

Families, placement, maintenance: GoogleCloudPlatform/cluster-toolkit, modules/compute/vm-instance;
cloud.google.com/compute/docs/instances/limit-vm-runtime, .../spot and .../placement.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_TYPE = re.compile(r"(?P<family>[a-z0-9]+)-(?P<shape>[a-z]+)-(?P<vcpus>[0-9]+)")
_DISKS = {
    "c3": ("pd-balanced", "pd-ssd", "hyperdisk-balanced"),
    "c4": ("hyperdisk-balanced",),
    "n4": ("hyperdisk-balanced",),
    "h3": ("pd-balanced", "hyperdisk-balanced"),
    "g2": ("pd-balanced", "pd-ssd", "hyperdisk-balanced"),
    "a2": ("pd-balanced", "pd-ssd"),
    "a3": ("pd-balanced", "pd-ssd", "hyperdisk-balanced"),
}
_COMPACT = ("c3", "h3", "g2", "a2", "a3")
_WITH_GPUS = ("g2", "a2", "a3")
_SPOT_ALONE = ("a3-highgpu-1g", "a3-highgpu-2g", "a3-highgpu-4g")
_TIER_1_FROM = {"c3": 44, "c4": 48}
_RUN_S = (30, 120 * 86_400)
# Changes that need a running machine, and changes that need a stopped one.
WHILE_STOPPED = ("setMachineType", "setServiceAccount", "updateShieldedInstanceConfig")

Collections = dict[str, tuple[str, ...]]
USED_BY: Collections = {
    "networks": ("subnetworks", "firewalls", "routers", "instances"),
    "subnetworks": ("instances", "routers"),
    "resourcePolicies": ("instances",),
    "disks": ("instances",),
}
"""Kinds that block the deletion of a resource while they refer to it."""


class RefusedError(Exception):
    """A response with an error status and Google's text."""

    def __init__(self, status: int, message: str, reason: str = "invalid") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


def family_of(machine_type: str) -> str:
    """Return the family, such as c3 of .../machineTypes/c3-highmem-8."""
    return machine_type.rpartition("/")[2].partition("-")[0]


def vcpus_of(machine_type: str) -> int:
    """Return the vCPUs, such as 8 of .../machineTypes/c3-highmem-8."""
    found = _TYPE.fullmatch(machine_type.rpartition("/")[2])
    return int(found["vcpus"]) if found else 0


def check_name(name: object) -> None:
    """Raise RefusedError for an invalid resource name."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RefusedError(
            400,
            f"Invalid value for field 'resource.name': '{name}'. Must be a match of regex "
            f"'(?:{NAME.pattern})'",
        )


def references(collection: str, body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield collection and link of each resource that this one refers to."""
    if collection in ("subnetworks", "firewalls", "routers"):
        yield "networks", body.get("network", "")
    for nat in body.get("nats", ()):
        for each in nat.get("subnetworks", ()):
            yield "subnetworks", each["name"]
    if collection == "instances":
        for each in body.get("networkInterfaces", ()):
            if "subnetwork" in each:
                yield "subnetworks", each["subnetwork"]
            if "network" in each:
                yield "networks", each["network"]
        for policy in body.get("resourcePolicies", ()):
            yield "resourcePolicies", policy


def check_instance(body: dict[str, Any], *, zone: str, account: Callable[[str], bool]) -> None:
    """Raise RefusedError for a machine that Google refuses; `account` checks service accounts."""
    for problem in _instance_problems(body, zone):
        raise RefusedError(400, problem)
    for each in body.get("serviceAccounts", ()):
        if not account(each["email"]):
            raise RefusedError(
                400, f"The resource '{each['email']}' of type 'serviceAccount' was not found."
            )


def _instance_problems(body: dict[str, Any], zone: str) -> Iterator[str]:
    kind = body.get("machineType", "").rpartition("/")[2]
    family, scheduling = family_of(kind), body.get("scheduling", {})
    migrates = scheduling.get("onHostMaintenance", "MIGRATE") == "MIGRATE"
    restarts = scheduling.get("automaticRestart", True)
    for disk in body.get("disks", ()):
        params = disk.get("initializeParams", {})
        disk_type = params.get("diskType", "pd-standard").rpartition("/")[2]
        if disk_type not in _DISKS.get(family, (disk_type,)):
            yield f"[{disk_type}] features are not compatible for creating instance."
        if disk_type.startswith("pd-") and "provisionedIops" in params:
            yield f"Provisioned IOPS cannot be specified with disk type {disk_type}."
    if body.get("resourcePolicies"):
        if family not in _COMPACT:
            yield f"Machine type {kind} does not support resource policies of group placement."
        if migrates or restarts:
            yield (
                "Instances in a collocated placement policy must have onHostMaintenance TERMINATE "
                "and no automaticRestart."
            )
    if scheduling.get("provisioningModel") == "SPOT":
        if family == "h3":
            yield f"Machine type {kind} is not available as a Spot VM."
        if migrates or restarts:
            yield "Scheduling must have onHostMaintenance TERMINATE and no restart when Spot."
    if family in _WITH_GPUS and migrates:
        yield "Instances with guest accelerators do not support live migration."
    if kind in _SPOT_ALONE and scheduling.get("provisioningModel") != "SPOT":
        yield f"Machine type {kind} is not available with provisioning model STANDARD."
    if family == "h3" and migrates:
        yield f"Machine type {kind} does not support live migration. Use TERMINATE."
    yield from _special_problems(body, kind, migrates=migrates)
    seconds = int(scheduling.get("maxRunDuration", {}).get("seconds", _RUN_S[0]))
    if not _RUN_S[0] <= seconds <= _RUN_S[1]:
        yield f"Scheduling maxRunDuration {seconds} is out of range {list(_RUN_S)}."
    if "maxRunDuration" in scheduling and not scheduling.get("instanceTerminationAction"):
        yield "Scheduling with maxRunDuration needs an instanceTerminationAction."
    if zone not in body.get("machineType", ""):
        yield f"Invalid value for field 'resource.machineType': it is not in zone {zone}."


def _special_problems(body: dict[str, Any], kind: str, *, migrates: bool) -> Iterator[str]:
    tier = body.get("networkPerformanceConfig", {}).get("totalEgressBandwidthTier")
    fast_from = _TIER_1_FROM.get(family_of(kind))
    if tier == "TIER_1" and (fast_from is None or vcpus_of(kind) < fast_from):
        yield f"Machine type {kind} does not support TIER_1 bandwidth."
    if body.get("confidentialInstanceConfig", {}).get("confidentialInstanceType") == "TDX":
        if not kind.startswith("c3-standard-"):
            yield f"Machine type {kind} does not support confidential instance type TDX."
        if migrates:
            yield "Confidential instances of type TDX need onHostMaintenance TERMINATE."
