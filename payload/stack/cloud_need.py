"""CONTRACT: a cluster's need of quotas, APIs and permissions, from the settings of its stack."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from payload.core.errors import ConfigError
from payload.core.printable_text import shown
from payload.core.validation.json_text import parse_json
from payload.machines.gpu_catalog import gpus_of
from payload.pricing.cluster_cost import Billed

CLOUD_NAME = re.compile(r"[a-z0-9][a-z0-9._:@-]{0,252}")
"""Any name that Google gives to a resource, a place or an account."""
Scope = Literal["region", "project"]
Spot = Literal["false", "true", "auto"]
SPOT: tuple[Spot, ...] = ("false", "true", "auto")
DEFAULT_IMAGE = "projects/ubuntu-os-cloud/global/images/ubuntu-2404-noble-amd64-v20260918"
"""The boot image of a config that names none, as in Pulumi.yaml."""
KMS_KEY = re.compile(
    r"projects/(?P<project>[\w:.-]+)/locations/(?P<location>[\w-]+)/keyRings/(?P<ring>[\w-]+)"
    r"/cryptoKeys/(?P<key>[\w-]+)",
    re.ASCII,
)
"""A Cloud KMS key by its full name."""
_REGION = re.compile(r"[a-z]+-[a-z]+[0-9]+")
# Continents, by which regions begin, of the multi-regions in
# https://cloud.google.com/kms/docs/locations; the last ones have letters and a number.
_CONTINENTS = {
    **{"us": "us", "nam": "us", "ca": "northamerica", "europe": "europe", "eur": "europe"},
    **{"asia": "asia", "in": "asia", "au": "australia"},
}
_FILESTORE_GIB = 1024
UNLISTED = {"tier1": "Tier_1 bandwidth", "confidential": "confidential computing"}
"""Settings of a stack that cost an amount that no table here has."""

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
    """The total of all nodes."""
    has_nat: bool = True
    has_public_head: bool = False
    uses_os_login: bool = False
    has_bucket: bool = False
    filestore_gib: int = 0
    """Size of the Filestore instance; 0 for none."""
    makes_bucket: bool = False
    cluster: str = ""
    """Empty where it is not known."""
    image: str = DEFAULT_IMAGE
    """Boot image by its full name."""
    bucket_name: str = ""
    """The bucket that exists; empty for none, and for one that is made."""
    kms_key: str = ""
    """Empty for Google's own keys."""
    unlisted: tuple[str, ...] = ()
    """Other parts that cost, which no table here has a price of."""
    grants_key: bool = True
    """True if `up` lets Google's services use the key."""

    @property
    def image_project(self) -> str:
        """Return the project of the boot image."""
        words = self.image.split("/")
        return words[1] if len(words) > 1 and words[0] == "projects" else "ubuntu-os-cloud"

    @property
    def needs_regional_key(self) -> bool:
        """Return whether something besides disks is encrypted, which takes no other key."""
        return self.makes_bucket or self.has_filestore

    @property
    def has_filestore(self) -> bool:
        """Return True if there is a Filestore instance."""
        return self.filestore_gib > 0

    @property
    def family(self) -> str:
        """Return the machine family as quotas name it: C3 of c3-highmem-8."""
        return self.machine_type.partition("-")[0].upper()

    def family_quota(self) -> str:
        """Return the family's own regional quota; only families up to C3 have one."""
        return f"{self.family}_CPUS"

    def key_users(self, project_number: str) -> tuple[str, ...]:
        """Return the service agents that have to be allowed to use the key."""
        bucket = ("gs-project-accounts",) if self.makes_bucket else ()
        file = ("cloud-filer",) if self.has_filestore else ()
        services = ("compute-system", *bucket, *file)
        return tuple(
            f"serviceAccount:service-{project_number}@{service}.iam.gserviceaccount.com"
            for service in services
        )

    def describe(self) -> str:
        """Return the cluster in words, for doctor's first line."""
        kind = {"false": "", "true": " (spot)", "auto": " (spot; on demand has to fit, too)"}[
            self.spot
        ]
        return (
            f"{self.node_count} x {self.machine_type}{kind} in {', '.join(self.zones)}, "
            f"{self.disk_gib} GiB {self.disk_type}"
        )

    def billed(self, *, spot: bool) -> Billed:
        """Return what of the cluster costs by the hour."""
        return Billed(
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
        """Return the APIs that have to be enabled."""
        iap = () if self.has_public_head else ("iap",)
        bucket = ("storage",) if self.has_bucket else ()
        dns = () if self.has_nat else ("dns",)
        file = ("file",) if self.has_filestore else ()
        key = ("cloudkms", "cloudresourcemanager") if self.kms_key else ()
        return ("compute", "iam", *iap, *bucket, *dns, *file, *key)

    def quotas(self, *, vcpus_per_node: int) -> list[tuple[Scope, tuple[str, ...], float]]:
        """Return each quota's scope, its metrics in order of preference, and the amount needed."""
        vcpus = float(self.node_count * vcpus_per_node)
        family = self.family_quota()
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
        wanted += self._gpu_quotas()
        addresses = float(self.has_nat + self.has_public_head)
        if addresses:
            wanted.append(("region", ("IN_USE_ADDRESSES",), addresses))
        if self.has_nat:
            wanted.append(("project", ("ROUTERS",), 1.0))
        return wanted

    def _gpu_quotas(self) -> list[tuple[Scope, tuple[str, ...], float]]:
        """Return the quotas of GPUs, of which spot machines have their own.

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
    """Return whether a key at `location` can encrypt what is in `region`.

    Disks take a key of their region, of a multi-region around it, or a global one. With `regional`
    it is for a bucket or a Filestore instance, too: they take a key of the region alone ("Cloud KMS
    region 'global' not available").
    """
    if location == region:
        return True
    if regional or _REGION.fullmatch(location):
        return False
    continent = _CONTINENTS.get(location.rstrip("0123456789"))
    return continent is None or continent == region.partition("-")[0]


def need_of(settings: Mapping[str, Any]) -> Need:
    """Return the need by the stack's config; a key that is not set has the config's default.

    Raises ConfigError.
    """
    machine = _name(settings, "machineType", Need().machine_type)
    nodes = _whole(settings, "nodeCount", Need().node_count)
    region = _name(settings, "region", Need().region)
    disk_gib = _whole(settings, "diskGb", 100)
    head_gib = _whole(settings, "headDiskGb", 0) or disk_gib
    access = settings.get("accessMode") or "iap"
    wanted = str(settings.get("spot") or "false").lower()
    spot = next((each for each in SPOT if each == wanted), None)
    if spot is None:
        raise ConfigError(f"spot = {shown(wanted)}; use false, true or auto.")
    zones = tuple(text_list(settings.get("zones"))) or (f"{region}-a",)
    for zone in zones:
        _name({"zones": zone}, "zones", "")
    kms_key = str(settings.get("kmsKey") or "")
    if kms_key and not KMS_KEY.fullmatch(kms_key):
        raise ConfigError(
            f"kmsKey = {shown(kms_key)}: must be projects/P/locations/L/keyRings/R/cryptoKeys/K. "
            "pulumi config set kmsKey NAME"
        )
    return Need(
        machine_type=machine,
        node_count=nodes,
        region=region,
        zones=zones,
        spot=spot,
        disk_type=_disk_type(_name(settings, "diskType", "auto"), machine),
        disk_gib=head_gib + (nodes - 1) * disk_gib,
        has_nat=(settings.get("egress") or "nat") == "nat",
        has_public_head=access == "direct",
        uses_os_login=access == "oslogin",
        has_bucket=(settings.get("bucket") or "none") != "none",
        filestore_gib=_filestore_gib(settings),
        makes_bucket=settings.get("bucket") == "create",
        cluster=str(settings.get("cluster") or ""),
        image=str(settings.get("image") or DEFAULT_IMAGE),
        bucket_name=_bucket(settings),
        kms_key=kms_key,
        unlisted=tuple(
            words
            for key, words in UNLISTED.items()
            if str(settings.get(key) or "false").lower() == "true"
        ),
        grants_key=str(settings.get("kmsGrant") or "true").lower() != "false",
    )


def _bucket(settings: Mapping[str, Any]) -> str:
    """Return the name of a bucket that exists. Raises ConfigError."""
    name = settings.get("bucket") or "none"
    return "" if name in ("none", "create") else _name(settings, "bucket", "")


def _disk_type(name: str, machine: str) -> str:
    if name != "auto":
        return name
    return (
        "pd-balanced" if machine.startswith(("c3-", "g2-", "a2-", "a3-")) else "hyperdisk-balanced"
    )


def _name(settings: Mapping[str, Any], key: str, default: str) -> str:
    """Return a setting that becomes a word of a request. Raises ConfigError."""
    value = settings.get(key) or default
    if not isinstance(value, str) or not CLOUD_NAME.fullmatch(value):
        raise ConfigError(f"{key} = {shown(value)}: must be a name. pulumi config set {key} NAME")
    return value


def _filestore_gib(settings: Mapping[str, Any]) -> int:
    if settings.get("sharedStorage") != "filestore":
        return 0
    return _whole(settings, "filestoreGb", _FILESTORE_GIB) or _FILESTORE_GIB


def _whole(settings: Mapping[str, Any], key: str, default: int) -> int:
    value = settings.get(key)
    if value in (None, ""):
        return default
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if number < 0:
        raise ConfigError(f"{key} = {shown(value)}; a whole number is needed.")
    return number


def text_list(value: Any) -> list[str]:
    """Return the list of a config value, which may be JSON text."""
    if isinstance(value, str):
        try:
            value = parse_json(value, where="a list")
        except ConfigError:
            value = [value] if value else []
    return [str(each) for each in value] if isinstance(value, list) else []
