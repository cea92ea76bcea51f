"""A cluster that is this machine: what it has, its supervisor's start, signals to it."""

from __future__ import annotations

import ctypes.util
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import which

import payload
from payload.errors import PreflightError, UsageError
from payload.inventory import RANK_PORTS, Access, ClusterInventory, Node
from payload.launch.launchers.base import Launcher, Reach
from payload.launch.launchers.registry import AUTO
from payload.launch.plan import rank_program
from payload.launch.ranks import Domain
from payload.orchestrate.node import control
from payload.results import RunPaths, StopWish
from payload.run_config import DtypeChoice
from payload.step_time import LOOPBACK_BYTES_PER_S

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This machine, as far as this process may use it."""

    name: str
    domains: tuple[Domain, ...]
    memory_bytes: int

    def num_cores(self) -> int:
        """Physical cores that may be used."""
        return sum(len(domain.cores) for domain in self.domains)

    def inventory(self) -> ClusterInventory:
        """The cluster of this one node."""
        node = Node(
            name=self.name,
            address="127.0.0.1",
            physical_cores=self.num_cores(),
            numa_domains=len(self.domains),
            memory_gib=round(self.memory_bytes / 2**30, 1),
        )
        return ClusterInventory(
            cluster="local",
            source="local",
            ssh_user="",
            access=Access(kind="local"),
            bucket=None,
            nodes=(node,),
        )


def discover(*, sys_root: Path = Path("/sys")) -> Machine:
    """Look at this machine."""
    name = socket.gethostname().partition(".")[0] or platform.node() or "localhost"
    if not hasattr(os, "sched_getaffinity"):
        cores = tuple(range(os.cpu_count() or 1))
        domains: tuple[Domain, ...] = (Domain(id=0, cores=cores),)
    else:
        domains = read_domains(
            sys_root, allowed=os.sched_getaffinity(0), quota=cpu_quota(sys_root / "fs/cgroup")
        )
    return Machine(name=name, domains=domains, memory_bytes=memory_limit(sys_root / "fs/cgroup"))


def read_domains(
    sys_root: Path, *, allowed: Collection[int], quota: float | None = None
) -> tuple[Domain, ...]:
    """NUMA domains with one logical CPU for each physical core in `allowed`.

    `quota` is the number of CPUs that a container may use at a time; more cores than that are not
    planned for. A domain without usable cores is left out.
    """
    cpus = sys_root / "devices/system/cpu"
    cores = sorted({min(_siblings(cpus, cpu, allowed)) for cpu in allowed})
    if quota is not None:
        cores = cores[: max(1, int(quota))]
    found = []
    for folder in sorted((sys_root / "devices/system/node").glob("node[0-9]*")):
        members = set(parse_cpu_list((folder / "cpulist").read_text(encoding="ascii")))
        mine = tuple(core for core in cores if core in members)
        if mine:
            found.append(Domain(id=int(folder.name.removeprefix("node")), cores=mine))
    found.sort(key=lambda domain: domain.id)
    return tuple(found) or (Domain(id=0, cores=tuple(cores)),)


def parse_cpu_list(text: str) -> list[int]:
    """The numbers in the kernel's `0-3,8,10-11`."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def cpu_quota(cgroup: Path) -> float | None:
    """CPUs' worth of time that a container's cgroup allows, or None without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except OSError:
            return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def memory_limit(cgroup: Path) -> int:
    """Bytes of memory: the machine's, or the container's where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            total = min(total, int((cgroup / name).read_text(encoding="ascii")))
        except (OSError, ValueError):
            # Absent, or `max`.
            continue
    return total


def free_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Memory that programs can have now without swapping, or None where the kernel does not say."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _siblings(cpus: Path, cpu: int, allowed: Collection[int]) -> list[int]:
    """The logical CPUs of one physical core that may be used; at least `cpu` itself."""
    topology = cpus / f"cpu{cpu}" / "topology"
    for name in ("core_cpus_list", "thread_siblings_list"):
        try:
            text = (topology / name).read_text(encoding="ascii")
        except OSError:
            continue
        return [other for other in parse_cpu_list(text) if other in allowed] or [cpu]
    return [cpu]


_TCMALLOC = ("tcmalloc", "tcmalloc_minimal")
_KILL_S = 10.0


