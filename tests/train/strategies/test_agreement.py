"""The ranks that must hold equal copies on a mesh, and settings that conflict."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from payload.config.engine_packages import require_packages_here
from payload.config.launch_sections import DistributedSection
from payload.config.run_config import RunConfig, parse_run_config
from payload.core.errors import ConfigError, RanksDifferError, TrainingError
from payload.train.strategies.shard_snapshot import rows_of
from payload.train.strategies.sync_check import RankState, require_one_model
from payload.train.torch_engines import require_strategy
from tests.train.strategies.cases import SHARD, TENSOR, ZERO3


def states(weights: str, optimizer: str) -> list[RankState]:
    return [
        RankState(weights=each * 64, optimizer=part * 64, not_finite=None)
        for each, part in zip(weights, optimizer, strict=True)
    ]


def test_parts_of_optimizer_state_are_compared_with_their_replicas_alone() -> None:
    require_one_model(states("aaaa", "0101"), step=4, passed_step=None, shards=2)
    require_one_model(states("aaaa", "0123"), step=4, passed_step=None, shards=4)
    with pytest.raises(RanksDifferError, match=r"optimizer state.*rank 1 .*rank 3 "):
        require_one_model(states("aaaa", "0102"), step=4, passed_step=None, shards=2)


def test_weights_are_compared_over_all_ranks() -> None:
    with pytest.raises(RanksDifferError, match="hold the same model: rank 2 differs"):
        require_one_model(states("aabaa", "01234"), step=4, passed_step=None, shards=5)


def test_a_nan_in_one_ranks_part_is_found() -> None:
    found = states("aa", "01")
    bad = RankState(weights="a" * 64, optimizer="1" * 64, not_finite="exp_avg.wte.weight")
    with pytest.raises(TrainingError, match=r"exp_avg\.wte\.weight holds NaN"):
        require_one_model([found[0], bad], step=4, passed_step=2, shards=2)


def test_parts_are_even_but_for_the_last_ranks() -> None:
    whole = torch.arange(5)
    assert [rows_of(whole, rank=rank, ranks=4).tolist() for rank in range(4)] == [
        [0, 1],
        [2, 3],
        [4],
        [],
    ]


def test_a_group_that_does_not_divide_the_ranks_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"shard_size = 4 .* 6 ranks\. Use 1 or 2 or 3 or 6"):
        DistributedSection(strategy="shard", shard_size=4).shards(6)
    assert DistributedSection(strategy="shard").shards(6) == 6
    assert DistributedSection().shards(6) == 1


_EVERYWHERE = (
    ('optimizer.name="muon"', "needs whole matrices"),
    ("engine.compile=true", "does not run with engine.compile = true"),
    ('distributed.backend="ccl"', "supports only gloo"),
)
REFUSED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    *(
        (strategy, (each,), said)
        for strategy in (SHARD, TENSOR, ZERO3)
        for each, said in _EVERYWHERE
    ),
    (
        SHARD,
        ('distributed.strategy="replicate"', "distributed.shard_size=2"),
        "leave shard_size out",
    ),
    (TENSOR, ('engine.kind="ipex"',), 'does not run with engine.kind = "ipex"'),
    (
        TENSOR,
        ('adapter.kind="lora"', 'model.init="x"'),
        "does not run with distributed.tensor_parallel",
    ),
    (TENSOR, ('task.kind="classify"',), "does not run with distributed.tensor_parallel = 2"),
    (
        TENSOR,
        ('adapter.kind="lora"', 'model.init="x"', 'model.quantize="nf4"'),
        "4-bit blocks cannot be split",
    ),
    (ZERO3, ("distributed.shard_size=2",), "leave shard_size out"),
    (ZERO3, ('distributed.grad_dtype="bf16"',), "DeepSpeed would sum the gradients in this dtype"),
    (
        ZERO3,
        ('model.quantize="nf4"', 'adapter.kind="lora"'),
        'with distributed.strategy = "zero3"',
    ),
)


@pytest.mark.parametrize(("strategy", "settings", "said"), REFUSED)
def test_what_does_not_go_with_a_strategy_is_one_line(
    strategy: str, settings: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        parse_run_config("", overrides=[strategy, *settings], where="run.toml")
    assert "\n" not in str(refused.value)


def test_without_deepspeed_the_error_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    settings = DistributedSection(strategy="zero3")
    with pytest.raises(ConfigError, match=r"no-build-isolation deepspeed==0\.19\.8") as refused:
        require_strategy(settings)
    assert refused.value.exit_code == 10
    with pytest.raises(ConfigError, match="needs deepspeed"):
        require_packages_here(RunConfig(distributed=settings))
