"""Checks organization policies for `doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from payload.core.errors import TileforgeError
from payload.core.printable_text import shown
from payload.core.validation.fields import checked
from payload.orchestrate.clouds.gcp.check_result import Check, auth, unknown
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.error_catalog import policy_fix
from payload.stack.cloud_requirements import CloudRequirements
from payload.stack.google_name_patterns import KMS_KEY


@dataclass(frozen=True, slots=True, kw_only=True)
class _Values:
    allowed: tuple[str, ...] = checked((), key="allowedValues")
    denied: tuple[str, ...] = checked((), key="deniedValues")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """https://cloud.google.com/resource-manager/docs/reference/orgpolicy/rest/v2/Policy."""

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


def check_policies(google: Google, need: CloudRequirements) -> Iterator[Check]:
    """Check the organization policies that can prevent building or reaching the cluster.

    The effective policy combines the policies of the organization, its folders and the project.
    """
    effects = {
        "compute.disableGuestAttributesAccess": "nodes could not publish their host keys",
        "iam.disableServiceAccountCreation": "the nodes' service account could not be created",
    }
    if not need.uses_os_login:
        effects["compute.requireOsLogin"] = "the operator's key would be ignored"
    for constraint, effect in effects.items():
        yield check_boolean_policy(google, constraint, effect)
    for constraint, values in _listed(google.project, need).items():
        yield _listed_policy(google, constraint, values)


def _listed(project: str, need: CloudRequirements) -> dict[str, Sequence[Sequence[str]]]:
    """Return the values that each list policy must allow, each with the groups that contain the
    value."""
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
    """Check that the policy `constraint` is not enforced; `effect` is what the policy prevents."""
    name = f"policy {constraint}"
    try:
        rules = _rules(google, constraint)
    except TileforgeError as error:
        return unknown(name, error)
    if any(rule.enforce for rule in rules):
        return auth(name, f"enforced: {effect}", f"{policy_fix(constraint)}.")
    return Check(name=name, outcome="ok", found="not enforced")


def _listed_policy(google: Google, constraint: str, values: Sequence[Sequence[str]]) -> Check:
    """Check that a list constraint allows each value, directly or through a group of values."""
    name, fix = f"policy {constraint}", f"{policy_fix(constraint)}."
    try:
        rules = _rules(google, constraint)
    except TileforgeError as error:
        return unknown(name, error)
    found = [_allows(rules, each) for each in values]
    for result in ("refused", "unknown"):
        for (answer, why), value in zip(found, values, strict=True):
            if answer == result == "refused":
                return auth(name, f"does not allow {value[0]}", fix)
            if answer == result:
                return Check(
                    name=name,
                    outcome="unknown",
                    found=why,
                    fix=f"If the value is not allowed: {fix}",
                )
    shown_values = ", ".join(value[0] for value in values)
    return Check(name=name, outcome="ok", found=f"allows {shown_values}")


def _allows(rules: Sequence[_Rule], value: Sequence[str]) -> tuple[str, str]:
    """Return allowed, refused or unknown, and the reason if unknown.

    `value` has the value, followed by the groups that contain it.
    """
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
        return "unknown", f"has conditions, so it is not known whether {value[0]} is allowed"
    if any(rule.deny_all for rule in rules) or denied & set(value):
        return "refused", ""
    if any(rule.allow_all for rule in rules) or allowed & set(value) or not allowed | denied:
        return "allowed", ""
    groups = sorted(each for each in allowed | denied if ":" in each)
    if groups:
        return "unknown", f"has group {shown(groups[0])}; not known whether {value[0]} is allowed"
    return ("refused" if allowed else "allowed"), ""
