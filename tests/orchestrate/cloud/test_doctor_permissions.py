"""`doctor`: list policies of the organization, and the encryption key."""

from __future__ import annotations

import json
from typing import Any

import pytest

from payload.core.errors import ExitCode
from payload.orchestrate.clouds.gcp.encryption_key import check_key
from payload.stack.cloud_requirements import requirements_of
from tests.orchestrate.cloud.conftest import Site
from tests.orchestrate.cloud.standin import NUMBER, PROJECT, ZONE
from tests.orchestrate.cloud.test_doctor import configure, doctor
from tests.orchestrate.cloud.test_doctor import project as project  # a fixture

pytestmark = pytest.mark.processes

Capture = pytest.CaptureFixture[str]
HEAD = f"projects/{PROJECT}/zones/{ZONE}/instances/mine-node-0"
KEY = f"projects/{PROJECT}/locations/us-central1/keyRings/ring/cryptoKeys/key"
COMPUTE = f"serviceAccount:service-{NUMBER}@compute-system.iam.gserviceaccount.com"
STORAGE = f"serviceAccount:service-{NUMBER}@gs-project-accounts.iam.gserviceaccount.com"
FILESTORE = f"serviceAccount:service-{NUMBER}@cloud-filer.iam.gserviceaccount.com"


