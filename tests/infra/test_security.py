"""Every security rule: the stacks follow it, and a violation is reported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from infra.gcp.security_checks import NOT_KNOWN
from infra.gcp.security_rules import EXCEPTIONS, NOT_MET, RULES, findings
from tests.infra.stacks import CASES, FILESTORE, ROOT, Plain
from tests.infra.test_graph import deployed

Change = Callable[[list[Plain]], object]


def first(resources: list[Plain], kind: str) -> Plain:
    """Return the inputs of the first resource of the kind."""
    found = next(r for r in resources if r["type"].rpartition(":")[2] == kind)
    inputs: Plain = found["inputs"]
    return inputs


def firewall(resources: list[Plain], name: str) -> Plain:
    """Return the inputs of a firewall rule."""
    found = next(r for r in resources if r["name"] == name)
    inputs: Plain = found["inputs"]
    return inputs


def of(kind: str, change: Callable[[Plain], object]) -> Change:
    """Return a mutation of the first resource of the kind."""
    return lambda resources: change(first(resources, kind))


def ssh(**inputs: object) -> Change:
    """Return a mutation of the rule that allows SSH."""
    return lambda resources: firewall(resources, "dev-allow-ssh").update(inputs)


def metadata(**values: str) -> Change:
    """Return a mutation of the first machine's metadata."""
    changed = {key.replace("_", "-"): value for key, value in values.items()}
    return of("Instance", lambda inputs: inputs["metadata"].update(changed))


def more(kind: str, **inputs: object) -> Change:
    """Return a mutation that adds a resource."""
    return lambda resources: resources.append({"type": kind, "name": "more", "inputs": inputs})


def without(resources: list[Plain], kind: str) -> None:
    """Return a mutation that removes every resource of the kind."""
    resources[:] = [found for found in resources if found["type"].rpartition(":")[2] != kind]


WORLD = ["0.0.0.0/0"]

