"""Hosts for `benchmarks.scaling`: network namespaces on one switch, each cable with a rate limit.

Run as a program, it waits until the benchmark ends or is killed, and removes the hosts.
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

from benchmarks.harness import REPO
from tests.rig.host import pids_in_network, run, wait_until
from tests.rig.network import INTERFACE, Link, address_of, make_operator_network
from tests.rig.whole import Whole

_PROGRAMS = ("ip", "tc", "bridge")
_NETWORKS = Path("/run/netns")

# Replaces ssh for mpirun: options, host, command. The command is already quoted for a second shell.
_AS_SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "NAME-$host" sh -c "$*"
"""


class Hosts(Whole):
    """`num_hosts` hosts that reach each other with `gbit_per_s`, each way; a context manager."""

    interface = INTERFACE

    def __init__(self, num_hosts: int, *, gbit_per_s: float) -> None:
        self.name = f"tfscale-{secrets.token_hex(3)}"
        self.addresses = [address_of(index) for index in range(num_hosts)]
        self._gbit_per_s = gbit_per_s
        self._reaper: subprocess.Popen[bytes] | None = None

    def _make(self) -> None:
        """Make the hosts. Raises RigError."""
        self._reaper = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scaling.hosts", self.name],
            cwd=REPO,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        make_operator_network(self.name)
        for index, address in enumerate(self.addresses):
            # The namespace's name contains the address, which `_AS_SSH` uses.
            link = Link(self.name, f"{self.name}-{address}", f"host-{index}", address)
            link.make()
            link.limit(self._gbit_per_s * 1e3)

    def enter(self, index: int) -> list[str]:
        """Return the command prefix that runs a command on the host with this index."""
        return ["ip", "netns", "exec", f"{self.name}-{self.addresses[index]}"]

    def write_ssh(self, path: Path) -> Path:
        """Write the program that mpirun uses to reach the hosts."""
        path.write_text(_AS_SSH.replace("NAME", self.name), encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def _end(self) -> None:
        """Let the reaper remove the hosts, as if this process were killed."""
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
            self._reaper.wait(60)


def missing() -> str | None:
    """Return why this machine cannot have hosts, in one line, or None."""
    if os.geteuid() != 0:
        return "hosts with a separate network need root"
    absent = [program for program in _PROGRAMS if shutil.which(program) is None]
    return f"{', '.join(absent)} not found; make test-packages installs them" if absent else None


def remove(name: str) -> None:
    """Kill the processes of the hosts of that name, and remove the hosts."""
    assert name.startswith("tfscale-"), name
    wait_until(lambda: _kill(name), what=f"{name}: its processes to end", timeout_s=20)
    for network in _NETWORKS.glob(f"{name}*"):
        run(["ip", "netns", "delete", network.name])


def _kill(name: str) -> bool:
    """Kill the processes of the hosts; return True if there was nothing to kill."""
    pids = [pid for path in _NETWORKS.glob(f"{name}*") for pid in pids_in_network(path.name)]
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return not pids


if __name__ == "__main__":
    # Ctrl-C is only for the benchmark.
    sys.stdin.buffer.read()
    remove(sys.argv[1])
