"""GPUs of a plan's nodes: the memory that ranks share, 8-bit matmuls, the predicted step."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from payload.config.launch_sections import DeviceSection
from payload.config.run_config import parse_run_config
from payload.config.training_sections import DtypeChoice, PrecisionSection
from payload.core.errors import ConfigError
from payload.machines.inventory import Node
from payload.machines.machine import discover
from payload.orchestrate.follow.run_text import Estimate, estimate
from payload.orchestrate.inventories.chosen import ResolvedInventory
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.planning import PlanTarget, resolve, resolve_placement
from payload.orchestrate.runs.run_input_checks import rank_memory, require_fp8_on
from payload.orchestrate.runs.run_request import PlanRequest
from payload.run_record.run_files import RunPaths

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


@pytest.mark.processes
def test_a_plan_of_gpu_nodes_counts_no_copies_and_says_that_its_share_of_the_peak_is_a_guess(
    tmp_path: Path,
) -> None:
    gpu = Node(name="a", address="10.0.0.2", physical_cores=4, memory_gib=64.0, gpus=2)
    words = ["distributed.strategy=shard", "batch.global_batch_size=8"]
    config = parse_run_config("", overrides=words, where="test")

    def step_s(node: Node) -> tuple[float | None, str]:
        inventory = replace(discover().inventory(), nodes=(node,))
        chosen = ResolvedInventory(inventory=inventory, why="test", domains={})
        placed = resolve_placement(
            replace(config, launch=replace(config.launch, ranks_per_node=2)), chosen
        )
        planned = resolve(
            PlanRequest(config=config, vocab_size=None),
            PlanTarget(
                chosen=chosen,
                profile=Measured(os.environ),
                paths=RunPaths(tmp_path / "runs" / "one"),
                work_dir=tmp_path,
                port=20_000,
            ),
            placed=placed,
        )
        assert planned.config.device.kind == "auto"
        return planned.plan.arithmetic.step_s, "\n".join(planned.notes())

    on_gpus, said = step_s(gpu)
    on_cores, nothing = step_s(replace(gpu, gpus=0))
    assert on_gpus is not None and on_cores is not None and on_gpus != on_cores
    assert "assumes an MFU that was not measured on GPUs" in said and "GPU" not in nothing


def test_unmeasured_gpu_nodes_are_estimated_at_the_share_of_the_cores_that_the_sentence_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("payload.orchestrate.machine_profiles.local_profile.has_bf16", lambda: True)
    gpu = Node(name="a", address="10.0.0.2", physical_cores=4, memory_gib=64.0, gpus=1)
    config = parse_run_config("", overrides=["launch.launcher=torchrun"], where="test")

    def estimated(node: Node) -> Estimate:
        inventory = replace(discover().inventory(), nodes=(node,))
        chosen = ResolvedInventory(inventory=inventory, why="test", domains={})
        planned = resolve(
            PlanRequest(config=config, vocab_size=None),
            PlanTarget(
                chosen=chosen,
                profile=LocalAccess(os.environ),
                paths=RunPaths(tmp_path / "runs" / "one"),
                work_dir=tmp_path,
                port=20_000,
            ),
        )
        return estimate(planned, data=tmp_path, earlier=[], is_local=True)

    on_gpu, on_cores = estimated(gpu), estimated(replace(gpu, gpus=0))
    assert on_gpu.seconds == on_cores.seconds
    assert on_gpu.basis.startswith(on_cores.basis) and "GPUs are faster" in on_gpu.basis


class Measured(LocalAccess):
    """This machine with a peak, as measured by a trial."""

    def peak_flops_per_s(self, choice: DtypeChoice, *, threads: int) -> float | None:
        return 1e14
