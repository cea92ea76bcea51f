"""Google's machine types with AMX or GPUs, and their features.

Sources of shapes, bandwidth and NUMA domains: Cyclenerd/google-cloud-compute-machine-types,
instances/series/{c3,c4,h3}.sql; GoogleCloudPlatform/cluster-toolkit at 10470803, util.py. Both were
read on 2026-11-21. Source of families with compact placement:
https://cloud.google.com/kubernetes-engine/docs/how-to/compact-placement, read on 2026-11-22.

GPU types (g2, a2, a3): shapes from payload/pricing/prices/machines.csv; the rest from
https://cloud.google.com/compute/docs/accelerator-optimized-machines. The page lists no NUMA
domains, so two are assumed for 96 vCPUs or more.
"""

from __future__ import annotations

from dataclasses import dataclass

from payload.core.errors import ConfigError
from payload.machines.gpu_catalog import SPOT_ALONE, Gpus, gpus_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineType:
    """A machine type."""

    name: str
    family: str
    vcpus: int
    physical_cores: int
    memory_gib: float
    numa_domains: int
    disk_types: tuple[str, ...]
    """Supported boot disk types; `auto` resolves to the first."""
    has_smt: bool
    """True if a core has two threads; only then does threads_per_core have an effect."""
    live_migrates: bool
    compact: bool
    """True if the machine type supports compact placement."""
    tier1: bool
    """True if the machine type supports Tier_1 bandwidth."""
    has_on_demand: bool = True
    """False if Google sells the machine type only as spot."""
    gpus: Gpus | None = None
    """The GPUs of the machine type; None for a type without GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    sizes: tuple[int, ...]
    """Sizes of the family's machine types, in vCPUs."""
    gib_per_vcpu: dict[str, float]
    """GiB of memory per vCPU, by the middle part of the type's name, such as highmem."""
    domains: tuple[tuple[int, int], ...]
    """Pairs of (vCPUs, NUMA domains), in ascending order. The first pair with at least the
    machine's vCPUs gives its number of NUMA domains."""
    disk_types: tuple[str, ...]
    tier1_from: int | None
    """Smallest number of vCPUs with Tier_1 bandwidth; None if no size supports it."""
    threads_per_core: int = 2
    live_migrates: bool = True
    compact: bool = True


_FAMILIES = {
    "c3": _Family(
        sizes=(4, 8, 22, 44, 88, 176),
        gib_per_vcpu={"standard": 4, "highmem": 8, "highcpu": 2},
        domains=((44, 1), (88, 2), (176, 4)),
        disk_types=("pd-balanced", "pd-ssd", "hyperdisk-balanced"),
        tier1_from=44,
    ),
    "c4": _Family(
        sizes=(4, 8, 16, 24, 32, 48, 96, 144, 192, 288),
        gib_per_vcpu={"standard": 3.75, "highmem": 7.75, "highcpu": 2},
        domains=((48, 1), (96, 2), (288, 4)),
        disk_types=("hyperdisk-balanced",),
        tier1_from=48,
        compact=False,
    ),
    "n4": _Family(
        sizes=(4, 8, 16, 32, 48, 64, 80),
        gib_per_vcpu={"standard": 4, "highmem": 8, "highcpu": 2},
        domains=((80, 1),),
        disk_types=("hyperdisk-balanced",),
        tier1_from=None,
        compact=False,
    ),
    "h3": _Family(
        sizes=(88,),
        gib_per_vcpu={"standard": 4},
        domains=((88, 2),),
        disk_types=("hyperdisk-balanced",),
        tier1_from=None,
        threads_per_core=1,
        live_migrates=False,
    ),
}

# vCPUs, GiB of memory and NUMA domains of each type. GPU machines do not live-migrate.
_GPU_TYPES = {
    "g2-standard-4": (4, 16, 1),
    "g2-standard-8": (8, 32, 1),
    "g2-standard-12": (12, 48, 1),
    "g2-standard-16": (16, 64, 1),
    "g2-standard-24": (24, 96, 1),
    "g2-standard-32": (32, 128, 1),
    "g2-standard-48": (48, 192, 1),
    "g2-standard-96": (96, 384, 2),
    "a2-highgpu-1g": (12, 85, 1),
    "a2-highgpu-2g": (24, 170, 1),
    "a2-highgpu-4g": (48, 340, 1),
    "a2-highgpu-8g": (96, 680, 2),
    "a2-megagpu-16g": (96, 1360, 2),
    "a2-ultragpu-1g": (12, 170, 1),
    "a2-ultragpu-2g": (24, 340, 1),
    "a2-ultragpu-4g": (48, 680, 1),
    "a2-ultragpu-8g": (96, 1360, 2),
    "a3-highgpu-1g": (26, 234, 1),
    "a3-highgpu-2g": (52, 468, 1),
    "a3-highgpu-4g": (104, 936, 1),
    "a3-highgpu-8g": (208, 1872, 2),
    "a3-megagpu-8g": (208, 1872, 2),
}
_GPU_DISKS = {
    "g2": ("pd-balanced", "pd-ssd", "hyperdisk-balanced"),
    "a2": ("pd-balanced", "pd-ssd"),
    "a3": ("pd-balanced", "pd-ssd", "hyperdisk-balanced"),
}
_FAMILY_NAMES = (*_FAMILIES, *_GPU_DISKS)

