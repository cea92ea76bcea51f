"""`doctor`: proxy, quota project, billing, boot image, bucket and effective policies."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.config import ClusterConfig
from payload.core.errors import ExitCode
from payload.orchestrate.clouds.gcp.prerequisites import check_proxy
from payload.orchestrate.clouds.proxy import with_loopback_exception
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.commands.doctor import examine
from payload.stack.cloud_requirements import requirements_of
from payload.stack.stack_settings import DEFAULTS
from tests.orchestrate.cloud.conftest import Site
from tests.orchestrate.cloud.standin import PROJECT, REGION, Fault
from tests.orchestrate.cloud.test_doctor import configure, doctor
from tests.orchestrate.cloud.test_doctor import project as project  # a fixture

Capture = pytest.CaptureFixture[str]
IMAGE = DEFAULTS.image.rpartition("/")[2]
NEWER = "projects/ubuntu-os-cloud/global/images/ubuntu-2404-noble-amd64-v20261101"


def checks(site: Site, capsys: Capture) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit code and the checks by name."""
    status = doctor(site, "--json")
    found = json.loads(capsys.readouterr().out)["checks"]
    return status, {each["name"]: each for each in found}


def test_the_default_image_is_the_cluster_programs() -> None:
    assert ClusterConfig().image == DEFAULTS.image


@pytest.mark.processes
@pytest.mark.parametrize(
    ("images", "outcome", "code", "found", "fix"),
    [
        ({IMAGE: {}}, "ok", ExitCode.OK, "exists", ""),
        ({}, "error", ExitCode.CONFIG, "not found in project", "pulumi config set image NAME"),
        (
            {IMAGE: {"deprecated": {"state": "OBSOLETE", "replacement": f"https://x/{NEWER}"}}},
            "error",
            ExitCode.CONFIG,
            "obsolete: no machine can be created from this",
            f"pulumi config set image {NEWER}",
        ),
        (
            {IMAGE: {"deprecated": {"state": "DEPRECATED", "replacement": "; rm -rf /"}}},
            "warning",
            ExitCode.OK,
            "deprecated: machines can be created from this",
            "pulumi config set image NAME",
        ),
    ],
)
def test_the_boot_image_exists_and_is_not_deprecated(
    project: Site,
    capsys: Capture,
    images: dict[str, Any],
    outcome: str,
    code: ExitCode,
    found: str,
    fix: str,
) -> None:
    project.cloud.images = images
    status, by_name = checks(project, capsys)
    check = by_name[f"image {IMAGE}"]
    assert (check["outcome"], status) == (outcome, code)
    assert found in check["found"] and fix in check["fix"]


@pytest.mark.processes
def test_an_image_that_is_no_shielded_one_is_held_against_the_policy(
    project: Site, capsys: Capture
) -> None:
    project.cloud.policies["compute.requireShieldedVm"] = True
    status, by_name = checks(project, capsys)
    assert status == ExitCode.OK and "policy compute.requireShieldedVm" not in by_name
    project.cloud.images = {IMAGE: {"guestOsFeatures": []}}
    status, by_name = checks(project, capsys)
    check = by_name["policy compute.requireShieldedVm"]
    assert status == ExitCode.AUTH and "lacks UEFI_COMPATIBLE" in check["found"]
    assert "use an image with the feature UEFI_COMPATIBLE" in check["fix"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("rights", "fault", "outcome", "code", "found", "fix"),
    [
        (None, None, "ok", ExitCode.OK, "`up` can grant the nodes access", ""),
        (None, 404, "error", ExitCode.CONFIG, "not found", "pulumi config set bucket create"),
        (None, 403, "error", ExitCode.AUTH, "does not have storage.buckets.get", "gs://acme-r"),
        (
            ["storage.objects.create"],
            None,
            "error",
            ExitCode.AUTH,
            "not writable: this login lacks storage.buckets.getIamPolicy, storage.buckets.setIamP",
            "gcloud storage buckets add-iam-policy-binding gs://acme-results --member=user:YOU",
        ),
    ],
)
def test_the_bucket_of_the_setting_exists_and_can_be_written_to(
    project: Site,
    capsys: Capture,
    rights: list[str] | None,
    fault: int | None,
    outcome: str,
    code: ExitCode,
    found: str,
    fix: str,
) -> None:
    project.cloud.services |= {"storage"}
    project.cloud.add_bucket("acme-results", labels={})
    project.cloud.bucket_rights = rights
    configure(project, bucket="acme-results")
    if fault is not None:
        said = {
            403: "ann@example.com does not have storage.buckets.get access to the Google Cloud "
            "Storage bucket. Permission 'storage.buckets.get' denied on resource (or it may not "
            "exist).",
            404: "The specified bucket does not exist.",
        }
        path = "/storage/v1/b/acme-results"
        refusal = Fault(path=path, status=fault, message=said[fault], reason="forbidden")
        project.cloud.faults.append(refusal)
    status, by_name = checks(project, capsys)
    check = by_name["bucket acme-results"]
    assert (check["outcome"], status) == (outcome, code)
    assert found in check["found"] and fix in check["fix"]


