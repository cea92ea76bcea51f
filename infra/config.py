"""Every setting of the cluster, as Pulumi.yaml declares it, and what follows from them."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from infra.machines import MachineType, machine_type

PROJECT = "tileforge"
"""Pulumi project: the namespace of the settings."""

MTU = 8896
"""The largest, and the default. The network of another one has that in its name."""
_SECONDS = {"m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """One field a key of Pulumi.yaml, `node_count` for `nodeCount`; its descriptions are there."""

    cluster: str = ""
    project: str = ""
    region: str = "us-central1"
    zones: tuple[str, ...] = ("us-central1-a", "us-central1-b", "us-central1-c", "us-central1-f")
    node_count: int = 3
    machine_type: str = "c3-highmem-8"
    access_mode: str = "iap"
    operator_cidr: str = ""
    operator_public_key_file: str = ""
    os_login_user: str = ""
    spot: str = "false"
    max_lifetime: str = "12h"
    max_hourly_usd: str = "10"
    disk_type: str = "auto"
    disk_gb: int = 100
    head_disk_gb: int = 0
    bucket: str = "none"
    threads_per_core: int = 1
    mtu: int = MTU
    compact_placement: str = "auto"
    tier1: bool = False
    image: str = "projects/ubuntu-os-cloud/global/images/ubuntu-2404-noble-amd64-v20260918"
    kms_key: str = ""
    kms_grant: bool = True
    confidential: bool = False
    egress: str = "nat"
    wheelhouse: str = ""
    flow_logs: bool = True
    monitoring: str = "none"
    shared_storage: str = "none"
    filestore_gb: int = 1024
    labels: tuple[str, ...] = ()

    def machine(self) -> MachineType:
        """Return the machine type's entry of the catalog. Raises ConfigError."""
        return machine_type(self.machine_type)

    @property
    def zone(self) -> str:
        """Where all the nodes are; the other zones are for when it has none free."""
        return self.zones[0]

    def uses_spot(self) -> bool:
        """Return True for spot machines; `auto` is spot until it is set to false."""
        return self.spot in ("true", "auto")

    def max_lifetime_s(self) -> int | None:
        """Seconds, or None where the text is no duration."""
        match = re.fullmatch(r"([0-9]{1,6})([mhd])", self.max_lifetime)
        return int(match[1]) * _SECONDS[match[2]] if match else None

    def price_cap_usd(self) -> float | None:
        """Most dollars an hour; None: no cap."""
        return None if self.max_hourly_usd == "none" else float(self.max_hourly_usd)

    def boot_disk_type(self) -> str:
        """Disk type of every node."""
        return self.machine().disk_types[0] if self.disk_type == "auto" else self.disk_type

    def boot_disk_gb(self, *, index: int) -> int:
        """Size of one node's disk in GiB; the head's may be larger."""
        return self.head_disk_gb or self.disk_gb if index == 0 else self.disk_gb

    def is_compact(self) -> bool:
        """Return True if a compact placement policy holds the nodes; never for one node alone."""
        return self.has_placement() and self.node_count > 1

    def has_placement(self) -> bool:
        """Return True if there is a compact placement policy, whatever the number of nodes."""
        return self.compact_placement == "true" or (
            self.compact_placement == "auto" and self.machine().compact
        )

    def ssh_source(self) -> str:
        """Where SSH to the nodes may come from, as an address range."""
        # Google's Identity-Aware Proxy: https://cloud.google.com/iap/docs/using-tcp-forwarding
        return self.operator_cidr if self.access_mode == "direct" else "35.235.240.0/20"

    def extra_labels(self) -> dict[str, str]:
        """The operator's own labels."""
        return dict(label.partition("=")[::2] for label in self.labels)

    def public_key_file(self) -> Path:
        """The operator's public key, relative to the project's folder."""
        default = f".cluster/{self.cluster}/id_ed25519.pub"
        return Path(self.operator_public_key_file or default).expanduser()


def key_of(field: str) -> str:
    """Return a field's key in Pulumi.yaml."""
    first, *rest = field.split("_")
    return first + "".join(word.capitalize() for word in rest)


KEYS = {key_of(field.name): field for field in dataclasses.fields(ClusterConfig)}
"""Fields by their key in Pulumi.yaml."""
