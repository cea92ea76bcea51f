"""The connections to the workers, with a program instead of ssh."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from payload.core.regular_files import MAX_FILE_BYTES
from payload.launch.plan_record import LaunchPlan
from payload.supervise.heartbeat_receiver import LineSplitter, NodeStream, close_all, parse_message
from tests.launch.inventories import make_inventory
from tests.supervise.planned import plan_stand_in, wait_for

# It ends when all of them are closed: a frozen node takes long, and the others need not wait.
SSH = """#!/bin/sh
cd {folder} && touch begun.$$ && cat > told.$$.partial && mv told.$$.partial told.$$
while [ $(ls told.* | grep -vc partial) -lt {count} ]; do sleep 0.02; done
touch left.$$
"""


# A worker that never ends its line.
ENDLESS_SSH = """#!/bin/sh
cd {folder} && touch begun.$$
head -c {count} /dev/zero
exec sleep 600
"""


@contextmanager
def connected(folder: Path, ssh: str, *, nodes: int, count: int) -> Iterator[list[NodeStream]]:
    """Streams that have begun, to nodes whose `ssh` is this script."""
    paths = plan_stand_in(folder / "run", ranks=1)
    plan = replace(LaunchPlan.load(paths.plan), ssh=("-F", "none"))
    script = folder / "bin" / "ssh"
    script.parent.mkdir()
    script.write_text(ssh.format(folder=folder, count=count))
    script.chmod(0o755)
    env = {"PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}"}
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        address, port = listener.getsockname()
        streams = [
            NodeStream(
                replace(node, address=address, ssh_port=port),
                plan=plan,
                run_dir=paths.root,
                lifeline_s=60.0,
                env=env,
            )
            for node in make_inventory(num_nodes=nodes).nodes
        ]
        for stream in streams:
            stream.start()
        try:
            yield streams
        finally:
            close_all(streams)


@pytest.mark.processes
def test_all_connections_are_closed_at_the_same_time(tmp_path: Path) -> None:
    with connected(tmp_path, SSH, nodes=3, count=3) as streams:
        wait_for(lambda: len(list(tmp_path.glob("begun.*"))) == 3, "three connections")
        close_all(streams)
    assert len(list(tmp_path.glob("left.*"))) == 3


@pytest.mark.slow
@pytest.mark.processes
def test_a_connection_whose_line_never_ends_is_closed_and_retried(tmp_path: Path) -> None:
    with connected(tmp_path, ENDLESS_SSH, nodes=1, count=MAX_FILE_BYTES + 1) as (stream,):
        wait_for(lambda: len(list(tmp_path.glob("begun.*"))) == 2, "a second connection")
        assert stream.messages() == []


def test_lines_that_come_in_pieces_are_put_together() -> None:
    splitter = LineSplitter()
    lines = [splitter.split(piece) for piece in (b"a", b"b\nc", b"\n\nd\ne", b"", b"f\n")]
    assert lines == [[], [b"ab"], [b"c", b"", b"d"], [], [b"ef"]]
    assert not splitter.is_over_limit()


@pytest.mark.parametrize("name", ["now", "monotonic_s"])
def test_a_heartbeat_with_a_time_that_no_clock_has_is_no_message(name: str) -> None:
    valid = {"now": 1.8e9, "monotonic_s": 5.0}
    for line, is_valid in ((valid, True), (valid | {name: 1.7e308}, False)):
        message = parse_message(json.dumps(line).encode(), now_unix=1.8e9, now_s=7.0)
        assert (message is not None) == is_valid
