"""Pulumi's output for refusals by the cloud, and the resulting errors."""

from __future__ import annotations

import pytest

from payload.core.errors import ExitCode
from payload.orchestrate.clouds.gcp.stock_outs import find_stock_out
from payload.orchestrate.clouds.pulumi.events import Diagnostic, Event, Step, Update
from payload.orchestrate.clouds.pulumi.failures import explain, stock_out_of

# As printed by pulumi-gcp, which includes the operation's error and its details.
PLAIN = """
Diagnostics:
  gcp:compute:Instance (mine-1):
    error:   sdk-v2/provider2.go:572: sdk.helper_schema: Error waiting for instance to create: The \
zone 'projects/acme-lab/zones/us-central1-a' does not have enough resources available to fulfill \
the request. Try a different zone, or try again later.: provider=google-beta@10.2.0
    error: 1 error occurred:
"""
DETAILS = """
    error: Error waiting for instance to create: The zone \
'projects/acme-lab/zones/us-central1-f' does not have enough resources available to fulfill the \
request.  '(state:STOCKOUT, sub-state:STOCKOUT, resource type:compute)'.

    A c3-highmem-8 VM instance is currently unavailable in the us-central1-f zone. Consider trying
    your request in the us-central1-b, us-central1-a zone(s), which currently has capacity to
    accommodate your request.
"""
CODES = """
code: ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS
errorDetails:
- errorInfo:
    domain: compute.googleapis.com
    metadatas:
      attachment: ''
      vmType: c3-highmem-8
      zone: us-central1-f
      zonesAvailable: us-central1-c,us-central1-a
    reason: resource_availability
"""
AS_QUOTA = """error: googleapi: Error 403: QUOTA_EXCEEDED: no resources, errorInfo: {"metadatas":
{"zone": "us-west1-a", "zonesAvailable": "us-west1-b"}, "reason": "stockout"}"""
OFFERED_NOWHERE = """Error waiting for instance to create: The zone
'projects/acme-lab/zones/europe-west3-c' does not have enough resources available to fulfill the
request. '(resource type:compute)'. A c3-highmem-8 VM instance is not supported in the
europe-west3-c zone with your configuration."""

# https://github.com/gruntwork-io/terratest/issues/1132, with another type and zone.
NOT_OFFERED = """Error creating instance: googleapi: Error 400: Invalid value for field \
'resource.machineType': 'zones/us-central1-f/machineTypes/c3-highmem-8'. Machine type with name \
'c3-highmem-8' does not exist in zone 'us-central1-f'., invalid"""
NO_DISK_TYPE = """Error creating instance: googleapi: Error 404: The resource \
'projects/acme-lab/zones/us-central1-f/diskTypes/hyperdisk-balanced' was not found, notFound"""
# https://github.com/hashicorp/terraform-provider-google/issues/8665
PREEMPTED = "Error waiting for instance to create: Instance failed to start due to preemption."

# From a self-managed backend, and from Pulumi Cloud.
LOCKED = (
    """error: the stack is currently locked by 1 lock(s). Either wait for the other process(es) to \
end or delete the lock file with `pulumi cancel`.
  gs://acme-state/.pulumi/locks/organization/tileforge/dev/1.json: created by ann@desk (pid 7) \
at 2026-11-22T08:00:00Z
""",
    """error: [409] Conflict: Another update is currently in progress.
To learn more about possible reasons and resolution, visit https://www.pulumi.com/docs
""",
)


def failed(message: str) -> Update:
    """Return an `up` whose engine reports this error."""
    said = Diagnostic(message=message, severity="error")
    return Update(arguments=["up"], status=255, events=[Event(time_unix=0.0, diagnostic=said)])


