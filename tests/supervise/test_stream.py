"""The connections to the workers, with a program in ssh's place."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

from payload.launch.environment import SSH_ARGUMENTS
from payload.launch.plan import LaunchPlan
from payload.supervise.stream import NodeStream, close_all
from tests.launch.inventories import make_inventory
from tests.supervise.planned import plan_stand_in, wait_for

# It goes when all of them are told to: a frozen node takes its time, which the others need not.
SSH = """#!/bin/sh
cd {folder} && touch begun.$$ && cat > told.$$.partial && mv told.$$.partial told.$$
while [ $(ls told.* | grep -vc partial) -lt {count} ]; do sleep 0.02; done
touch left.$$
"""


def test_all_connections_are_closed_at_the_same_time(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run", ranks=1)
    plan = replace(LaunchPlan.load(paths.plan), launcher_environment={SSH_ARGUMENTS: "-F none"})
    script = tmp_path / "bin" / "ssh"
    script.parent.mkdir()
    script.write_text(SSH.format(folder=tmp_path, count=3))
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
            for node in make_inventory(num_nodes=3).nodes
        ]
        for stream in streams:
            stream.start()
        wait_for(lambda: len(list(tmp_path.glob("begun.*"))) == 3, "three connections")
        close_all(streams)
    assert len(list(tmp_path.glob("left.*"))) == 3
