"""The policy pack, as a separate process with Pulumi's protocol."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import empty_pb2, struct_pb2
from pulumi.runtime.proto import analyzer_pb2, analyzer_pb2_grpc
from pulumi_policy.proxy import UNKNOWN_STRING_VALUE

from infra.gcp.node_and_cost_limits import cost_problems, number_of_nodes
from infra.gcp.security_rules import EXCEPTIONS, RULES
from tests.infra.stacks import CASES, ROOT, Plain
from tests.infra.test_graph import deployed
from tests.infra.test_security import MUTATIONS, Change, clean
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.processes

LIMITS = {"maximum-nodes", "maximum-price"}


@pytest.fixture(scope="module")
def analyzer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start the pack as Pulumi does, from a separate folder."""
    process = subprocess.Popen(
        [sys.executable, "-u", str(ROOT / "infra/policy")],
        cwd=tmp_path_factory.mktemp("pack"),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    try:
        port = int(process.stdout.readline())
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield analyzer_pb2_grpc.AnalyzerStub(channel)
    finally:
        process.terminate()
        process.wait(timeout=DEADLINE_S)
        process.stdout.close()


def violations(analyzer: Any, resources: list[Plain]) -> dict[str, list[str]]:
    """Return the pack's violations for these resources, by policy."""
    answers = []
    sent = [
        {
            "type": found["type"],
            "name": found["name"],
            "urn": f"urn:pulumi:dev::tileforge::{found['type']}::{found['name']}",
            "properties": _struct(found["inputs"]),
        }
        for found in resources
    ]
    for one in sent:
        answers.append(analyzer.Analyze(analyzer_pb2.AnalyzeRequest(**one)))
    everything = [analyzer_pb2.AnalyzerResource(**one) for one in sent]
    answers.append(analyzer.AnalyzeStack(analyzer_pb2.AnalyzeStackRequest(resources=everything)))
    found: dict[str, list[str]] = {}
    for answer in answers:
        for diagnostic in answer.diagnostics:
            found.setdefault(diagnostic.policyName, []).append(diagnostic.message)
    return found


def _struct(inputs: Plain) -> struct_pb2.Struct:
    struct = struct_pb2.Struct()
    struct.update(inputs)
    return struct


def test_the_pack_has_a_policy_for_each_rule_and_the_limits(analyzer: Any) -> None:
    info = analyzer.GetAnalyzerInfo(empty_pb2.Empty())
    assert {policy.name for policy in info.policies} == {rule.name for rule in RULES} | LIMITS
    levels = {policy.name: policy.enforcementLevel for policy in info.policies}
    advisory = {name for name, level in levels.items() if level == analyzer_pb2.ADVISORY}
    assert advisory == EXCEPTIONS["direct"]


@pytest.mark.parametrize("case", ["default", "direct", "oslogin", "bucket", "sixteen-nodes"])
def test_the_pack_finds_in_a_stack_its_documented_exceptions_alone(
    analyzer: Any, case: str
) -> None:
    found = violations(analyzer, deployed(case).resources)
    assert set(found) == EXCEPTIONS[CASES[case].get("accessMode", "iap")]


@pytest.mark.parametrize(
    ("rule", "change"),
    [pytest.param(rule, change, id=rule) for rule, change in dict(MUTATIONS).items()],
)
def test_the_pack_reports_a_rule_that_is_turned_off(
    analyzer: Any, rule: str, change: Change
) -> None:
    resources = clean()
    change(resources)
    assert rule in violations(analyzer, resources)


def test_what_is_known_only_after_up_is_no_violation_in_a_preview(analyzer: Any) -> None:
    resources = clean()
    for resource in resources:
        if resource["type"].endswith(":Instance"):
            resource["inputs"]["serviceAccount"]["email"] = UNKNOWN_STRING_VALUE
            resource["inputs"]["networkInterfaces"][0]["subnetwork"] = UNKNOWN_STRING_VALUE
    assert violations(analyzer, resources) == {}


def test_more_nodes_than_allowed_are_refused(analyzer: Any) -> None:
    resources = deployed("sixteen-nodes").resources
    assert number_of_nodes(resources) == 16
    resources.append(next(r for r in resources if r["type"].endswith(":Instance")))
    assert violations(analyzer, resources)["maximum-nodes"][0].endswith(
        "17 nodes, more than the limit of 16"
    )


def test_machines_that_are_too_dear_or_have_no_price_are_refused(analyzer: Any) -> None:
    resources = deployed("default").resources
    assert list(cost_problems(resources, most_usd=2)) == []
    assert list(cost_problems(resources, most_usd=1)) == [
        "machines and disks cost $1.63 per hour, more than the limit of $1"
    ]
    for resource in resources:
        if resource["type"].endswith(":Instance"):
            resource["inputs"]["zone"] = "moon-north1-a"
    (message,) = violations(analyzer, resources)["maximum-price"]
    assert "dev-node-0, dev-node-1, dev-node-2: unknown price" in message


def test_the_pack_runs_in_the_projects_own_environment() -> None:
    text = Path(ROOT / "infra/policy/PulumiPolicy.yaml").read_text(encoding="utf-8")
    assert "virtualenv: ../../.venv" in text
