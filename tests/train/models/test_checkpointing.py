"""Activation checkpointing: equal loss and gradients with a fraction of the kept tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.architecture_cases import CASES, random_tokens
from payload.config.run_config import parse_run_config
from payload.config.training_sections import AdapterSection
from payload.core.errors import ConfigError
from payload.kernels.kernels import Kernels
from payload.kernels.library import Library
from payload.models.gpt2.spec import PRESETS
from payload.models.registry import spec_of
from payload.models.spec import RankSetting
from payload.train.families.transformers.model import TransformersLM
from payload.train.models.base import CausalLM
from payload.train.models.classifier import Classifier
from payload.train.models.loading import build
from payload.train.models.lora import add_adapter
from tests.support.launching import losses
from tests.train.alone import train_alone
from tests.train.test_kernels import bf16

Precision = Callable[[], AbstractContextManager[object]]
STABLELM = {**CASES["llama"], "model_type": "stablelm"}


def make(raw: Any, *, checkpoints: bool, dropout: float = 0.0) -> CausalLM:
    torch.manual_seed(1)
    model = build(spec_of(raw, where="test"), dropout=dropout)
    if checkpoints:
        model.enable_checkpointing()
    return model


def gradients(
    model: CausalLM, batch: tuple[Tensor, ...], precision: Precision = nullcontext
) -> tuple[float, dict[str, Tensor], int]:
    """Return loss, gradients, and the bytes kept by the forward pass."""
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    torch.manual_seed(2)
    with precision(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.train()(*batch)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), found, kept


def require_equal(
    plain: tuple[float, dict[str, Tensor], int], again: tuple[float, dict[str, Tensor], int]
) -> None:
    assert again[0] == plain[0]
    assert set(again[1]) == set(plain[1])
    for name, gradient in plain[1].items():
        assert torch.equal(again[1][name], gradient), name


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("raw", [CASES["gpt2"], CASES["gemma3_text"], STABLELM])
def test_loss_and_gradients_are_bitwise_the_same_and_less_is_kept(raw: Any, dropout: float) -> None:
    batch = random_tokens(raw["vocab_size"])
    plain, again = (
        gradients(make(raw, checkpoints=each, dropout=dropout), batch) for each in (False, True)
    )
    require_equal(plain, again)
    logits = batch[0].numel() * raw["vocab_size"] * 4
    assert again[2] - logits < 0.5 * (plain[2] - logits)


@pytest.mark.usefixtures("fresh_memory_is_nan")
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "qwen3", "gemma3_text", "olmo3", "granite 4, dense"]
)
def test_over_the_kernels_too(library: Library, name: str) -> None:
    batch = random_tokens(CASES[name]["vocab_size"])
    found = []
    for checkpoints in (False, True):
        model = make(CASES[name], checkpoints=checkpoints)
        model.kernels = Kernels(library)
        assert model.speed_notes() == []
        found.append(gradients(model, batch, bf16))
    require_equal(*found)
    assert found[1][2] < 0.6 * found[0][2]


def test_with_an_adapter_and_as_a_classifier() -> None:
    tokens, targets = random_tokens(CASES["llama"]["vocab_size"])
    found = []
    for checkpoints in (False, True):
        model = make(CASES["llama"], checkpoints=False)
        classifier = Classifier(model, labels=("a", "b"), pad_token=0)
        add_adapter(classifier, AdapterSection(kind="lora", rank=2, dropout=0.1), seed=1)
        if checkpoints:
            classifier.enable_checkpointing()
        found.append(gradients(classifier, (tokens, targets[:, 0] % 2)))
    require_equal(*found)
    assert found[1][2] < 0.5 * found[0][2]


def test_nothing_is_computed_twice_without_gradients() -> None:
    model = make(CASES["llama"], checkpoints=True).eval()
    tokens, targets = random_tokens(CASES["llama"]["vocab_size"])
    plain = make(CASES["llama"], checkpoints=False).eval()
    assert torch.equal(model.token_losses(tokens, targets), plain.token_losses(tokens, targets))


def test_a_model_of_transformers_without_it_is_refused() -> None:
    model = make(STABLELM, checkpoints=False)
    assert isinstance(model, TransformersLM)
    model.module.supports_gradient_checkpointing = False
    with pytest.raises(ConfigError, match=r"memory\.activation_checkpointing: .*'stablelm'"):
        model.enable_checkpointing()


def test_a_run_trains_to_the_same_losses(tmp_path: Path, tiny_config: Path) -> None:
    for setting in ("off", "on", "auto"):
        train_alone(
            tmp_path / setting,
            tiny_config,
            "train.steps=2",
            f"memory.activation_checkpointing={setting}",
        )
    assert losses(tmp_path / "on") == losses(tmp_path / "off") == losses(tmp_path / "auto")


def test_auto_turns_it_on_where_the_estimate_is_above_what_is_free(
    tmp_path: Path,
    tiny_config: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    enabled = []
    monkeypatch.setattr(CausalLM, "enable_checkpointing", lambda model: enabled.append(model))
    many = ("batch.micro_batch_size=1000000", "batch.global_batch_size=1000000")
    sequences = (*many, "data.sequence_length=1000")
    with caplog.at_level("INFO"), pytest.raises(_StopError):
        monkeypatch.setattr("payload.train.strategies.base.build_optimizers", _stop)
        train_alone(tmp_path, tiny_config, *sequences)
    assert len(enabled) == 1 and "activation checkpointing is on, " in caplog.text


@pytest.mark.parametrize(
    ("words", "bf16_here", "expected"),
    [
        (("precision.dtype=auto",), True, "bf16"),
        (("precision.dtype=auto",), None, "bf16"),
        (("precision.dtype=auto",), False, "fp32"),
        (("precision.dtype=bf16",), False, "bf16"),
        (("precision.dtype=fp32",), True, "fp32"),
    ],
)
def test_a_micro_batch_left_to_the_run_is_sized_for_the_dtype_that_it_will_compute_in(
    tmp_path: Path,
    tiny_config: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    bf16_here: bool | None,
    expected: str,
) -> None:
    counted = []

    def settle(*_: object, dtype: str, **__: object) -> None:
        counted.append(dtype)
        raise _StopError

    monkeypatch.setattr("payload.train.session.has_bf16", lambda: bf16_here)
    monkeypatch.setattr("payload.train.session.resolve_batch", settle)
    with pytest.raises(_StopError):
        train_alone(tmp_path, tiny_config, "batch.micro_batch_size=auto", *words)
    assert counted == [expected]


class _StopError(Exception):
    """Ends the run before it allocates memory."""


def _stop(*_: object, **__: object) -> None:
    raise _StopError


def test_the_estimate_and_the_time_of_a_step_follow() -> None:
    setting = RankSetting(
        micro_batch_size=8, dtype="bf16", kernels=True, alone=True, accumulates=False
    )
    for spec in (PRESETS["gpt2"], spec_of(CASES["llama"], where="test")):
        whole = spec.memory_bytes(setting)
        less = spec.checkpointed_memory_bytes(setting)
        weights = spec.memory_bytes(replace(setting, micro_batch_size=0))
        assert weights < less <= whole
    on = parse_run_config("[memory]\nactivation_checkpointing = 'on'", where="test")
    assert (on.recomputation(), parse_run_config("", where="test").recomputation()) == (4 / 3, 1)


@pytest.mark.parametrize("kernels", [False, True])
def test_a_step_of_2048_tokens_keeps_a_fraction_of_what_it_would(
    library: Library, kernels: bool
) -> None:
    raw = {**CASES["llama"], "max_position_embeddings": 2048, "num_hidden_layers": 3}
    tokens = torch.randint(0, raw["vocab_size"], (1, 2049), generator=torch.Generator())
    kept = []
    for checkpoints in (False, True):
        model = make(raw, checkpoints=checkpoints)
        if kernels:
            model.kernels = Kernels(library)
        loss, found, size = gradients(model, (tokens[:, :-1], tokens[:, 1:]), bf16)
        assert loss == pytest.approx(math.log(raw["vocab_size"]), rel=0.05)
        assert all(bool(each.isfinite().all()) for each in found.values())
        kept.append(size)
    assert kept[1] < 0.8 * kept[0]
