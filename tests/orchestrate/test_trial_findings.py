"""Findings from a trial's output, with real messages of mpirun and gloo."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from payload.launch.launchers.registry import find
from payload.orchestrate.findings.nodes import Finding
from payload.orchestrate.findings.trial import MARK, Outcome, failures
from payload.train import fabric
from tests.orchestrate.test_findings import make_node

NODES = [make_node(i) for i in range(3)]
HOSTNAMES = {"first": "node-0", "second": "node-1", "third": "node-2"}
STARTED = [{"rank": i, "node": f"node-{i}", "stage": "started"} for i in range(3)]
RESULT = {"ranks": [{"node": "node-0", "bf16": 2e12, "fp32": 1e12}], "exchange": None}
JOINED = [{"rank": i, "node": f"node-{i}", "stage": "joined"} for i in range(3)]
# All of these are from Intel MPI 2021.18.1.
GUESSES = """\
[mpiexec@first] Error setting up the bootstrap proxies
[mpiexec@first] Possible reasons:
[mpiexec@first] 1. Host is unavailable. Please check that all hosts are available.
[mpiexec@first]    Check that enough ports are allowed in the firewall and specify them.
"""
UNRESOLVED = (
    """\
[mpiexec@first] Error: Unable to run bstrap_proxy on 10.0.0.3 (pid 87, exit code 768)
"""
    + GUESSES
    + """\
