"""The scaling benchmark's hosts: two hosts reach each other, and nothing of them remains."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.rig.host import pids_in_network, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
NETWORKS = Path("/run/netns")

# One host connects to the other, as mpirun does; then this process waits to be killed.
_PROGRAM = """
import subprocess, sys, tempfile
from pathlib import Path
from benchmarks.scaling.hosts import Hosts

with Hosts(2, gbit_per_s=1.0) as hosts, tempfile.TemporaryDirectory() as folder:
    ssh = hosts.write_ssh(Path(folder) / "enter")
    asked = [ssh, "-x", "-q", hosts.addresses[1], "ip", "-o", "-4", "addr;", "tc", "qdisc"]
    said = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    assert hosts.addresses[1] in said and "rate 1Gbit" in said, said
    sleeping = subprocess.Popen([*hosts.enter(0), "sleep", "1000"])
    print(hosts.name, flush=True)
    sys.stdin.read()
"""


def test_hosts_reach_each_other_and_are_gone_with_the_benchmark_however_it_ends() -> None:
    for end in (None, signal.SIGKILL, signal.SIGINT):
        program = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert program.stdout is not None
        name = program.stdout.readline().strip()
        assert name.startswith("tfscale-"), "the hosts were not created"
        head = f"{name}-10.77.0.11"
        wait_until(partial(has_processes, head), what="sleep")
        if end is None:
            program.communicate()
            assert program.returncode == 0
        else:
            program.send_signal(end)
            program.communicate()
        wait_until(partial(is_gone, name), what=f"end of {name}")


def has_processes(host: str) -> bool:
    return bool(pids_in_network(host))


def is_gone(name: str) -> bool:
    return not list(NETWORKS.glob(f"{name}*"))
