"""A stack's settings with derived values: machine, disks, lifetime, access."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.google_address_ranges import IAP_RANGE
from payload.core.validation.readers import DeclaredField, fields_of
from payload.machines.machine_types import MachineType, machine_type
from payload.stack.stack_settings import StackSettings

PROJECT = "tileforge"
"""Name of the Pulumi project, which is the namespace of the settings."""

_SECONDS = {"m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(StackSettings):
    """The settings of a stack, with derived values."""

    def machine(self) -> MachineType:
        """Return the machine type's entry of the catalog. Raises ConfigError."""
        return machine_type(self.machine_type)

    @property
    def zone(self) -> str:
        """The zone of all nodes. If this zone is full, `up` can use another zone in the setting."""
        return self.zones[0]

    def uses_spot(self) -> bool:
        """Return whether the machines are spot. `auto` counts as spot until `up` sets `spot` to
        false."""
        return self.spot in ("true", "auto")

    def max_lifetime_s(self) -> int | None:
        """Return the lifetime limit in seconds, or None if the setting is not a valid duration."""
        match = re.fullmatch(r"([0-9]{1,6})([mhd])", self.max_lifetime)
        return int(match[1]) * _SECONDS[match[2]] if match else None

    def price_cap_usd(self) -> float | None:
        """Return the highest cost in dollars per hour, or None for no limit."""
        return None if self.max_hourly_usd == "none" else float(self.max_hourly_usd)

    def boot_disk_type(self) -> str:
        """Return the disk type of every node, with `auto` resolved."""
        return self.machine().disk_types[0] if self.disk_type == "auto" else self.disk_type

    def boot_disk_gb(self, *, index: int) -> int:
        """Return the size of a node's disk in GiB; the head's disk can be larger."""
        return self.head_disk_gb or self.disk_gb if index == 0 else self.disk_gb

    def is_compact(self) -> bool:
        """Return whether the nodes have compact placement; always False for a single node."""
        return self.has_placement() and self.node_count > 1

    def has_placement(self) -> bool:
        """Return whether a compact placement policy is created, even for a single node."""
        return self.compact_placement == "true" or (
            self.compact_placement == "auto" and self.machine().compact
        )

    def ssh_source(self) -> str:
        """Return the address range from which SSH is allowed."""
        return self.operator_cidr if self.access_mode == "direct" else IAP_RANGE

    def extra_labels(self) -> dict[str, str]:
        """Return the operator's additional labels."""
        return dict(label.partition("=")[::2] for label in self.labels)

    def public_key_file(self) -> Path:
        """Return the operator's public key file, relative to the project's folder."""
        default = f".cluster/{self.cluster}/id_ed25519.pub"
        return Path(self.operator_public_key_file or default).expanduser()


def key_of(field: str) -> str:
    """Return a field's key in Pulumi.yaml."""
    first, *rest = field.split("_")
    return first + "".join(word.capitalize() for word in rest)


KEYS: Mapping[str, DeclaredField] = {
    key_of(name): field for name, field in fields_of(ClusterConfig).items()
}
"""The declared field for each key in Pulumi.yaml."""