@pytest.mark.parametrize(
    ("output", "full", "free"),
    [
        (PLAIN, ["us-central1-a"], []),
        (DETAILS, ["us-central1-f"], ["us-central1-b", "us-central1-a"]),
        (CODES, ["us-central1-f"], ["us-central1-c", "us-central1-a"]),
        (AS_QUOTA, ["us-west1-a"], ["us-west1-b"]),
        (OFFERED_NOWHERE, ["europe-west3-c"], []),
        (PLAIN + DETAILS, ["us-central1-a", "us-central1-f"], ["us-central1-b"]),
        ("ZONE_RESOURCE_POOL_EXHAUSTED", [], []),
    ],
)
def test_a_stock_out_names_zones_without_and_with_machines(
    output: str, full: list[str], free: list[str]
) -> None:
    found = find_stock_out(output)
    assert found is not None and (list(found.full), list(found.free)) == (full, free)
    error = explain(failed(output))
    assert error.exit_code == ExitCode.NO_CAPACITY
    assert all(zone in str(error) for zone in [*full, *free])
    wanted = f"pulumi config set --path 'zones[0]' {free[0]} &&" if free else "up --next-zone"
    assert wanted in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("output", "status", "reason", "words"),
    [
        (
            NOT_OFFERED,
            ExitCode.CONFIG,
            "no c3-highmem-8 offered",
            "c3-highmem-8 is not offered in ",
        ),
        (
            NO_DISK_TYPE,
            ExitCode.CONFIG,
            "no hyperdisk-balanced offered",
            "is not offered in us-cen",
        ),
        (
            PREEMPTED,
            ExitCode.NO_CAPACITY,
            "preempted spot machines",
            "a spot machine was preempted",
        ),
    ],
)
def test_a_zone_without_the_type_and_a_preemption_are_the_next_zones_turn(
    output: str, status: ExitCode, reason: str, words: str
) -> None:
    found = find_stock_out(output)
    assert found is not None and found.shown_reason == reason
    error = explain(failed(output))
    assert error.exit_code == status
    assert words in str(error) and "up --next-zone; or" in str(error)


@pytest.mark.parametrize(
    ("spot", "op", "kind", "status"),
    [
        (True, "create", "instance:Instance", ExitCode.NO_CAPACITY),
        (False, "create", "instance:Instance", ExitCode.CONFIG),
        (True, "update", "instance:Instance", ExitCode.CONFIG),
        (True, "create", "network:Network", ExitCode.CONFIG),
    ],
)
def test_a_spot_machine_that_is_gone_while_it_is_created_was_preempted(
    spot: bool, op: str, kind: str, status: ExitCode
) -> None:
    urn = f"urn:pulumi:dev::tileforge::gcp:compute/{kind}::dev-node-1"
    message = "Error waiting for instance to create: couldn't find resource (21 retries)"
    events = [
        Event(time_unix=0.0, diagnostic=Diagnostic(message=message, severity="error", urn=urn)),
        Event(time_unix=0.0, failed=Step(op=op, urn=urn)),
    ]
    update = Update(arguments=["up"], status=255, events=events)
    assert explain(update, spot=spot).exit_code == status
    assert (stock_out_of(update, spot=spot) is None) == (status == ExitCode.CONFIG)


@pytest.mark.parametrize(
    ("output", "status", "words"),
    [
        (
            "error: Error waiting for instance to create: Quota 'SSD_TOTAL_GB' exceeded.  Limit: "
            "500.0 in region us-central1.",
            ExitCode.QUOTA,
            "quota SSD_TOTAL_GB is 500 in us-central1",
        ),
        (
            "error: Quota 'CPUS_ALL_REGIONS' exceeded.  Limit: 32.0 globally.",
            ExitCode.QUOTA,
            "quota CPUS_ALL_REGIONS is 32 in all regions together",
        ),
        (
            "error: googleapi: Error 403: Quota exceeded for x",
            ExitCode.QUOTA,
            "message does not name it",
        ),
        (
            "error: googleapi: Error 403: Compute Engine API has not been used in project 7 before "
            "https://console.developers.google.com/apis/api/iap.googleapis.com/overview",
            ExitCode.AUTH,
            "gcloud services enable iap.googleapis.com",
        ),
        (
            "error: could not find default credentials. See https://x",
            ExitCode.AUTH,
            "gcloud auth application-default login",
        ),
        (
            "error: googleapi: Error 403: Required 'compute.networks.create' permission for "
            "'projects/acme-lab', forbidden",
            ExitCode.AUTH,
            "compute.networks.create",
        ),
        (
            "warning: x\nerror: infra.config: zones is empty; name one",
            ExitCode.CONFIG,
            "zones is empty; name one",
        ),
        ("", ExitCode.CONFIG, "without a message"),
    ],
)
def test_other_failures_keep_their_own_exit_code(output: str, status: ExitCode, words: str) -> None:
    error = explain(failed(output))
    assert (error.exit_code, find_stock_out(output)) == (status, None)
    assert words in str(error) and str(error).startswith("pulumi up: ")


@pytest.mark.parametrize(
    ("said", "whose"),
    [(LOCKED[0], "ann@desk (process 7)"), (LOCKED[1], "does not show whose")],
)
def test_a_locked_stack_names_who_holds_it(said: str, whose: str) -> None:
    error = explain(Update(arguments=["up"], status=255, text=said))
    assert error.exit_code == ExitCode.CONFIG
    assert "another update of the stack is running" in str(error) and whose in str(error)
