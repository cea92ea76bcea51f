"""What a cluster needs of a project's quotas, from its settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from payload.errors import ConfigError
from payload.orchestrate.cloud.settings import text_list

Scope = Literal["region", "project"]
Spot = Literal["false", "true", "auto"]

# The compute quotas count pd-balanced as SSD, too.
_DISK_QUOTAS = {
    "pd-balanced": "SSD_TOTAL_GB",
    "pd-ssd": "SSD_TOTAL_GB",
    "pd-standard": "DISKS_TOTAL_GB",
    "hyperdisk-balanced": "HDB_TOTAL_GB",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One cluster, as far as quotas and offers go."""

    machine_type: str = "c3-highmem-8"
    node_count: int = 3
    region: str = "us-central1"
    zones: tuple[str, ...] = ("us-central1-a",)
    spot: Spot = "false"
    disk_type: str = "pd-balanced"
    disk_gib: int = 300
    """Of all nodes together."""
    has_nat: bool = True
    has_public_head: bool = False
    uses_os_login: bool = False
    has_bucket: bool = False

    def describe(self) -> str:
        """For the first line."""
        kind = {"false": "", "true": " (spot)", "auto": " (spot; on demand has to fit, too)"}[
            self.spot
        ]
        return (
            f"{self.node_count} x {self.machine_type}{kind} in {', '.join(self.zones)}, "
            f"{self.disk_gib} GiB {self.disk_type}"
        )

    def services(self) -> tuple[str, ...]:
        """APIs that have to be enabled."""
        iap = () if self.has_public_head else ("iap",)
        bucket = ("storage",) if self.has_bucket else ()
        return ("compute", "iam", *iap, *bucket)

    def quotas(self, *, vcpus_per_node: int) -> list[tuple[Scope, tuple[str, ...], float]]:
        """Scope, the metric (or one that stands in for it, later), and how much of it."""
        vcpus = float(self.node_count * vcpus_per_node)
        family = f"{self.machine_type.partition('-')[0].upper()}_CPUS"
        # Without a quota for preemptible CPUs of its own a project's spot machines use the others.
        spot: list[tuple[Scope, tuple[str, ...], float]] = [
            ("region", ("PREEMPTIBLE_CPUS", family), vcpus)
        ]
        on_demand: list[tuple[Scope, tuple[str, ...], float]] = [("region", (family,), vcpus)]
        wanted = [
            *(spot if self.spot != "false" else ()),
            *(on_demand if self.spot != "true" else ()),
            ("project", ("CPUS_ALL_REGIONS",), vcpus),
            ("region", (_DISK_QUOTAS.get(self.disk_type, "SSD_TOTAL_GB"),), float(self.disk_gib)),
            ("region", ("INSTANCES",), float(self.node_count)),
            ("project", ("NETWORKS",), 1.0),
        ]
        addresses = float(self.has_nat + self.has_public_head)
        if addresses:
            wanted.append(("region", ("IN_USE_ADDRESSES",), addresses))
        if self.has_nat:
            wanted.append(("project", ("ROUTERS",), 1.0))
        return wanted


def need_of(settings: Mapping[str, Any]) -> Need:
    """What the stack's config asks for; a key that is not set has the config's default.

    Raises ConfigError.
    """
    machine = str(settings.get("machineType") or Need().machine_type)
    nodes = _whole(settings, "nodeCount", Need().node_count)
    region = str(settings.get("region") or Need().region)
    disk_gib = _whole(settings, "diskGb", 100)
    head_gib = _whole(settings, "headDiskGb", 0) or disk_gib
    access = settings.get("accessMode") or "iap"
    spot = str(settings.get("spot") or "false").lower()
    if spot not in ("false", "true", "auto"):
        raise ConfigError(f"spot = {spot!r}; use false, true or auto.")
    return Need(
        machine_type=machine,
        node_count=nodes,
        region=region,
        zones=tuple(text_list(settings.get("zones"))) or (f"{region}-a",),
        spot=spot,  # type: ignore[arg-type]
        disk_type=_disk_type(str(settings.get("diskType") or "auto"), machine),
        disk_gib=head_gib + (nodes - 1) * disk_gib,
        has_nat=(settings.get("egress") or "nat") == "nat",
        has_public_head=access == "direct",
        uses_os_login=access == "oslogin",
        has_bucket=(settings.get("bucket") or "none") != "none",
    )


def _disk_type(name: str, machine: str) -> str:
    if name != "auto":
        return name
    return "pd-balanced" if machine.startswith("c3-") else "hyperdisk-balanced"


def _whole(settings: Mapping[str, Any], key: str, default: int) -> int:
    value = settings.get(key)
    if value in (None, ""):
        return default
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if number < 0:
        raise ConfigError(f"{key} = {value!r}; a whole number is needed.")
    return number
