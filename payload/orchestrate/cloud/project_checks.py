"""`doctor`'s checks of a project: enabled APIs, offers in its zones, policies, quotas."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from payload.core.errors import CloudAuthError, CloudError, ExitCode, TileforgeError
from payload.core.printable_text import shown
from payload.core.validation.fields import checked
from payload.machines.gpu_catalog import FP8_CAPABILITY, NVIDIA_DRIVER_BRANCH, SPOT_ALONE, gpus_of
from payload.machines.inventory import Node
from payload.orchestrate.cloud.error_catalog import policy_fix
from payload.orchestrate.cloud.google import REQUEST_S, CloudMissingError, Google, request_of
from payload.orchestrate.hardware.nvidia import GpuNeed, NvidiaFacts, gpu_faults
from payload.stack.cloud_names import KMS_KEY
from payload.stack.cloud_need import Need, Scope

Outcome = Literal["ok", "error", "warning", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    outcome: Outcome
    found: str
    """With the numbers."""
    fix: str = ""
    exit_code: ExitCode = ExitCode.OK
    """The exit code for an error."""


def auth(name: str, found: str, fix: str) -> Check:
    """Return the error of something that is not permitted or not enabled."""
    return Check(name=name, outcome="error", found=found, fix=fix, exit_code=ExitCode.AUTH)


def denied(name: str, error: TileforgeError, permission_fix: str) -> Check:
    """Return the error of a refusal; `permission_fix` is for one that a permission would end.

    Another one has its own fix, such as billing, or a perimeter of VPC Service Controls.
    """
    own = error.fix if error.fix and "Ask for" not in error.fix else ""
    lacks_permission = not own or "roles/" in own
    found = error.cause.removeprefix(f"{name}: ")
    return auth(name, found, permission_fix if lacks_permission else own)


def wrong(name: str, found: str, fix: str) -> Check:
    """Return the error of a setting that names what is not there, or cannot be used."""
    return Check(name=name, outcome="error", found=found, fix=f"{fix}.", exit_code=ExitCode.CONFIG)


def unknown(name: str, error: TileforgeError) -> Check:
    """Return the check of something that could not be looked at."""
    fix = str(error).removeprefix(f"{name}: ")
    return Check(name=name, outcome="unknown", found="could not be looked at", fix=fix)


def ask_compute(google: Google, kind: str, request: str, *, what: str, **fields: str) -> Any:
    """Return one resource of Compute Engine. Raises as Google.ask does."""
    client = google.compute(kind)
    asked = request_of(request, project=google.project, **fields)
    return google.ask(what, partial(client.get, request=asked, retry=None, timeout=REQUEST_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Api:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Service:
    config: _Api


@dataclass(frozen=True, slots=True, kw_only=True)
class _ServicePage:
    services: tuple[_Service, ...] = ()
    next_page_token: str = checked("", key="nextPageToken")


def check_services(google: Google, need: Need) -> Iterator[Check]:
    """Check that every API that the cluster needs is enabled."""
    path = f"/v1/projects/{google.project}/services?filter=state:ENABLED&pageSize=200"
    what = "listing enabled APIs"
    try:
        pages = google.get_pages("serviceusage", path, what=what, shape=_ServicePage)
        names = {entry.config.name for page in pages for entry in page.services}
    except CloudAuthError as error:
        if "no quota project" in error.fix:
            yield auth("quota project", error.cause, error.fix)
        else:
            yield unknown("APIs", error)
        return
    except TileforgeError as error:
        yield unknown("APIs", error)
        return
    for service in need.services():
        api = f"{service}.googleapis.com"
        if api in names:
            yield Check(name=api, outcome="ok", found="enabled")
        else:
            fix = f"Enable it: gcloud services enable {api} --project={google.project}"
            yield auth(api, "not enabled", fix)


def check_offers(google: Google, need: Need) -> Iterator[Check]:
    """Check that each zone offers the machine type and the disk type."""
    for place, zone in enumerate(need.zones):
        machine = replace(need, zones=(zone,))
        for kind, name, request in (
            ("MachineTypes", need.machine_type, "GetMachineTypeRequest"),
            ("DiskTypes", need.disk_type, "GetDiskTypeRequest"),
        ):
            word = "machine_type" if kind == "MachineTypes" else "disk_type"
            label = f"{name} in {zone}"
            try:
                found = ask_compute(google, kind, request, what=label, zone=zone, **{word: name})
            except CloudMissingError:
                # The first zone is where the nodes go; the others are for later.
                yield Check(
                    name=label,
                    outcome="warning" if place else "error",
                    found="not offered there",
                    fix=f"Use another zone of {machine.region}, or another one of its kind.",
                    exit_code=ExitCode.CONFIG,
                )
            except TileforgeError as error:
                yield unknown(label, error)
            else:
                size = f", {found.guest_cpus} vCPUs" if kind == "MachineTypes" else ""
                yield Check(name=label, outcome="ok", found=f"offered{size}")


def check_gpus(need: Need) -> Iterator[Check]:
    """Say what GPUs the machine type has and with which driver; nothing for one without."""
    gpus = gpus_of(need.machine_type)
    if gpus is None:
        return
    gpu = gpus.gpu
    capability = ".".join(map(str, gpu.capability))
    fp8 = "with" if gpu.capability >= FP8_CAPABILITY else "without"
    found = (
        f"{gpus.count} x {gpu.name} on each node, a rank on each GPU: "
        f"{gpu.memory_mib / 1024:.1f} GiB, compute capability {capability} ({fp8} fp8), "
        f"driver branch {NVIDIA_DRIVER_BRANCH}"
    )
    if need.machine_type in SPOT_ALONE and need.spot != "true":
        yield Check(
            name="GPUs",
            outcome="error",
            found=f"{found}; {need.machine_type} is sold only as spot",
            fix="Set spot true (--spot), or take a3-highgpu-8g.",
            exit_code=ExitCode.CONFIG,
        )
    else:
        yield Check(name="GPUs", outcome="ok", found=found)


def check_own_gpus(facts: NvidiaFacts) -> Iterator[Check]:
    """Say what GPUs this machine has, for runs here; nothing where it has no nvidia-smi."""
    if facts.smi is None:
        return
    node = Node(name="this machine", address="127.0.0.1", physical_cores=1, memory_gib=0.0)
    need = GpuNeed(why="a run here", ranks_per_node=None)
    faults = list(gpu_faults(facts, need=need, node=node))
    yield Check(
        name="GPUs of this machine",
        outcome="warning" if faults else "ok",
        found="; ".join([facts.describe(), *(fault.cause for fault in faults)]),
        fix=" ".join(fault.fix for fault in faults),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Values:
    allowed: tuple[str, ...] = checked((), key="allowedValues")
    denied: tuple[str, ...] = checked((), key="deniedValues")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """One of https://cloud.google.com/resource-manager/docs/reference/orgpolicy/rest/v2/Policy."""

    enforce: bool = False
    allow_all: bool = checked(False, key="allowAll")
    deny_all: bool = checked(False, key="denyAll")
    values: _Values | None = None
    condition: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    rules: tuple[_Rule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Policy:
    spec: _Spec | None = None


def check_policies(google: Google, need: Need) -> Iterator[Check]:
    """Check the organization policies that would keep the cluster from being built or reached.

    Each by its effective value: what the organization, its folders and the project say together.
    """
    effects = {
        "compute.disableGuestAttributesAccess": "nodes could not publish their host keys",
        "iam.disableServiceAccountCreation": "the nodes' service account could not be made",
    }
    if not need.uses_os_login:
        effects["compute.requireOsLogin"] = "the operator's key would be ignored"
    for constraint, effect in effects.items():
        yield check_boolean_policy(google, constraint, effect)
    for constraint, values in _listed(google.project, need).items():
        yield _listed_policy(google, constraint, values)


def _listed(project: str, need: Need) -> dict[str, Sequence[Sequence[str]]]:
    """Return the values that policies with lists have to allow, each with its groups."""
    cluster, region = need.cluster or "CLUSTER", need.region
    own = f"under:projects/{project}"
    values: dict[str, Sequence[Sequence[str]]] = {
        "compute.trustedImageProjects": [(f"projects/{need.image_project}",)],
        "gcp.resourceLocations": [
            (region, f"in:{region}-locations", f"in:{region.partition('-')[0]}-locations")
        ],
    }
    if need.has_nat:
        subnetwork = f"projects/{project}/regions/{region}/subnetworks/{cluster}-subnet"
        values["compute.restrictCloudNATUsage"] = [(subnetwork, own)]
    if need.has_public_head:
        head = f"projects/{project}/zones/{need.zones[0]}/instances/{cluster}-node-0"
        values["compute.vmExternalIpAccess"] = [(head, own)]
    if not need.kms_key:
        bucket = ("storage",) if need.makes_bucket else ()
        file = ("file",) if need.has_filestore else ()
        services = ("compute", *bucket, *file)
        values["gcp.restrictNonCmekServices"] = [(f"{name}.googleapis.com",) for name in services]
    elif key := KMS_KEY.fullmatch(need.kms_key):
        keys = f"projects/{key['project']}"
        values["gcp.restrictCmekCryptoKeyProjects"] = [(keys, f"under:{keys}")]
    return values


def _rules(google: Google, constraint: str) -> Sequence[_Rule]:
    path = f"/v2/projects/{google.project}/policies/{constraint}:getEffectivePolicy"
    policy = google.get("orgpolicy", path, what=f"policy {constraint}", shape=_Policy)
    return policy.spec.rules if policy.spec else ()


def check_boolean_policy(google: Google, constraint: str, effect: str) -> Check:
    """Check that a policy with the given effect is not enforced."""
    name = f"policy {constraint}"
    try:
        rules = _rules(google, constraint)
    except TileforgeError as error:
        return unknown(name, error)
    if any(rule.enforce for rule in rules):
        return auth(name, f"enforced: {effect}", f"{policy_fix(constraint)}.")
    return Check(name=name, outcome="ok", found="not enforced")


def _listed_policy(google: Google, constraint: str, values: Sequence[Sequence[str]]) -> Check:
    """Check that a list constraint allows each value, by itself or by a group that it is in."""
    name, fix = f"policy {constraint}", f"{policy_fix(constraint)}."
    try:
        rules = _rules(google, constraint)
    except TileforgeError as error:
        return unknown(name, error)
    found = [_allows(rules, each) for each in values]
    for wanted in ("refused", "unknown"):
        for (answer, why), value in zip(found, values, strict=True):
            if answer == wanted == "refused":
                return auth(name, f"does not allow {value[0]}", fix)
            if answer == wanted:
                return Check(name=name, outcome="unknown", found=why, fix=f"If it does not: {fix}")
    shown_values = ", ".join(value[0] for value in values)
    return Check(name=name, outcome="ok", found=f"allows {shown_values}")


def _allows(rules: Sequence[_Rule], value: Sequence[str]) -> tuple[str, str]:
    """Return allowed, refused or unknown, and why it is unknown; `value` with its groups."""
    allowed, denied = (
        {
            each.removeprefix("is:")
            for rule in rules
            if rule.values
            for each in (rule.values.allowed if kind == "allowed" else rule.values.denied)
        }
        for kind in ("allowed", "denied")
    )
    if any(rule.condition for rule in rules):
        return "unknown", f"allows {value[0]} under conditions alone, which are not looked at"
    if any(rule.deny_all for rule in rules) or denied & set(value):
        return "refused", ""
    if any(rule.allow_all for rule in rules) or allowed & set(value) or not allowed | denied:
        return "allowed", ""
    groups = sorted(each for each in allowed | denied if ":" in each)
    if groups:
        return "unknown", f"names {shown(groups[0])}; whether {value[0]} is in it is not looked at"
    return ("refused" if allowed else "allowed"), ""


_PAGE = "https://console.cloud.google.com/iam-admin/quotas?project={project}"
# Families after C3 have no metric of their own; Google counts them in one quota, by dimension.
# https://cloud.google.com/docs/quotas/terminology and .../docs/quotas/configure-dimensions
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
"""Limits of a project that never asked for more, as public listings of `gcloud compute project-info
describe` show them; one on a free trial has less (CPUS_ALL_REGIONS 12)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Details:
    value: str = checked(pattern=_INTEGER, wanted="an integer as text")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """The limit where these dimensions hold; those that are not named may have any value."""

    dimensions: dict[str, str] = field(default_factory=dict)
    details: _Details | None = None
    locations: tuple[str, ...] = checked((), key="applicableLocations")


@dataclass(frozen=True, slots=True, kw_only=True)
class _QuotaInfo:
    limits: tuple[_Limit, ...] = checked((), key="dimensionsInfos")


def check_quotas(google: Google, need: Need, project: Any) -> Iterator[Check]:
    """Check every quota that the cluster counts against.

    `project` is Compute Engine's answer, or None where it could not be read.
    """
    try:
        region = ask_compute(
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
        # A limit of 0 for preemptible CPUs means that spot machines use the family's quota.
        preferred = (m for m in metrics[:-1] if m in known and known[m].limit > 0)
        metric = next(preferred, metrics[-1])
        if metric in seen:
            continue  # spot machines that use the quota of the others
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
        fix = f"It fits and leaves nothing: for any more than this cluster, ask at {page}"
        return Check(name=name, outcome="warning", found=found, fix=fix)
    fix = f"Ask for {quota.usage + amount:g} at {page}, or need less."
    return Check(name=name, outcome="error", found=found, fix=fix, exit_code=ExitCode.QUOTA)


def _of_family(google: Google, need: Need, *, amount: float, page: str) -> Check:
    """Check the family's share of the quota that has dimensions; its use is not to be had there."""
    name = f"{_FAMILY_METRIC} ({need.family}) in {need.region}"
    path = (
        f"/v1/projects/{google.project}/locations/global/services/compute.googleapis.com/"
        f"quotaInfos/{_FAMILY_QUOTA}"
    )
    try:
        info = google.get("cloudquotas", path, what=name, shape=_QuotaInfo)
    except TileforgeError as error:
        return _not_known(name, amount, f"{error} Or look at {page}")
    limit = _applicable(info, region=need.region, family=need.family)
    if limit is None:
        return _not_known(name, amount, f"Look at {page}")
    if limit < 0:
        return Check(name=name, outcome="ok", found=f"{amount:g} needed, no limit")
    found = f"{amount:g} needed, limit {limit:g} (what is in use is not listed)"
    if limit < amount:
        fix = f"Ask for {amount:g} more than is in use at {page}, or need less."
        if limit == 0:
            fix += " A limit of 0 may mean that the region does not have the family."
        return Check(name=name, outcome="error", found=found, fix=fix, exit_code=ExitCode.QUOTA)
    if limit == amount:
        fix = f"It fits only while nothing else uses it: for more, ask at {page}"
        return Check(name=name, outcome="warning", found=found, fix=fix)
    return Check(name=name, outcome="ok", found=found)


def _applicable(info: _QuotaInfo, *, region: str, family: str) -> int | None:
    """Return the limit with the most dimensions that fit; -1 is none, None is not known."""
    wanted = {"region": region, "vm_family": family.lower()}
    fitting = [
        each
        for each in info.limits
        if each.details is not None
        and all(wanted.get(key) == value.lower() for key, value in each.dimensions.items())
        and (not each.locations or region in each.locations)
    ]
    # Of those with one dimension a location's goes first (configure-dimensions, "precedence").
    best = max(fitting, key=lambda e: (len(e.dimensions), "region" in e.dimensions), default=None)
    return None if best is None or best.details is None else int(best.details.value)


def _not_listed(metric: str, where: str, *, amount: float, page: str) -> Check:
    """Compare with what a default project has; nothing but the console has this project's limit."""
    name, default = f"{metric} in {where}", _DEFAULTS.get(metric)
    if default is None:
        return _not_known(name, amount, f"Look at {page}")
    found = f"{amount:g} needed, the limit is not listed; a default project has {default:g}"
    if amount <= default:
        return Check(name=name, outcome="unknown", found=found, fix=f"Look at {page}")
    fix = f"See that the limit is at least {amount:g} more than is in use, or ask for it: {page}"
    return Check(name=name, outcome="error", found=found, fix=fix, exit_code=ExitCode.QUOTA)


def _not_known(name: str, amount: float, fix: str) -> Check:
    found = f"{amount:g} needed, the limit is not listed"
    return Check(name=name, outcome="unknown", found=found, fix=fix)


def _vcpus(google: Google, need: Need) -> int:
    """Return the vCPUs of one node, from the first zone that offers it."""
    for zone in need.zones:
        try:
            found = ask_compute(
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
