"""Real sshd processes on loopback addresses, each a node with a separate home."""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from payload.machines.inventory import Access, AccessKind, ClusterInventory, Node
from payload.orchestrate.node.look import numa_domains, physical_cores
from tests.support.ports import free_port
from tests.support.waiting import wait_until

SSHD = Path("/usr/sbin/sshd")
USER = getpass.getuser()

LOGS: list[Path] = []
"""Logs of all started sshd processes; for `logs_since`."""

_CONFIG = """\
ListenAddress {address}:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {home}/.ssh/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
Subsystem sftp internal-sftp
SetEnv HOME={home}
LogLevel VERBOSE
{more}
"""


_SHOWN_LINES = 100


def make_key(path: Path, *, kind: str = "ed25519") -> str:
    """Create a key pair at `path`; return the public half."""
    command = ["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(command, check=True)
    return path.with_suffix(".pub").read_text(encoding="ascii").strip()


class Sshd:
    """A node: an sshd on `address` that authorizes `public_key`."""

    def __init__(
        self, folder: Path, *, name: str, address: str, public_key: str, more: str = ""
    ) -> None:
        self.home = folder / name / "home"
        self.folder = self.home.parent
        (self.home / ".ssh").mkdir(parents=True, mode=0o700)
        self.authorized_keys = self.home / ".ssh" / "authorized_keys"
        self.authorized_keys.write_text(public_key + "\n", encoding="ascii")
        self.port = free_port(address)
        self.node = Node(
            name=name,
            address=address,
            ssh_port=self.port,
            host_keys=(make_key(self.folder / "host_key"),),
            physical_cores=physical_cores() or 1,
            numa_domains=numa_domains() or 1,
            memory_gib=1.0,
        )
        config = self.folder / "sshd_config"
        config.write_text(
            _CONFIG.format(
                address=address, port=self.port, folder=self.folder, home=self.home, more=more
            ),
            encoding="utf-8",
        )
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        self.log = self.folder / "sshd.log"
        self._argv = [str(SSHD), "-D", "-E", str(self.log), "-f", str(config)]
        self.start()

    def _listens(self) -> bool:
        assert self._process.poll() is None, self.log.read_text(encoding="utf-8")
        return self.log.exists() and "Server listening" in self.log.read_text(encoding="utf-8")

    def with_host_key(self, line: str) -> Node:
        """Return the node with another host key, as in a wrong inventory."""
        return replace(self.node, host_keys=(line,))

    def processes(self) -> list[int]:
        """Return sshd's process and all its descendants."""
        return _with_descendants(self._process.pid)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to sshd and all its descendants."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def start(self) -> None:
        """Start sshd, also after `stop`."""
        self.log.unlink(missing_ok=True)
        LOGS.append(self.log)
        self._process = subprocess.Popen(
            self._argv, stdin=subprocess.DEVNULL, start_new_session=True
        )
        wait_until(self._listens, what=f"sshd of {self.node.name}")

    def stop(self) -> None:
        """Stop sshd and all its sessions."""
        if self._process.poll() is None:
            self.signal(signal.SIGKILL)
            self._process.wait()

    def __enter__(self) -> Sshd:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def _with_descendants(process: int) -> list[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    found = [process]
    for candidate in found:
        found += [child for child, parent in parents.items() if parent == candidate]
    return found


def logs_since(time_unix: float) -> Iterator[tuple[str, str]]:
    """Yield name and end of the log of each node whose sshd has logged since then."""
    for log in dict.fromkeys(LOGS):
        if log.exists() and log.stat().st_mtime >= time_unix:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            yield log.parent.name, "\n".join(lines[-_SHOWN_LINES:])


def make_cluster(*nodes: Node, kind: AccessKind = "direct") -> ClusterInventory:
    """Return an inventory of these nodes."""
    return ClusterInventory(
        cluster="test",
        source="file",
        ssh_user=USER,
        access=Access(kind=kind, project="project" if kind == "iap" else None),
        bucket=None,
        nodes=nodes,
    )


RELAY = """\
import os, socket, sys, threading
# Carries bytes between stdin/stdout and an address; after `limit` bytes towards us it breaks off.
address, port, limit = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
peer = socket.create_connection((address, port))
def up():
    while data := os.read(0, 65536):
        peer.sendall(data)
    os._exit(0)
def down(seen=0):
    while data := peer.recv(65536):
        os.write(1, data)
        seen += len(data)
        if seen > limit:
            os._exit(1)
    os._exit(0)
threading.Thread(target=up, daemon=True).start()
down()
"""


_GCLOUD = """\
#!{python}
import sys
assert sys.argv[1:3] == ["compute", "start-iap-tunnel"] and "--zone=here" in sys.argv
with open(__file__ + ".starts", "a") as starts:
    starts.write(sys.argv[3] + "\\n")
sys.argv = ["relay", "{address}", sys.argv[4], "inf"]
{relay}
"""


def make_gcloud(folder: Path, node: Node) -> Path:
    """Create a `gcloud` in `folder` whose tunnels, to zone `here`, lead to `node`.

    The file `gcloud.starts` next to it gets a line for each opened tunnel.
    """
    gcloud = folder / "gcloud"
    text = _GCLOUD.format(python=sys.executable, address=node.address, relay=RELAY)
    gcloud.write_text(text, encoding="utf-8")
    gcloud.chmod(0o755)
    return gcloud


def relay_argv(node: Node, *, limit_bytes: float = float("inf")) -> list[str]:
    """Return a proxy command to `node` that ends after a number of bytes from the node."""
    return [sys.executable, "-c", RELAY, node.address, str(node.ssh_port), str(limit_bytes)]