[bstrap:0:1@second] HYD_sock_connect (../hydra_sock_intel.c:209): getaddrinfo returned error -3 \
(Temporary failure in name resolution)
[bstrap:0:1@second] main (../hydra_bstrap_proxy.c:532): unable to connect to server first at port \
46501 (check for firewalls!)
"""
)
NO_INTERFACE = """\
[mpiexec@first] HYD_sock_get_iface_ip (../hydra_sock_intel.c:421): unable to find interface eth9
[mpiexec@first] get_local_host (../i_hydra_bstrap.c:260): unable to get iface ip
"""
KILLED = """\
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   RANK 2 PID 106 RUNNING AT 10.0.0.4
=   KILLED BY SIGNAL: {}
===================================================================================
"""


def outcome(
    *records: Mapping[str, Any],
    stdout: str = "",
    stderr: str = "",
    status: int | None = 255,
    **unreached: str,
) -> Outcome:
    said = "".join(f"{MARK}{json.dumps(record)}\n" for record in records)
    named = {name.replace("_", "-"): words for name, words in unreached.items()}
    return Outcome(
        unreached=named, status=status, late=status is None, stdout=said + stdout, stderr=stderr
    )


def found(outcome: Outcome) -> list[Finding]:
    mpirun = find("mpirun")
    return failures(NODES, outcome, hostnames=HOSTNAMES, deadline_s=60, launcher=mpirun)


def unable(code: int, address: str = "10.0.0.4") -> str:
    return (
        f"[mpiexec@first] Error: Unable to run bstrap_proxy on {address} (pid 1, exit code {code})"
    )


def test_the_ranks_mark_their_lines_as_we_look_for_them() -> None:
    assert MARK == fabric.MARK


def test_a_trial_that_ends_with_figures_has_no_failure() -> None:
    assert found(outcome(*STARTED, *JOINED, {"result": RESULT}, status=0)) == []


@pytest.mark.parametrize(
    ("given", "node", "check", "cause", "fix"),
    [
        (
            outcome(status=None, node_1="No ED25519 key\nHost key verification failed."),
            *("node-1", "mpirun"),
            "node-0 cannot start a program on this node over ssh: Host key verification failed",
            "differs from the one in the inventory",
        ),
        (
            outcome(status=None, node_2="root@10.0.0.4: Permission denied (publickey)."),
            *("node-2", "mpirun", "over ssh: root@10.0.0.4: Permission denied (publickey)"),
            "authorized_keys",
        ),
        (
            outcome(status=None, node_2="ssh: connect to host x port 22: Connection timed out"),
            *("node-2", "mpirun", "Connection timed out", "Open TCP port 22 of this node"),
        ),
        (
            outcome(stderr=UNRESOLVED),
            *("node-1", "mpirun", "cannot resolve the name 'first': getaddrinfo: Temporary failu"),
            "the address 10.0.0.2 to /etc/hosts",
        ),
        (
            outcome(stderr=NO_INTERFACE + GUESSES),
            *("node-0", "mpirun", "mpirun finds no interface eth9 on this node", "ip addr"),
        ),
        (
            outcome(stderr=unable(127 << 8)),
            *("node-2", "mpirun", "helper hydra_bstrap_proxy is missing on this node", "bootstrap"),
        ),
        (
            outcome(stderr=unable(255 << 8)),
            *("node-2", "mpirun", "closed the ssh connection from the head", "log of sshd"),
        ),
        (
            outcome(
                stderr=unable(127 << 8)
                + "\nhydra: error while loading shared libraries: libm.so.6: cannot open shared "
                "object file: No such file or directory\n"
            ),
            *("node-2", "mpirun", "mpirun's helper lacks the library libm.so.6", "bootstrap"),
        ),
        (
            outcome(
                stderr=unable(3 << 8)
                + "\n[bstrap:0:2@third] main (../hydra_bstrap_proxy.c:532): unable to connect to "
                "server 10.0.0.2 at port 46501 (check for firewalls!)\n"
            ),
            *("node-2", "mpirun", "cannot connect back to the head", "Open all TCP ports"),
        ),
        (
            outcome(*STARTED, stdout=KILLED.format("9 (Killed)")),
            *("node-2", "mpirun", "the trial's rank on this node was killed by signal 9", "memory"),
        ),
        (
            outcome(
                *STARTED,
                {"rank": 1, "node": "node-1", "error": "RuntimeError: Connection closed by peer"},
                {
                    "rank": 2,
                    "node": "node-2",
                    "error": "ImportError: libgomp.so.1: cannot open shared object file: No such",
                },
                status=1,
            ),
            *("node-2", "payload", "its environment lacks the library libgomp.so.1", "bootstrap"),
        ),
        (
            outcome(
                *STARTED,
                {"rank": 1, "node": "node-1", "error": "ModuleNotFoundError: No module 'torch'"},
                status=1,
            ),
            *(
                "node-1",
                "payload",
                "torch cannot be loaded on this node: ModuleNot",
                "bootst",
            ),
        ),
        (
            outcome(
                *STARTED,
                {"rank": 1, "node": "node-1", "error": "RuntimeError: Connect\n timeout"},
                status=1,
            ),
            *("node-1", "gloo", "gloo failed while the ranks connect to each other: RuntimeError"),
            "TCP ports are open",
        ),
        (
            outcome(*STARTED[:2], status=None),
            *("node-2", "mpirun", "mpirun started no rank on this node within 60 s", "Python"),
        ),
        (
            outcome(*STARTED, *JOINED[:2], stdout=KILLED.format("14 (Alarm clock)")),
            *("node-2", "gloo", "its rank did not find the other ranks within 60 s", "TCP ports"),
        ),
        (
            outcome(*STARTED, *JOINED, status=None),
            *("node-0", "gloo", "the measurement did not end within 60 s", "Check the network"),
        ),
    ],
)
def test_a_failure_names_the_node_the_cause_and_the_fix(
    given: Outcome, node: str, check: str, cause: str, fix: str
) -> None:
    (finding,) = found(given)
    assert (finding.node, finding.check, finding.severity) == (node, check, "error")
    assert cause in finding.cause and fix in finding.fix
    assert finding.exit_code == 31


def test_every_node_that_failed_is_named() -> None:
    refused = outcome(status=None, node_1="Permission denied", node_2="Permission denied")
    assert [finding.node for finding in found(refused)] == ["node-1", "node-2"]
    assert [f.node for f in found(outcome(status=None))] == ["node-0", "node-1", "node-2"]


def test_the_log_leaves_out_what_mpirun_always_guesses() -> None:
    (finding,) = found(outcome(stderr=UNRESOLVED))
    assert any("getaddrinfo" in line for line in finding.log)
    assert not any("Possible reasons" in line or "firewall and" in line for line in finding.log)


def test_lines_that_are_cut_short_are_passed_over() -> None:
    broken = outcome(
        *STARTED, *JOINED, {"result": RESULT}, stdout=f'{MARK}{{"rank": 1, "no', status=0
    )
    assert found(broken) == []


NCCL_ERROR = (
    "DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "
    "remote process exited or there was a network error"
)
NO_DEVICE = (
    "ConfigError: device.kind = 'cuda': torch 2.13.0+cu130 finds no CUDA device. Install the "
    "driver and torch's CUDA build, or use device.kind = 'cpu'."
)


@pytest.mark.parametrize(
    ("given", "check", "nodes", "cause"),
    [
        # Errors of other ranks that lost contact are left out.
        (
            outcome(
                *STARTED,
                {"node": "node-1", "error": NO_DEVICE},
                {"node": "node-0", "error": "RuntimeError: Connection closed by peer"},
            ),
            "gpu",
            ["node-1"],
            "its rank has no GPU: device.kind = 'cuda': torch 2.13.0+cu130 finds no CUDA device.",
        ),
        (
            outcome(*STARTED, *JOINED, {"node": "node-2", "error": NCCL_ERROR}),
            "nccl",
            ["node-2"],
            "NCCL failed while measuring: DistBackendError: NCCL error in:",
        ),
        (
            outcome(*STARTED, *JOINED, {"node": "node-0", "stage": "summed"}, status=None),
            "nccl",
            ["node-1", "node-2"],
            "NCCL's first all-reduce did not finish on this node within 90 s",
        ),
        (
            outcome(
                *STARTED, *JOINED, *({**said, "stage": "summed"} for said in JOINED), status=None
            ),
            "nccl",
            ["node-0"],
            "the measurement did not end within 90 s",
        ),
        (
            outcome(*STARTED, {"node": "node-0", "error": "RuntimeError: no route"}),
            "gloo",
            ["node-0"],
            "gloo failed while the ranks connect to each other",
        ),
    ],
)
def test_on_gpus_a_failure_is_the_gpu_s_gloo_s_or_nccl_s_by_how_far_the_ranks_came(
    given: Outcome, check: str, nodes: list[str], cause: str
) -> None:
    mpirun = find("mpirun")
    said = failures(NODES, given, hostnames=HOSTNAMES, deadline_s=90, launcher=mpirun, on_gpus=True)
    assert [(finding.node, finding.check) for finding in said] == [(node, check) for node in nodes]
    assert all(cause in finding.cause for finding in said)
