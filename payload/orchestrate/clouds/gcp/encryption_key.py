"""Checks `kmsKey` for `doctor`: its location, its state, and who can use it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from payload.core.errors import TileforgeError
from payload.core.validation.fields import checked
from payload.orchestrate.clouds.gcp.check_result import Check, auth, unknown, wrong
from payload.orchestrate.clouds.gcp.client import CloudMissingError, Google
from payload.stack.cloud_requirements import CloudRequirements, key_location_fits
from payload.stack.google_name_patterns import KMS_KEY, KMS_ROLE

_NAME = "kmsKey"
_MAY_GRANT = "cloudkms.cryptoKeys.setIamPolicy"
_PURPOSE = "ENCRYPT_DECRYPT"
_ANOTHER = "pulumi config set kmsKey NAME"
_WORD = re.compile("[A-Z_0-9]{0,60}")
_VERSION = re.compile(r"projects/\S{1,300}/cryptoKeyVersions/[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    name: str = checked(pattern=_VERSION, wanted="the name of a key's version")
    state: str = checked("", pattern=_WORD, wanted="an upper-case name")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """https://cloud.google.com/kms/docs/reference/rest/v1/projects.locations.keyRings.cryptoKeys.

    An encryption key has a primary version, which encrypts all new data.
    """

    purpose: str = checked("", pattern=_WORD, wanted="an upper-case name")
    primary: _Version | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Project:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Binding:
    role: str = ""
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grants:
    bindings: tuple[_Binding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Allowed:
    permissions: tuple[str, ...] = ()


def check_key(google: Google, need: CloudRequirements) -> Iterator[Check]:
    """Check that `kmsKey` fits the region, exists, is enabled and is usable.

    Google's services need permission to use the key, or `up` needs permission to grant them access.
    https://cloud.google.com/compute/docs/disks/customer-managed-encryption,
    https://cloud.google.com/storage/docs/encryption/using-customer-managed-keys and
    https://cloud.google.com/filestore/docs/cmek
    """
    if not need.kms_key:
        return
    try:
        yield _location_error(need) or _state_error(google, need) or _users(google, need)
    except CloudMissingError as error:
        yield wrong(_NAME, str(error), f"Create the key, or set another one: {_ANOTHER}")
    except TileforgeError as error:
        yield unknown(_NAME, error)


def _location_error(need: CloudRequirements) -> Check | None:
    """Return the error for a key in a location that does not fit the cluster's region, or None."""
    key = KMS_KEY.fullmatch(need.kms_key)
    regional = need.needs_regional_key
    if key is None or key_location_fits(key["location"], region=need.region, regional=regional):
        return None
    places = (
        need.region
        if regional
        else f"{need.region}, a multi-region that contains this region, or global"
    )
    return wrong(
        _NAME,
        f"it is in {key['location']}, and the cluster's region is {need.region}",
        f"Use a key in {places}: {_ANOTHER}",
    )


def _state_error(google: Google, need: CloudRequirements) -> Check | None:
    """Return the error for a key that cannot encrypt now, or None. Raises CloudMissingError."""
    found = google.get("cloudkms", f"/v1/{need.kms_key}", what=_NAME, shape=_Key)
    if found.purpose != _PURPOSE:
        purpose = f"its purpose is {found.purpose or 'unknown'}, but must be {_PURPOSE}"
        return wrong(_NAME, purpose, f"Use another key: {_ANOTHER}")
    if found.primary is None:
        fix = f"Set a primary version, or use another key: {_ANOTHER}"
        return wrong(_NAME, "the key has no primary version, so nothing can be encrypted", fix)
    state = found.primary.state
    if state == "ENABLED":
        return None
    commands = {
        "DISABLED": ("enable",),
        "DESTROY_SCHEDULED": ("restore", "enable"),  # a restored version of a key is disabled
    }.get(state, ())
    other = f"use another key: {_ANOTHER}"
    number, named = found.primary.name.rpartition("/")[2], _flags(need.kms_key)
    verbs = "; ".join(f"gcloud kms keys versions {verb} {number} {named}" for verb in commands)
    return wrong(
        _NAME,
        f"the state of its primary version is {state or 'unknown'}, so nothing can be encrypted",
        f"{verbs}; or {other}" if verbs else f"U{other[1:]}",
    )


def _flags(kms_key: str) -> str:
    """Return the gcloud options that select the key."""
    _, project, _, location, _, ring, _, key = kms_key.split("/")
    return f"--key={key} --keyring={ring} --location={location} --project={project}"


def _users(google: Google, need: CloudRequirements) -> Check:
    """Check that Google's services can use the key. Raises TileforgeError."""
    path, key = f"/v3/projects/{google.project}", f"/v1/{need.kms_key}"
    project = google.get("cloudresourcemanager", path, what="project", shape=_Project)
    grants = google.get("cloudkms", f"{key}:getIamPolicy", what=_NAME, shape=_Grants)
    body = {"permissions": [_MAY_GRANT]}
    may = google.post("cloudkms", f"{key}:testIamPermissions", body, what=_NAME, shape=_Allowed)
    number = project.name.rpartition("/")[2]
    members = {m for b in grants.bindings if b.role == KMS_ROLE for m in b.members}
    missing = [m for m in need.key_users(number) if m not in members]
    if not missing:
        return Check(name=_NAME, outcome="ok", found="the service agents can use the key")
    if need.grants_key and _MAY_GRANT in may.permissions:
        return Check(name=_NAME, outcome="ok", found="`up` will let the service agents use the key")
    return auth(
        _NAME,
        f"the key's own policy does not let {', '.join(missing)} use it",
        f"The key's owner must run: {'; '.join(_grant(need.kms_key, m) for m in missing)}",
    )


def _grant(key: str, member: str) -> str:
    return f"gcloud kms keys add-iam-policy-binding {key} --role={KMS_ROLE} --member={member}"
