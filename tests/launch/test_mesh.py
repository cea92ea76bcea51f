"""The mesh of ranks, and the plan of ranks that compute each layer together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.architecture_cases import CASES
from payload.config.launch_sections import DistributedSection
from payload.config.run_config import parse_run_config
from payload.core.errors import ConfigError
from payload.estimates.network import Link
from payload.estimates.run_estimate import RunEstimate, estimate_run
from payload.machines.rank_mesh import Mesh, require_tensor_ranks_on_a_node
from payload.models.gpt2.spec import PRESETS
from payload.models.registry import spec_of
from payload.models.spec import ModelSpec
from payload.models.stages import slowest_share, stage_layers

GPT2 = replace(PRESETS["gpt2"], sequence_length=64)
LLAMA = spec_of(CASES["llama"], where="config.json")
TENSOR = "distributed.tensor_parallel=2"


def numbers(*settings: str, spec: ModelSpec = GPT2, ranks: int = 4) -> RunEstimate:
    words = ("batch.micro_batch_size=1", "batch.global_batch_size=8", "data.sequence_length=64")
    return estimate_run(
        parse_run_config("", overrides=[*words, *settings], where="test"),
        spec=spec,
        world_size=ranks,
        link=Link(bytes_per_s=1e9),
        peak_flops_per_s=1e12,
    )


def test_tensor_ranks_are_neighbours_and_stages_are_far_apart() -> None:
    mesh = Mesh(replicate=2, tensor=2, pipeline=2)
    assert mesh.world_size == 8 and mesh.data_ranks == 2
    assert mesh.along(5, "tensor") == (4, 5)
    assert mesh.along(5, "replicate") == (5, 7)
    assert mesh.along(5, "pipeline") == (1, 5)
    assert mesh.along(5, "pipeline", "tensor") == (0, 1, 4, 5)
    assert [mesh.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert all(mesh.rank(mesh.place(rank)) == rank for rank in range(8))
    assert mesh.describe() == "pipeline 2 x replicate 2 x tensor 2"


@pytest.mark.parametrize(
    ("mesh", "tied", "said"),
    [
        (Mesh(pipeline=2), False, "nothing, because no two ranks hold the same values"),
        (Mesh(pipeline=2), True, "the embedding with the head on the last stage"),
        (Mesh(pipeline=2, shard=2), False, "each weight as the shards gather it"),
        (Mesh(tensor=2), True, "tensors that all tensor ranks hold"),
        (Mesh(pipeline=2, replicate=2), False, "with its replicas"),
    ],
)
def test_state_that_two_ranks_of_a_mesh_share_is_noted(mesh: Mesh, tied: bool, said: str) -> None:
    assert said in mesh.compared(tied=tied)


def test_ranks_that_make_no_mesh_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"= 2 x 1 = 2 does not divide the 3 ranks"):
        DistributedSection(tensor_parallel=2).mesh(3)
    with pytest.raises(ConfigError, match=r"does not divide the 3 rank\(s\) of a node"):
        require_tensor_ranks_on_a_node(2, ranks_per_node=3)
    require_tensor_ranks_on_a_node(2, ranks_per_node=4)


@pytest.mark.parametrize(
    ("spec", "tensor", "said"),
    [
        (GPT2, 8, "its 12 attention heads are not a multiple of 8"),
        (LLAMA, 4, "its 2 key and value heads are not a multiple of 4"),
        (spec_of(CASES["llama, dynamic rope"], where=""), 2, "uses transformers' layers"),
        (spec_of(CASES["olmo3"], where=""), 2, "its norms of queries and keys span all heads"),
    ],
)
def test_a_model_that_cannot_be_shared_out_makes_no_plan(
    spec: ModelSpec, tensor: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        numbers(f"distributed.tensor_parallel={tensor}", spec=spec, ranks=8)


def test_a_plan_counts_the_sums_of_each_layer_and_gradients_of_a_half() -> None:
    found = numbers(TENSOR, "precision.dtype=fp32")
    assert (found.replicas, found.shards, found.tensor) == (2, 1, 2)
    assert found.grad_accum_steps == 4
    tokens = 64 * GPT2.width() * 4
    assert found.tensor_bytes == 4 * tokens * (4 * 12 + 2)
    assert found.replicate_bytes == 4 * GPT2.num_params() // 2
    assert numbers().tensor_bytes == 0


def test_a_half_of_each_layer_takes_about_a_half_of_the_memory() -> None:
    whole, half = (numbers(*each).memory_bytes_per_rank for each in ((), (TENSOR,)))
    assert 0.5 * whole < half < 0.7 * whole


PIPELINE = "distributed.pipeline_parallel=2"


def test_stages_are_balanced_with_the_head_on_the_last_one() -> None:
    first, last = stage_layers(GPT2, 2)
    assert (list(first), list(last)) == (list(range(9)), [9, 10, 11])
    assert 0.5 < slowest_share(GPT2, 2) < 0.54
    assert [len(each) for each in stage_layers(GPT2, 12)] == [1] * 12
    three = stage_layers(GPT2, 3)
    assert [number for each in three for number in each] == list(range(12))


def test_a_pipeline_deeper_than_the_model_makes_no_plan() -> None:
    with pytest.raises(ConfigError, match=r"pipeline_parallel = 16 .* fewer layers \(12\) than"):
        numbers("distributed.pipeline_parallel=16", "batch.global_batch_size=16", ranks=16)


def test_a_plan_counts_what_stages_pass_on_and_the_bubble() -> None:
    found, alone = numbers(PIPELINE), numbers()
    assert (found.pipeline, found.replicas, found.grad_accum_steps) == (2, 2, 4)
    activations = 4 * 64 * GPT2.width() * 4
    assert found.pipeline_bytes == activations + 4 * GPT2.embedding_size()
    assert found.replicate_bytes < alone.replicate_bytes
    assert found.compute_s is not None and found.step_s is not None
    assert found.step_s > found.compute_s * 5 / 4 + found.sync_s


def test_gpipe_keeps_the_activations_of_all_passes() -> None:
    words = ("batch.micro_batch_size=16", "batch.global_batch_size=256", PIPELINE)
    early, late = (
        numbers(*words, f"distributed.pipeline_schedule={each}") for each in ("1f1b", "gpipe")
    )
    assert early.grad_accum_steps == 8
    assert late.memory_bytes_per_rank > 1.5 * early.memory_bytes_per_rank