class LocalAccess:
    """This machine as a cluster of one node."""

    python = sys.executable
    link_bytes_per_s = LOOPBACK_BYTES_PER_S
    launcher = AUTO

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env

    def environment(self) -> dict[str, str]:
        """The operator's own environment, for programs that run on this machine."""
        return dict(self._env)

    def interfaces(self, inventory: ClusterInventory) -> Mapping[str, str]:
        """Loopback."""
        return {node.name: LOOPBACK for node in inventory.nodes}

    def peak_flops_per_s(self, choice: DtypeChoice) -> float | None:
        """Not kept: the trainer measures it at its start."""
        return None

    def free_memory_bytes(self) -> int | None:
        """What the system could give without swapping, or None where it does not say."""
        return free_memory_bytes()

    def program(self, paths: RunPaths) -> tuple[str, ...]:
        """What each rank runs."""
        return rank_program(python=self.python, run_dir=paths.root)

    def executable(self, launcher: Launcher) -> str:
        """Return the launcher's path. Raises PreflightError that says why there is none."""
        unfit = launcher.unfit(sys.platform, platform.machine())
        if unfit is not None:
            raise PreflightError(f"{unfit}.")
        if launcher.program is None:
            return self.python
        beside = Path(sys.executable).parent / launcher.program
        on_path = which(launcher.program, path=self._path())
        found = str(beside) if os.access(beside, os.X_OK) else on_path
        if found is None:
            raise PreflightError(
                f"no {launcher.program} beside {sys.executable} nor on PATH. Install it: "
                f"{launcher.install}"
            )
        # A script may call its helper, which lies beside it, by its bare name.
        path = f"{Path(found).parent}{os.pathsep}{self._path()}"
        version = subprocess.run(
            [found, "--version"], capture_output=True, text=True, check=False, env={"PATH": path}
        )
        if launcher.version not in version.stdout:
            first = (version.stdout or version.stderr).strip().partition("\n")[0]
            raise PreflightError(
                f"{found} prints {first or 'no version'!r}, which is not {launcher.version}. "
                f"Install it: {launcher.install}"
            )
        return found

    def reach(self) -> Reach:
        """Return loopback, without ssh."""
        return Reach(interface=LOOPBACK)

    def python_path(self) -> str | None:
        """Where the payload package lies, or None when it is installed."""
        root = Path(payload.__file__).parent.parent
        installed = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
        if root in installed:
            return None
        known = self._env.get("PYTHONPATH")
        return f"{root}{os.pathsep}{known}" if known else str(root)

    def tcmalloc(self) -> str:
        """Path of the tcmalloc library. Raises PreflightError with the line that installs it."""
        for name in _TCMALLOC:
            found = ctypes.util.find_library(name)
            if found:
                return found
        raise PreflightError(
            "launch.malloc = 'tcmalloc', but this machine has no libtcmalloc. Install it: sudo "
            "apt-get install libtcmalloc-minimal4 (or use launch.malloc = 'tuned')."
        )

    def reserve_port(self) -> socket.socket:
        """A socket that keeps a free port for the ranks; close it once a supervisor holds it.

        Two runs that start at once get different ports.
        """
        for port in random.sample(RANK_PORTS, k=100):
            holder = _try_port(port)
            if holder is not None:
                return holder
        raise PreflightError(
            f"none of 100 ports between {RANK_PORTS.start} and {RANK_PORTS.stop} is free. Stop "
            "what holds them."
        )

    def supervisor_words(self) -> list[str]:
        """Return options of the supervisor that come from where it runs."""
        return []

    def start_supervisor(
        self, paths: RunPaths, *, detached: bool, grace_s: float
    ) -> subprocess.Popen[bytes]:
        """Start the run's supervisor in a session of its own.

        Unless detached, it stops the run when this process dies.
        """
        owner = [] if detached else ["--owner-pid", str(os.getpid())]
        command = [self.python, "-m", "payload.supervise", "--run-dir", str(paths.root), *owner]
        command += self.supervisor_words()
        paths.logs.mkdir(parents=True, exist_ok=True)
        env = dict(self._env)
        python_path = self.python_path()
        if python_path:
            env["PYTHONPATH"] = python_path
        with paths.supervisor_log.open("ab") as log, control.held_back(control.STOP_SIGNALS):
            return subprocess.Popen(
                [*command, "--grace", str(grace_s)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def signal_supervisor(
        self,
        paths: RunPaths,
        numbers: Sequence[signal.Signals],
        *,
        wish: StopWish,
    ) -> bool:
        """Send signals to the run's supervisor, with what it finds then; tell whether it lives.

        Raises UsageError when it is another user's.
        """
        try:
            answer = control.send(paths.root, [int(number) for number in numbers], asdict(wish))
        except PermissionError:
            raise UsageError(
                f"run {paths.run_id} belongs to another user. Stop it as that user."
            ) from None
        return bool(answer["alive"])

    def end_at_once(self, paths: RunPaths) -> None:
        """Kill the run's supervisor, which does not answer, and every process of the run."""
        control.send(paths.root, [int(signal.SIGKILL)])
        ends = time.monotonic() + _KILL_S
        while control.left(paths.root, kill=True)["pids"] and time.monotonic() < ends:
            time.sleep(0.1)

    def _path(self) -> str:
        return self._env.get("PATH", os.defpath)


def _try_port(port: int) -> socket.socket | None:
    """A socket bound to `port` if nobody else is, or None."""
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        holder.bind(("0.0.0.0", port))
    except OSError:
        holder.close()
        return None
    # Only now, so that this bind shared with nobody; from here on the supervisor and rank 0 may
    # bind as well, see payload.supervise.supervisor.hold_port.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder
