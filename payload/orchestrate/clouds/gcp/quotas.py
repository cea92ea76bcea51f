"""Checks quotas for `doctor`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from payload.core.errors import CloudError, ExitCode, TileforgeError
from payload.core.validation.fields import checked
from payload.orchestrate.clouds.gcp.check_result import Check, unknown
from payload.orchestrate.clouds.gcp.client import CloudMissingError, Google
from payload.orchestrate.clouds.gcp.compute_resource import get_compute_resource
from payload.stack.cloud_requirements import CloudRequirements, Scope

_PAGE = "https://console.cloud.google.com/iam-admin/quotas?project={project}"
# Machine families after C3 have no separate metric; Google counts them in a quota with
# dimensions. https://cloud.google.com/docs/quotas/terminology and
# .../docs/quotas/configure-dimensions
_INTEGER = re.compile(r"-?[0-9]{1,19}")
_FAMILY_METRIC = "CPUS_PER_VM_FAMILY"
_FAMILY_QUOTA = "CPUS-PER-VM-FAMILY-per-project-region"
_DEFAULTS = {
    "C3_CPUS": 24.0,
    "GPUS_ALL_REGIONS": 0.0,
    "CPUS_ALL_REGIONS": 32.0,
    "INSTANCES": 24.0,
    "IN_USE_ADDRESSES": 8.0,
    "NETWORKS": 5.0,
    "ROUTERS": 10.0,
    "SSD_TOTAL_GB": 500.0,
}
"""Default limits of a project, from public listings of `gcloud compute project-info describe`. A
free trial has lower limits (CPUS_ALL_REGIONS 12)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Details:
    value: str = checked(pattern=_INTEGER, wanted="an integer as text")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """A quota limit. It applies to requests that match all `dimensions`."""

    dimensions: dict[str, str] = field(default_factory=dict)
    details: _Details | None = None
    locations: tuple[str, ...] = checked((), key="applicableLocations")


@dataclass(frozen=True, slots=True, kw_only=True)
class _QuotaInfo:
    limits: tuple[_Limit, ...] = checked((), key="dimensionsInfos")


def check_quotas(google: Google, need: CloudRequirements, project: Any) -> Iterator[Check]:
    """Check every quota that the cluster uses.

    `project` is Compute Engine's project resource, or None if it could not be read.
    """
    try:
        region = get_compute_resource(
            google, "Regions", "GetRegionRequest", what="region", region=need.region
        )
        vcpus = _vcpus(google, need)
    except TileforgeError as error:
        yield unknown("quotas", error)
        return
    limits: dict[Scope, Mapping[str, Any]] = {
        "region": {quota.metric: quota for quota in region.quotas},
        "project": {quota.metric: quota for quota in (project.quotas if project else ())},
    }
    page = _PAGE.format(project=google.project)
    seen = set()
    for scope, metrics, amount in need.quotas(vcpus_per_node=vcpus):
        known = limits[scope]
        # If the limit for preemptible CPUs is 0, spot machines use the family's quota.
        preferred = (m for m in metrics[:-1] if m in known and known[m].limit > 0)
        metric = next(preferred, metrics[-1])
        if metric in seen:
            continue  # spot and on-demand machines share this quota
        seen.add(metric)
        where = need.region if scope == "region" else "all regions"
        if metric in known:
            yield _against(known[metric], f"{metric} in {where}", amount=amount, page=page)
        elif metric == need.family_quota():
            yield _of_family(google, need, amount=amount, page=page)
        else:
            yield _not_listed(metric, where, amount=amount, page=page)


def _against(quota: Any, name: str, *, amount: float, page: str) -> Check:
    free = quota.limit - quota.usage
    found = f"{amount:g} needed, {free:g} free (limit {quota.limit:g}, used {quota.usage:g})"
    if amount < free:
        return Check(name=name, outcome="ok", found=found)
    if amount == free:
        fix = (
            f"The cluster uses all of this quota. To run more machines, request an increase: {page}"
        )
        return Check(name=name, outcome="warning", found=found, fix=fix)
    fix = f"Request a limit of {quota.usage + amount:g} at {page}, or build a smaller cluster."
    return Check(name=name, outcome="error", found=found, fix=fix, exit_code=ExitCode.QUOTA)


