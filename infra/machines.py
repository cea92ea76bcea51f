"""Google's machine types that have matrix tiles (AMX), and what each allows.

Source of shapes, bandwidth and NUMA domains: Cyclenerd/google-cloud-compute-machine-types,
instances/series/{c3,c4,h3}.sql; GoogleCloudPlatform/cluster-toolkit at 10470803, util.py. Both
read 2026-11-21. Of compact placement: the families that
https://cloud.google.com/kubernetes-engine/docs/how-to/compact-placement lists, read 2026-11-22.
"""

from __future__ import annotations

from dataclasses import dataclass

from payload.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineType:
    """One size of machine."""

    name: str
    family: str
    vcpus: int
    physical_cores: int
    memory_gib: float
    numa_domains: int
    disk_types: tuple[str, ...]
    """Supported boot disk types; the first is the one that `auto` means."""
    has_spot: bool
    has_smt: bool
    """True if a core has two threads, so that threads_per_core has an effect."""
    live_migrates: bool
    compact: bool
    """True if a compact placement policy may hold it."""
    tier1: bool
    """True if it may have the higher bandwidth, Tier_1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    sizes: tuple[int, ...]
    """vCPUs."""
    gib_per_vcpu: dict[str, float]
    """By the middle word of the name."""
    domains: tuple[tuple[int, int], ...]
    """(vCPUs up to, NUMA domains)."""
    disk_types: tuple[str, ...]
    tier1_from: int | None
    """vCPUs; None: no Tier_1 at any size."""
    threads_per_core: int = 2
    has_spot: bool = True
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
        has_spot=False,
        live_migrates=False,
    ),
}

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
    "e2": "whichever older processor is free",
}


def machine_type(name: str) -> MachineType:
    """The machine type called `name`. Raises ConfigError with what there is instead."""
    family_name, _, rest = name.partition("-")
    if family_name in _WITHOUT_AMX:
        raise ConfigError(
            f"family {family_name} runs on {_WITHOUT_AMX[family_name]}, which has no AMX. Use C3, "
            "C4, N4 or H3, such as c3-highmem-8."
        )
    family = _FAMILIES.get(family_name)
    if family is None:
        raise ConfigError(
            f"family {family_name!r} is not known. Use one of: {', '.join(_FAMILIES)}."
        )
    shape, _, size = rest.partition("-")
    if shape not in family.gib_per_vcpu or size not in {str(vcpus) for vcpus in family.sizes}:
        raise ConfigError(
            f"there is no such size here. {family_name} has "
            f"{family_name}-{{{','.join(family.gib_per_vcpu)}}}-"
            f"{{{','.join(str(vcpus) for vcpus in family.sizes)}}}."
        )
    return _machine(name, family_name, family, shape, int(size))


def machine_types() -> tuple[MachineType, ...]:
    """Every machine type that may be asked for."""
    return tuple(
        _machine(f"{name}-{shape}-{size}", name, family, shape, size)
        for name, family in _FAMILIES.items()
        for size in family.sizes
        for shape in family.gib_per_vcpu
    )


def _machine(name: str, family_name: str, family: _Family, shape: str, vcpus: int) -> MachineType:
    return MachineType(
        name=name,
        family=family_name,
        vcpus=vcpus,
        physical_cores=vcpus // family.threads_per_core,
        memory_gib=vcpus * family.gib_per_vcpu[shape],
        numa_domains=next(domains for limit, domains in family.domains if vcpus <= limit),
        disk_types=family.disk_types,
        has_spot=family.has_spot,
        has_smt=family.threads_per_core == 2,
        live_migrates=family.live_migrates,
        compact=family.compact,
        tier1=family.tier1_from is not None and vcpus >= family.tier1_from,
    )
