"""Machines as engines give them to a job: containers on a network of their own, with one storage.

A pod is a process in its own network, mount and process namespaces. It has this machine's programs,
as an image would, and its own /etc, /mnt, /tmp and home. Needs root.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.rig.network import Link, address_of, make_operator_network
from tests.rig.whole import Whole
from tests.support.launching import BIN, REPO

# $1 the pod's folder, $2 the storage, $3 the pod's name; what follows is its command.
_BOOT = """\
mount -t tmpfs tmpfs "$1/over"
for folder in etc "${HOME#/}"; do
    mkdir "$1/over/$folder" "$1/over/work-$folder"
    upper="$1/over/$folder,workdir=$1/over/work-$folder"
    mount -t overlay -o "lowerdir=/$folder,upperdir=$upper" overlay "/$folder"
done
mount -t tmpfs tmpfs /mnt
mkdir /mnt/tileforge
mount --bind "$2" /mnt/tileforge
mount -t tmpfs tmpfs /run
mount -t sysfs sysfs /sys
cp "$1/hosts" /etc/hosts
: >/etc/resolv.conf
hostname "$3"
rm -rf /etc/mpi
cp -R "$1/mpi" /etc/mpi
cp -R "$1/secret" /etc/mpijob-ssh
chmod -R a+r /etc/mpijob-ssh
mount -t tmpfs tmpfs /tmp
shift 3
exec "$@"
"""


class Pods(Whole):
    """Pods by their names; a context manager."""

    def __init__(self, folder: Path, names: Mapping[str, Sequence[str]]) -> None:
        """`names`: what each pod is called, and the other names by which it is found."""
        self.storage = folder / "storage"
        self.names = list(names)
        self._folder = folder
        self._hosts = "127.0.0.1 localhost\n" + "".join(
            f"{address_of(i)} {' '.join([*others, name])}\n"
            for i, (name, others) in enumerate(names.items())
        )
        self._bridge = f"tfx{os.getpid()}"
        self._links: list[Link] = []
        self._started: list[subprocess.Popen[str]] = []

    def address_of(self, name: str) -> str:
        """A pod's address."""
        return address_of(self.names.index(name))

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        secret: Path | None = None,
        hostfile: str = "",
    ) -> subprocess.Popen[str]:
        """Start a pod's command; `secret` is the folder that is mounted for its ssh."""
        folder = self._folder / f"{name}-{len(self._started)}"
        for part in ("over", "mpi", "secret"):
            (folder / part).mkdir(parents=True)
        (folder / "hosts").write_text(self._hosts, encoding="utf-8")
        (folder / "mpi" / "hostfile").write_text(hostfile, encoding="utf-8")
        (folder / "secret" / "none").touch()
        if secret is not None:
            for file in secret.iterdir():
                (folder / "secret" / file.name).write_bytes(file.read_bytes())
        link = self._links[self.names.index(name)]
        command = [
            "setpriv",
            "--pdeathsig=KILL",
            "--",
            "nsenter",
            f"--net=/run/netns/{link.machine}",
        ]
        command += ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child"]
        command += ["--mount-proc", "sh", "-ec", _BOOT, "sh", str(folder), str(self.storage), name]
        image = {
            "PATH": f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(REPO),
            "HOME": str(Path.home()),
        }
        started = subprocess.Popen(
            [*command, *argv],
            env={**image, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(started)
        return started

    def _make(self) -> None:
        self.storage.mkdir(parents=True)
        make_operator_network(self._bridge)
        for i in range(len(self.names)):
            link = Link(self._bridge, f"{self._bridge}n{i}", f"port{i}", address_of(i))
            self._links.append(link)
            link.make()

    def _end(self) -> None:
        for started in self._started:
            # The first process of its namespace takes all others along.
            started.kill()
            started.wait(30)
        for namespace in [*(link.machine for link in self._links), self._bridge]:
            subprocess.run(["ip", "netns", "delete", namespace], check=False)


def job_secret(folder: Path) -> Path:
    """What the MPI Operator makes for a job: an ECDSA key pair that is let in by itself."""
    folder.mkdir()
    kind = ["-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-C", ""]
    subprocess.run(["ssh-keygen", "-q", *kind, "-f", str(folder / "id_rsa")], check=True)
    (folder / "authorized_keys").write_bytes((folder / "id_rsa.pub").read_bytes())
    return folder


def can_make_pods() -> bool:
    """Whether root may make namespaces here."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    tried = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    return subprocess.run(tried, check=False, stderr=subprocess.DEVNULL).returncode == 0