# Each disables one feature in the stack with a bucket and OS Login, where every rule holds.
MUTATIONS: list[tuple[str, Change]] = [
    ("own-network", of("Subnetwork", lambda i: i.update(network="global/networks/default"))),
    ("own-network", of("Instance", lambda i: i["networkInterfaces"][0].pop("subnetwork"))),
    ("custom-subnets", of("Network", lambda i: i.update(autoCreateSubnetworks=True))),
    ("custom-subnets", of("Network", lambda i: i.pop("autoCreateSubnetworks"))),
    ("ssh-source", ssh(sourceRanges=WORLD)),
    ("ssh-source", ssh(sourceRanges=["::/0"])),
    ("ssh-source", ssh(sourceRanges=["35.0.0.0/8"], allows=[{"protocol": "tcp"}])),
    ("ssh-source", ssh(sourceRanges=WORLD, allows=[{"protocol": "tcp", "ports": ["20-30"]}])),
    ("no-rdp", ssh(allows=[{"protocol": "tcp", "ports": ["22", "3389"]}])),
    ("flow-logs", of("Subnetwork", lambda i: i.pop("logConfig"))),
    ("flow-logs", of("Subnetwork", lambda i: i["logConfig"].update(flowSampling=0.1))),
    (
        "flow-logs",
        of("Subnetwork", lambda i: i["logConfig"].update(aggregationInterval="INTERVAL_10_MIN")),
    ),
    ("proxy-only", ssh(sourceRanges=["198.51.100.7/32"])),
    ("narrow-ingress", ssh(sourceRanges=WORLD)),
    ("narrow-ingress", ssh(allows=[{"protocol": "all"}])),
    ("narrow-ingress", ssh(allows=[{"protocol": "tcp"}])),
    ("narrow-ingress", ssh(allows=[{"protocol": "udp", "ports": ["0-65535"]}])),
    ("narrow-ingress", ssh(sourceRanges=[])),
    (
        "narrow-egress",
        lambda found: firewall(found, "dev-egress-web").update(allows=[{"protocol": "all"}]),
    ),
    (
        "narrow-egress",
        lambda found: firewall(found, "dev-egress-nodes").update(destinationRanges=WORLD),
    ),
    ("egress-denied", lambda found: firewall(found, "dev-deny-egress").update(disabled=True)),
    ("egress-denied", lambda found: firewall(found, "dev-deny-egress").pop("denies")),
    ("closed-without-nat", lambda found: without(found, "RouterNat")),
    ("private-google-access", of("Subnetwork", lambda i: i.update(privateIpGoogleAccess=False))),
    ("own-account", of("Instance", lambda i: i.pop("serviceAccount"))),
    (
        "own-account",
        of(
            "Instance",
            lambda i: i["serviceAccount"].update(email="1-compute@developer.gserviceaccount.com"),
        ),
    ),
    (
        "narrow-scope",
        of("Instance", lambda i: i["serviceAccount"].update(scopes=["x/auth/cloud-platform"])),
    ),
    ("least-roles", of("BucketIAMMember", lambda i: i.update(role="roles/storage.admin"))),
    ("least-roles", of("BucketIAMMember", lambda i: i.update(member="allUsers"))),
    ("least-roles", of("BucketIAMMember", lambda i: i.pop("condition"))),
    ("least-roles", of("CryptoKeyIAMMember", lambda i: i.update(role="roles/cloudkms.admin"))),
    ("least-roles", of("CryptoKeyIAMMember", lambda i: i.update(member="user:eve@example.com"))),
    ("least-roles", more("gcp:projects/iAMMember:IAMMember", role="roles/editor", member="x")),
    ("no-project-keys", metadata(block_project_ssh_keys="FALSE")),
    ("os-login", metadata(enable_oslogin="FALSE")),
    ("no-serial-port", metadata(serial_port_enable="TRUE")),
    ("no-forwarding", of("Instance", lambda i: i.update(canIpForward=True))),
    (
        "no-plain-disk-keys",
        of("Instance", lambda i: i["bootDisk"].update(diskEncryptionKeyRaw="k")),
    ),
    ("shielded", of("Instance", lambda i: i["shieldedInstanceConfig"].update(enableVtpm=False))),
    ("shielded", of("Instance", lambda i: i.pop("shieldedInstanceConfig"))),
    (
        "no-public-address",
        of("Instance", lambda i: i["networkInterfaces"][0].update(accessConfigs=[{}])),
    ),
    (
        "confidential-whole",
        of(
            "Instance",
            lambda i: i.update(confidentialInstanceConfig={"confidentialInstanceType": "SEV"}),
        ),
    ),
    (
        "confidential-whole",
        of(
            "Instance",
            lambda i: i.update(
                confidentialInstanceConfig={"confidentialInstanceType": "TDX"},
                scheduling=i["scheduling"] | {"onHostMaintenance": "MIGRATE"},
            ),
        ),
    ),
    (
        "pinned-image",
        of(
            "Instance",
            lambda i: i["bootDisk"]["initializeParams"].update(
                image="projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts"
            ),
        ),
    ),
    ("private-bucket", of("Bucket", lambda i: i.update(uniformBucketLevelAccess=False))),
    ("private-bucket", of("Bucket", lambda i: i.update(publicAccessPrevention="inherited"))),
    ("private-filestore", more(FILESTORE, fileShares={"capacityGb": 1024})),
    ("private-filestore", more(FILESTORE, fileShares={"nfsExportOptions": [{}]})),
    (
        "private-filestore",
        more(
            FILESTORE,
            fileShares={"nfsExportOptions": [{"ipRanges": ["10.60.0.10", "10.60.0.11"]}]},
        ),
    ),
    ("labelled", more(FILESTORE, fileShares={})),
    ("recoverable-bucket", of("Bucket", lambda i: i.update(versioning={"enabled": True}))),
    ("recoverable-bucket", of("Bucket", lambda i: i.pop("softDeletePolicy"))),
    (
        "recoverable-bucket",
        of("Bucket", lambda i: i["softDeletePolicy"].update(retentionDurationSeconds=0)),
    ),
    ("no-secrets", metadata(note="-----BEGIN OPENSSH " + "PRIVATE KEY-----")),
    ("host-keys-published", metadata(enable_guest_attributes="FALSE")),
    ("limited-life", of("Instance", lambda i: i["scheduling"].pop("maxRunDuration"))),
    ("limited-life", of("Instance", lambda i: i["scheduling"].update(automaticRestart=True))),
    (
        "limited-life",
        of("Instance", lambda i: i["scheduling"].update(instanceTerminationAction="STOP")),
    ),
    ("disk-goes-too", of("Instance", lambda i: i["bootDisk"].update(autoDelete=False))),
    ("labelled", of("Instance", lambda i: i["labels"].pop("tileforge-expires"))),
    ("labelled", of("Bucket", lambda i: i.pop("labels"))),
    ("labelled", of("Instance", lambda i: i["bootDisk"]["initializeParams"].pop("labels"))),
]


def clean() -> list[Plain]:
    """Return resources that follow every rule."""
    resources = deployed("bucket").resources
    for resource in resources:
        if resource["type"].endswith(":Instance"):
            resource["inputs"]["metadata"]["enable-oslogin"] = "TRUE"
    return resources


@pytest.mark.parametrize("case", CASES)
def test_a_stack_keeps_every_rule_but_the_documented_exceptions(case: str) -> None:
    mode = CASES[case].get("accessMode", "iap")
    assert set(findings(deployed(case).resources)) == EXCEPTIONS[mode]


def test_with_os_login_nothing_is_found() -> None:
    assert EXCEPTIONS["oslogin"] == frozenset()
    assert EXCEPTIONS["iap"] == {"os-login"}
    assert findings(clean()) == {}


