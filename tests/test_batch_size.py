"""`batch.micro_batch_size = "auto"`: the number it resolves to, and that it stays that number."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from payload.config.run_config import RunConfig, load_run_config, parse_run_config
from payload.core.errors import ConfigError
from payload.estimates.batch_size import USED, resolve_batch, with_auto_size, with_recorded_size
from payload.launch.plan_record import LaunchPlan
from payload.models.spec import ModelSpec
from payload.orchestrate.inventories.chosen import load_cluster
from payload.orchestrate.runs.planning import PlanTarget, resolve
from payload.orchestrate.runs.resolved_plan import ResolvedPlan
from payload.orchestrate.runs.run_request import PlanRequest
from payload.run_record.run_files import RunPaths
from tests.supervise.planned import REPO, StandInAccess, plan_stand_in

GIB = 2**30


def auto(*overrides: str) -> RunConfig:
    wanted = ("batch.micro_batch_size=auto", "batch.global_batch_size=24", *overrides)
    return parse_run_config("", overrides=wanted, where="test")


def spec_of(config: RunConfig) -> ModelSpec:
    return config.model.spec(sequence_length=config.data.sequence_length, vocab_size=None)


def settled(
    config: RunConfig, *, free_bytes: int | None, ranks: int = 1
) -> tuple[RunConfig, str | None]:
    return resolve_batch(
        config,
        spec_of(config),
        dtype="bf16",
        world_size=ranks,
        ranks_per_node=ranks,
        free_bytes=free_bytes,
    )


def need(config: RunConfig, *, size: int, ranks: int = 1, checkpointing: str = "off") -> int:
    overrides = [f"batch.micro_batch_size={size}", "batch.global_batch_size=24"]
    overrides.append(f"memory.activation_checkpointing={checkpointing}")
    fixed = parse_run_config("", overrides=overrides, where="test")
    return fixed.memory_bytes(spec_of(config), dtype="bf16", world_size=ranks)


def test_auto_is_the_largest_divisor_of_a_ranks_share_that_fits_the_estimate() -> None:
    config = auto()
    for size in (1, 2, 4, 12, 24):
        found, note = settled(config, free_bytes=int(need(config, size=size) / USED) + 1)
        assert found.batch.micro_batch_size == size
        assert found.memory.activation_checkpointing == "auto"
        assert (
            note is not None
            and f": a micro-batch has {size} of at most 24 sequences; memory" in note
        )


def test_the_ranks_of_a_node_share_its_memory_and_the_batch() -> None:
    config = auto()
    free = int(2 * need(config, size=4, ranks=2) / USED) + 2
    found, _ = settled(config, free_bytes=free, ranks=2)
    assert found.batch.micro_batch_size == 4
    assert found.batch.grad_accum_steps(2) == 3


def test_the_same_memory_gives_the_same_size() -> None:
    assert settled(auto(), free_bytes=9 * GIB) == settled(auto(), free_bytes=9 * GIB)


def test_checkpointing_comes_on_only_where_one_sequence_does_not_fit_without() -> None:
    config = auto("data.sequence_length=1024")
    free = int((need(config, size=1) - 1) / USED)
    found, note = settled(config, free_bytes=free)
    assert found.memory.activation_checkpointing == "on"
    assert note is not None and "with activation checkpointing" in note
    is_off = replace(config, memory=replace(config.memory, activation_checkpointing="off"))
    found, note = settled(is_off, free_bytes=free)
    assert found.batch.micro_batch_size == 1
    assert found.memory.activation_checkpointing == "off"
    assert note is not None and " GiB a rank, more than the" in note


def test_where_nothing_fits_it_is_one_sequence_with_checkpointing() -> None:
    found, note = settled(auto(), free_bytes=GIB // 8)
    assert (found.batch.micro_batch_size, found.memory.activation_checkpointing) == (1, "on")
    assert note is not None and " GiB a rank, more than the 0.1 GiB available" in note


def test_without_knowledge_of_the_memory_it_is_one_sequence() -> None:
    found, note = settled(auto(), free_bytes=None)
    assert found.batch.micro_batch_size == 1
    assert note is not None and "the free memory is unknown" in note


def test_a_number_stays() -> None:
    config = parse_run_config("", where="test")
    assert settled(config, free_bytes=1) == (config, None)


def test_ranks_that_cannot_share_the_batch_are_refused_with_what_they_could() -> None:
    with pytest.raises(ConfigError, match=r"24 is not a multiple of world_size = 5\. Use 20 or 25"):
        settled(auto(), free_bytes=GIB, ranks=5)


def test_a_resume_takes_the_recorded_size_where_it_still_divides() -> None:
    recorded, _ = settled(auto(), free_bytes=GIB // 8)
    again = with_recorded_size(auto(), recorded)
    assert again.batch.micro_batch_size == 1 and again.memory.activation_checkpointing == "on"
    size = parse_run_config(
        "", overrides=["batch.micro_batch_size=24", "batch.global_batch_size=24"], where="test"
    )
    assert with_recorded_size(auto(), size).batch.micro_batch_size == 24
    assert with_recorded_size(auto(), size, world_size=2) == auto()
    number = parse_run_config("", where="test")
    assert with_recorded_size(number, size) == number


def test_a_size_that_a_plan_chose_is_open_again_and_a_given_one_is_not() -> None:
    chosen = replace(auto(), batch=replace(auto().batch, micro_batch_size=24))
    assert with_auto_size(chosen, auto_size=24) == auto()
    assert with_auto_size(chosen, auto_size=None) == chosen
    assert with_auto_size(chosen, auto_size=12) == chosen


@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "kept"), [(2, True), (4, False)])
def test_other_ranks_keep_the_size_they_can_share_and_else_get_another(
    tmp_path: Path, ranks: int, kept: bool
) -> None:
    sizes = ("batch.global_batch_size=24", "batch.micro_batch_size=auto")
    first = plan_stand_in(tmp_path / "one", ranks=1, settings=sizes)
    assert LaunchPlan.load(first.plan).auto_batch_size == 24
    assert load_run_config(first.config).batch.micro_batch_size == 24
    planned = plan_again(first, ranks=ranks, size=3 if kept else 24)
    assert planned.config.batch.micro_batch_size == (3 if kept else 6)
    assert planned.plan.auto_batch_size == planned.config.batch.micro_batch_size


@pytest.mark.processes
def test_a_size_that_was_given_and_does_not_divide_is_refused(tmp_path: Path) -> None:
    sizes = ("batch.global_batch_size=24", "batch.micro_batch_size=24")
    first = plan_stand_in(tmp_path / "one", ranks=1, settings=sizes)
    assert LaunchPlan.load(first.plan).auto_batch_size is None
    with pytest.raises(ConfigError, match="24 is not a multiple of"):
        plan_again(first, ranks=2, size=None)


def plan_again(paths: RunPaths, *, ranks: int, size: int | None) -> ResolvedPlan:
    """Plan a run again from its folder; `size` is the choice of its last plan."""
    overrides = [f"launch.ranks_per_node={ranks}"]
    overrides += [] if size is None else [f"batch.micro_batch_size={size}"]
    config = load_run_config(paths.config, overrides=overrides)
    target = PlanTarget(
        chosen=load_cluster("local", env={}),
        profile=StandInAccess(os.environ),
        paths=paths,
        work_dir=REPO,
        port=29500,
    )
    return resolve(PlanRequest(config=config, vocab_size=50257, auto_size=size), target)


def test_auto_survives_a_file_and_another_word_does_not() -> None:
    text = auto().to_toml()
    assert 'micro_batch_size = "auto"' in text
    assert parse_run_config(text, where="test") == auto()
    with pytest.raises(ConfigError, match=r'must be a whole number \(or "auto"\)'):
        parse_run_config("", overrides=["batch.micro_batch_size=most"], where="test")
    with pytest.raises(ConfigError, match="must be at least 1"):
        parse_run_config("", overrides=["batch.micro_batch_size=0"], where="test")
