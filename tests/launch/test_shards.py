"""The plan of a run whose ranks each hold a part of the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from payload.config.run_config import RunConfig, parse_run_config
from payload.core.errors import ConfigError
from payload.estimates.network import PLANNED_COPIES, Link
from payload.estimates.run_estimate import RunEstimate, estimate_run
from payload.models.gpt2.spec import PRESETS
from payload.models.spec import PROCESS_BYTES
from payload.optimizers.adamw import UPDATE_S_PER_WEIGHT

MEDIUM = replace(PRESETS["gpt2-medium"], sequence_length=64)
WEIGHTS = 4 * MEDIUM.num_params()
OUTER = 4 * MEDIUM.embedding_size()


def config(*settings: str) -> RunConfig:
    words = ("batch.micro_batch_size=1", "batch.global_batch_size=8", "data.sequence_length=64")
    return parse_run_config("", overrides=[*words, *settings], where="test")


def numbers(*settings: str, ranks: int = 4) -> RunEstimate:
    return estimate_run(
        config(*settings),
        spec=MEDIUM,
        world_size=ranks,
        link=Link(bytes_per_s=1e9),
        peak_flops_per_s=1e12,
    )


SHARD = "distributed.strategy=shard"


def test_a_rank_holds_a_quarter_of_the_state_and_one_whole_layer_at_a_time() -> None:
    whole, quarter = numbers(), numbers(SHARD)
    state = 16 * MEDIUM.num_params()
    assert quarter.memory_bytes_per_rank < 0.45 * whole.memory_bytes_per_rank
    assert quarter.memory_bytes_per_rank > PROCESS_BYTES + state / 4 + OUTER
    assert numbers(SHARD, ranks=8).memory_bytes_per_rank < quarter.memory_bytes_per_rank
    halves = numbers(SHARD, "distributed.shard_size=2")
    assert quarter.memory_bytes_per_rank < halves.memory_bytes_per_rank


def test_each_pass_gathers_layers_twice_and_sums_gradients() -> None:
    found = numbers(SHARD)
    layers = WEIGHTS - OUTER
    assert found.grad_accum_steps == 2 and (found.replicas, found.shards) == (1, 4)
    assert found.shard_bytes == round(2 * 3 / 4 * (OUTER + 2 * layers + WEIGHTS))
    assert found.replicate_bytes == 0
    assert found.sync_s == pytest.approx(found.shard_bytes / 1e9)
    update_s = UPDATE_S_PER_WEIGHT * MEDIUM.num_params() / 4
    copies_s = 2 * PLANNED_COPIES.gathered_s_per_byte * (OUTER + 2 * layers)
    copies_s += 2 * PLANNED_COPIES.summed_s_per_byte * WEIGHTS
    waiting_s = found.sync_s + update_s + copies_s
    assert found.step_s == pytest.approx((found.compute_s or 0) + waiting_s)


def test_groups_of_two_send_less_between_shards_and_a_half_between_groups() -> None:
    found = numbers(SHARD, "distributed.shard_size=2")
    assert (found.replicas, found.shards) == (2, 2)
    assert found.shard_bytes == round(numbers(SHARD).shard_bytes * (1 / 2) / (3 / 4))
    assert found.replicate_bytes == 2 * WEIGHTS // 2


def test_deepspeed_gathers_all_weights_twice_and_sums_gradients_by_an_all_reduce() -> None:
    found = numbers("distributed.strategy=zero3")
    assert (found.replicas, found.shards) == (1, 4)
    assert found.shard_bytes == round(2 * 3 / 4 * 4 * WEIGHTS)
    assert found.replicate_bytes == 0
    assert found.memory_bytes_per_rank < 0.45 * numbers().memory_bytes_per_rank


def test_replicas_send_gradients_once_a_step() -> None:
    found = numbers()
    assert (found.replicas, found.shards, found.shard_bytes) == (4, 1, 0)
    assert found.replicate_bytes == round(2 * 3 / 4 * WEIGHTS)


def test_a_group_that_does_not_divide_the_ranks_makes_no_plan() -> None:
    with pytest.raises(ConfigError, match="shard_size = 3 does not divide the 4 ranks"):
        numbers(SHARD, "distributed.shard_size=3")


def test_zero3_returns_memory_immediately_by_default() -> None:
    assert config().malloc() == "tuned"
    assert config(SHARD).malloc() == "tuned"
    assert config("distributed.strategy=zero3").malloc() == "lean"
    assert config(SHARD, "launch.malloc=lean").malloc() == "lean"
    assert config(SHARD, "launch.malloc=tcmalloc").malloc() == "tcmalloc"


def test_shards_of_a_stage_gather_its_weights_and_hold_a_part_of_them() -> None:
    stages = "distributed.pipeline_parallel=2"
    found, plain = numbers(SHARD, stages), numbers(stages)
    assert (found.pipeline, found.shards, found.replicas, found.grad_accum_steps) == (2, 2, 1, 4)
    layers, head = WEIGHTS - OUTER, OUTER
    # Of 24 layers the first stage has 14 or more, and each stage has the embedding.
    assert 4 * (2 * layers / 2 + head) / 2 < found.shard_bytes < 4 * (3 * layers + 2 * head) / 2
    assert found.pipeline_bytes == plain.pipeline_bytes and found.replicate_bytes == 0
    assert found.memory_bytes_per_rank < 0.75 * plain.memory_bytes_per_rank


def test_shards_of_tensor_ranks_have_a_quarter_of_the_state() -> None:
    tensor = "distributed.tensor_parallel=2"
    found, plain = numbers(SHARD, tensor), numbers(SHARD)
    assert (found.tensor, found.shards) == (2, 2)
    assert found.memory_bytes_per_rank < plain.memory_bytes_per_rank
    assert found.tensor_bytes == numbers(tensor).tensor_bytes
