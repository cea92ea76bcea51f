"""CONTRACT: the quotas, APIs and permissions that a cluster needs, from its stack's settings."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from payload.core.errors import ConfigError
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.readers import fields_of
from payload.core.validation.records import build
from payload.machines.gpu_catalog import gpus_of
from payload.pricing.cluster_cost import BilledResources
from payload.stack.google_name_patterns import CLOUD_NAME, KMS_KEY, REGION
from payload.stack.stack_settings import DEFAULTS

Scope = Literal["region", "project"]
Spot = Literal["false", "true", "auto"]
# For each multi-region, the continent with which names of its regions begin. Source:
# https://cloud.google.com/kms/docs/locations. Some multi-regions also end in a number.
_CONTINENTS = {
    **{"us": "us", "nam": "us", "ca": "northamerica", "europe": "europe", "eur": "europe"},
    **{"asia": "asia", "in": "asia", "au": "australia"},
}
UNLISTED = {"tier1": "Tier_1 bandwidth", "confidential": "confidential computing"}
"""Settings of a stack that cost money but have no price in the tables."""

# The compute quotas also count pd-balanced as SSD.
_DISK_QUOTAS = {
    "pd-balanced": "SSD_TOTAL_GB",
    "pd-ssd": "SSD_TOTAL_GB",
    "pd-standard": "DISKS_TOTAL_GB",
    "hyperdisk-balanced": "HDB_TOTAL_GB",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudRequirements:
    """Properties of a cluster that its quotas, prices and permissions depend on."""

    machine_type: str = DEFAULTS.machine_type
    node_count: int = DEFAULTS.node_count
    region: str = DEFAULTS.region
    zones: tuple[str, ...] = DEFAULTS.zones[:1]
    spot: Spot = "false"
    disk_type: str = "pd-balanced"
    disk_gib: int = DEFAULTS.node_count * DEFAULTS.disk_gb
    """Total size of all nodes' disks."""
    has_nat: bool = True
    has_public_head: bool = False
    uses_os_login: bool = False
    has_bucket: bool = False
    filestore_gib: int = 0
    """Size of the Filestore instance; 0 for none."""
    makes_bucket: bool = False
    cluster: str = ""
    """Name of the cluster; empty if unknown."""
    image: str = DEFAULTS.image
    """Full name of the boot image."""
    bucket_name: str = ""
    """Name of an existing bucket; empty without a bucket, or if `up` creates the bucket."""
    kms_key: str = ""
    """Name of the customer-managed key; empty for Google's keys."""
    unlisted: tuple[str, ...] = ()
    """Further billed resources without a price in the tables."""
    grants_key: bool = True
    """True if `up` grants Google's services the use of the key."""

    @property
    def image_project(self) -> str:
        """Return the project of the boot image."""
        parts = self.image.split("/")
        return parts[1] if len(parts) > 1 and parts[0] == "projects" else "ubuntu-os-cloud"

    @property
    def needs_regional_key(self) -> bool:
        """Return whether the key must be regional.

        All resources except disks require a regional key.
        """
        return self.makes_bucket or self.has_filestore

    @property
    def has_filestore(self) -> bool:
        """Return True if there is a Filestore instance."""
        return self.filestore_gib > 0

    @property
    def family(self) -> str:
        """Return the machine family as in names of quotas: C3 for c3-highmem-8."""
        return self.machine_type.partition("-")[0].upper()

    def family_quota(self) -> str:
        """Return the name of the family's regional quota.

        Only families up to C3 have such a quota.
        """
        return f"{self.family}_CPUS"

    def key_users(self, project_number: str) -> tuple[str, ...]:
        """Return the service agents that need permission to use the key."""
        bucket = ("gs-project-accounts",) if self.makes_bucket else ()
        file = ("cloud-filer",) if self.has_filestore else ()
        services = ("compute-system", *bucket, *file)
        return tuple(
            f"serviceAccount:service-{project_number}@{service}.iam.gserviceaccount.com"
            for service in services
        )

    def describe(self) -> str:
        """Return a description of the cluster, for doctor's first line."""
        kind = {"false": "", "true": " (spot)", "auto": " (spot; on demand must fit as well)"}[
            self.spot
        ]
        return (
            f"{self.node_count} x {self.machine_type}{kind} in {', '.join(self.zones)}, "
            f"{self.disk_gib} GiB {self.disk_type}"
        )

    def billed(self, *, spot: bool) -> BilledResources:
        """Return the resources that are billed by the hour."""
        return BilledResources(
            machine_type=self.machine_type,
            node_count=self.node_count,
            region=self.region,
            spot=spot,
            disk_type=self.disk_type,
            disks_gib=(self.disk_gib,),
            has_nat=self.has_nat,
            has_external_address=self.has_public_head,
            filestore_gib=self.filestore_gib,
            unlisted=self.unlisted,
        )

    def services(self) -> tuple[str, ...]:
        """Return the APIs that must be enabled."""
        iap = () if self.has_public_head else ("iap",)
        bucket = ("storage",) if self.has_bucket else ()
        dns = () if self.has_nat else ("dns",)
        file = ("file",) if self.has_filestore else ()
        key = ("cloudkms", "cloudresourcemanager") if self.kms_key else ()
        return ("compute", "iam", *iap, *bucket, *dns, *file, *key)

    def quotas(self, *, vcpus_per_node: int) -> list[tuple[Scope, tuple[str, ...], float]]:
        """Return each quota's scope, the names of its metric by preference, and the required
        amount."""
        vcpus = float(self.node_count * vcpus_per_node)
        family = self.family_quota()
        # If a project has no quota for preemptible CPUs, spot machines use the on-demand quota.
        spot: list[tuple[Scope, tuple[str, ...], float]] = [
            ("region", ("PREEMPTIBLE_CPUS", family), vcpus)
        ]
        on_demand: list[tuple[Scope, tuple[str, ...], float]] = [("region", (family,), vcpus)]
        needed = [
            *(spot if self.spot != "false" else ()),
            *(on_demand if self.spot != "true" else ()),
            ("project", ("CPUS_ALL_REGIONS",), vcpus),
            ("region", (_DISK_QUOTAS.get(self.disk_type, "SSD_TOTAL_GB"),), float(self.disk_gib)),
            ("region", ("INSTANCES",), float(self.node_count)),
            ("project", ("NETWORKS",), 1.0),
        ]
        needed += self._gpu_quotas()
        addresses = float(self.has_nat + self.has_public_head)
        if addresses:
            needed.append(("region", ("IN_USE_ADDRESSES",), addresses))
        if self.has_nat:
            needed.append(("project", ("ROUTERS",), 1.0))
        return needed

    def _gpu_quotas(self) -> list[tuple[Scope, tuple[str, ...], float]]:
        """Return the quotas for GPUs. Spot machines have separate quotas.

        https://cloud.google.com/compute/resource-usage#gpu_quota
        """
        gpus = gpus_of(self.machine_type)
        if gpus is None:
            return []
        count, quota = float(self.node_count * gpus.count), gpus.gpu.quota
        metrics = (
            *((f"PREEMPTIBLE_{quota}",) if self.spot != "false" else ()),
            *((quota,) if self.spot != "true" else ()),
        )
        own: list[tuple[Scope, tuple[str, ...], float]] = [
            ("region", (metric,), count) for metric in metrics
        ]
        return [*own, ("project", ("GPUS_ALL_REGIONS",), count)]


