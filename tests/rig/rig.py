"""A rig: machines on a separate network, from user-data to sshd, which leaves nothing behind."""

from __future__ import annotations

import fcntl
import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil

from payload.kernels.build import default_cache
from payload.machines.inventory import Access, ClusterInventory, Node
from tests.rig.cache import cache_dir, locked
from tests.rig.cleanup import lock_of, remove_leftovers
from tests.rig.host import RigError, missing, wait_until
from tests.rig.image import PACKAGES_ON_MACHINE, SUITE, root_image
from tests.rig.machine import Machine
from tests.rig.network import Link, address_of, joined, make_operator_network
from tests.rig.wheelhouse import folder_on_machine, pip_conf, wheelhouse
from tests.rig.whole import Whole
from tests.support.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]

# In memory: a disk mounted with `discard` can take 4 ms per deleted file, minutes per machine.
_PLENTY_MIB = 8192
_FILLED_MIB = 2560
"""Memory for a machine's writes: its environment takes 2 GB."""
_REMOVAL_S = 900


class Rig(Whole):
    """Boots a machine per user-data: `with Rig([text, text]) as rig: rig.machines[0]...`.

    They are named node-0, node-1, ...; the first is the head. The host's own network cannot reach
    them: the operator's commands run with `operator_argv` or within `joined()`. The rig ends with
    the `with` block, or when this process ends or is killed.
    """

    def __init__(
        self,
        user_data: Sequence[str],
        *,
        layers: Sequence[Path] = (),
        disk_mib: int | None = None,
        in_memory: bool = True,
        wheels: Sequence[str] = ("train",),
        without_index: Collection[int] = (),
        binds: Sequence[str] = (),
        shared: Sequence[str] = (),
        suite: str = SUITE,
    ) -> None:
        """`layers`: disk layers over the image; `wheels`: extras whose wheels machines get.

        `disk_mib`: writable size of each machine in the host's memory; None means a large disk, in
        memory if there is room, otherwise on the host's disk.
        `in_memory`: False means a large disk on the host's disk, for more than `_PLENTY_MIB`.
        `without_index`: machines whose pip has no package index; the others use the wheelhouse as
        their index.
        `binds`, `shared`: folders of this host that all machines can read, or also write to
        (`HOST_PATH:MACHINE_PATH`).
        `suite`: release of Debian.
        """
        self.user_data = list(user_data)
        self.name = f"tfrig-{secrets.token_hex(3)}"
        self.machines: list[Machine] = []
        self._layers = layers
        plenty_mib = _plenty_mib(machines=len(user_data)) if in_memory else None
        self._disk_mib = disk_mib or plenty_mib
        self._wheels = wheels
        self._without_index = without_index
        self._binds = binds
        self._shared = shared
        self._suite = suite
        self._reaper: subprocess.Popen[bytes] | None = None

    def _make(self) -> None:
        """Boot the machines, where cloud-init then starts. Raises RigError."""
        problem = missing()
        if problem:
            raise RigError(problem)
        remove_leftovers()
        image = root_image(self._suite)
        binds = [f"{image / 'packages'}:{PACKAGES_ON_MACHINE}", *self._binds]
        binds += [f"{wheelhouse(each)}:{folder_on_machine(each)}" for each in self._wheels]
        folder = self._start_reaper()
        make_operator_network(self.name)
        self._make_machines(folder, binds=tuple(binds))
        for index, machine in enumerate(self.machines):
            layers, user_data = [*self._layers, image / "root"], self.user_data[index]
            hosts = self._hosts()
            machine.mount(layers, user_data=user_data, hosts=hosts, disk_mib=self._disk_mib)
            if platform.freedesktop_os_release().get("VERSION_CODENAME") == self._suite:
                _share_kernels(machine.root / "home/trainer")
            if self._wheels and index not in self._without_index:
                (machine.root / "etc/pip.conf").write_text(pip_conf(self._wheels), encoding="ascii")
            machine.power_on()
        for machine in self.machines:
            machine.wait_for_systemd()

    def wait_for_bootstrap(self, *, timeout_s: float = DEADLINE_S) -> dict[str, dict[str, Any]]:
        """Wait until every bootstrap has ended; return the last state of each machine."""

        def ended() -> bool:
            return all((m.bootstrap_state() or {}).get("ok") is not None for m in self.machines)

        try:
            wait_until(ended, what="bootstrap of all machines", timeout_s=timeout_s)
        except RigError as error:
            states = {machine.name: machine.bootstrap_state() for machine in self.machines}
            raise RigError(f"{error}; {states}") from None
        return {machine.name: machine.bootstrap_state() or {} for machine in self.machines}

    def operator_argv(self, argv: Sequence[str | Path]) -> list[str]:
        """Return the command that runs `argv` on this host in the rig's network."""
        return ["nsenter", f"--net=/run/netns/{self.name}", "--", *map(str, argv)]

    def joined(self) -> AbstractContextManager[None]:
        """Move this thread, and threads that it starts, into the rig's network."""
        return joined(self.name)

    def inventory(self, *, physical_cores: int = 1, memory_gib: float = 4.0) -> ClusterInventory:
        """Return the machines' inventory with their current host keys."""
        nodes = tuple(
            Node(
                name=machine.name,
                address=machine.address,
                host_keys=machine.host_keys(),
                physical_cores=physical_cores,
                memory_gib=memory_gib,
            )
            for machine in self.machines
        )
        return ClusterInventory(
            cluster=self.name,
            source="file",
            ssh_user="trainer",
            access=Access(kind="direct"),
            bucket=None,
            nodes=nodes,
        )

    def _start_reaper(self) -> Path:
        """Make the rig's folder, locked while this process or the reaper runs."""
        folder = cache_dir() / "live" / self.name
        with locked(cache_dir() / "live.lock"):
            folder.parent.mkdir(exist_ok=True)
            lock = os.open(lock_of(folder), os.O_CREAT | os.O_RDWR)
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder.mkdir()
        self._reaper = subprocess.Popen(
            [sys.executable, "-m", "tests.rig.cleanup", folder],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            pass_fds=[lock],
            start_new_session=True,
        )
        os.close(lock)
        return folder

    def _make_machines(self, folder: Path, *, binds: tuple[str, ...]) -> None:
        for index in range(len(self.user_data)):
            name = f"node-{index}"
            full_name = f"{self.name}-{name}"
            link = Link(self.name, full_name, port=name, address=address_of(index))
            link.make()
            folders = (binds, tuple(self._shared))
            self.machines.append(Machine(name, full_name, link, folder / name, *folders))

    def _hosts(self) -> str:
        """Let every machine resolve every name, as in the cloud's DNS."""
        lines = [f"{machine.address} {machine.name}" for machine in self.machines]
        return "\n".join(["127.0.0.1 localhost", *lines]) + "\n"

    def _end(self) -> None:
        """Let the reaper remove everything, as if this process were killed."""
        if self._reaper is None or self._reaper.stdin is None:
            return
        self._reaper.stdin.close()
        status = self._reaper.wait(_REMOVAL_S)
        for machine in self.machines:
            machine.wait_for_end()
        if status:
            raise RigError(f"{self.name}: could not be removed completely; see above")


def _share_kernels(home: Path) -> None:
    """Copy this host's built kernels into a prepared home: same CPU, same libraries.

    A home from nothing does not exist yet; such a machine builds them, as does one with another
    torch.
    """
    if not home.is_dir():
        return
    owner, cache = home.stat(), home / ".cache/tileforge/kernels"
    cache.mkdir(parents=True, exist_ok=True)
    for library in default_cache().glob("*.so"):
        shutil.copy(library, cache)
    for path in (home / ".cache", cache.parent, cache, *cache.iterdir()):
        path.chmod(0o700)
        os.chown(path, owner.st_uid, owner.st_gid)


def _plenty_mib(*, machines: int) -> int | None:
    """Return the size of each machine's disk if all fit into the host's memory, or None."""
    available_mib = psutil.virtual_memory().available / 2**20
    return _PLENTY_MIB if available_mib > machines * _FILLED_MIB else None
