"""`doctor`: missing prerequisites of a project, with numbers and fixes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import ExitCode
from payload.orchestrate.__main__ import main
from payload.orchestrate.clouds.gcp.endpoints import VARIABLE
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.stack_config import settings
from payload.stack.cloud_requirements import requirements_of
from tests.orchestrate.cloud.conftest import Site
from tests.orchestrate.cloud.standin import PROJECT, REGION, ZONE, Fault
from tests.support.nvidia_smi import L4, make_nvidia_smi

pytestmark = pytest.mark.processes

Capture = pytest.CaptureFixture[str]
PLENTY = {"C3_CPUS": 100.0, "SSD_TOTAL_GB": 500.0, "IN_USE_ADDRESSES": 8.0, "INSTANCES": 24.0}


@pytest.fixture
def project(site: Site) -> Site:
    """Return a project that fits the default cluster, and a stack with its config."""
    site.cloud.regions[REGION] = {
        **{name: (limit, 0.0) for name, limit in PLENTY.items()},
        "PREEMPTIBLE_CPUS": (0.0, 0.0),
    }
    site.cloud.project_quotas = {
        "CPUS_ALL_REGIONS": (32.0, 4.0),
        "NETWORKS": (5.0, 1.0),
        "ROUTERS": (20.0, 0.0),
    }
    offer(site, ZONE)
    configure(site)
    return site


def offer(site: Site, zone: str) -> None:
    site.cloud.add("machineTypes", "c3-highmem-8", place=zone, labels={}, guestCpus=8)
    site.cloud.add("diskTypes", "pd-balanced", place=zone, labels={})


def configure(site: Site, **values: Any) -> None:
    site.configure(**{"project": PROJECT, "zones": [ZONE], **values})


def doctor(site: Site, *arguments: str) -> int:
    return main(["doctor", *arguments], site.env)


@pytest.mark.parametrize(
    ("machine", "words", "outcome"),
    [
        (
            "c3-highmem-8",
            "$1.6380 an hour: 3 x $0.529232 on demand, disks $0.0411, NAT $0.0092 (list prices of",
            "ok",
        ),
        ("c9-standard-8", "no known price for c9-standard-8 on demand in us-central1", "unknown"),
    ],
)
def test_the_price_is_named_with_its_source_and_age(
    project: Site, capsys: Capture, machine: str, words: str, outcome: str
) -> None:
    doctor(project, "--machine-type", machine, "--disk-type", "pd-balanced", "--json")
    checks = json.loads(capsys.readouterr().out)["checks"]
    (price,) = [each for each in checks if each["name"] == "price"]
    assert words in price["found"] and price["outcome"] == outcome
    assert "days old, packaged" in price["found"]


def test_the_table_fits_a_terminal_and_omits_nothing(
    project: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("payload.orchestrate.terminal.console._PIPE_WIDTH", 80)
    doctor(project)
    lines = capsys.readouterr().out.splitlines()
    table = lines[: next(i for i, line in enumerate(lines) if re.match("[0-9]+: ", line))]
    assert max(map(len, table)) <= 80 and not any("\u2026" in line for line in table)
    # The reason why the catalog was not read is below the table, not in its narrow column.
    assert not any("catalog" in line for line in table)
    assert any(re.match("[0-9]+: ok: price: .*Today's prices", line) for line in lines)


@pytest.mark.parametrize(
    ("machine", "outcome", "found", "code"),
    [
        ("g2-standard-24", "ok", "2 x L4 per node, one rank per GPU: 22.5 GiB, comp", None),
        ("a2-highgpu-1g", "ok", "compute capability 8.0 (without fp8), driver branch 580", None),
        ("a3-highgpu-2g", "error", "a3-highgpu-2g is sold only as spot", ExitCode.CONFIG),
        ("c3-highmem-8", None, "", None),
    ],
)
def test_a_gpu_machine_has_a_row_with_its_gpus(
    project: Site,
    capsys: Capture,
    machine: str,
    outcome: str | None,
    found: str,
    code: ExitCode | None,
) -> None:
    project.cloud.add("machineTypes", machine, place=ZONE, labels={}, guestCpus=24)
    configure(project, machineType=machine)
    exit_code = doctor(project, "--json")
    checks = json.loads(capsys.readouterr().out)["checks"]
    rows = [each for each in checks if each["name"] == "GPUs"]
    assert [row["outcome"] for row in rows] == ([outcome] if outcome else [])
    assert all(found in row["found"] for row in rows)
    if code is not None:
        assert code in {each["exit_code"] for each in rows} and exit_code != ExitCode.OK
    # Google's GPU machines boot from pd-balanced, as in the cluster program.
    assert f"pd-balanced in {ZONE}" in {each["name"] for each in checks}


def test_the_gpus_of_this_machine_are_shown_and_fail_no_check(
    project: Site, capsys: Capture, tmp_path: Path
) -> None:
    smi = make_nvidia_smi(tmp_path / "bin", L4, L4)
    project.env["PATH"] = f"{smi}{os.pathsep}{project.env['PATH']}"
    project.env["CUDA_VISIBLE_DEVICES"] = "1"
    doctor(project, "--json")
    checks = json.loads(capsys.readouterr().out)["checks"]
    (row,) = [each for each in checks if each["name"] == "GPUs of this machine"]
    assert row["outcome"] == "warning" and row["exit_code"] == 0
    assert row["found"].startswith("2 x NVIDIA L4 (22.5 GiB), driver 580.95.05, ECC on, torch ")
    assert "CUDA_VISIBLE_DEVICES = '1' makes 1 of 2 visible" in row["found"]
    assert "is a build without CUDA" in row["found"]


def test_a_project_that_fits_is_exit_0_with_every_number(project: Site, capsys: Capture) -> None:
    project.cloud.page_size = 2
    assert doctor(project) == ExitCode.OK
    out, err = capsys.readouterr()
    assert "3 x c3-highmem-8 in us-central1-a, 300 GiB pd-balanced" in err
    assert "no check failed" in err
    for words in (
        "compute.googleapis.com",
        "iap.googleapis.com",
        "c3-highmem-8 in us-central1-a",
        "offered, 8 vCPUs",
        "24 needed, 100 free (limit 100, used 0)",
        "24 needed, 28 free (limit 32, used 4)",
        "300 needed, 500 free",
        "policy compute.disableGuestAttributesAccess",
    ):
        assert words in out
    assert "error" not in out and "unknown" not in out


def test_a_quota_that_is_too_small_is_exit_11_with_how_much_to_ask_for(
    project: Site, capsys: Capture
) -> None:
    project.cloud.regions[REGION]["SSD_TOTAL_GB"] = (500.0, 250.0)
    assert doctor(project) == ExitCode.QUOTA
    out, err = capsys.readouterr()
    assert (
        "300 needed, 250 free (limit 500, used 250). Request a limit of 550 at https://console"
        in out
    )
    assert "error: 1 of" in err


@pytest.mark.parametrize(
    ("flags", "metric", "amount"),
    [
        (("--node-count", "4"), "CPUS_ALL_REGIONS in all regions", "32 needed, 28 free"),
        (("--disk-gb", "200"), "SSD_TOTAL_GB in us-central1", "600 needed, 500 free"),
        (("--node-count", "30"), "INSTANCES in us-central1", "30 needed, 24 free"),
    ],
)
def test_flags_go_before_the_config(
    project: Site, capsys: Capture, flags: tuple[str, ...], metric: str, amount: str
) -> None:
    assert doctor(project, *flags) == ExitCode.QUOTA
    assert f"error: {metric}: {amount}" in capsys.readouterr().out


def test_spot_machines_use_their_own_quota_where_there_is_one(
    project: Site, capsys: Capture
) -> None:
    assert doctor(project, "--spot") == ExitCode.OK
    assert "PREEMPTIBLE" not in capsys.readouterr().out
    project.cloud.regions[REGION]["PREEMPTIBLE_CPUS"] = (16.0, 0.0)
    assert doctor(project, "--spot") == ExitCode.QUOTA
    assert "PREEMPTIBLE_CPUS in us-central1: 24 needed, 16 free" in capsys.readouterr().out


def test_spot_auto_needs_both_quotas_as_on_demand_machines_come_next(
    project: Site, capsys: Capture
) -> None:
    configure(project, spot="auto")
    project.cloud.regions[REGION] |= {"PREEMPTIBLE_CPUS": (16.0, 0.0), "C3_CPUS": (8.0, 0.0)}
    assert doctor(project) == ExitCode.QUOTA
    out, err = capsys.readouterr()
    assert "3 x c3-highmem-8 (spot; on demand must fit as well) in us-central1-a" in err
    assert "error: PREEMPTIBLE_CPUS in us-central1: 24 needed, 16 free" in out
    assert "error: C3_CPUS in us-central1: 24 needed, 8 free" in out
    # Spot machines without a separate quota use the same one, which is checked once.
    project.cloud.regions[REGION] |= {"PREEMPTIBLE_CPUS": (0.0, 0.0)}
    assert doctor(project) == ExitCode.QUOTA
    out, err = capsys.readouterr()
    assert out.count("error: C3_CPUS") == 1 and "PREEMPTIBLE" not in out
    assert "error: 1 of" in err


@pytest.mark.parametrize(
    ("metric", "needed", "default"),
    [("CPUS_ALL_REGIONS", 24, 32), ("NETWORKS", 1, 5), ("ROUTERS", 1, 10)],
)
def test_a_quota_that_is_not_listed_is_compared_with_a_default_projects(
    project: Site, capsys: Capture, metric: str, needed: int, default: int
) -> None:
    del project.cloud.project_quotas[metric]
    assert doctor(project) == ExitCode.OK
    out, err = capsys.readouterr()
    words = f"{needed} needed, the limit is not listed; a default project has {default}. Check the"
    assert f"unknown: {metric} in all regions: {words}" in out
    assert "no check failed; 1 of " in err
    # More than the default is an error.
    if metric == "CPUS_ALL_REGIONS":
        assert doctor(project, "--node-count", "5") == ExitCode.QUOTA
        words = f"40 needed, the limit is not listed; a default project has {default}"
        assert f"error: {metric} in all regions: {words}" in capsys.readouterr().out


def test_a_quota_without_a_known_default_is_unknown(project: Site, capsys: Capture) -> None:
    project.cloud.add("diskTypes", "hyperdisk-balanced", place=ZONE, labels={})
    assert doctor(project, "--disk-type", "hyperdisk-balanced") == ExitCode.OK
    out = capsys.readouterr().out
    assert (
        "unknown: HDB_TOTAL_GB in us-central1: 300 needed, the limit is not listed. Check the quota"
        in out
    )


def test_a_quota_that_fits_and_leaves_nothing_is_said(project: Site, capsys: Capture) -> None:
    # The default of C3_CPUS, from a public report, equals the default cluster's requirement.
    project.cloud.regions[REGION]["C3_CPUS"] = (24.0, 0.0)
    assert doctor(project) == ExitCode.OK
    out = capsys.readouterr().out
    assert "warning: C3_CPUS in us-central1: 24 needed, 24 free (limit 24, used 0)" in out
    assert "The cluster uses all of this quota. To run more machines, request an" in out
    assert doctor(project, "--node-count", "4") == ExitCode.QUOTA
    assert "error: C3_CPUS in us-central1: 32 needed, 24 free" in capsys.readouterr().out


def family_limit(value: str, **dimensions: str) -> dict[str, Any]:
    """Return one entry of Cloud Quotas' response."""
    return {"dimensions": dimensions, "details": {"value": value}}