@pytest.mark.processes
def test_a_project_without_billing_is_exit_13(project: Site, capsys: Capture) -> None:
    assert checks(project, capsys)[1]["billing"]["outcome"] == "ok"
    project.cloud.has_billing = False
    status, by_name = checks(project, capsys)
    assert status == ExitCode.AUTH and by_name["billing"]["found"] == "not enabled"
    fix = f"gcloud billing projects link {PROJECT} --billing-account=ACCOUNT"
    assert fix in by_name["billing"]["fix"]


_PERIMETER = (
    "Request is prohibited by organization's policy. vpcServiceControlsUniqueIdentifier: VQQnKfXt"
)
_OWN_PROJECT = f"/projects/{PROJECT}([?]|$)"


@pytest.mark.parametrize(
    ("path", "said", "name", "fix"),
    [
        (
            _OWN_PROJECT,
            "This API method requires billing to be enabled. Please enable billing on project #1",
            "Compute Engine",
            f"gcloud billing projects link {PROJECT} --billing-account=ACCOUNT",
        ),
        (_OWN_PROJECT, _PERIMETER, "Compute Engine", "request an ingress rule"),
        ("/b/acme-results", _PERIMETER, "bucket acme-results", "request an ingress rule"),
        (
            "/b/acme-results",
            "The billing account for the owning project is disabled in state absent",
            "bucket acme-results",
            "gcloud billing projects link",
        ),
        ("/images/", _PERIMETER, f"image {IMAGE}", "request an ingress rule"),
        (
            "/images/",
            "Required 'compute.images.get' permission for 'projects/x/global/images/y'",
            f"image {IMAGE}",
            "Its owner must grant you roles/compute.imageUser",
        ),
        (
            _OWN_PROJECT,
            f"Required 'compute.projects.get' permission for 'projects/{PROJECT}'",
            "Compute Engine",
            f"Is {PROJECT} the project's id?",
        ),
    ],
)
@pytest.mark.processes
def test_a_refusal_has_the_fix_of_its_own_cause(
    project: Site, path: str, said: str, name: str, fix: str
) -> None:
    project.cloud.add_bucket("acme-results", labels={})
    project.cloud.faults.append(
        Fault(path=path, status=403, reason="forbidden", message=said, times=99)
    )
    need = requirements_of({"bucket": "acme-results"})
    (check,) = [each for each in examine(project.google(), need, None) if each.name == name]
    assert (check.outcome, check.exit_code) == ("error", ExitCode.AUTH)
    assert fix in check.fix and not check.found.startswith(name)
    assert ("roles/" in check.fix) == ("permission" in said)


@pytest.mark.processes
def test_a_login_without_a_quota_project_is_exit_13_and_no_api_is_to_be_enabled(
    project: Site, capsys: Capture
) -> None:
    said = (
        "Your application is authenticating by using local Application Default Credentials. The "
        "{api}.googleapis.com API requires a quota project, which is not set by default. To learn "
        "how to set your quota project, see "
        "https://cloud.google.com/docs/authentication/adc-troubleshooting/user-creds ."
    )
    for path, api in (
        ("/services[?]", "serviceusage"),
        ("getEffectivePolicy", "orgpolicy"),
        ("billingInfo", "cloudbilling"),
        ("/skus", "cloudbilling"),
    ):
        refusal = Fault(path=path, status=403, reason="SERVICE_DISABLED", times=99)
        refusal.message = said.format(api=api)
        project.cloud.faults.append(refusal)
    status, by_name = checks(project, capsys)
    check = by_name["quota project"]
    assert (check["outcome"], status) == ("error", ExitCode.AUTH)
    assert f"gcloud auth application-default set-quota-project {PROJECT}" in check["fix"]
    assert not any("services enable" in each["fix"] for each in by_name.values() if each["fix"])


