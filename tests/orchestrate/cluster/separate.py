"""Nodes in separate namespaces: sshd in its own mount and process namespaces.

Every node has the same paths, as real ones have, and its own files there. Needs root.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import payload
from payload.kernels.build import default_cache
from payload.machines.inventory import ClusterInventory, Node
from payload.orchestrate.node.look import numa_domains, physical_cores
from payload.stack.node_paths import VENV
from tests.orchestrate.sshd import LOGS, SSHD, make_cluster, make_key
from tests.rig.network import Link, address_of, make_operator_network
from tests.rig.whole import Whole
from tests.support.launching import REPO
from tests.support.ports import free_port
from tests.support.waiting import wait_until

_CONFIG = """\
ListenAddress {address}:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {home}/.ssh/authorized_keys
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
MaxStartups 50
Subsystem sftp internal-sftp
SetEnv HOME={home}
LogLevel VERBOSE
"""
# A home, a /var/lib and an environment in /opt of the node's own; all end with its processes.
_BOOT = """\
mount --bind "$1/home" "$2"
mount -t tmpfs tmpfs /var/lib
mkdir /var/lib/tileforge
cp "$1/bootstrap.json" /var/lib/tileforge/
mount -t tmpfs tmpfs "$1/over"
mkdir "$1/over/upper" "$1/over/work"
mount -t overlay -o "lowerdir=/opt,upperdir=$1/over/upper,workdir=$1/over/work" overlay /opt
mkdir -p "$3"
mount --bind "$4" "$3"
# What /sys says of the network is that of the one who mounted it. The node knows its own name, and
# has nobody to ask for others: a resolver that does not answer would cost mpirun half a minute.
if [ "$6" = linked ]; then
    mount -t sysfs sysfs /sys
    hostname "$7"
    printf '127.0.0.1 localhost\\n%s %s\\n' "$8" "$7" >"$1/hosts"
    : >"$1/resolv.conf"
    mount --bind "$1/hosts" /etc/hosts
    mount --bind "$1/resolv.conf" /etc/resolv.conf
