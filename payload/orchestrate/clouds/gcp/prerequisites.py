"""Checks prerequisites of `up` for `doctor`: proxy, quota project, billing, image, bucket."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlencode

from payload.core.errors import CloudAuthError, ExitCode, TileforgeError
from payload.core.validation.fields import checked
from payload.orchestrate.clouds.gcp.check_result import Check, auth, denied, unknown, wrong
from payload.orchestrate.clouds.gcp.client import REQUEST_S, CloudMissingError, Google, request_of
from payload.orchestrate.clouds.gcp.error_catalog import QUOTA_PROJECT_FIX, billing_fix, bucket_fix
from payload.orchestrate.clouds.gcp.organization_policies import check_boolean_policy
from payload.orchestrate.clouds.proxy import address_of, bypasses_loopback, proxy_of
from payload.stack.cloud_requirements import CloudRequirements

_CONNECT_S = 5.0
_IMAGE = re.compile(r"projects/(?P<project>[a-z0-9:.-]+)/global/images/(?P<name>[a-z0-9-]+)")
_GONE = ("OBSOLETE", "DELETED")
_UEFI = "UEFI_COMPATIBLE"
_BUCKET_NEEDS = (
    "storage.buckets.getIamPolicy",
    "storage.buckets.setIamPolicy",
    "storage.objects.create",
)


def check_proxy(env: Mapping[str, str]) -> Iterator[Check]:
    """If a proxy is set, check that it responds and that no_proxy lists 127.0.0.1."""
    found = proxy_of(env)
    if found is None:
        return
    variable, value = found
    address = address_of(value)
    if address is None:
        yield Check(
            name="proxy",
            outcome="error",
            found=f"{variable} is not a URL",
            fix=f"export {variable}=http://HOST:PORT, or unset {variable}.",
            exit_code=ExitCode.CONFIG,
        )
        return
    shown = f"{variable}: {address[0]}:{address[1]}"
    try:
        socket.create_connection(address, timeout=_CONNECT_S).close()
    except OSError as error:
        yield Check(
            name="proxy",
            outcome="error",
            found=f"{shown} does not respond ({error.strerror or error})",
            fix=f"Correct the URL, or unset {variable}.",
            exit_code=ExitCode.PREFLIGHT,
        )
        return
    if bypasses_loopback(env):
        yield Check(name="proxy", outcome="ok", found=f"{shown} responds")
    else:
        yield Check(
            name="proxy",
            outcome="warning",
            found=f"{shown} responds; no_proxy lacks 127.0.0.1, which Pulumi's processes use",
            fix="`up` and `down` add it; for `pulumi` by hand: export no_proxy=127.0.0.1,localhost",
        )


def check_quota_project(google: Google) -> Iterator[Check]:
    """Check that a user's login has a quota project, which some APIs require."""
    if google.lacks_quota_project():
        fix = f"{QUOTA_PROJECT_FIX.format(project=google.project)}."
        yield auth("quota project", "required by the APIs for services, policies and quotas", fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Billing:
    enabled: bool = checked(False, key="billingEnabled")


def check_billing(google: Google) -> Check:
    """Check that the project has an open billing account."""
    path = f"/v1/projects/{google.project}/billingInfo"
    try:
        billing = google.get("cloudbilling", path, what="billing", shape=_Billing)
    except TileforgeError as error:
        return unknown("billing", error)
    if billing.enabled:
        return Check(name="billing", outcome="ok", found="enabled")
    return auth("billing", "not enabled", f"{billing_fix(google.project)}.")


def check_image(google: Google, need: CloudRequirements) -> Iterator[Check]:
    """Check that the boot image exists, is accessible and is not deprecated.

    If the image does not support Shielded VM, also check the policy that can require it.
    """
    named = _IMAGE.fullmatch(need.image)
    if named is None:
        return  # the cluster program reports this before it builds
    name = f"image {named['name']}"
    request = request_of("GetImageRequest", project=named["project"], image=named["name"])
    client = google.compute("Images")
    fix = f"Use another image: gcloud compute images list --project={named['project']}; then: "
    fix += "pulumi config set image NAME"
    try:
        image = google.call(
            name, partial(client.get, request=request, retry=None, timeout=REQUEST_S)
        )
    except CloudMissingError:
        yield wrong(name, f"not found in project {named['project']}", fix)
        return
    except CloudAuthError as error:
        role = f"roles/compute.imageUser on the project {named['project']}"
        yield denied(name, error, f"Its owner must grant you {role}.")
        return
    except TileforgeError as error:
        yield unknown(name, error)
        return
    state = image.deprecated.state
    newer = _IMAGE.search(image.deprecated.replacement)
    fix = f"{fix.removesuffix('NAME')}{newer.group()}" if newer else fix
    if state in _GONE:
        yield wrong(name, f"{state.lower()}: no machine can be created from this image", fix)
    elif state == "DEPRECATED":
        found = "deprecated: machines can be created from this image until Google withdraws it"
        yield Check(name=name, outcome="warning", found=found, fix=f"{fix}.")
    else:
        yield Check(name=name, outcome="ok", found="exists")
    if _UEFI not in {feature.type_ for feature in image.guest_os_features}:
        effect = f"the image lacks {_UEFI}, so no machine could be created from it"
        yield check_boolean_policy(google, "compute.requireShieldedVm", effect)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Allowed:
    permissions: tuple[str, ...] = ()


def check_bucket(google: Google, need: CloudRequirements) -> Iterator[Check]:
    """Check that the configured bucket exists, and that `up` can grant the nodes access to it."""
    if not need.bucket_name:
        return
    name = f"bucket {need.bucket_name}"
    path = f"/storage/v1/b/{need.bucket_name}"
    query = urlencode([("permissions", each) for each in _BUCKET_NEEDS])
    try:
        google.get("storage", path, what=name, shape=_Bucket)
        may = google.get(
            "storage", f"{path}/iam/testPermissions?{query}", what=name, shape=_Allowed
        )
    except CloudMissingError:
        fix = (
            "List your buckets: gcloud storage ls; then: pulumi config set bucket NAME; or have "
            "`up` "
        )
        yield wrong(name, "not found", f"{fix}create one: pulumi config set bucket create")
        return
    except CloudAuthError as error:
        yield denied(name, error, f"{bucket_fix(need.bucket_name)}.")
        return
    except TileforgeError as error:
        yield unknown(name, error)
        return
    missing = [each for each in _BUCKET_NEEDS if each not in may.permissions]
    if missing:
        found = f"not writable: this login lacks {', '.join(missing)}"
        yield auth(name, found, f"{bucket_fix(need.bucket_name)}.")
    else:
        yield Check(name=name, outcome="ok", found="exists, and `up` can grant the nodes access")