@pytest.fixture
def c4(project: Site) -> Site:
    """Return the project, and a stack with C4 machines, whose CPUs are counted by family."""
    project.cloud.add("machineTypes", "c4-standard-8", place=ZONE, labels={}, guestCpus=8)
    project.cloud.add("diskTypes", "hyperdisk-balanced", place=ZONE, labels={})
    project.cloud.regions[REGION]["HDB_TOTAL_GB"] = (500.0, 0.0)
    configure(project, machineType="c4-standard-8")
    return project


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--spot",)])
@pytest.mark.parametrize(
    ("limits", "outcome", "words"),
    [
        ([family_limit("100", region=REGION, vm_family="C4")], "ok", "24 needed, limit 100"),
        ([family_limit("-1", region=REGION, vm_family="c4")], "ok", "24 needed, no limit"),
        ([family_limit("24", region=REGION, vm_family="C4")], "warning", "24 needed, limit 24"),
        ([family_limit("16", region=REGION, vm_family="C4")], "error", "24 needed, limit 16"),
        (
            [family_limit("99"), family_limit("0", region=REGION, vm_family="C4")],
            "error",
            "A limit of 0 can mean that the region does not offer the family",
        ),
        (
            [family_limit("48", region=REGION), family_limit("99", vm_family="C4")],
            "ok",
            "24 needed, limit 48",
        ),
        ([family_limit("99", region="us-east1", vm_family="C4")], "unknown", "24 needed"),
        ([family_limit("99", region=REGION, vm_family="N4")], "unknown", "the limit is not listed"),
        ([], "unknown", "the limit is not listed"),
    ],
)
def test_a_family_without_a_quota_of_its_own_is_looked_up_by_dimension(
    c4: Site,
    capsys: Capture,
    limits: list[dict[str, Any]],
    outcome: str,
    words: str,
    flags: tuple[str, ...],
) -> None:
    c4.cloud.family_limits = limits
    status = doctor(c4, *flags, "--json")
    checks = json.loads(capsys.readouterr().out)["checks"]
    (check,) = [each for each in checks if "CPUS_PER_VM_FAMILY (C4)" in each["name"]]
    assert check["outcome"] == outcome and words in f"{check['found']} {check['fix']}"
    assert status == (ExitCode.QUOTA if outcome == "error" else ExitCode.OK)
    # A missing quota for preemptible CPUs does not block spot machines.
    assert not any("PREEMPTIBLE" in each["name"] for each in checks)


