"""One action on all nodes: every outcome is kept, and one error names all failed nodes."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from payload.core.errors import (
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
from payload.machines.inventory import Node
from payload.orchestrate.ssh.remote_calls import all_or_raise, on_every_node
from tests.launch.inventories import make_inventory
from tests.support.waiting import DEADLINE_S, wait_until


def test_all_nodes_are_asked_at_once() -> None:
    nodes = make_inventory(num_nodes=3).nodes
    meeting = threading.Barrier(3, timeout=DEADLINE_S)

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


def main_thread_waits() -> bool:
    """Return True when `on_every_node` has started all actions and waits."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back and frame.f_back.f_code is not on_every_node.__code__:
        frame = frame.f_back
    return frame.f_code.co_name in ("wait", "__exit__")


def test_what_is_to_be_undone_has_ended_even_after_ctrl_c() -> None:
    interrupted, returned, ended = threading.Event(), threading.Event(), []

    def interrupt(number: int, frame: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def work(node: Node) -> None:
        if node.name == "node-0":
            wait_until(main_thread_waits, what="the main thread to wait for all")
            os.kill(os.getpid(), signal.SIGINT)
        interrupted.wait(60)
        # It is set only after all have ended; one second is enough to detect an early return.
        ended.append(returned.wait(1))

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            on_every_node(make_inventory(num_nodes=2).nodes, work, to_the_end=True)
        returned.set()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == [False, False]


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