def found(site: Site, capsys: Capture, name: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the check with this name."""
    status = doctor(site, "--json")
    checks = json.loads(capsys.readouterr().out)["checks"]
    (check,) = [each for each in checks if each["name"] == name]
    return status, check


@pytest.mark.parametrize(
    ("rules", "outcome"),
    [
        ([{"allowAll": True}], "ok"),
        pytest.param([], "ok", marks=pytest.mark.slow),
        ([{"denyAll": True}], "error"),
        pytest.param([{"values": {"allowedValues": [HEAD]}}], "ok", marks=pytest.mark.slow),
        ([{"values": {"allowedValues": [f"is:{HEAD}"]}}], "ok"),
        ([{"values": {"allowedValues": [HEAD.replace("mine", "other")]}}], "error"),
        ([{"values": {"deniedValues": [HEAD]}}], "error"),
        pytest.param(
            [{"values": {"deniedValues": [HEAD.replace("mine", "other")]}}],
            "ok",
            marks=pytest.mark.slow,
        ),
        ([{"values": {"allowedValues": ["under:organizations/1"]}}], "unknown"),
        pytest.param(
            [{"denyAll": True, "condition": {"expression": "x"}}], "unknown", marks=pytest.mark.slow
        ),
    ],
)
def test_a_head_with_an_address_needs_the_policy_on_external_addresses(
    project: Site, capsys: Capture, rules: list[dict[str, Any]], outcome: str
) -> None:
    project.cloud.rules["compute.vmExternalIpAccess"] = rules
    configure(project, cluster="mine", accessMode="direct")
    status, check = found(project, capsys, "policy compute.vmExternalIpAccess")
    assert check["outcome"] == outcome
    assert status == (ExitCode.AUTH if outcome == "error" else ExitCode.OK)
    assert ("accessMode iap" in check["fix"]) == (outcome != "ok")
    # Without an external address the policy is not checked.
    configure(project, cluster="mine")
    assert doctor(project) == ExitCode.OK
    assert "vmExternalIpAccess" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("image", "allowed", "outcome"),
    [
        ("", ["projects/ubuntu-os-cloud"], "ok"),
        ("", ["projects/baked"], "error"),
        ("projects/baked/global/images/tileforge", ["projects/baked"], "ok"),
        ("projects/baked/global/images/tileforge", ["projects/ubuntu-os-cloud"], "error"),
        ("", ["under:folders/12"], "unknown"),
    ],
)
def test_the_image_has_to_be_of_a_trusted_project(
    project: Site, capsys: Capture, image: str, allowed: list[str], outcome: str
) -> None:
    project.cloud.rules["compute.trustedImageProjects"] = [{"values": {"allowedValues": allowed}}]
    configure(project, image=image)
    status, check = found(project, capsys, "policy compute.trustedImageProjects")
    assert check["outcome"] == outcome
    assert status == (ExitCode.AUTH if outcome == "error" else ExitCode.OK)


@pytest.mark.parametrize(
    ("members", "may_grant", "settings", "outcome", "words"),
    [
        ([COMPUTE], False, {}, "ok", "the service agents can use the key"),
        ([COMPUTE], False, {"bucket": "create"}, "error", STORAGE),
        ([COMPUTE, STORAGE], False, {"bucket": "create"}, "ok", "can use the key"),
        ([COMPUTE], False, {"sharedStorage": "filestore"}, "error", FILESTORE),
        ([], True, {}, "ok", "`up` will let the service agents use the key"),
        ([], True, {"kmsGrant": "false"}, "error", f"add-iam-policy-binding {KEY} --role=roles/"),
        ([], False, {}, "error", f"--member={COMPUTE}"),
    ],
)
def test_googles_services_have_to_be_allowed_to_use_the_key(
    project: Site,
    capsys: Capture,
    members: list[str],
    may_grant: bool,
    settings: dict[str, str],
    outcome: str,
    words: str,
) -> None:
    project.cloud.services |= {"cloudkms", "cloudresourcemanager", "file"}
    project.cloud.key_members[KEY] = members
    project.cloud.key_grants = may_grant
    configure(project, kmsKey=KEY, **settings)
    status, check = found(project, capsys, "kmsKey")
    assert check["outcome"] == outcome and words in f"{check['found']} {check['fix']}"
    assert status == (ExitCode.AUTH if outcome == "error" else ExitCode.OK)


def test_a_key_that_does_not_exist_or_whose_apis_are_off_is_said(
    project: Site, capsys: Capture
) -> None:
    configure(project, kmsKey=KEY)
    assert doctor(project) == ExitCode.AUTH
    out = capsys.readouterr().out
    assert "error: cloudkms.googleapis.com: not enabled" in out
    assert "error: cloudresourcemanager.googleapis.com: not enabled" in out
    project.cloud.services |= {"cloudkms", "cloudresourcemanager"}
    status, check = found(project, capsys, "kmsKey")
    assert status == ExitCode.CONFIG and "not found" in check["found"]


def _at(location: str) -> str:
    return KEY.replace("us-central1", location)


def _key_in(state: str, **more: Any) -> dict[str, Any]:
    return {"purpose": "ENCRYPT_DECRYPT", "primary": {"state": state}} | more


_ENABLE = "gcloud kms keys versions enable 1 --key=key --keyring=ring --location=us-central1 --proj"


@pytest.mark.parametrize(
    ("key", "document", "settings", "outcome", "words"),
    [
        # Disks accept a key of the region, of its multi-region, or a global one.
        *(
            (_at(place), None, {}, "ok", "`up` will let")
            for place in ("global", "us", "nam4", "eur-x")
        ),
        (_at("europe"), None, {}, "error", "it is in europe, and the cluster's region is us-c"),
        (_at("asia1"), None, {}, "error", "Use a key in us-central1, a multi-region that contains"),
        (_at("us-east1"), None, {}, "error", "it is in us-east1, and"),
        # Regional buckets and Filestore instances accept only a key of the region.
        (_at("us"), None, {"bucket": "create"}, "error", "Use a key in us-central1: pulumi"),
        (_at("global"), None, {"sharedStorage": "filestore"}, "error", "it is in global"),
        (_at("global"), None, {"bucket": "acme"}, "ok", "`up` will let"),
        (KEY, _key_in("DISABLED"), {}, "error", _ENABLE),
        (KEY, _key_in("DESTROY_SCHEDULED"), {}, "error", f"{_ENABLE.replace('enable', 'restore')}"),
        (KEY, _key_in("DESTROYED"), {}, "error", "is DESTROYED, so nothing can be encrypted Use"),
        (
            KEY,
            _key_in("ENABLED", purpose="MAC"),
            {},
            "error",
            "its purpose is MAC, but must be ENCRYPT_D",
        ),
        (KEY, _key_in("", primary=None), {}, "error", "the key has no primary version"),
    ],
)
def test_the_key_fits_the_region_and_can_encrypt(
    project: Site,
    key: str,
    document: dict[str, Any] | None,
    settings: dict[str, str],
    outcome: str,
    words: str,
) -> None:
    project.cloud.key_members[key] = []
    project.cloud.key = document or project.cloud.key
    (check,) = check_key(project.google(), requirements_of({"kmsKey": key, **settings}))
    assert check.outcome == outcome and words in f"{check.found} {check.fix}"
    assert check.exit_code == (ExitCode.CONFIG if outcome == "error" else ExitCode.OK)


def test_a_key_of_a_project_that_a_policy_forbids_is_named(project: Site, capsys: Capture) -> None:
    constraint = "gcp.restrictCmekCryptoKeyProjects"
    project.cloud.services |= {"cloudkms", "cloudresourcemanager"}
    project.cloud.key_members[KEY] = []
    configure(project, kmsKey=KEY)
    for allowed, outcome in ((f"under:projects/{PROJECT}", "ok"), ("projects/keys", "error")):
        project.cloud.rules[constraint] = [{"values": {"allowedValues": [allowed]}}]
        status, check = found(project, capsys, f"policy {constraint}")
        assert check["outcome"] == outcome
    assert status == ExitCode.AUTH and "use a key from an allowed project" in check["fix"]


def test_without_nat_the_dns_api_is_needed(project: Site, capsys: Capture) -> None:
    configure(project, egress="none", wheelhouse="/srv/wheels")
    assert doctor(project) == ExitCode.AUTH
    assert "error: dns.googleapis.com: not enabled" in capsys.readouterr().out
