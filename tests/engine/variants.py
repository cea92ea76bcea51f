"""Settings of the stack variants that must build, stay unchanged and be removed, by name."""

from __future__ import annotations

from typing import Any

from tests.infra.stacks import CASES

_ANY_PRICE = {"maxHourlyUsd": "none"}

VARIANTS: dict[str, dict[str, Any]] = {
    **CASES,
    "n4": {"machineType": "n4-standard-8"},
    "n4-spot": {"machineType": "n4-highmem-16", "spot": "true", **_ANY_PRICE},
    "c4-spot": {"machineType": "c4-highmem-16", "spot": "auto", **_ANY_PRICE},
    "c3-spread": {"compactPlacement": "false", "threadsPerCore": 2},
    "c3-ssd": {"diskType": "pd-ssd", "diskGb": 64, "headDiskGb": 256},
    "c3-hyperdisk": {"diskType": "hyperdisk-balanced"},
    "c3-tier-1": {"machineType": "c3-standard-44", "tier1": True, **_ANY_PRICE},
    "confidential-spot": {
        "machineType": "c3-standard-22",
        "confidential": True,
        "spot": "true",
        **_ANY_PRICE,
    },
    "europe": {"region": "europe-west4", "zones": ["europe-west4-b", "europe-west4-a"]},
    "direct-spot": {"accessMode": "direct", "operatorCidr": "198.51.100.0/24", "spot": "true"},
    "small-packets": {"mtu": 1460, "flowLogs": False},
    "own-bucket": {"bucket": "acme-results", "cluster": "research"},
    "new-bucket": {"bucket": "create", "nodeCount": 2},
    "l4": {"machineType": "g2-standard-8", "nodeCount": 2, **_ANY_PRICE},
    "a100-spot": {"machineType": "a2-highgpu-1g", "spot": "true", **_ANY_PRICE},
    "h100-spot": {"machineType": "a3-highgpu-2g", "spot": "true", "nodeCount": 2, **_ANY_PRICE},
    "h100-mega": {"machineType": "a3-megagpu-8g", "nodeCount": 2, **_ANY_PRICE},
    "sixty-four-nodes": {"nodeCount": 64, **_ANY_PRICE},
}
"""Return 29 variants, including those with golden files."""

CRYPTO_KEY = str(CASES["bucket"]["kmsKey"])