def key_location_fits(location: str, *, region: str, regional: bool) -> bool:
    """Return whether a key at `location` can encrypt resources in `region`.

    Disks accept a key of their region, of a multi-region around it, or a global key. With
    `regional`, the key must be in the same region, as for buckets and Filestore instances ("Cloud
    KMS region 'global' not available").
    """
    if location == region:
        return True
    if regional or REGION.fullmatch(location):
        return False
    continent = _CONTINENTS.get(location.rstrip("0123456789"))
    return continent is None or continent == region.partition("-")[0]


def _named(default: str | tuple[str, ...], *, key: str) -> Any:
    """Declare a setting that must be a valid name, because it is inserted into cloud API
    requests."""
    fix = f"pulumi config set {key} NAME"
    return checked(default, key=key, pattern=CLOUD_NAME, wanted="a name", fix=fix)


def _whole(default: int, *, key: str) -> Any:
    return checked(default, key=key, low=0, refusal=": must be a whole number.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """The settings that the requirements depend on.

    `up` also checks limits that this class lacks.
    """

    machine_type: str = _named(DEFAULTS.machine_type, key="machineType")
    node_count: int = _whole(DEFAULTS.node_count, key="nodeCount")
    region: str = _named(DEFAULTS.region, key="region")
    zones: tuple[str, ...] = _named((), key="zones")
    spot: Spot = checked(  # noqa: RUF009 - a field
        DEFAULTS.spot, refusal=": must be false, true or auto."
    )
    disk_type: str = _named(DEFAULTS.disk_type, key="diskType")
    disk_gb: int = _whole(DEFAULTS.disk_gb, key="diskGb")
    head_disk_gb: int = _whole(DEFAULTS.head_disk_gb, key="headDiskGb")
    bucket: str = _named(DEFAULTS.bucket, key="bucket")
    kms_key: str = checked(
        DEFAULTS.kms_key,
        key="kmsKey",
        pattern=KMS_KEY,
        wanted="projects/P/locations/L/keyRings/R/cryptoKeys/K",
        fix="pulumi config set kmsKey NAME",
    )
    filestore_gb: int = _whole(DEFAULTS.filestore_gb, key="filestoreGb")


def _set_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `_Settings` that have a value, with numbers as integers."""
    given: dict[str, Any] = {}
    for key, each in fields_of(_Settings).items():
        value = settings.get(key)
        if each.hint is int and value not in (None, ""):
            given[key] = value
            with suppress(ValueError):
                given[key] = int(str(value))
        elif value:
            given[key] = value
    if settings.get("sharedStorage") != "filestore":
        given["filestoreGb"] = 0
    spot = str(settings.get("spot") or DEFAULTS.spot).lower()
    return given | {"spot": spot, "zones": text_list(settings.get("zones"))}


def requirements_of(settings: Mapping[str, Any]) -> CloudRequirements:
    """Return the requirements of a stack's config; a missing key has its default.

    Raises ConfigError.
    """
    stack = build(_Settings, _set_values(settings), where="")
    head_gib = stack.head_disk_gb or stack.disk_gb
    access, egress = (settings.get(key) for key in ("accessMode", "egress"))
    has_filestore = settings.get("sharedStorage") == "filestore"
    names_bucket = stack.bucket not in ("none", "create")
    return CloudRequirements(
        machine_type=stack.machine_type,
        node_count=stack.node_count,
        region=stack.region,
        zones=stack.zones or (f"{stack.region}-a",),
        spot=stack.spot,
        disk_type=_disk_type(stack.disk_type, stack.machine_type),
        disk_gib=head_gib + (stack.node_count - 1) * stack.disk_gb,
        has_nat=(egress or DEFAULTS.egress) == "nat",
        has_public_head=access == "direct",
        uses_os_login=access == "oslogin",
        has_bucket=stack.bucket != "none",
        filestore_gib=(stack.filestore_gb or DEFAULTS.filestore_gb) * has_filestore,
        makes_bucket=stack.bucket == "create",
        cluster=str(settings.get("cluster") or ""),
        image=str(settings.get("image") or DEFAULTS.image),
        bucket_name=stack.bucket if names_bucket else "",
        kms_key=stack.kms_key,
        unlisted=tuple(
            name for key, name in UNLISTED.items() if str(settings.get(key)).lower() == "true"
        ),
        grants_key=str(settings.get("kmsGrant") or DEFAULTS.kms_grant).lower() != "false",
    )


def _disk_type(name: str, machine: str) -> str:
    if name != "auto":
        return name
    return (
        "pd-balanced" if machine.startswith(("c3-", "g2-", "a2-", "a3-")) else "hyperdisk-balanced"
    )


def text_list(value: Any) -> list[str]:
    """Return a config value as a list; the value can be JSON text."""
    if isinstance(value, str):
        try:
            value = parse_json(value, where="a list")
        except ConfigError:
            value = [value] if value else []
    return [str(each) for each in value] if isinstance(value, list) else []
