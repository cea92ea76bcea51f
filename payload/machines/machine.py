"""CONTRACT: the cores, NUMA domains and memory that a process on this machine can use."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from payload.machines.cgroup_limits import read_limits
from payload.machines.inventory import Access, ClusterInventory, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """One NUMA domain of a node, with its usable physical cores."""

    id: int
    """The operating system's number of the domain."""
    cores: tuple[int, ...]
    """Usable physical cores, each as the number of one of its logical CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The resources of this machine that this process can use."""

    name: str
    domains: tuple[Domain, ...]
    memory_bytes: int

    def num_cores(self) -> int:
        """Return the number of usable physical cores."""
        return sum(len(domain.cores) for domain in self.domains)

    def inventory(self) -> ClusterInventory:
        """Return an inventory with this machine as its only node."""
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


def hostname() -> str:
    """Return this machine's name, without its domain."""
    return socket.gethostname().partition(".")[0] or platform.node() or "localhost"


def discover(*, sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> Machine:
    """Return the usable resources of this machine, within the limits of a container."""
    limits = read_limits(sys_root=sys_root, proc_root=proc_root)
    if not hasattr(os, "sched_getaffinity"):
        cores = tuple(range(os.cpu_count() or 1))
        domains: tuple[Domain, ...] = (Domain(id=0, cores=cores),)
    else:
        domains = read_domains(sys_root, allowed=os.sched_getaffinity(0), quota=limits.cpus)
    total = total_memory_bytes()
    return Machine(
        name=hostname(), domains=domains, memory_bytes=min(total, limits.memory_bytes or total)
    )


def read_domains(
    sys_root: Path, *, allowed: Collection[int], quota: float | None = None
) -> tuple[Domain, ...]:
    """Return the NUMA domains, with one logical CPU for each physical core in `allowed`.

    `quota` is the CPU limit of a container. It also limits the number of cores. Domains without
    usable cores are left out.
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
    """Return the numbers in a list in the kernel's format, such as `0-3,8,10-11`."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def total_memory_bytes() -> int:
    """Return the memory of the machine, which can be more than this process may use."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory_bytes(
    *, sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")
) -> int | None:
    """Return the memory in bytes that this process can get without swapping, or None if unknown."""
    try:
        lines = (proc_root / "meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit = read_limits(sys_root=sys_root, proc_root=proc_root).free_memory_bytes
    return min([*found, *([] if limit is None else [limit])], default=None)


def _siblings(cpus: Path, cpu: int, allowed: Collection[int]) -> list[int]:
    """Return the usable logical CPUs of the physical core of `cpu`, including `cpu`."""
    topology = cpus / f"cpu{cpu}" / "topology"
    for name in ("core_cpus_list", "thread_siblings_list"):
        try:
            text = (topology / name).read_text(encoding="ascii")
        except OSError:
            continue
        return [other for other in parse_cpu_list(text) if other in allowed] or [cpu]
    return [cpu]
