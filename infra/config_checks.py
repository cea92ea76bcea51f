"""Checks settings that depend on each other; each problem states the value and the fix."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from infra.config import ClusterConfig
from payload.core.errors import ConfigError
from payload.machines.machine_types import MachineType
from payload.stack.cloud_requirements import key_location_fits
from payload.stack.google_name_patterns import KMS_KEY, REGION
from payload.stack.stack_settings import LOGIN

MIN_LIFETIME_S, MAX_LIFETIME_S = 600, 30 * 86_400
# Compute Engine's limit is 120 days, which is too long for machines with hourly costs.

_IMAGE = re.compile(r"projects/[a-z0-9:.-]+/global/images/[a-z]([a-z0-9-]*[a-z0-9])?")
# Google's image projects that cannot boot a node, with the reason. Debian's images deliberately
# have Google's agent instead of cloud-init: andsens/bootstrap-vz, pull request 469.
_NO_APT = "its images lack apt, which the bootstrap needs to install packages"
_UNFIT_IMAGES = {
    "debian-cloud": "Google's Debian images lack cloud-init, which prepares the nodes and creates "
    "the login user (bootstrap-vz, pull request 469)",
    **dict.fromkeys(
        (
            *("centos-cloud", "cloud-hpc-image-public", "cos-cloud", "fedora-cloud"),
            *("fedora-coreos-cloud", "opensuse-cloud", "oracle-linux-cloud", "rhel-cloud"),
            *("rhel-sap-cloud", "rocky-linux-cloud", "suse-cloud", "suse-sap-cloud"),
            *("windows-cloud", "windows-sql-cloud"),
        ),
        _NO_APT,
    ),
}

Problem = tuple[str, str]
"""The key of a setting, and the text that follows the key in the error message."""


def problems(config: ClusterConfig, *, refused: frozenset[str]) -> list[Problem]:
    """Return all problems.

    Keys in `refused` are skipped, because their problems are already reported.
    """
    checks = (_places, _machine, _disks, _money, _access, _network, _software)
    found = [problem for check in checks for problem in check(config)]
    return [problem for problem in found if problem[0] not in refused]


def _places(config: ClusterConfig) -> Iterator[Problem]:
    if not REGION.fullmatch(config.region):
        return  # already reported as a problem
    if not config.zones:
        yield "zones", f" is empty. List zones of {config.region} in the order to try."
    for zone in config.zones:
        if not re.fullmatch(rf"{config.region}-[a-z]", zone):
            yield (
                "zones",
                f" has {zone!r}, which is not in region {config.region}. Use zones of the region: "
                f"pulumi config set --path 'zones[0]' {config.region}-a",
            )
            return


def _machine(config: ClusterConfig) -> Iterator[Problem]:
    try:
        machine = config.machine()
    except ConfigError as error:
        yield "machineType", f" = {config.machine_type!r}: {error}"
        return
    if config.spot != "true" and not machine.has_on_demand:
        yield (
            "spot",
            f" = {config.spot!r}, but {machine.name} is sold only as spot. Set it: pulumi config "
            "set spot true; or use a3-highgpu-8g.",
        )
    if config.threads_per_core == 2 and not machine.has_smt:
        yield "threadsPerCore", f" = 2, but {machine.name} has one thread per core. Use 1."
    if config.compact_placement == "true" and not machine.compact:
        yield (
            "compactPlacement",
            f" = 'true', but {machine.family.upper()} machines have no compact placement. Set it: "
            "pulumi config set compactPlacement auto",
        )
    if config.tier1 and not machine.tier1:
        yield (
            "tier1",
            f" = true, but {machine.name} has {machine.vcpus} vCPUs: C3 needs at least 44, C4 at "
            "least 48. Set it: pulumi config set tier1 false; or use a larger machineType.",
        )
    if config.confidential and not machine.name.startswith("c3-standard-"):
        yield (
            "confidential",
            f" = true, but only c3-standard machines have TDX, not {machine.name}. Change the "
            "machine type: pulumi config set machineType c3-standard-8",
        )


def _disks(config: ClusterConfig) -> Iterator[Problem]:
    try:
        machine: MachineType | None = config.machine()
    except ConfigError:
        machine = None  # already reported as a problem
    if machine and config.disk_type not in ("auto", *machine.disk_types):
        yield (
            "diskType",
            f" = {config.disk_type!r}, which {machine.name} cannot boot from. Use auto or one "
            f"of: {', '.join(machine.disk_types)}.",
        )
    if config.head_disk_gb and not config.disk_gb <= config.head_disk_gb <= 65_536:
        yield (
            "headDiskGb",
            f" = {config.head_disk_gb}: must be 0 (use the value of diskGb), or from diskGb "
            f"({config.disk_gb}) to 65536.",
        )
    # Google's limits for the tier ZONAL: https://cloud.google.com/filestore/docs/service-tiers
    if config.shared_storage == "filestore" and (
        not 1024 <= config.filestore_gb <= 9_984 or config.filestore_gb % 256
    ):
        yield (
            "filestoreGb",
            f" = {config.filestore_gb}: must be 1024 to 9984 GiB in steps of 256. Set it: "
            "pulumi config set filestoreGb 1024",
        )
    if key := KMS_KEY.fullmatch(config.kms_key):
        yield from _key(config, location=key["location"])


def _key(config: ClusterConfig, *, location: str) -> Iterator[Problem]:
    regional = config.bucket == "create" or config.shared_storage == "filestore"
    if not key_location_fits(location, region=config.region, regional=regional):
        yield (
            "kmsKey",
            f" = {config.kms_key!r}: its location is {location}, but the cluster's region is "
            f"{config.region}. Use a key of that region: pulumi config set kmsKey NAME",
        )


def _money(config: ClusterConfig) -> Iterator[Problem]:
    lifetime_s = config.max_lifetime_s()
    if lifetime_s is None or not MIN_LIFETIME_S <= lifetime_s <= MAX_LIFETIME_S:
        yield (
            "maxLifetime",
            f" = {config.max_lifetime!r}: must be from 10m to 30d, such as 90m, 12h or 2d. This "
            "limit is required, because it ends forgotten machines.",
        )


def _access(config: ClusterConfig) -> Iterator[Problem]:
    if config.access_mode == "direct":
        yield from _cidr(config.operator_cidr)
    elif config.operator_cidr:
        yield (
            "operatorCidr",
            f" = {config.operator_cidr!r}: used only with accessMode direct; with "
            f"{config.access_mode}, SSH comes from Google's proxy. Remove it: pulumi config rm "
            "operatorCidr",
        )
    if config.access_mode == "oslogin" and not LOGIN.fullmatch(config.os_login_user):
        yield (
            "osLoginUser",
            f" = {config.os_login_user!r}: must be your OS Login user name with accessMode "
            "oslogin. Find it under posixAccounts: gcloud compute os-login describe-profile",
        )
    if config.os_login_user and config.access_mode != "oslogin":
        yield (
            "osLoginUser",
            f" = {config.os_login_user!r}: used only with accessMode oslogin. Remove it: pulumi "
            "config rm osLoginUser",
        )


def _cidr(text: str) -> Iterator[Problem]:
    fix = "Use your own address: pulumi config set operatorCidr A.B.C.D/32"
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        yield "operatorCidr", f" = {text!r}: {error}. {fix}"
        return
    if network.prefixlen == 0:
        yield "operatorCidr", f" = {text!r}: this range is the whole internet. {fix}"
    elif network.version == 6:
        yield "operatorCidr", f" = {text!r}: must be an IPv4 address range. {fix}"
    elif network.prefixlen < 24:
        yield "operatorCidr", f" = {text!r}: this range has more than 256 addresses. {fix}"


def _network(config: ClusterConfig) -> Iterator[Problem]:
    if config.egress == "none" and config.access_mode == "direct":
        yield (
            "egress",
            " = 'none' with accessMode direct, which gives the head an external address. Change "
            "one of these settings: pulumi config set accessMode iap; or: pulumi config set "
            "egress nat",
        )
    if config.egress == "none" and not config.wheelhouse:
        yield (
            "wheelhouse",
            " is empty, but with egress none the nodes cannot reach a package index. Set the "
            "folder of wheels on the image, or: pulumi config set egress nat",
        )


def _software(config: ClusterConfig) -> Iterator[Problem]:
    if not _IMAGE.fullmatch(config.image):
        family = " is a family, whose image can change" if "/family/" in config.image else ""
        yield (
            "image",
            f" = {config.image!r}{family}: must be projects/PROJECT/global/images/NAME. "
            "List names: gcloud compute images list --project ubuntu-os-cloud",
        )
        return
    unfit = _UNFIT_IMAGES.get(config.image.split("/")[1])
    if unfit:
        yield (
            "image",
            f" = {config.image!r}: {unfit}. Use an image of ubuntu-os-cloud, or your own image "
            "with cloud-init and apt.",
        )
