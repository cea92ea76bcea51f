"""GPUs of a plan's nodes: the memory that ranks share, and 8-bit matmuls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from payload.errors import ConfigError
from payload.inventory import Node
from payload.launch_sections import DeviceSection
from payload.start_checks import rank_memory, require_fp8_on
from payload.training_sections import PrecisionSection

L4 = Node(
    name="a",
    address="10.0.0.2",
    physical_cores=4,
    memory_gib=16.0,
    gpus=1,
    gpu_memory_gib=22.5,
    gpu_capability="8.9",
)
A100 = replace(L4, name="b", gpu_memory_gib=40.0, gpu_capability="8.0")


def test_the_least_gpu_of_all_nodes_counts_once_for_each_rank() -> None:
    assert rank_memory(DeviceSection(), [A100, L4], ranks=2) == int(22.5 * 2**30) * 2


def test_ranks_on_cpus_share_no_gpu_memory() -> None:
    assert rank_memory(DeviceSection(kind="cpu"), [L4], ranks=1) is None
    assert rank_memory(DeviceSection(), [L4, replace(L4, gpus=0)], ranks=1) is None
    assert rank_memory(DeviceSection(), [replace(L4, gpu_memory_gib=None)], ranks=1) is None


def test_fp8_is_refused_on_gpus_that_lack_it() -> None:
    require_fp8_on(PrecisionSection(fp8="on"), [L4])
    require_fp8_on(PrecisionSection(fp8="emulated"), [A100])
    with pytest.raises(ConfigError, match=r"the GPUs of b have compute capability 8\.0"):
        require_fp8_on(PrecisionSection(fp8="on"), [L4, A100])
