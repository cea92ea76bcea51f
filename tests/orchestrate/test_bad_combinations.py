"""Settings that are valid alone but not together: `plan` and `run` reject them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from payload.config import engine_packages as engines
from payload.core.errors import ExitCode
from payload.orchestrate.__main__ import main
from tests.orchestrate.test_commands import Workplace

_ON_TWO_RANKS = {
    "distributed.tensor_parallel=2 model.n_head=3 model.n_embd=96 model.n_layer=2": (
        "distributed.tensor_parallel = 2 does not fit the model: its 3 attention heads are not a "
        "multiple of 2. Use another tensor_parallel, or 1."
    ),
    "distributed.pipeline_parallel=2 model.n_layer=1 model.n_head=4 model.n_embd=64": (
        "distributed.pipeline_parallel = 2 does not fit the model: it has fewer layers (1) "
        "than stages. Use another pipeline_parallel, or 1."
    ),
    "distributed.strategy=zero3": (
        "distributed.strategy = 'zero3' needs deepspeed (not installed). Install it with: pip "
        "install --no-build-isolation deepspeed==0.19.8 (or use strategy = 'shard')."
    ),
    "distributed.backend=nccl": (
        "distributed.backend = 'nccl' supports only GPU tensors, but this machine has no CUDA "
        "device. Set backend to 'gloo'."
    ),
    "device.kind=cuda": (
        "device.kind = 'cuda': this machine has no CUDA device. Install the NVIDIA driver, and "
        "PyTorch's CUDA build (make setup TORCH_CUDA=1). Or use device.kind = 'cpu'."
    ),
    "distributed.strategy=shard distributed.shard_size=3": (
        "distributed.shard_size = 3 does not divide the 2 ranks. Use 1 or 2, or leave shard_size "
        "out."
    ),
    "distributed.pipeline_parallel=3": (
        "distributed.tensor_parallel x pipeline_parallel = 1 x 3 = 3 does not divide the 2 ranks. "
        "Start a multiple of 3 ranks, or lower one of the two."
    ),
    "distributed.tensor_parallel=4": (
        "distributed.tensor_parallel = 4 does not divide the 2 rank(s) of a node, and tensor ranks "
        "must share a node. Set launch.ranks_per_node to a multiple of 4, or lower tensor_parallel."
    ),
}
_ANYWHERE = {
    "distributed.backend=nccl device.kind=cpu": (
        'distributed.backend = "nccl" supports only GPU tensors, but device.kind = "cpu". Set '
        'backend to "gloo".'
    ),
    "model.quantize=nf4 adapter.kind=lora model.init=x distributed.tensor_parallel=2": (
        'model.quantize = "nf4" does not run with distributed.tensor_parallel or '
        "pipeline_parallel: 4-bit blocks cannot be split. Remove these two settings. "
        'adapter.kind = "lora" does not run with distributed.tensor_parallel = 2. Use '
        'distributed.strategy = "shard" without distributed.tensor_parallel = 2, or set '
        'adapter.kind to "none".'
    ),
    "distributed.shard_size=2": (
        'distributed.shard_size = 2 needs distributed.strategy = "shard". Set that strategy, or '
        "leave shard_size out."
    ),
    "distributed.strategy=shard optimizer.name=muon": (
        'optimizer.name = "muon" needs whole matrices, but distributed.strategy = "shard" splits '
        'them. Use adamw, or strategy = "replicate".'
    ),
    "distributed.strategy=shard engine.compile=true": (
        'distributed.strategy = "shard" does not run with engine.compile = true. Set compile to '
        "false."
    ),
    "distributed.strategy=shard distributed.backend=ccl": (
        'distributed.backend = "ccl": on CPUs, strategy = "shard" supports only gloo. Set backend '
        'to "gloo".'
    ),
    "distributed.strategy=zero3 distributed.grad_dtype=bf16": (
        'distributed.grad_dtype = "bf16": DeepSpeed would sum the gradients in this dtype. Use '
        'fp32 with strategy = "zero3".'
    ),
    "distributed.strategy=zero3 distributed.tensor_parallel=2": (
        'distributed.tensor_parallel = 2 does not run with distributed.strategy = "zero3": '
        "DeepSpeed shards whole models over all ranks. Use strategy = "
        '"shard" or "replicate".'
    ),
    "distributed.pipeline_parallel=2 optimizer.name=muon": (
        'optimizer.name = "muon" needs whole matrices, but distributed.pipeline_parallel = 2 '
        "splits the model. Use adamw."
    ),
    "distributed.tensor_parallel=2 engine.kind=ipex": (
        'distributed.tensor_parallel = 2 does not run with engine.kind = "ipex". Set engine.kind '
        'to "native".'
    ),
    "distributed.tensor_parallel=2 distributed.backend=ccl": (
        'distributed.backend = "ccl": distributed.tensor_parallel = 2 supports only gloo. Set '
        'backend to "gloo".'
    ),
    "distributed.pipeline_parallel=2 adapter.kind=lora model.init=x": (
        'adapter.kind = "lora" does not run with distributed.pipeline_parallel = 2. Use '
        'distributed.strategy = "shard" without distributed.pipeline_parallel = 2, or set '
        'adapter.kind to "none".'
    ),
    "distributed.pipeline_parallel=2 task.kind=classify": (
        'task.kind = "classify" does not run with distributed.pipeline_parallel = 2. Use '
        'distributed.strategy = "shard" without distributed.pipeline_parallel = 2.'
    ),
    "precision.fp8=on device.kind=cpu": (
        'precision.fp8 = "on" needs a GPU, but device.kind = "cpu". Set fp8 to "emulated" for the '
        'same rounding, or to "off".'
    ),
    "precision.fp8=emulated distributed.tensor_parallel=2": (
        'precision.fp8 = "emulated" does not run with distributed.strategy = "zero3", '
        'tensor_parallel or pipeline_parallel. Use "replicate" or "shard" alone, or set fp8 to '
        '"off".'
    ),
    "adapter.kind=lora adapter.dora=true distributed.strategy=shard model.init=x": (
        'adapter.dora = true does not run with distributed.strategy = "shard". Set strategy to '
        '"replicate".'
    ),
}
"""Rejected by the settings alone; the message names the file of the settings."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("workplace"))


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize(
    ("settings", "line"),
    [
        *((each, f"error: {line}") for each, line in _ON_TWO_RANKS.items()),
        *((each, f"error: defaults: {line}") for each, line in _ANYWHERE.items()),
    ],
)
def test_a_bad_combination_is_refused_with_one_line_and_starts_nothing(
    workplace: Workplace,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    settings: str,
    line: str,
) -> None:
    monkeypatch.setattr(engines, "has_nvidia_device", lambda: False)
    monkeypatch.setattr(engines, "DEEPSPEED_MODULE", "deepspeed_is_not_here")
    words = [word for each in settings.split() for word in ("--set", each)]
    where = ["--inventory", "local", "--runs-dir", str(workplace.runs)]
    status = main([command, *workplace.settings(), *where, *words], os.environ)
    captured = capsys.readouterr()
    assert status == ExitCode.CONFIG
    assert captured.out == ""
    assert [each for each in captured.err.splitlines() if not each.startswith("inventory:")] == [
        line
    ]
    assert not workplace.runs.exists() or not list(Path(workplace.runs).iterdir())