def _of_family(google: Google, need: CloudRequirements, *, amount: float, page: str) -> Check:
    """Check the machine family's limit. Google lists no usage for quotas with dimensions."""
    name = f"{_FAMILY_METRIC} ({need.family}) in {need.region}"
    path = (
        f"/v1/projects/{google.project}/locations/global/services/compute.googleapis.com/"
        f"quotaInfos/{_FAMILY_QUOTA}"
    )
    try:
        info = google.get("cloudquotas", path, what=name, shape=_QuotaInfo)
    except TileforgeError as error:
        return _not_known(name, amount, f"{error} Check the quota at {page}")
    limit = _applicable(info, region=need.region, family=need.family)
    if limit is None:
        return _not_known(name, amount, f"Check the quota at {page}")
    if limit < 0:
        return Check(name=name, outcome="ok", found=f"{amount:g} needed, no limit")
    found = f"{amount:g} needed, limit {limit:g} (usage is not listed)"
    if limit < amount:
        fix = f"Request {amount:g} more than the usage at {page}, or build a smaller cluster."
        if limit == 0:
            fix += " A limit of 0 can mean that the region does not offer the family."
        return Check(name=name, outcome="error", found=found, fix=fix, exit_code=ExitCode.QUOTA)
    if limit == amount:
        fix = (
            "The cluster fits only if no other machine uses this quota. Request an increase: "
            f"{page}"
        )
        return Check(name=name, outcome="warning", found=found, fix=fix)
    return Check(name=name, outcome="ok", found=found)


def _applicable(info: _QuotaInfo, *, region: str, family: str) -> int | None:
    """Return the value of the limit that matches the most dimensions; -1 = unlimited, None =
    unknown."""
    dimensions = {"region": region, "vm_family": family.lower()}
    fitting = [
        each
        for each in info.limits
        if each.details is not None
        and all(dimensions.get(key) == value.lower() for key, value in each.dimensions.items())
        and (not each.locations or region in each.locations)
    ]
    # Among limits with one dimension, the limit of the region has priority (configure-dimensions,
    # "precedence").
    best = max(fitting, key=lambda e: (len(e.dimensions), "region" in e.dimensions), default=None)
    return None if best is None or best.details is None else int(best.details.value)


def _not_listed(metric: str, where: str, *, amount: float, page: str) -> Check:
    """Compare `amount` with the limit of a default project.

    Only Google's console shows the actual limit.
    """
    name, default = f"{metric} in {where}", _DEFAULTS.get(metric)
    if default is None:
        return _not_known(name, amount, f"Check the quota at {page}")
    found = f"{amount:g} needed, the limit is not listed; a default project has {default:g}"
    if amount <= default:
        return Check(name=name, outcome="unknown", found=found, fix=f"Check the quota at {page}")
    fix = f"Check that at least {amount:g} are unused, or request an increase: {page}"
    return Check(name=name, outcome="error", found=found, fix=fix, exit_code=ExitCode.QUOTA)


def _not_known(name: str, amount: float, fix: str) -> Check:
    found = f"{amount:g} needed, the limit is not listed"
    return Check(name=name, outcome="unknown", found=found, fix=fix)


def _vcpus(google: Google, need: CloudRequirements) -> int:
    """Return the number of vCPUs of one node, from the first zone that offers the machine type."""
    for zone in need.zones:
        try:
            found = get_compute_resource(
                google,
                "MachineTypes",
                "GetMachineTypeRequest",
                what=need.machine_type,
                zone=zone,
                machine_type=need.machine_type,
            )
        except CloudMissingError:
            continue
        return int(found.guest_cpus)
    raise CloudError(f"no zone offers {need.machine_type}, so its vCPUs are not known")