_WITHOUT_AMX = {
    "c3d": "AMD EPYC Genoa",
    "c4d": "AMD EPYC Turin",
    "h4d": "AMD EPYC Turin",
    "n4d": "AMD EPYC Turin",
    "c2d": "AMD EPYC",
    "n2d": "AMD EPYC",
    "t2d": "AMD EPYC",
    "c4a": "Google Axion (Arm)",
    "n4a": "Google Axion (Arm)",
    "t2a": "Ampere Altra (Arm)",
    "c2": "Intel Cascade Lake",
    "n1": "Intel Skylake or older",
    "n2": "Intel Cascade Lake or Ice Lake",
    "e2": "any available older processor",
}


def machine_type(name: str) -> MachineType:
    """Return the machine type `name`. Raises ConfigError that lists the valid names."""
    family_name, _, rest = name.partition("-")
    if family_name in _WITHOUT_AMX:
        raise ConfigError(
            f"family {family_name} runs on {_WITHOUT_AMX[family_name]}, which has no AMX. Use C3, "
            "C4, N4 or H3, such as c3-highmem-8."
        )
    if family_name in _GPU_DISKS:
        return _gpu_machine(name, family_name)
    family = _FAMILIES.get(family_name)
    if family is None:
        raise ConfigError(
            f"unknown family {family_name!r}. Use one of: {', '.join(_FAMILY_NAMES)}."
        )
    shape, _, size = rest.partition("-")
    if shape not in family.gib_per_vcpu or size not in {str(vcpus) for vcpus in family.sizes}:
        raise ConfigError(
            f"not a machine type of family {family_name}. Use one of: "
            f"{family_name}-{{{','.join(family.gib_per_vcpu)}}}-"
            f"{{{','.join(str(vcpus) for vcpus in family.sizes)}}}."
        )
    return _machine(name, family_name, family, shape, int(size))


def machine_types() -> tuple[MachineType, ...]:
    """Return every supported machine type."""
    on_cpus = (
        _machine(f"{name}-{shape}-{size}", name, family, shape, size)
        for name, family in _FAMILIES.items()
        for size in family.sizes
        for shape in family.gib_per_vcpu
    )
    return (*on_cpus, *(_gpu_machine(name, name.partition("-")[0]) for name in _GPU_TYPES))


def _machine(name: str, family_name: str, family: _Family, shape: str, vcpus: int) -> MachineType:
    return MachineType(
        name=name,
        family=family_name,
        vcpus=vcpus,
        physical_cores=vcpus // family.threads_per_core,
        memory_gib=vcpus * family.gib_per_vcpu[shape],
        numa_domains=next(domains for limit, domains in family.domains if vcpus <= limit),
        disk_types=family.disk_types,
        has_smt=family.threads_per_core == 2,
        live_migrates=family.live_migrates,
        compact=family.compact,
        tier1=family.tier1_from is not None and vcpus >= family.tier1_from,
    )


def _gpu_machine(name: str, family_name: str) -> MachineType:
    if name not in _GPU_TYPES:
        sizes = ", ".join(each for each in _GPU_TYPES if each.startswith(f"{family_name}-"))
        raise ConfigError(f"unknown size. Use one of: {sizes}.")
    vcpus, memory_gib, domains = _GPU_TYPES[name]
    return MachineType(
        name=name,
        family=family_name,
        vcpus=vcpus,
        physical_cores=vcpus // 2,
        memory_gib=memory_gib,
        numa_domains=domains,
        disk_types=_GPU_DISKS[family_name],
        has_smt=True,
        live_migrates=False,
        compact=True,
        tier1=False,
        has_on_demand=name not in SPOT_ALONE,
        gpus=gpus_of(name),
    )