def test_family_quotas_that_may_not_be_read_are_unknown(c4: Site, capsys: Capture) -> None:
    off = "Cloud Quotas API has not been used in project 1 before or it is disabled."
    c4.cloud.faults.append(
        Fault(path="quotaInfos", status=403, message=off, reason="accessNotConfigured")
    )
    assert doctor(c4) == ExitCode.OK
    out = capsys.readouterr().out
    assert "unknown: CPUS_PER_VM_FAMILY (C4) in us-central1" in out and "Enable it" in out


def test_a_type_that_the_first_zone_has_not_is_exit_10(project: Site, capsys: Capture) -> None:
    configure(project, zones=["us-central1-b", ZONE])
    assert doctor(project) == ExitCode.CONFIG
    out = capsys.readouterr().out
    assert "error: c3-highmem-8 in us-central1-b: not offered" in out
    configure(project, zones=[ZONE, "us-central1-b"])
    assert doctor(project) == ExitCode.OK
    assert "warning: pd-balanced in us-central1-b: not offered" in capsys.readouterr().out


def test_what_is_off_or_forbidden_is_exit_13(project: Site, capsys: Capture) -> None:
    project.cloud.services -= {"iap"}
    project.cloud.policies = {
        "compute.disableGuestAttributesAccess": True,
        "compute.requireOsLogin": True,
    }
    project.cloud.regions[REGION]["C3_CPUS"] = (8.0, 0.0)
    assert doctor(project) == ExitCode.AUTH
    out = capsys.readouterr().out
    assert "gcloud services enable iap.googleapis.com --project=acme-lab" in out
    assert "nodes could not publish their host keys" in out
    assert "the operator's key would be ignored" in out and "accessMode oslogin" in out
    configure(project, accessMode="oslogin")
    project.cloud.services |= {"iap"}
    del project.cloud.policies["compute.disableGuestAttributesAccess"]
    assert doctor(project) == ExitCode.QUOTA


