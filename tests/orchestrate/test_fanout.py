"""One action on all nodes: every outcome is kept, one error names every node that failed."""

from __future__ import annotations

import threading

import pytest

from payload.errors import (
    BootstrapError,
    ExitCode,
    HostKeyError,
    NodesError,
    PreflightError,
    SshAuthError,
    SshUnreachableError,
    TileforgeError,
    most_telling,
)
from payload.inventory import Node
from payload.orchestrate.fanout import all_or_raise, on_every_node
from tests.launch.inventories import make_inventory


def test_all_nodes_are_asked_at_once() -> None:
    nodes = make_inventory(num_nodes=3).nodes
    meeting = threading.Barrier(3, timeout=30)

    def meet(node: Node) -> str:
        meeting.wait()
        return node.address

    outcomes = on_every_node(nodes, meet)
    assert all_or_raise(outcomes, what="meeting") == {node.name: node.address for node in nodes}


def test_every_failing_node_is_named_and_the_others_are_waited_for() -> None:
    done = []

    def work(node: Node) -> None:
        done.append(node.name)
        if node.name != "node-1":
            raise PreflightError(f"{node.name}: disk full")

    with pytest.raises(NodesError) as caught:
        all_or_raise(on_every_node(make_inventory(num_nodes=3).nodes, work), what="copying x")
    assert str(caught.value) == (
        "copying x failed on 2 node(s):\n  node-0: disk full\n  node-2: disk full"
    )
    assert caught.value.exit_code == ExitCode.PREFLIGHT
    assert sorted(done) == ["node-0", "node-1", "node-2"]


def test_a_bug_is_not_taken_for_a_node_s_failure() -> None:
    def work(node: Node) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        on_every_node(make_inventory(num_nodes=2).nodes, work)


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([SshUnreachableError, HostKeyError, SshAuthError], ExitCode.HOST_KEY),
        ([SshUnreachableError, SshAuthError], ExitCode.SSH_AUTH),
        ([BootstrapError, PreflightError], ExitCode.BOOTSTRAP),
        ([BootstrapError, SshUnreachableError], ExitCode.SSH_UNREACHABLE),
    ],
)
def test_the_most_telling_failure_gives_the_code(
    errors: list[type[TileforgeError]], code: ExitCode
) -> None:
    assert most_telling([error.exit_code for error in errors]) == code
