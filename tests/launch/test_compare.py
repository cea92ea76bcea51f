"""The strategies that a plan compares, and their order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from payload.config.run_config import parse_run_config
from payload.estimates.network import LOCAL_LINK, Link
from payload.estimates.strategy_comparison import StrategyPrediction, compare_strategies
from payload.models.gpt2.spec import PRESETS

SPEC = replace(PRESETS["gpt2-medium"], sequence_length=64)
GIB = 2**30


def compared(
    *settings: str, free_gib: int | None, ranks: int = 4
) -> tuple[StrategyPrediction, ...]:
    words = ("batch.micro_batch_size=1", "batch.global_batch_size=8", "data.sequence_length=64")
    return compare_strategies(
        parse_run_config("", overrides=[*words, *settings], where="test"),
        spec=SPEC,
        world_size=ranks,
        ranks_per_node=2,
        link=Link(bytes_per_s=1e9),
        peak_flops_per_s=1e12,
        free_bytes=None if free_gib is None else free_gib * GIB,
    )


def test_the_fastest_is_first_where_all_fit() -> None:
    found = compared(free_gib=64)
    assert [each.name() for each in found] == [
        "pipeline 2 x tensor 2",
        "pipeline 4",
        "replicate 2 x tensor 2",
        "pipeline 2 x replicate 2",
        "replicate",
        "shard 2 x tensor 2",
        "shard, 2 ranks",
        "shard, 4 ranks",
        "pipeline 2 x shard 2",
        "zero3, 4 ranks",
    ]
    assert all(each.fits for each in found)
    assert [each.step_s for each in found] == sorted(each.step_s or 0 for each in found)
    memory = {each.name(): each.memory_bytes for each in found}
    names = ("replicate", "shard, 2 ranks", "pipeline 2 x shard 2", "shard 2 x tensor 2")
    assert [memory[name] for name in names] == sorted(memory[name] for name in names)[::-1]


def test_what_does_not_fit_comes_last() -> None:
    found = compared(free_gib=9)
    names = [each.name() for each in found]
    assert names[-1] == "replicate" and not found[-1].fits
    assert [name for name in names if name.startswith(("shard,", "zero3"))] == [
        "shard, 2 ranks",
        "shard, 4 ranks",
        "zero3, 4 ranks",
    ]
    fitting = [bool(each.fits) for each in found]
    assert fitting == sorted(fitting, reverse=True)


@pytest.mark.parametrize(
    ("ranks_per_node", "link", "names"),
    [
        (2, LOCAL_LINK, ["replicate", "tensor 2", "pipeline 2", "shard", "zero3"]),
        (1, Link(bytes_per_s=9.6e8), ["replicate", "pipeline 2", "shard", "zero3"]),
        (1, Link(bytes_per_s=1.2e8), ["pipeline 2", "replicate", "shard", "zero3"]),
    ],
)
def test_where_no_peak_was_measured_the_order_is_that_of_an_ordinary_core(
    ranks_per_node: int, link: Link, names: list[str]
) -> None:
    # The measured order, except for zero3 at 1 Gbit/s, which was not measured.
    words = ["batch.micro_batch_size=2", "batch.global_batch_size=8", "data.sequence_length=128"]
    found = compare_strategies(
        parse_run_config("", overrides=[*words, "precision.dtype=fp32"], where="test"),
        spec=PRESETS["gpt2"].with_sequence_length(128),
        world_size=2,
        ranks_per_node=ranks_per_node,
        link=link,
        peak_flops_per_s=None,
        free_bytes=None,
    )
    assert [each.name().removesuffix(", 2 ranks") for each in found] == names
    assert {each.step_s for each in found} == {None}


def test_gpus_that_were_not_measured_wait_for_the_network_where_cores_would_compute() -> None:
    words = ["batch.micro_batch_size=2", "batch.global_batch_size=8"]
    first = {}
    for device in ("cpu", "cuda"):
        found = compare_strategies(
            parse_run_config("", overrides=[*words, f"device.kind={device}"], where="test"),
            spec=PRESETS["gpt2"],
            world_size=2,
            ranks_per_node=1,
            link=Link(bytes_per_s=1.25e9),
            peak_flops_per_s=None,
            free_bytes=None,
        )
        first[device] = found[0].name()
    assert first == {"cpu": "replicate", "cuda": "pipeline 2"}


def test_unknown_memory_decides_nothing() -> None:
    assert {each.fits for each in compared(free_gib=None)} == {None}


def test_what_a_setting_rules_out_is_not_compared() -> None:
    assert [each.name() for each in compared("optimizer.name=muon", free_gib=64)] == ["replicate"]
    assert [each.name() for each in compared(free_gib=64, ranks=1)] == ["replicate"]