def test_a_project_that_refuses_ends_with_its_words(project: Site, capsys: Capture) -> None:
    message = "Required 'compute.projects.get' permission for 'projects/acme-lab'"
    fault = Fault(path="/compute/v1/projects/acme-lab", status=403, reason="forbidden")
    fault.message, fault.times = message, 99
    project.cloud.faults.append(fault)
    assert doctor(project) == ExitCode.AUTH
    assert message in capsys.readouterr().out


def test_what_cannot_be_looked_at_does_not_hide_the_rest(project: Site, capsys: Capture) -> None:
    project.cloud.faults += [
        Fault(path="/v1/projects/acme-lab/services", status=403, reason="forbidden"),
        Fault(path="disableGuestAttributesAccess", status=403, reason="forbidden"),
        Fault(path=f"regions/{REGION}", status=404),
    ]
    assert doctor(project, "--json") == ExitCode.OK
    checks = json.loads(capsys.readouterr().out)["checks"]
    unknown = [check["name"] for check in checks if check["outcome"] == "unknown"]
    assert unknown == ["APIs", "quotas", "policy compute.disableGuestAttributesAccess"]
    assert all(check["fix"] for check in checks if check["outcome"] == "unknown")


def test_without_a_stack_it_checks_the_defaults(project: Site, capsys: Capture) -> None:
    project.env["PATH"] = "/nowhere"
    reason = "defaults and options; no stack config: `pulumi` not found on PATH. Install it: http"
    assert doctor(project, "--project", PROJECT) == ExitCode.OK
    assert reason in capsys.readouterr().err
    assert doctor(project, "--project", PROJECT, "--stack", "dev") == ExitCode.CONFIG
    capsys.readouterr()
    assert doctor(project) == ExitCode.USAGE
    price, error = capsys.readouterr().err.splitlines()
    assert price.startswith("price of 3 x c3-highmem-8 in us-central1-a") and "$1.63" in price
    assert error.startswith("error: no project given. Set it with --project") and reason in error


