"""Linears in 8-bit floats, emulated on the CPU: conversion, losses, and checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from payload.config.run_config import parse_run_config
from payload.config.training_sections import PrecisionSection
from payload.core.errors import ConfigError, ExitCode
from payload.run_record.run_files import RunPaths
from payload.train.models.float8 import convert_linears
from tests.support.launching import losses
from tests.support.slow_imports import float8_linear
from tests.train.alone import ALONE, train_alone
from tests.train.test_model import make_model

EMULATED = PrecisionSection(fp8="emulated")
SIZES = ("model.n_layer=2", "model.n_head=4", "model.n_embd=64", "data.sequence_length=32")
RUN = (*SIZES, "precision.dtype=bf16", "optimizer.lr=0.001", "engine.kernels=off")


def float8_paths(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_modules() if isinstance(each, float8_linear())}


def test_every_linear_of_a_layer_is_converted_and_nothing_else() -> None:
    model = make_model(n_embd=32, n_head=2, n_layer=2)
    before = dict(model.named_parameters())
    note = convert_linears(model, EMULATED)
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    found = float8_paths(model)
    assert len(found) == 8 and all(name.endswith(names) for name in found)
    assert "8 of the layers' 8 linears" in note and "emulated" in note
    assert not model.takes_inference_mode
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in after)


def test_linears_of_odd_sizes_stay_and_a_model_of_them_alone_is_refused() -> None:
    model = make_model(n_embd=24, n_head=2, n_layer=1)
    with pytest.raises(ConfigError, match=r"no linear of the layers .*'off'") as refused:
        convert_linears(model, EMULATED)
    assert refused.value.exit_code == ExitCode.CONFIG and "\n" not in str(refused.value)
    assert not float8_paths(model)


def test_eight_bits_round_and_gradients_are_near_those_of_bf16() -> None:
    plain, rounded = (make_model(n_embd=32, n_head=2, n_layer=2) for _ in range(2))
    convert_linears(rounded, EMULATED)
    tokens = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(3))
    found = []
    for model in (plain, rounded):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model.train()(tokens, tokens)
        loss.backward()
        found.append((loss.item(), gradient_of(model, "mlp.c_fc.weight")))
    (loss_before, gradient), (near_loss, near) = found
    assert near_loss != loss_before and abs(near_loss - loss_before) < 0.01 * loss_before
    assert 0 < (near - gradient).norm() / gradient.norm() < 0.2


def gradient_of(model: nn.Module, ending: str) -> Tensor:
    gradient = next(each for name, each in model.named_parameters() if name.endswith(ending)).grad
    assert gradient is not None
    return gradient


@pytest.mark.slow
def test_a_run_is_within_a_hundredth_of_bf16_and_resumes_to_the_same_bits(
    tmp_path: Path, tiny_config: Path
) -> None:
    steps = ("train.steps=8", "train.checkpoint_every=4")
    train_alone(tmp_path / "bf16", tiny_config, *RUN, *steps)
    train_alone(tmp_path / "fp8", tiny_config, *RUN, *steps, "precision.fp8=emulated")
    ours, theirs = losses(tmp_path / "fp8"), losses(tmp_path / "bf16")
    assert ours != theirs and ours[-1] < ours[0]
    assert all(abs(a - b) < 0.01 * b for a, b in zip(ours, theirs, strict=True))

    whole = RunPaths(tmp_path / "fp8").checkpoint(8)
    names = ("model.safetensors", "optimizer.safetensors")
    kept = {name: (whole / name).read_bytes() for name in names}
    shutil.rmtree(whole)
    train_alone(tmp_path / "fp8", tiny_config, *RUN, *steps, "precision.fp8=emulated")
    assert losses(tmp_path / "fp8") == ours
    assert {name: (whole / name).read_bytes() for name in kept} == kept
    plain = load_file(RunPaths(tmp_path / "bf16").checkpoint(8) / "model.safetensors")
    assert load_file(whole / "model.safetensors").keys() == plain.keys()


def test_a_rank_on_a_cpu_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"computes on a CPU.*'emulated'") as refused:
        ALONE.require_fp8()
    assert refused.value.exit_code == ExitCode.CONFIG and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("device.kind=cpu", "needs a GPU"),
        ("precision.dtype=fp32", "bf16 for the other operations"),
        ("adapter.kind=lora", "full training"),
        ("engine.kind=ipex", "does not run with engine.kind"),
        ("distributed.strategy=zero3", '"replicate" or "shard"'),
        ("distributed.pipeline_parallel=2", '"replicate" or "shard"'),
    ],
)
def test_what_does_not_go_with_8_bits_is_refused_before_anything_starts(
    setting: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_run_config("", overrides=["precision.fp8=on", setting], where="test")
