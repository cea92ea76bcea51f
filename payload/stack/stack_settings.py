"""CONTRACT: all settings of a stack, the same as in Pulumi.yaml. Each setting has its default, its
limits and its error message."""

from __future__ import annotations

import re
from dataclasses import dataclass

from payload.core.validation.fields import checked
from payload.stack.google_name_patterns import KMS_KEY, REGION

MTU = 8896
"""Largest MTU, and the default. Any different value becomes a part of the network's name."""
MAX_NODES = 64
_MAX_DISK_GIB = 65_536
LOGIN = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
"""Name of a user on a node."""
CLUSTER_NAME = re.compile(r"[a-z]([a-z0-9-]{0,22}[a-z0-9])?")
CLUSTER_NAME_FIX = (
    " (by default the stack's name) must have up to 24 lower-case letters, digits and hyphens, "
    "begin with a letter and not end with a hyphen. Set it: pulumi config set cluster NAME"
)
_PROJECT = re.compile(r"[a-z][a-z0-9-]{4,28}[a-z0-9]")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_LABEL = re.compile(r"(?!tileforge|goog)[a-z][a-z0-9_-]{0,62}=[a-z0-9_-]{0,63}")
NODE_PATH = re.compile(r"/[\w./+-]+", re.ASCII)
_DOLLARS = re.compile(r"none|(?=[0-9.]*[1-9])[0-9]{1,6}(\.[0-9]{1,4})?")


def _or_empty(pattern: re.Pattern[str]) -> re.Pattern[str]:
    return re.compile(f"({pattern.pattern})?", pattern.flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """The settings of a stack. Pulumi.yaml describes each; there, `node_count` is `nodeCount`."""

    cluster: str = checked(
        "",
        pattern=CLUSTER_NAME,
        refusal=CLUSTER_NAME_FIX,
    )
    project: str = checked(
        "",
        pattern=_PROJECT,
        refusal=" is not a Google Cloud project id. List your projects: gcloud projects list; "
        "then: pulumi config set project ID",
    )
    region: str = checked(
        "us-central1", pattern=REGION, refusal=" is not a region. Use a region such as us-central1."
    )
    zones: tuple[str, ...] = ("us-central1-a", "us-central1-b", "us-central1-c", "us-central1-f")
    node_count: int = checked(
        3, low=1, high=MAX_NODES, refusal=f": must be from 1 to {MAX_NODES} nodes."
    )
    machine_type: str = "c3-highmem-8"
    access_mode: str = checked("iap", choices=("iap", "direct", "oslogin"))
    operator_cidr: str = ""
    operator_public_key_file: str = ""
    os_login_user: str = ""
    spot: str = checked("false", choices=("false", "true", "auto"))
    max_lifetime: str = "12h"
    max_hourly_usd: str = checked(
        "10", pattern=_DOLLARS, refusal=": must be dollars an hour such as 2.50, or none."
    )
    disk_type: str = "auto"
    disk_gb: int = checked(
        100,
        low=30,
        high=_MAX_DISK_GIB,
        refusal=f": must be from 30 (the environment needs 10) to {_MAX_DISK_GIB} GiB.",
    )
    head_disk_gb: int = 0
    bucket: str = checked(
        "none", pattern=_BUCKET, refusal=". Use none, create, or the name of a bucket."
    )
    threads_per_core: int = checked(1, choices=(1, 2))
    mtu: int = checked(
        MTU,
        low=1300,
        high=MTU,
        refusal=f": must be from 1300 to {MTU}, the limits of Google's networks.",
    )
    compact_placement: str = checked("auto", choices=("auto", "true", "false"))
    tier1: bool = False
    image: str = "projects/ubuntu-os-cloud/global/images/ubuntu-2404-noble-amd64-v20260918"
    kms_key: str = checked(
        "",
        pattern=_or_empty(KMS_KEY),
        refusal=": must be projects/P/locations/L/keyRings/R/cryptoKeys/K.",
    )
    kms_grant: bool = True
    confidential: bool = False
    egress: str = checked("nat", choices=("nat", "none"))
    wheelhouse: str = checked(
        "",
        pattern=_or_empty(NODE_PATH),
        refusal=": must be an absolute path on the node.",
    )
    flow_logs: bool = True
    monitoring: str = checked("none", choices=("none", "prometheus"))
    shared_storage: str = checked("none", choices=("none", "nfs", "filestore"))
    filestore_gb: int = 1024
    labels: tuple[str, ...] = checked(
        (),
        pattern=_LABEL,
        refusal=": must be key=value of lower-case letters, digits, - and _. Keys must not begin "
        "with tileforge or goog.",
    )


DEFAULTS = StackSettings()