def test_the_price_needs_no_login(
    project: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CLOUDSDK_CONFIG", "HOME"):
        monkeypatch.setenv(name, str(project.folder))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    env = {**project.env, "CLOUDSDK_CONFIG": str(project.folder)}
    del env[VARIABLE]
    assert main(["doctor"], env) == ExitCode.AUTH
    *_, price, error = capsys.readouterr().err.splitlines()
    assert "an hour: 3 x $0.529232 on demand" in price and "Log in: gcloud auth" in error


@pytest.mark.parametrize(
    ("settings", "disk", "gib", "services"),
    [
        ({}, "pd-balanced", 300, ("compute", "iam", "iap")),
        ({"machineType": "h3-standard-88"}, "hyperdisk-balanced", 300, ("compute", "iam", "iap")),
        ({"headDiskGb": "400", "accessMode": "direct"}, "pd-balanced", 600, ("compute", "iam")),
        (
            {"bucket": "create", "diskType": "pd-ssd", "nodeCount": "1"},
            "pd-ssd",
            100,
            ("compute", "iam", "iap", "storage"),
        ),
    ],
)
def test_the_need_follows_from_the_config(
    settings: dict[str, str], disk: str, gib: int, services: tuple[str, ...]
) -> None:
    need = requirements_of(settings)
    assert (need.disk_type, need.disk_gib, need.services()) == (disk, gib, services)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"spot": "maybe"}, "spot = 'maybe'"), ({"nodeCount": "three"}, "nodeCount = 'three'")],
)
def test_a_config_without_sense_is_refused(
    project: Site, capsys: Capture, settings: dict[str, str], message: str
) -> None:
    configure(project, **settings)
    assert doctor(project) == ExitCode.CONFIG
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("own", "project", "region"),
    [
        ({}, "acme-lab", "europe-west4"),
        ({"tileforge:project": "", "tileforge:region": "us-central1"}, "acme-lab", "europe-west4"),
        ({"tileforge:project": "mine", "tileforge:region": "us-east5"}, "mine", "us-east5"),
    ],
)
def test_doctor_reads_the_providers_project_and_region_as_the_program_does(
    site: Site, own: dict[str, str], project: str, region: str
) -> None:
    # tests/infra/test_config.py has the same cases for the cluster program.
    values = {"gcp:project": "acme-lab", "gcp:region": "europe-west4", **own}
    document = {key: {"value": value} for key, value in values.items()}
    site.pulumi.on("config", "--json", out=json.dumps(document))
    known = settings(Pulumi(site.env, folder=site.folder))
    assert (known["project"], known["region"]) == (project, region)