@pytest.mark.parametrize(
    ("rule", "change"),
    [pytest.param(rule, change, id=f"{rule}-{n}") for n, (rule, change) in enumerate(MUTATIONS)],
)
def test_a_rule_that_is_turned_off_is_reported(rule: str, change: Change) -> None:
    resources = clean()
    change(resources)
    assert rule in findings(resources)


def test_every_rule_has_been_seen_to_fail() -> None:
    assert {rule.name for rule in RULES} == {name for name, _ in MUTATIONS}


def test_without_nat_web_traffic_to_everywhere_or_a_missing_dns_zone_is_reported() -> None:
    web = firewall(deployed("no-nat").resources, "dev-egress-web")
    assert web["destinationRanges"] == ["199.36.153.4/30"]
    assert web["allows"] == [{"protocol": "tcp", "ports": ["443"]}]
    for ranges in (WORLD, ["199.36.153.0/24"], ["199.36.153.4/30", "8.8.8.8/32"], []):
        wide = deployed("no-nat").resources
        firewall(wide, "dev-egress-web").update(destinationRanges=ranges)
        assert "closed-without-nat" in findings(wide)
    bare = deployed("no-nat").resources
    without(bare, "ManagedZone")
    assert "closed-without-nat" in findings(bare)


def test_a_finding_names_the_resource() -> None:
    resources = clean()
    metadata(serial_port_enable="TRUE")(resources)
    assert findings(resources) == {
        "no-serial-port": ["dev-node-0: metadata serial-port-enable is 'TRUE', not FALSE"]
    }


def leaves(value: object) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) inside."""
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from leaves(value[key])


def test_a_value_that_is_not_known_yet_or_odd_upsets_no_rule() -> None:
    for kind in (
        "Instance",
        "Firewall",
        "Subnetwork",
        "Network",
        "Bucket",
        "BucketIAMMember",
        "CryptoKeyIAMMember",
    ):
        for odd in (NOT_KNOWN, "", "10.0.0.1/8"):
            for place in range(sum(1 for _ in leaves(first(clean(), kind)))):
                resources = clean()
                container, key = list(leaves(first(resources, kind)))[place]
                if not isinstance(container[key], (dict, list)):
                    container[key] = odd
                    findings(resources)


# Rows of the CIS benchmark, checkov and Trivy about kinds of resources that the program creates.
_ROWS = (
    *("1.5", "3.1", "3.2", "3.6", "3.7", "3.8", "3.10", "4.1", "4.2", "4.3", "4.4", "4.5", "4.6"),
    *("4.8", "4.9", "5.1", "5.2", "CKV_GCP_74", "CKV2_GCP_12", "GCP-0035", "CKV_GCP_41"),
)


@pytest.mark.parametrize("row", _ROWS)
def test_every_row_of_the_benchmarks_has_a_rule(row: str) -> None:
    named = " ".join(f"{rule.cis} {rule.tools}" for rule in RULES)
    assert re.search(rf"(?<![\w.]){re.escape(row)}(?![\w.])", named)


def test_a_recommendation_that_is_not_met_is_no_rules_and_is_on_the_page_of_rules() -> None:
    claimed = " ".join(rule.cis for rule in RULES).replace(",", " ").split()
    assert set(NOT_MET) == {"2.12", "4.7", "4.11", "4.12"} and not set(NOT_MET) & set(claimed)
    page = (ROOT / "docs/reference/security_rules.md").read_text(encoding="utf-8")
    for number, why in NOT_MET.items():
        assert f"| {number} | {why} |" in page


def test_every_rule_and_exception_is_on_the_page_of_rules() -> None:
    page = (ROOT / "docs/reference/security_rules.md").read_text(encoding="utf-8")
    for rule in RULES:
        assert f"`{rule.name}`" in page


def test_every_attacker_in_the_docs_has_a_protection_a_risk_and_tests_that_exist() -> None:
    pages = ("hostile_machines.md", "hostile_folders.md", "hostile_files.md")
    attackers = [
        attacker
        for page in pages
        for attacker in (ROOT / "docs/explanations" / page).read_text("utf-8").split("\n## ")[1:]
        if not attacker.startswith("A planted checkpoint")
    ]
    titles = {attacker.partition("\n")[0] for attacker in attackers}
    assert "Everyone who may write to a store" in titles
    assert "Everyone who may write to a shared folder that is a store" in titles
    for attacker in attackers:
        assert "**Protection.**" in attacker and "**Remaining risk.**" in attacker
        named = re.findall(r"`([\w/]+\.py)`", attacker.partition("\nTests: ")[2])
        assert named, attacker
        for name in named:
            text = (ROOT / "tests" / name).read_text(encoding="utf-8")
            assert "\ndef test_" in text, name
