"""Preflight's findings from facts: every one, and none when nothing is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from payload.core.errors import ExitCode, HostKeyError, PreflightError, SshUnreachableError
from payload.machines.inventory import Node
from payload.orchestrate.findings import nodes as find
from payload.orchestrate.findings.nodes import Finding, NodeFacts, SharedFolder, clock_offset_s
from payload.orchestrate.ssh.remote_calls import MeshAnswer, Pair

READY = {"schema_version": 1, "step": "done", "ok": True, "reason": None}
GIB = 2**30


def make_node(i: int = 0, **changes: Any) -> Node:
    node = Node(name=f"node-{i}", address=f"10.0.0.{i + 2}", physical_cores=4, memory_gib=32)
    return replace(node, **changes)


def make_facts(i: int = 0, **changes: Any) -> NodeFacts:
    facts = NodeFacts(
        time_unix=0.0,
        took_s=0.1,
        hostname=f"node-{i}",
        hostname_addresses=(f"10.0.0.{i + 2}",),
        architecture="x86_64",
        python="3.11.2",
        bootstrap=READY | {"version": "1.0", "sha": "abc"},
        bootstrap_log=(),
        cpu_flags=("amx_bf16", "amx_tile"),
        physical_cores=4,
        numa_domains=1,
        memory_bytes=int(31.3 * GIB),
        disk_path="/home/trainer",
        disk_free_bytes=80 * GIB,
        interface="ens4",
        source_address=f"10.0.0.{i + 2}",
        mtu=1460,
        clock_offset_s=0.01,
    )
    return replace(facts, **changes)


def of_node(node: Node, facts: NodeFacts) -> list[Finding]:
    return [
        *find.bootstrap_findings(node, facts),
        *find.cpu_findings(node, facts),
        *find.capacity_findings(node, facts),
        *find.name_findings(node, facts),
        *find.route_findings(node, facts),
        *find.shared_findings(node, facts),
        *find.clock_findings([node], {node.name: facts}),
        *find.payload_findings([node], {node.name: facts}, version="1.0", lock_sha="abc"),
    ]


def shared(
    *, mounted: bool = True, took_s: float | None = None, error: str | None = None
) -> SharedFolder:
    """Return a node's report on its shared folder; without arguments, it does not answer."""
    return SharedFolder(folder="/srv/shared", mounted=mounted, took_s=took_s, error=error)


def test_a_good_node_has_no_finding() -> None:
    assert of_node(make_node(), make_facts()) == []
    assert of_node(make_node(), make_facts(shared=shared(took_s=0.02))) == []
    arm = make_facts(architecture="aarch64", cpu_flags=("bf16", "svebf16"))
    assert of_node(make_node(), arm) == []


