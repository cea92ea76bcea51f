"""Hosts for `benchmarks.scaling`: network namespaces on one switch, each cable with a limit.

As a program it waits for the benchmark's end, however it comes, and removes what that left.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

from tests.rig.host import pids_in_network, run, wait_until
from tests.rig.network import INTERFACE, Link, address_of, make_operator_network
from tests.rig.whole import Whole

REPO = Path(__file__).parents[2]
_PROGRAMS = ("ip", "tc", "bridge")
_NETWORKS = Path("/run/netns")

# What mpirun calls in ssh's place: its options, the host, then the command. It is on the host's
# network already, all share the machine's files, and its words were quoted for one more shell.
_AS_SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "NAME-$host" sh -c "$*"
"""


class Hosts(Whole):
    """`num_hosts` hosts that reach each other with `gbit_per_s`, each way. They end with `with`."""

    interface = INTERFACE

    def __init__(self, num_hosts: int, *, gbit_per_s: float) -> None:
        self.name = f"tfscale-{secrets.token_hex(3)}"
        self.addresses = [address_of(index) for index in range(num_hosts)]
        self._gbit_per_s = gbit_per_s
        self._reaper: subprocess.Popen[bytes] | None = None

    def _make(self) -> None:
        """Raises RigError."""
        self._reaper = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scaling.hosts", self.name],
            cwd=REPO,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        make_operator_network(self.name)
        for index, address in enumerate(self.addresses):
            # The namespace has the address in its name, for who calls it like ssh.
            link = Link(self.name, f"{self.name}-{address}", f"host-{index}", address)
            link.make()
            link.limit(self._gbit_per_s * 1e3)

    def enter(self, index: int) -> list[str]:
        """Return the words before a command that run it on the host with this index."""
        return ["ip", "netns", "exec", f"{self.name}-{self.addresses[index]}"]

    def write_ssh(self, path: Path) -> Path:
        """Write the program that mpirun reaches the hosts by."""
        path.write_text(_AS_SSH.replace("NAME", self.name), encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def _end(self) -> None:
        """The reaper does it, as it would if this process were killed."""
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
            self._reaper.wait(60)


def missing() -> str | None:
    """Why there can be no hosts here, in one line, or None."""
    if os.geteuid() != 0:
        return "hosts with a network of their own need root"
    absent = [program for program in _PROGRAMS if shutil.which(program) is None]
    return f"{', '.join(absent)} not found; make test-packages installs them" if absent else None


def remove(name: str) -> None:
    """End and remove the hosts of that name."""
    assert name.startswith("tfscale-"), name
    wait_until(lambda: _kill(name), what=f"{name}: end of its processes", timeout_s=20)
    for network in _NETWORKS.glob(f"{name}*"):
        run(["ip", "netns", "delete", network.name])


def _kill(name: str) -> bool:
    """Kill what runs there; true if nothing did."""
    pids = [pid for path in _NETWORKS.glob(f"{name}*") for pid in pids_in_network(path.name)]
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return not pids


if __name__ == "__main__":
    # Ctrl-C is for the benchmark alone.
    sys.stdin.buffer.read()
    remove(sys.argv[1])
