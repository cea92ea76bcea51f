"""The ranks' device: rejected settings, and that no other module names a device.

These machines have no GPU. The meta device simulates one: an operation on tensors of
two devices fails on it as on CUDA.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from payload.config.engine_packages import require_known_backend
from payload.config.launch_sections import DeviceSection, DistributedSection
from payload.config.run_config import parse_run_config
from payload.config.training_sections import AdapterSection
from payload.core.errors import ConfigError, ExitCode
from payload.formats.data_folder import IGNORED_TARGET
from payload.train.models import chunked_loss
from payload.train.models.base import CausalLM
from payload.train.models.chunked_loss import ChunkedLoss
from payload.train.models.lora import add_adapter
from payload.train.optimizers.optimizer import build_optimizers
from tests.train.alone import ALONE
from tests.train.test_model import make_model

TRAIN = Path(__file__).resolve().parents[2] / "payload" / "train"


def test_gpus_exchange_over_the_interface_that_ranks_meet_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ens4")
    ALONE.name_interface()
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    replace(ALONE, kind="cuda").name_interface()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=ens4"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    replace(ALONE, kind="cuda").name_interface()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth1"


def test_auto_is_the_cpu_where_torch_sees_no_cuda_device() -> None:
    world = ALONE.on(DeviceSection())
    assert world.device == torch.device("cpu") and world.is_cpu
    assert world.free_bytes() > 0
    world.synchronize()


def test_cuda_without_a_device_is_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"finds no CUDA device\..*device\.kind = 'cpu'"
    ) as refused:
        ALONE.on(DeviceSection(kind="cuda"))
    assert refused.value.exit_code == ExitCode.CONFIG
    assert "\n" not in str(refused.value)


def test_nccl_is_refused_without_cuda() -> None:
    with pytest.raises(ConfigError, match=r"no CUDA device\. Set backend"):
        require_known_backend(DistributedSection(backend="nccl"))
    with pytest.raises(ConfigError, match=r"only GPU tensors, but device\.kind"):
        parse_run_config(
            "", overrides=["distributed.backend=nccl", "device.kind=cpu"], where="run.toml"
        )


def test_the_world_alone_names_a_device() -> None:
    named = re.compile(r"""torch\.cuda|["']cuda|device\(["'](?!meta)|cpu=True|\.cuda\(""")
    found = {
        path.relative_to(TRAIN.parent).as_posix()
        for folder in (TRAIN, TRAIN.parent / "kernels")
        for path in folder.rglob("*.py")
        if named.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"train/ranks/world.py"}


@pytest.mark.parametrize("ignored", [False, True])
def test_a_loss_in_chunks_is_the_loss_and_has_its_gradients(
    monkeypatch: pytest.MonkeyPatch, ignored: bool
) -> None:
    monkeypatch.setattr(chunked_loss, "logits_tokens", lambda _rows: 3)
    chunked = ChunkedLoss()
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 5, 8), torch.randn(11, 8)
    targets = torch.randint(11, (2, 5))
    if ignored:
        targets[1, 2:] = IGNORED_TARGET

    def whole(x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy((x @ y.T).flatten(0, 1), targets.flatten())

    def in_chunks(x: Tensor, y: Tensor) -> Tensor:
        return chunked.mean_loss(x, y, targets)

    both = (graded(each, hidden, weight) for each in (in_chunks, whole))
    for ours, theirs in zip(*both, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    each = chunked.token_losses(hidden, weight, targets)
    assert each.shape == targets.shape and bool((each[targets == IGNORED_TARGET] == 0).all())
    count = (targets != IGNORED_TARGET).sum()
    assert torch.allclose(each.sum() / count, whole(hidden, weight), atol=1e-6)


def graded(loss: Callable[[Tensor, Tensor], Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [each.clone().requires_grad_() for each in inputs]
    found = loss(*leaves)
    torch.autograd.backward(found)
    return [found.detach(), *(each.grad for each in leaves if each.grad is not None)]


def adapted(model: CausalLM) -> CausalLM:
    add_adapter(model, AdapterSection(kind="lora", rank=2), seed=1)
    return model


@pytest.mark.parametrize("change", [lambda model: model, adapted])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_step_makes_no_tensor_on_another_device(
    change: Callable[[CausalLM], CausalLM], checkpoints: bool
) -> None:
    model = change(make_model(n_embd=32, n_head=2, n_layer=2, vocab_size=512)).to("meta").train()
    model.compute_loss_in_chunks(compiles=False)
    model.checkpoints_layers = checkpoints
    tokens = torch.zeros(2, 16, dtype=torch.int64, device="meta")
    loss = model(tokens, tokens)
    loss.backward()
    trained = build_optimizers(model, parse_run_config("", where="test").optimizer).trained()
    assert all(each.grad is not None and each.grad.is_meta for each in trained.values())
    assert model.token_losses(tokens, tokens).is_meta