@pytest.mark.parametrize(
    ("changes", "check", "severity", "cause"),
    [
        (
            {"physical_cores": 2},
            "cpu",
            "error",
            "it has 2 physical core(s), but the inven",
        ),
        (
            {"physical_cores": 8},
            "cpu",
            "warning",
            "it has 8 physical core(s), but the inventory lists 4",
        ),
        (
            {"numa_domains": 2},
            "cpu",
            "warning",
            "it has 2 NUMA domain(s), but the inven",
        ),
        ({"cpu_flags": ()}, "cpu", "warning", "its CPU shows no AMX (amx_bf16) and no avx512_bf16"),
        ({"cpu_flags": ("avx512_bf16",)}, "cpu", "warning", "its CPU shows no AMX (amx_bf16): bf"),
        (
            {"architecture": "aarch64", "cpu_flags": ()},
            "cpu",
            "warning",
            "its CPU (aarch64) shows no bf16: runs compute in fp32",
        ),
        ({"memory_bytes": 16 * GIB}, "memory", "error", "it has 16.0 GiB of memory, but the"),
        ({"disk_free_bytes": 0}, "disk", "error", "0.0 GiB are free in /home/trainer"),
        ({"disk_free_bytes": 5 * GIB}, "disk", "warning", "5.0 GiB are free"),
        ({"clock_offset_s": 3600.0}, "clock", "error", "its clock is 1 h ahead of the clock of"),
        ({"shared": shared(mounted=False)}, "shared", "error", "is in /etc/fstab but not mounted"),
        ({"shared": shared(error="ESTALE")}, "shared", "error", "the mount is stale"),
        ({"shared": shared(error="EACCES")}, "shared", "error", "(root squash)"),
        ({"shared": shared(error="EPERM")}, "shared", "error", "(root squash)"),
        ({"shared": shared(error="EROFS")}, "shared", "error", "read-only"),
        ({"shared": shared(error="EIO")}, "shared", "error", "a write fails with EIO"),
        ({"shared": shared()}, "shared", "error", "/srv/shared does not answer"),
        ({"shared": shared(took_s=2.5)}, "shared", "warning", "is slow: a small file took 2.5 s"),
        ({"resolver_answers": False}, "name", "warning", "its resolver does not answer"),
        ({"clock_offset_s": -30.0}, "clock", "warning", "its clock is 30 s behind"),
        (
            {"hostname_addresses": ("127.0.1.1",)},
            "name",
            "warning",
            "own name 'node-0' resolves to 127.0.1.1 on this node",
        ),
        ({"hostname_addresses": ("::1",)}, "name", "warning", "resolves to ::1"),
        ({"hostname_addresses": ()}, "name", "warning", "own name 'node-0' does not resolve"),
        ({"interface": None}, "route", "error", "its interface towards the other nodes is"),
        ({"interface": "lo"}, "route", "error", "its route to the other nodes is the loopback"),
        (
            {"source_address": "172.17.0.1", "interface": "docker0"},
            "route",
            "warning",
            "leave from 172.17.0.1 (docker0), but the inventory lists 10.0.0.2",
        ),
        (
            {"bootstrap": READY | {"version": "0.9", "sha": "abc"}},
            "payload",
            "error",
            "it has payload 0.9, but this machine has 1.0",
        ),
    ],
)
def test_a_fault_is_found_and_named(
    changes: dict[str, Any], check: str, severity: str, cause: str
) -> None:
    (finding,) = of_node(make_node(), make_facts(**changes))
    assert (finding.node, finding.check, finding.severity) == ("node-0", check, severity)
    assert cause in finding.cause
    assert finding.fix
    assert finding.exit_code == ExitCode.PREFLIGHT
    assert "\n" not in finding.line()


@pytest.mark.parametrize("unknown", ["physical_cores", "numa_domains", "memory_bytes", "cpu_flags"])
def test_an_unknown_fact_is_not_a_fault(unknown: str) -> None:
    silent: dict[str, Any] = {unknown: None}
    assert of_node(make_node(), make_facts(**silent)) == []


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        (None, "bootstrap has not reported yet: /var/lib/tileforge/bootstrap.json is missing"),
        ("half a fi", "is damaged: 'half a fi'"),
        ({"ok": True}, "is damaged"),
        (READY | {"ok": None, "step": "payload", "reason": None}, "current step is 'payload'"),
        (READY | {"ok": False, "step": "packages", "reason": None}, "step 'packages': no reason"),
        (
            READY | {"ok": False, "step": "packages", "reason": "a\nE: no package x\nfailed"},
            "bootstrap failed in step 'packages': E: no package x",
        ),
    ],
)
def test_an_unfinished_bootstrap_is_reported_with_its_step(state: Any, cause: str) -> None:
    (finding,) = of_node(make_node(), make_facts(bootstrap=state))
    assert finding.exit_code == ExitCode.BOOTSTRAP
    assert cause in finding.cause
    assert "\n" not in finding.line()


def test_a_failed_bootstrap_shows_its_log() -> None:
    state = READY | {"ok": False, "step": "payload", "reason": "one\ntwo"}
    (finding,) = of_node(make_node(), make_facts(bootstrap=state))
    assert finding.log == ("one", "two")
    (finding,) = of_node(make_node(), make_facts(bootstrap=None, bootstrap_log=("booting",)))
    assert finding.log == ("booting",)


def of_clocks(*offsets: float) -> Sequence[Finding]:
    nodes = [make_node(i) for i in range(len(offsets))]
    facts = {f"node-{i}": make_facts(i, clock_offset_s=value) for i, value in enumerate(offsets)}
    return list(find.clock_findings(nodes, facts))


def test_one_clock_among_three_that_is_off_is_that_node_s() -> None:
    (finding,) = of_clocks(0.1, 3600.0, -0.1)
    assert (finding.node, finding.severity) == ("node-1", "error")


