"""Every setting of the cluster, as Pulumi.yaml declares it; read once, before anything is built."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pulumi
from pulumi.runtime.config import CONFIG, get_config_env

from infra.cloud_init import key_problem
from infra.config_checks import problems
from infra.machines import MachineType, machine_type
from infra.operator_key import make_key, would_make_key
from payload.errors import ConfigError
from payload.untrusted import parse_json, read_bytes, shown

PROJECT = "tileforge"
"""Pulumi project: the namespace of the settings."""

_MOST_KEY_BYTES = 2**18
"""Of the public key file: as much as user-data may have."""
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
    mtu: int = 8896
    compact_placement: str = "auto"
    tier1: bool = False
    image: str = "projects/ubuntu-os-cloud/global/images/ubuntu-2404-noble-amd64-v20260918"
    kms_key: str = ""
    kms_grant: bool = True
    confidential: bool = False
    egress: str = "nat"
    wheelhouse: str = ""
    flow_logs: bool = True
    labels: tuple[str, ...] = ()

    def machine(self) -> MachineType:
        """What is known of the machine type. Raises ConfigError."""
        return machine_type(self.machine_type)

    @property
    def zone(self) -> str:
        """Where all the nodes are; the other zones are for when it has none free."""
        return self.zones[0]

    def uses_spot(self) -> bool:
        """Whether spot machines are asked for; with `auto`, too, until it is set to false."""
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
        """Whether the nodes are placed close together: one node has nobody to be close to."""
        wanted = self.compact_placement == "true" or (
            self.compact_placement == "auto" and self.machine().compact
        )
        return wanted and self.node_count > 1

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


KEYS = {
    "".join([word[0], *(part.capitalize() for part in word[1:])]): field
    for field in dataclasses.fields(ClusterConfig)
    for word in [field.name.split("_")]
}
"""Fields by their key in Pulumi.yaml."""


def load_config(root: Path) -> tuple[ClusterConfig, tuple[str, ...]]:
    """The stack's settings and the operator's public keys.

    `root` is the project's folder. Raises ConfigError with everything that is wrong.
    """
    prefix = f"{PROJECT}:"
    # Pulumi gives a program its settings in the environment; CONFIG is for those set within.
    there = {*get_config_env(), *CONFIG.get()}
    raw = {key.removeprefix(prefix) for key in there if key.startswith(prefix)}
    settings = pulumi.Config(PROJECT)
    values = {key: settings.get(key) or "" for key in sorted(raw)}
    return read_config(values, stack=pulumi.get_stack(), root=root, missing_key=_missing_key)


def _missing_key(public_file: Path) -> str:
    """Return the key that takes the place of a missing one; a preview only says so."""
    private_file = public_file.with_suffix("")
    if pulumi.runtime.is_dry_run():
        pulumi.info(f"would make the key that opens the cluster: {private_file}")
        return would_make_key(public_file)
    public = make_key(public_file)
    pulumi.info(f"made the key that opens the cluster: {private_file}")
    return public


def read_config(
    values: Mapping[str, str],
    *,
    stack: str,
    root: Path,
    missing_key: Callable[[Path], str] | None = None,
) -> tuple[ClusterConfig, tuple[str, ...]]:
    """The same from plain values, each as Pulumi hands it over: text, or JSON for an array.

    `missing_key` makes the public key of a file that is not there, where no file is named and all
    else is right. Raises ConfigError with every problem, one a line.
    """
    config, found = _parsed(values, stack=stack)
    found += problems(config, unreadable=frozenset(key for key, _ in found))
    keys: tuple[str, ...] = ()
    # Without a name that can be used, there is no place to look for the cluster's key.
    named = config.operator_public_key_file or "cluster" not in {key for key, _ in found}
    if config.access_mode != "oslogin" and named:
        path = root / config.public_key_file()
        may_make = missing_key is not None and not config.operator_public_key_file
        if may_make and not found and not path.exists():
            assert missing_key is not None
            return config, (missing_key(path),)
        keys, problem = _operator_keys(config, root=root)
        found += problem
    if found:
        lines = "".join(f"\n  {PROJECT}:{key}{text}" for key, text in found)
        raise ConfigError(f"the stack's settings have {len(found)} problem(s):{lines}")
    return config, keys


Problems = list[tuple[str, str]]


def _parsed(values: Mapping[str, str], *, stack: str) -> tuple[ClusterConfig, Problems]:
    """What can be read, with defaults for the rest, and what cannot."""
    found: Problems = []
    fields: dict[str, object] = {"cluster": stack}
    for key, text in values.items():
        field = KEYS.get(key)
        if field is None:
            known = ", ".join(sorted(KEYS))
            found.append((key, f" is no setting; remove it. Known: {known}."))
            continue
        value, wanted = _read(text, default=field.default)
        if wanted:
            found.append((key, f" = {shown(text)} is not {wanted}. pulumi config set {key} VALUE"))
        elif not (field.name == "cluster" and not value):
            fields[field.name] = value
    return ClusterConfig(**fields), found  # type: ignore[arg-type]  # _read keeps to the types


def _read(text: str, *, default: object) -> tuple[object, str | None]:
    """The value, and what was expected if it cannot be read."""
    match default:
        case bool():
            good = text in ("true", "false")
            return text == "true", None if good else "true or false"
        case int():
            good = re.fullmatch(r"-?[0-9]{1,9}", text) is not None
            return (int(text), None) if good else (None, "a whole number")
        case tuple():
            try:
                items = parse_json(text, where="a list")
            except ConfigError:
                items = None
            good = isinstance(items, list) and all(isinstance(item, str) for item in items)
            return (tuple(items), None) if good else (None, "a list of texts")
        case _:
            return text.strip(), None


def _operator_keys(config: ClusterConfig, *, root: Path) -> tuple[tuple[str, ...], Problems]:
    """The lines of the public key file, and what is wrong with it."""
    name = "operatorPublicKeyFile"
    path = config.public_key_file()
    private = path.with_suffix("")
    make = f"mkdir -p -m 700 {private.parent} && ssh-keygen -q -t ed25519 -N '' -f {private}"
    try:
        text = read_bytes(root / path, limit_bytes=_MOST_KEY_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        return (), [(name, f": {path}: {reason}. Make a key pair: {make}")]
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        return (), [(name, f": {path} is empty. Make a key pair: {make}")]
    bad = [problem for key in keys if (problem := key_problem(key))]
    return keys, [(name, f": {path}: {problem}") for problem in bad[:1]]