fi
exec "$5" -D -E "$1/sshd.log" -f "$1/sshd_config"
"""


class SeparateNodes(Whole):
    """A cluster of such nodes; a context manager."""

    def __init__(self, folder: Path, *, num_nodes: int, linked: bool = False) -> None:
        """With `linked`, each node has its own network, on a bridge that only `inside` reaches."""
        self.folder = folder
        self.key = folder / "operator_key"
        self.home = folder / "home"
        self.inside: list[str] = []
        """Return the prefix of a command that has to reach the nodes."""
        self.links: list[Link] = []
        self._num_nodes = num_nodes
        self._linked = linked
        self._started: list[subprocess.Popen[bytes]] = []
        self._nodes: list[Node] = []

    def _make(self) -> None:
        self.home.mkdir()
        public = make_key(self.key)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        if self._linked:
            self._lay_cables()
        for i in range(self._num_nodes):
            self._start(i, public)

    @property
    def inventory(self) -> ClusterInventory:
        """The nodes as the operator knows them."""
        return make_cluster(*self._nodes)

    def write_inventory(self, path: Path, inventory: ClusterInventory | None = None) -> Path:
        """As a file."""
        path.write_text((inventory or self.inventory).to_json(), encoding="utf-8")
        return path

    def home_of(self, i: int) -> Path:
        """Return the path of a node's home as seen from outside."""
        return self.folder / f"node-{i}" / "home"

    def log_of(self, i: int) -> str:
        """Return the log of a node's sshd."""
        return (self.folder / f"node-{i}" / "sshd.log").read_text(encoding="utf-8")

    def processes(self) -> list[str]:
        """Return command lines on all nodes, except sshd's own."""
        return [line for i in range(self._num_nodes) for line in self.processes_of(i)]

    def processes_of(self, i: int) -> list[str]:
        """The same on one node."""
        return [line for line in self._commands(i).values() if "sshd" not in line]

    def cut_sessions(self, i: int) -> None:
        """Close every session of a node's sshd without notice; sshd itself stays."""
        for process, line in self._commands(i).items():
            if line.startswith("sshd:") and "listener" not in line:
                os.kill(process, signal.SIGKILL)

    def kill(self, i: int, words: str) -> None:
        """SIGKILL to the one process of a node whose command line has these words."""
        (process,) = [pid for pid, line in self._commands(i).items() if words in line]
        os.kill(process, signal.SIGKILL)

    def freeze(self, i: int) -> None:
        """Stop every process of a node; its kernel still accepts connections."""
        self._signal_all(i, signal.SIGSTOP)

    def thaw(self, i: int) -> None:
        """Undo `freeze`."""
        self._signal_all(i, signal.SIGCONT)

    def kill_node(self, i: int) -> None:
        """End every process of a node, sshd too."""
        os.killpg(self._started[i].pid, signal.SIGKILL)
        self._started[i].wait(60)

    def within(self, i: int, *argv: str) -> None:
        """Run a command with a node's files and processes."""
        # Any sshd would not do: the sshd of a session may end in between.
        (server,) = [pid for pid, line in self._commands(i).items() if "listener" in line]
        enter = ["nsenter", f"--target={server}", "--mount", "--pid", "--"]
        subprocess.run([*enter, *argv], check=True, stdin=subprocess.DEVNULL)

    def _signal_all(self, i: int, number: signal.Signals) -> None:
        for pid in self._commands(i):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _lay_cables(self) -> None:
        bridge = f"tf{os.getpid()}"
        make_operator_network(bridge)
        self.inside = ["nsenter", f"--net=/run/netns/{bridge}"]
        for i in range(self._num_nodes):
            link = Link(bridge, f"{bridge}n{i}", f"port{i}", address_of(i))
            self.links.append(link)
            link.make()

    def _commands(self, i: int) -> dict[int, str]:
        """A node's processes and their command lines, zombies left out."""
        space = Path(f"/proc/{self._started[i].pid}/ns/pid_for_children").readlink()
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if text and (entry / "ns" / "pid").readlink() == space:
                    found[int(entry.name)] = text
        return found

    def _share_kernels(self, cache: Path) -> None:
        """The nodes are this machine: what one compiled for it, all may use."""
        cache.mkdir(parents=True)
        here = default_cache()
        here.mkdir(parents=True, exist_ok=True)
        (cache / "kernels").symlink_to(here)

    def _start(self, i: int, public: str) -> None:
        name, enter = f"node-{i}", []
        address = f"127.0.0.{i + 2}"
        if self._linked:
            address, enter = address_of(i), ["nsenter", f"--net=/run/netns/{self.links[i].machine}"]
        folder = self.folder / name
        (folder / "home" / ".ssh").mkdir(parents=True, mode=0o700)
        (folder / "over").mkdir()
        self._share_kernels(folder / "home" / ".cache" / "tileforge")
        (folder / "home" / ".ssh" / "authorized_keys").write_text(public + "\n", encoding="ascii")
        host_key = make_key(folder / "host_key")
        port = 22 if self._linked else free_port(address)
        text = _CONFIG.format(address=address, port=port, folder=folder, home=self.home)
        (folder / "sshd_config").write_text(text, encoding="utf-8")
        sha = hashlib.sha256((REPO / "bootstrap" / "requirements.lock").read_bytes()).hexdigest()
        state = {"schema_version": 1, "step": "done", "ok": True, "reason": None}
        state |= {"version": payload.__version__, "sha": sha}
        (folder / "bootstrap.json").write_text(json.dumps(state), encoding="utf-8")
        # Even when pytest itself is killed, no node stays behind.
        argv = ["setpriv", "--pdeathsig=KILL", "--", *enter]
        argv += ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        argv += ["sh", "-ec", _BOOT, "sh", str(folder), str(self.home), str(VENV), sys.prefix]
        started = subprocess.Popen(
            [*argv, str(SSHD), "linked" if self._linked else "", name, address],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._started.append(started)
        log = folder / "sshd.log"
        LOGS.append(log)
        wait_until(
            lambda: log.exists() and "listening" in log.read_text(encoding="utf-8"),
            what=f"sshd of {name}",
        )
        self._nodes.append(
            Node(
                name=name,
                address=address,
                ssh_port=port,
                host_keys=(host_key,),
                physical_cores=physical_cores() or 1,
                numa_domains=numa_domains() or 1,
                memory_gib=1.0,
            )
        )

    def _end(self) -> None:
        for i, started in enumerate(self._started):
            # Its child, the first process of the namespace, takes all others along.
            if started.poll() is None:
                self.kill_node(i)
        if self.inside:
            bridge = self.inside[-1].rpartition("/")[2]
            for namespace in [*(link.machine for link in self.links), bridge]:
                subprocess.run(["ip", "netns", "delete", namespace], check=False)
