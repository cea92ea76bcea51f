"""CONTRACT: facts about this machine that determine a run's speed, for people to read."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from payload.machines.cgroup_limits import CgroupLimits, read_limits
from payload.machines.machine import free_memory_bytes, total_memory_bytes

COMPILERS = ("g++", "clang++")
"""Compilers of the kernels, the preferred one first."""
INSTALL_COMPILER = "apt-get install g++"

_INSTRUCTIONS = {
    "AMX": ("amx_bf16",),
    "AVX-512 with bf16": ("avx512_bf16",),
    "AVX-512": ("avx512f",),
    "AVX2": ("avx2",),
    "bf16": ("bf16",),
    "SVE": ("sve",),
    "NEON": ("asimd",),
}
_IMPLIED = {
    "AVX-512 with bf16": ("AVX-512", "AVX2"),
    "AVX-512": ("AVX2",),
    "bf16": ("NEON",),
    "SVE": ("NEON",),
}
_ARM_CORES = {
    ("0x41", "0xd0c"): "Arm Neoverse-N1",
    ("0x41", "0xd40"): "Arm Neoverse-V1",
    ("0x41", "0xd49"): "Arm Neoverse-N2",
    ("0x41", "0xd4f"): "Arm Neoverse-V2",
    ("0x41", "0xd84"): "Arm Neoverse-V3",
    ("0x41", "0xd8e"): "Arm Neoverse-N3",
    ("0xc0", "0xac3"): "Ampere-1",
}
"""Names of server cores by implementer and part. Source: util-linux, sys-utils/lscpu-arm.c."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Facts about this machine; None or an empty text means unknown or absent."""

    system: str
    """Name of the operating system: `Linux`, `Darwin`."""
    cpu: str
    """Name of the CPU, or the architecture."""
    instructions: tuple[str, ...]
    """Instruction sets for matmuls, the fastest first."""
    cpus: int
    """Logical CPUs of the machine."""
    usable_cpus: int
    """Logical CPUs that this process may use."""
    limits: CgroupLimits
    total_memory_bytes: int
    free_memory_bytes: int | None
    free_disk_bytes: int
    """Free space in the current folder, where runs are written."""
    compiler: str | None
    libc: tuple[str, str]
    """Name and version of the C library; both are empty on systems without glibc."""
    huge_pages: str | None
    """Setting of transparent huge pages: `always`, `madvise` or `never`."""


def read_machine_facts(
    *, path: str | None, sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")
) -> MachineFacts:
    """Return the facts about this machine; `path` is the PATH of the run."""
    cpu, flags = read_cpu(proc_root / "cpuinfo")
    cpus = os.cpu_count() or 1
    has_affinity = hasattr(os, "sched_getaffinity")
    return MachineFacts(
        system=platform.system(),
        cpu=cpu or platform.machine(),
        instructions=instructions_of(flags),
        cpus=cpus,
        usable_cpus=len(os.sched_getaffinity(0)) if has_affinity else cpus,
        limits=read_limits(sys_root=sys_root, proc_root=proc_root),
        total_memory_bytes=total_memory_bytes(),
        free_memory_bytes=free_memory_bytes(sys_root=sys_root, proc_root=proc_root),
        free_disk_bytes=shutil.disk_usage(Path.cwd()).free,
        compiler=find_compiler(path),
        libc=platform.libc_ver(),
        huge_pages=_huge_pages(sys_root / "kernel/mm/transparent_hugepage/enabled"),
    )


def find_compiler(path: str | None = None) -> str | None:
    """Return the C++ compiler that builds the kernels; `path` replaces PATH."""
    found = (shutil.which(name, path=path) for name in COMPILERS)
    return next((each for each in found if each), None)


def instructions_of(flags: Collection[str]) -> tuple[str, ...]:
    """Return the instruction sets for matmuls; omit a set that another set includes."""
    found = [name for name, needed in _INSTRUCTIONS.items() if {*needed} <= {*flags}]
    implied = {other for name in found for other in _IMPLIED.get(name, ())}
    return tuple(name for name in found if name not in implied)


def read_cpu(cpuinfo: Path) -> tuple[str, tuple[str, ...]]:
    """Return the name and the flags of the first CPU; both can be missing."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "", ()
    values: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), value.strip())
    # On Arm, Linux writes `Features`, and numbers instead of a name.
    flags = values.get("flags") or values.get("Features") or ""
    name = values.get("model name") or _arm_name(
        values.get("CPU implementer", ""), values.get("CPU part", "")
    )
    return name, tuple(flags.split())


def _arm_name(implementer: str, part: str) -> str:
    """Return the name of an Arm core, or its numbers if it is not in the table."""
    if not part:
        return ""
    return _ARM_CORES.get((implementer, part), f"Arm implementer {implementer} part {part}")


def _huge_pages(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="ascii")
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or None