def test_when_all_clocks_agree_it_is_the_operator_s_that_is_off() -> None:
    (finding,) = of_clocks(-3600.0, -3600.1, -3599.9)
    assert finding.severity == "warning"
    assert "this machine's clock is 1 h ahead of the clocks of all nodes" in finding.cause


def test_the_clock_is_compared_in_the_middle_of_the_answer_s_journey() -> None:
    offset = clock_offset_s(sent_unix=100.0, received_unix=105.0, node_unix=102.0, took_s=1.0)
    assert offset == 0.0


def test_nodes_with_packages_from_another_lock_are_named() -> None:
    nodes = [make_node(i) for i in range(3)]
    facts = {node.name: make_facts(i) for i, node in enumerate(nodes)}
    other = READY | {"version": "1.0", "sha": "def"}
    facts["node-2"] = make_facts(2, bootstrap=other)
    (finding,) = find.payload_findings(nodes, facts, version="1.0", lock_sha=None)
    assert finding.line().startswith("node-2: its requirements.lock")
    found = list(find.payload_findings(nodes, facts, version="1.0", lock_sha="def"))
    assert [finding.node for finding in found] == ["node-0", "node-1"]
    assert "requirements.lock (abc) differs from the one of this machine (def)" in found[0].cause


def answer(
    *, failed: dict[str, str] | None = None, largest: int | None = 1460, peer: str
) -> MeshAnswer:
    pair = Pair(failed=failed or {}, largest_packet=largest)
    return MeshAnswer(bind_error=None, port_taken=False, pairs={peer: pair})


def of_mesh(first: MeshAnswer, second: MeshAnswer) -> list[Finding]:
    nodes = [make_node(0), make_node(1)]
    mtus = {"node-0": 1460, "node-1": 1460}
    return list(find.mesh_findings(nodes, {"node-0": first, "node-1": second}, mtus=mtus))


def test_an_open_network_has_no_finding() -> None:
    assert of_mesh(answer(peer="node-1"), answer(peer="node-0")) == []
    # Without an answer to any datagram there is nothing to say: the ranks use TCP.
    assert of_mesh(answer(peer="node-1", largest=None), answer(peer="node-0")) == []


def test_a_closed_port_names_the_pair() -> None:
    closed = answer(peer="node-1", failed={"20001": "no answer"})
    (finding,) = of_mesh(closed, answer(peer="node-0"))
    assert (finding.severity, finding.exit_code) == ("error", ExitCode.PREFLIGHT)
    assert "node-0: cannot reach node-1 (10.0.0.3) on port(s) 20001: no answer" in finding.line()


def test_lost_large_packets_are_named_with_the_size_that_works() -> None:
    (finding,) = of_mesh(answer(peer="node-1", largest=1400), answer(peer="node-0"))
    assert finding.severity == "warning"
    assert "packets over 1400 bytes to node-1 get lost" in finding.cause


def test_lost_large_packets_that_stop_tcp_too_are_an_error() -> None:
    stuck = answer(peer="node-1", largest=1400, failed={"20001": "data is lost"})
    (finding,) = of_mesh(stuck, answer(peer="node-0"))
    assert (finding.severity, finding.fix) == ("error", "Set the MTU to 1400 on all nodes.")


def test_a_node_that_cannot_listen_is_the_cause_and_not_those_who_call_it() -> None:
    said = "10.0.0.3 port 20001: Cannot assign requested address"
    deaf = MeshAnswer(bind_error=said, port_taken=False, pairs={})
    (finding,) = of_mesh(answer(peer="node-1", failed={"20001": "refused"}), deaf)
    assert finding.line().startswith("node-1: cannot listen on 10.0.0.3 port 20001")


def test_a_node_that_could_not_be_queried_keeps_its_exit_code_and_its_fix() -> None:
    error = HostKeyError("node-0: it shows another host key. Hm", fix="Write a new one.")
    finding = find.from_error(make_node(), error)
    assert (finding.check, finding.exit_code) == ("ssh", ExitCode.HOST_KEY)
    assert finding.line() == str(error) == "node-0: it shows another host key. Hm. Write a new one."
    assert (finding.cause, finding.fix) == ("it shows another host key. Hm", "Write a new one.")
    assert find.from_error(make_node(), SshUnreachableError("node-0: gone")).cause == "gone"
    assert find.from_error(make_node(), PreflightError("node-0: no python3")).check == "bootstrap"
