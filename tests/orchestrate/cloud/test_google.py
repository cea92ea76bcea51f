"""Requests to the cloud: retries, refusals with their fixes, and allowed endpoints."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time

import pytest
import requests

from payload.core.errors import CloudAuthError, CloudError, ConfigError
from payload.orchestrate.clouds.gcp.endpoints import VARIABLE, Endpoints
from payload.orchestrate.clouds.gcp.listing import list_everything
from tests.orchestrate.cloud.conftest import Site
from tests.orchestrate.cloud.standin import Fault
from tests.support.waiting import DEADLINE_S
from tests.test_architecture import ROOT

INSTANCES = "aggregated/instances"


def test_a_busy_cloud_is_given_the_time_that_it_asks_for(site: Site) -> None:
    site.build()
    site.cloud.faults += [
        Fault(path=INSTANCES, status=429, headers={"Retry-After": "7"}),
        Fault(path=INSTANCES, status=503, times=2),
    ]
    listing = list_everything(site.google())
    assert (site.sleeps, listing.blind) == ([7.0, 2.0, 4.0], [])
    assert sum(each.kind == "instance" for each in listing.resources) == 3


def test_a_cloud_that_stays_busy_is_an_error_with_its_own_words(site: Site) -> None:
    site.cloud.faults.append(Fault(path=INSTANCES, status=503, message="try later", times=99))
    with pytest.raises(CloudError, match=r"listing instances: Google Cloud returned 503: .*later"):
        list_everything(site.google(retry_s=0.0))
    assert site.cloud.count(INSTANCES) == 1


def test_a_cloud_that_cannot_be_reached_is_tried_again_and_then_an_error(site: Site) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        site.env[VARIABLE] = f"http://127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(CloudError, match="listing instances: Google Cloud cannot be reached"):
            list_everything(site.google(retry_s=0.5, sleep=time.sleep))


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (
            requests.exceptions.ProxyError(
                "HTTPSConnectionPool(host='compute.googleapis.com', port=443): Max retries exceeded"
                " with url: / (Caused by ProxyError('Unable to connect to proxy', OSError('Tunnel "
                "connection failed: 407 Proxy Authentication Required')))"
            ),
            "export https_proxy=http://USER:PASSWORD@HOST:PORT",
        ),
        (
            requests.exceptions.SSLError(
                "HTTPSConnectionPool(host='compute.googleapis.com', port=443): Max retries exceeded"
                " with url: / (Caused by SSLError(SSLCertVerificationError(1, '[SSL: "
                "CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate in "
                "certificate chain (_ssl.c:1016)')))"
            ),
            "export SSL_CERT_FILE=FILE REQUESTS_CA_BUNDLE=FILE",
        ),
    ],
)
def test_a_proxys_refusal_and_a_strange_certificate_are_said_at_once_with_their_fix(
    site: Site, error: Exception, fix: str
) -> None:
    def request() -> None:
        raise error

    with pytest.raises(CloudError, match=re.escape(fix)):
        site.google().call("listing", request)
    assert site.sleeps == []


def test_a_rate_limit_that_comes_as_403_is_waited_for(site: Site) -> None:
    site.cloud.faults.append(Fault(path=INSTANCES, status=403, reason="rateLimitExceeded"))
    assert list_everything(site.google()).blind == []
    assert site.sleeps == [1.0]


def test_a_rate_limit_that_lasts_is_no_refusal_of_the_login(site: Site) -> None:
    refusal = Fault(path="/projects/acme-lab", status=403, reason="rateLimitExceeded", times=9)
    refusal.message = "Quota exceeded for quota metric 'Queries' and limit 'Queries per minute'"
    site.cloud.faults.append(refusal)
    with pytest.raises(CloudError, match="Repeat the command in a minute"):
        site.google(retry_s=0.0).check_access()


def test_every_page_is_read_and_each_with_retries(site: Site) -> None:
    site.build(nodes=7)
    site.cloud.page_size = 3
    site.cloud.faults.append(Fault(path=f"{INSTANCES}.*pageToken=3", status=500))
    site.cloud.faults.append(Fault(path="storage/v1/b", status=502))
    for number in range(4):
        site.cloud.add_bucket(f"other-{number}", labels={})
    listing = list_everything(site.google())
    assert sum(each.kind == "instance" for each in listing.resources) == 7
    assert sum(each.kind == "bucket" for each in listing.resources) == 5
    assert site.cloud.count(INSTANCES) == 4


@pytest.mark.parametrize(
    ("message", "reason", "fix"),
    [
        (
            "Compute Engine API has not been used in project 1 before or it is disabled. Enable it "
            "by visiting https://console.developers.google.com/apis/api/compute.googleapis.com/x",
            "accessNotConfigured",
            "gcloud services enable compute.googleapis.com --project=acme-lab",
        ),
        (
            "Required 'compute.instances.list' permission for 'projects/acme-lab'",
            "forbidden",
            "compute.instances.list is in roles/compute.viewer. The project's owner must run",
        ),
        ("The caller does not have permission", "forbidden", "Request the roles"),
        (
            "Your application is authenticating by using local Application Default Credentials. "
            "The compute.googleapis.com API requires a quota project, which is not set by default.",
            "SERVICE_DISABLED",
            "gcloud auth application-default set-quota-project acme-lab",
        ),
        (
            "This API method requires billing to be enabled. Please enable billing on project "
            "#1051023892108 by visiting https://console.developers.google.com/billing/enable then "
            "retry.",
            "forbidden",
            "gcloud billing projects link acme-lab --billing-account=ACCOUNT",
        ),
        (
            "Request is prohibited by organization's policy. vpcServiceControlsUniqueIdentifier: "
            "VQQnKfXtZ16NHnOmdJAy0E92tVT",
            "forbidden",
            "A perimeter of VPC Service Controls blocks requests from this machine",
        ),
    ],
)
def test_a_refusal_says_what_to_do(site: Site, message: str, reason: str, fix: str) -> None:
    site.cloud.faults.append(Fault(path=INSTANCES, status=403, message=message, reason=reason))
    with pytest.raises(CloudAuthError) as caught:
        list_everything(site.google())
    assert message in str(caught.value) and fix in str(caught.value)


def test_a_place_that_does_not_answer_is_not_taken_for_an_empty_one(site: Site) -> None:
    site.build()
    # Only its own entry in the list, where its machines would be, reports the failure.
    site.cloud.failing = {"zones/us-central1-a": "The zone is currently unavailable"}
    listing = list_everything(site.google())
    assert not any(each.kind == "instance" for each in listing.resources)
    assert sorted(listing.blind) == [
        f"listing {kind}: us-central1-a: UNREACHABLE: The zone is currently unavailable. Try again."
        for kind in ("disks", "instances")
    ]
    # Reported twice, it is printed once.
    site.cloud.unreachable = ["projects/acme-lab/zones/us-central1-a"]
    blind = list_everything(site.google()).blind
    assert blind.count("listing instances: us-central1-a does not respond. Try again.") == 1
    assert not any("UNREACHABLE" in each for each in blind)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://compute.example.org", "only allowed for loopback addresses. Use https"),
        ("http://127.0.0.1.example.org", "only allowed for loopback addresses. Use https"),
        ("ftp://{service}.example.org", "not an https URL"),
        ("https://one.example.org", "the host must contain {service}"),
        ("https://me:secret@{service}.example.org", "scheme, host and port only"),
        ("https://{service}.example.org/compute/v1", "scheme, host and port only"),
        ("https://{service}.example.org:x", "not a URL"),
        ("compute.example.org", "not an https URL"),
        ("'; rm -rf /", "not an https URL"),
    ],
)
def test_an_endpoint_that_credentials_must_not_go_to_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Endpoints.from_env({"TILEFORGE_API_ENDPOINT": text})
    assert message in str(caught.value)


def test_an_endpoint_has_a_place_for_the_service() -> None:
    named = Endpoints.from_env({"TILEFORGE_API_ENDPOINT": "https://{service}-a.p.googleapis.com/"})
    assert named.url("storage") == "https://storage-a.p.googleapis.com"
    assert Endpoints.from_env({}).url("compute") == "https://compute.googleapis.com"
    assert not named.is_loopback() and not Endpoints().is_loopback()
    assert Endpoints.from_env({"TILEFORGE_API_ENDPOINT": "http://[::1]:8080"}).is_loopback()


@pytest.mark.processes
def test_without_credentials_it_says_how_to_log_in(site: Site) -> None:
    program = (
        "from payload.orchestrate.__main__ import main; import os, sys; "
        "sys.exit(main(['sweep', '--project', 'acme-lab'], os.environ))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=site.folder,
        env={"HOME": str(site.folder), "PYTHONPATH": str(ROOT), "NO_GCE_CHECK": "true"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 13
    assert "gcloud auth application-default login" in done.stderr
    # Google's library also prints no warning about Python's version.
    assert "Warning" not in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.processes
def test_commands_without_the_cloud_do_not_import_googles_libraries() -> None:
    program = (
        "import sys; from payload.orchestrate.__main__ import main; main(['list'], {}); "
        "sys.exit(any(name.startswith(('google.cloud', 'google.api')) for name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