NAT = f"projects/{PROJECT}/regions/{REGION}/subnetworks/mine-subnet"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("constraint", "rules", "settings", "outcome"),
    [
        ("compute.restrictCloudNATUsage", {"allowedValues": [NAT]}, {}, "ok"),
        (
            "compute.restrictCloudNATUsage",
            {"allowedValues": [f"under:projects/{PROJECT}"]},
            {},
            "ok",
        ),
        ("compute.restrictCloudNATUsage", {"allowedValues": ["under:folders/1"]}, {}, "unknown"),
        ("compute.restrictCloudNATUsage", "denyAll", {}, "error"),
        ("gcp.resourceLocations", {"allowedValues": ["in:us-locations"]}, {}, "ok"),
        ("gcp.resourceLocations", {"allowedValues": ["us-central1"]}, {}, "ok"),
        ("gcp.resourceLocations", {"allowedValues": ["europe-west4"]}, {}, "error"),
        ("gcp.resourceLocations", {"allowedValues": ["in:eu-locations"]}, {}, "unknown"),
        ("gcp.resourceLocations", {"deniedValues": ["in:us-locations"]}, {}, "error"),
        ("gcp.restrictNonCmekServices", {"deniedValues": ["compute.googleapis.com"]}, {}, "error"),
        ("gcp.restrictNonCmekServices", {"deniedValues": ["storage.googleapis.com"]}, {}, "ok"),
        (
            "gcp.restrictNonCmekServices",
            {"deniedValues": ["is:storage.googleapis.com"]},
            {"bucket": "create"},
            "error",
        ),
    ],
)
def test_a_policy_counts_by_its_effective_value(
    project: Site,
    capsys: Capture,
    constraint: str,
    rules: dict[str, list[str]] | str,
    settings: dict[str, str],
    outcome: str,
) -> None:
    rule = {rules: True} if isinstance(rules, str) else {"values": rules}
    project.cloud.services |= {"storage"}
    project.cloud.rules[constraint] = [rule]
    configure(project, cluster="mine", **settings)
    status, by_name = checks(project, capsys)
    check = by_name[f"policy {constraint}"]
    assert check["outcome"] == outcome
    assert status == (ExitCode.AUTH if outcome == "error" else ExitCode.OK)
    assert ("Request an exception for this project" in check["fix"]) == (outcome != "ok")
    assert project.cloud.count(f"{constraint}:getEffectivePolicy") == 1


@pytest.fixture
def listener() -> Iterator[int]:
    """Return a local port that accepts connections, as a proxy does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.mark.parametrize(
    ("no_proxy", "outcome"),
    [
        ("", "warning"),
        ("localhost", "warning"),
        ("localhost, 127.0.0.1", "warning"),  # a space hides it from gRPC
        ("localhost,127.0.0.1", "ok"),
    ],
)
def test_a_proxy_has_to_leave_out_the_loopback_address(
    listener: int, no_proxy: str, outcome: str
) -> None:
    env = {"HTTPS_PROXY": f"http://ann:secret@127.0.0.1:{listener}", "no_proxy": no_proxy}
    (check,) = check_proxy(env)
    assert check.outcome == outcome and "secret" not in f"{check.found} {check.fix}"
    assert ("export no_proxy=127.0.0.1,localhost" in check.fix) == (outcome == "warning")


def test_a_proxy_that_does_not_answer_is_an_error() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # bound but not listening
        (check,) = check_proxy({"https_proxy": f"127.0.0.1:{holder.getsockname()[1]}"})
    assert (check.outcome, check.exit_code) == ("error", ExitCode.PREFLIGHT)
    (check,) = check_proxy({"https_proxy": "http://host:port"})
    assert (check.outcome, check.exit_code) == ("error", ExitCode.CONFIG)
    assert list(check_proxy({"no_proxy": "x"})) == []


@pytest.mark.processes
@pytest.mark.parametrize(
    ("no_proxy", "expected"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"no_proxy": "localhost, .acme.example"}, "localhost,.acme.example,127.0.0.1"),
        ({"NO_PROXY": "127.0.0.1"}, "127.0.0.1,localhost"),
    ],
)
def test_pulumi_reaches_its_own_parts_past_a_proxy(
    tmp_path: Path, no_proxy: dict[str, str], expected: str
) -> None:
    program = tmp_path / "pulumi"
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    env = {"PATH": f"{tmp_path}{os.pathsep}/bin", "https_proxy": "http://proxy.example:3128"}
    found = Pulumi({**env, **no_proxy}, folder=tmp_path).ask_json("about")
    assert (found["no_proxy"], found["NO_PROXY"]) == (expected, expected)


def test_without_a_proxy_the_environment_stays_as_it_is() -> None:
    assert with_loopback_exception({"no_proxy": "a, b"}) == {"no_proxy": "a, b"}
