"""CONTRACT: the GPUs of Google's machine types: memory, compute capability and quota.

Sources: https://cloud.google.com/compute/docs/accelerator-optimized-machines (GPUs of a type),
https://cloud.google.com/compute/resource-usage#gpu_quota (names of quotas),
https://developer.nvidia.com/cuda-gpus (compute capability). Memory is the value that nvidia-smi
shows."""

from __future__ import annotations

import re
from dataclasses import dataclass

FP8_CAPABILITY = (8, 9)
"""Lowest compute capability that has 8-bit floating-point matmuls (Ada; Hopper is higher)."""
NVIDIA_DRIVER_BRANCH = "580"
"""Branch of NVIDIA's driver on nodes."""

# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, table 1.
_LEAST_DRIVER_BRANCHES = {11: 450, 12: 525, 13: 580}
"""Oldest supported driver branch by CUDA's major version."""


def least_driver_branch(cuda: str) -> int | None:
    """Return the oldest branch of NVIDIA's driver for a CUDA version, or None if unknown."""
    major = cuda.partition(".")[0]
    return _LEAST_DRIVER_BRANCHES.get(int(major)) if major.isdecimal() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One model of GPU."""

    name: str
    memory_mib: int
    capability: tuple[int, int]
    """Compute capability."""
    quota: str
    """Name of the regional quota for on-demand machines; for spot machines, it has the prefix
    PREEMPTIBLE_."""


L4 = Gpu(name="L4", memory_mib=23_034, capability=(8, 9), quota="NVIDIA_L4_GPUS")
A100 = Gpu(name="A100 40GB", memory_mib=40_960, capability=(8, 0), quota="NVIDIA_A100_GPUS")
A100_80 = Gpu(name="A100 80GB", memory_mib=81_920, capability=(8, 0), quota="NVIDIA_A100_80GB_GPUS")
H100 = Gpu(name="H100 80GB", memory_mib=81_559, capability=(9, 0), quota="NVIDIA_H100_GPUS")
H100_MEGA = Gpu(
    name="H100 80GB (Mega)", memory_mib=81_559, capability=(9, 0), quota="NVIDIA_H100_MEGA_GPUS"
)

SPOT_ALONE = ("a3-highgpu-1g", "a3-highgpu-2g", "a3-highgpu-4g")
"""Machine types that are not sold on demand. Google's page "A3 High": "you must use Spot VMs or
Flex-start VMs"."""

_G2_GPUS = {4: 1, 8: 1, 12: 1, 16: 1, 24: 2, 32: 1, 48: 4, 96: 8}
"""Number of GPUs of a G2 machine type, by its number of vCPUs."""
_BY_SHAPE = {
    "a2-highgpu": A100,
    "a2-megagpu": A100,
    "a2-ultragpu": A100_80,
    "a3-highgpu": H100,
    "a3-megagpu": H100_MEGA,
}
_TYPE = re.compile(r"(?P<shape>a[23]-[a-z]+gpu)-(?P<count>[0-9]{1,2})g")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The GPUs of one machine."""

    gpu: Gpu
    count: int


def gpus_of(machine_type: str | None) -> Gpus | None:
    """Return the GPUs of a Google machine type; None for a type without GPUs or an unknown type."""
    text = machine_type or ""
    if text.startswith("g2-standard-"):
        vcpus = text.removeprefix("g2-standard-")
        count = _G2_GPUS.get(int(vcpus)) if vcpus.isdecimal() else None
        return None if count is None else Gpus(gpu=L4, count=count)
    found = _TYPE.fullmatch(text)
    gpu = _BY_SHAPE.get(found["shape"]) if found else None
    return None if found is None or gpu is None else Gpus(gpu=gpu, count=int(found["count"]))
