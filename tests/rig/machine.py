"""A machine with a real systemd, cloud-init and sshd, and its own network, disk and host keys."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rig.host import RigError, own_cgroups, pids_in_network, run, wait_until
from tests.rig.network import Link
from tests.support.waiting import DEADLINE_S

_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Joins each control group named before `--`, then executes the command after it.
_IN_CGROUPS = 'while [ "$1" != -- ]; do echo $$ >"$1/cgroup.procs"; shift; done; shift; exec "$@"'


@dataclass(slots=True)
class Machine:
    """A machine of a rig, which creates and ends it."""

    name: str
    full_name: str
    """Name of the machine and its network namespace, unique on this host."""
    link: Link
    folder: Path
    binds: tuple[str, ...]
    """Folders of the host that are mounted read-only, each as `HOST_PATH:MACHINE_PATH`."""
    shared: tuple[str, ...] = ()
    """Folders of the host that the machine can write to."""
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def address(self) -> str:
        """The machine's address for the operator and the other machines."""
        return self.link.address

    @property
    def root(self) -> Path:
        """Path of the machine's file system on the host."""
        return self.folder / "root"

    def mount(
        self, layers: Sequence[Path], *, user_data: str, hosts: str, disk_mib: int | None
    ) -> None:
        """Mount its disk over the layers, the uppermost first, with cloud-init's seed.

        `disk_mib` is its writable size; None means all space of the host.
        """
        disk = self.folder / "disk"
        disk.mkdir(parents=True)
        if disk_mib is not None:
            run(["mount", "-t", "tmpfs", "-o", f"size={disk_mib}m", self.full_name, disk])
        upper, work = disk / "upper", disk / "work"
        for path in (self.root, upper, work):
            path.mkdir()
        lower = ":".join(map(str, layers))
        # volatile: otherwise each unmount flushes everything to the host's disk.
        options = f"lowerdir={lower},upperdir={upper},workdir={work},volatile"
        run(["mount", "-t", "overlay", self.full_name, "-o", options, self.root])
        seed = self.root / "var/lib/cloud/seed/nocloud"
        seed.mkdir(parents=True)
        (seed / "user-data").write_text(user_data, encoding="utf-8")
        meta = f"instance-id: {self.full_name}\nlocal-hostname: {self.name}\n"
        (seed / "meta-data").write_text(meta, encoding="utf-8")
        (self.root / "etc/hosts").write_text(hosts, encoding="utf-8")

    def start(self) -> None:
        """Power on and wait until systemd runs."""
        self.power_on()
        self.wait_for_systemd()

    def power_on(self) -> None:
        """Start the machine without waiting."""
        cgroups = own_cgroups(self.full_name)
        for group in cgroups:
            group.mkdir(exist_ok=True)
        nspawn = ["systemd-nspawn", "--quiet", "--boot", f"--directory={self.root}"]
        nspawn += [f"--machine={self.full_name}", "--register=no", "--link-journal=no"]
        nspawn += ["--keep-unit"] if cgroups else []
        nspawn += [f"--network-namespace-path=/run/netns/{self.link.machine}"]
        nspawn += ["--capability=CAP_NET_ADMIN", "--resolv-conf=off", "--suppress-sync=yes"]
        nspawn += ["--console=read-only", *(f"--bind-ro={bind}" for bind in self.binds)]
        nspawn += [f"--bind={bind}" for bind in self.shared]
        launcher = ["sh", "-c", _IN_CGROUPS, "sh", *map(str, cgroups), "--"]
        with (self.folder / "console.log").open("ab") as console:
            self._process = subprocess.Popen(
                [*launcher, *nspawn],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A machine's administrator can set its network parameters.
                env={**os.environ, "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network"},
            )

    def wait_for_systemd(self) -> None:
        """Wait until systemd runs."""
        wait_until(self._answers, what=f"{self.name}: systemd")

    def wait_for_ssh(self) -> None:
        """Wait until sshd listens."""
        wait_until(self._listens_on_22, what=f"{self.name}: sshd")

    def exec(
        self, argv: Sequence[str], *, check: bool = True, timeout_s: float = DEADLINE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as root on the machine. Raises RigError if it fails and `check` is true."""
        done = subprocess.run(
            [*self._enter(), *argv],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode:
            raise RigError(
                f"{self.name}: {' '.join(argv)}: exit status {done.returncode}: "
                f"{(done.stderr + done.stdout)[-2000:].strip()}"
            )
        return done

    def start_service(
        self, name: str, argv: Sequence[str], *, env: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """Start a command that ends with all its processes, as a container does.

        It runs as root with only `env` as its environment; the returned process has its output.
        """
        service = ["systemd-run", "--quiet", "--pipe", "--wait", "--collect", f"--unit={name}"]
        service += [f"--setenv={key}={value}" for key, value in env.items()]
        return subprocess.Popen(
            [*self._enter(), *service, "--", *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def kill_service(self, name: str) -> None:
        """Kill all processes of a service, if it runs."""
        self.exec(["systemctl", "kill", "--signal=KILL", name], check=False)

    def host_keys(self) -> tuple[str, ...]:
        """Return its public host keys, each as `type base64`."""
        files = sorted((self.root / "etc/ssh").glob("ssh_host_*_key.pub"))
        return tuple(" ".join(path.read_text(encoding="utf-8").split()[:2]) for path in files)

    def live_root(self) -> Path:
        """Return the file system as the machine sees it, including file systems in memory."""
        leader = self._leader()
        if leader is None:
            raise RigError(f"{self.name} is not running")
        return Path(f"/proc/{leader}/root")

    def user_name(self, uid: int) -> str:
        """Return the name of a user id on the machine."""
        rows = (self.root / "etc/passwd").read_text(encoding="utf-8").splitlines()
        names = {int(row.split(":")[2]): row.split(":")[0] for row in rows}
        return names.get(uid, str(uid))

    def pids(self) -> list[int]:
        """Return the host's ids of all its processes."""
        return pids_in_network(self.link.machine)

    def bootstrap_state(self) -> dict[str, Any] | None:
        """Return its bootstrap's last state, or None before the first."""
        path = self.root / "var/lib/tileforge/bootstrap.json"
        if not path.exists():
            return None
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return state

    def cut_link(self) -> None:
        """Drop all traffic of its link silently."""
        self.link.unplug()

    def restore_link(self) -> None:
        """Undo `cut_link`."""
        self.link.plug()

    def cut_from(self, other: Machine) -> None:
        """Drop traffic to the other machine silently; other traffic continues."""
        self.link.misdirect(other.address)

    def restore_to(self, other: Machine) -> None:
        """Undo `cut_from`."""
        self.link.redirect(other.address)

    def limit(self, *, mbit_per_s: float) -> None:
        """Limit the rate of its link, each way."""
        self.link.limit(mbit_per_s)

    def unlimit(self) -> None:
        """Undo `limit`."""
        self.link.unlimit()

    def freeze(self) -> None:
        """Stop every process; its connections stay open without traffic."""
        wait_until(lambda: self._signal(signal.SIGSTOP, but="T"), what="freeze")

    def thaw(self) -> None:
        """Undo `freeze`."""
        self._signal(signal.SIGCONT, but="")

    def kill(self) -> None:
        """Power it off; the link goes down first, so that no peer gets a closing packet."""
        self.cut_link()
        wait_until(lambda: self._signal(signal.SIGKILL, but="Z"), what="kill")
        self.wait_for_end()

    def stop(self) -> None:
        """Shut it down regularly."""
        assert self._process is not None, "it was not started"
        self._process.terminate()
        self.wait_for_end()

    def reboot(self) -> None:
        """Shut it down and start it again with the same disk, and wait until SSH answers."""
        self.stop()
        self.start()
        self.wait_for_ssh()

    def wait_for_end(self) -> None:
        """Wait until it is off. Raises RigError after the timeout."""
        if self._process is None:
            return
        try:
            self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise RigError(f"{self.name} did not end within {DEADLINE_S:g} s") from None

    def console(self) -> str:
        """Return the end of its boot output."""
        path = self.folder / "console.log"
        return path.read_text(encoding="utf-8", errors="replace")[-4000:]

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RigError(f"{self.name} ended while it booted:\n{self.console()}")
        if self._leader() is None:
            return False
        state = self.exec(["systemctl", "is-system-running"], check=False).stdout.strip()
        return state in {"starting", "running", "degraded"}

    def _listens_on_22(self) -> bool:
        leader = self._leader()
        if leader is None:
            return False
        rows = Path(f"/proc/{leader}/net/tcp").read_text(encoding="ascii").splitlines()[1:]
        sockets = [row.split() for row in rows]
        # Local address and port, and the state: 0A is listening.
        return any(row[1].endswith(":0016") and row[3] == "0A" for row in sockets)

    def _enter(self) -> list[str]:
        leader = self._leader()
        if leader is None:
            raise RigError(f"{self.name} is not running")
        namespaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        enter = ["nsenter", f"--target={leader}", *namespaces, "--"]
        return [*enter, "env", "-i", "--chdir=/", _PATH, "HOME=/root", "LANG=C.UTF-8"]

    def _leader(self) -> int | None:
        """Return the host's id of its process 1."""
        for pid in pids_in_network(self.link.machine):
            numbers = _status(pid).get("NSpid", "").split()
            if len(numbers) > 1 and numbers[-1] == "1":
                return pid
        return None

    def _signal(self, number: signal.Signals, *, but: str) -> bool:
        """Signal all processes except those in state `but`; return True if there were no others."""
        states = {pid: _status(pid).get("State", "Z")[0] for pid in self.pids()}
        targets = [pid for pid, state in states.items() if state != but and state != "Z"]
        for pid in targets:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        return not targets


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
