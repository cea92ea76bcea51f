"""Gemma 4's dense text models against transformers', beyond what `test_families` compares."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.architecture_cases import CASES, make_folder, random_tokens
from payload.config.training_sections import AdapterSection
from payload.kernels.kernels import Kernels
from payload.kernels.library import Library
from payload.models.registry import read_spec, spec_of
from payload.train.families.gemma4 import kernel_layers
from payload.train.families.gemma4.capped_head import CappedHead
from payload.train.families.gemma4.model import Gemma4
from payload.train.families.transformers.model import TransformersLM
from payload.train.models.base import CausalLM, trainable
from payload.train.models.head_loss import PlainHead
from payload.train.models.hf_weights import save_hf
from payload.train.models.loading import build, load
from payload.train.models.lora import add_adapter
from tests.train.test_kernels import bf16, error

SMALL, LARGE = "gemma4_text, small", "gemma4_text, large"
WEIGHTS = "model.safetensors"
TOKENS, TARGETS = random_tokens(1031)


def logits(model: CausalLM) -> Tensor:
    with torch.no_grad():
        return model.logits(model.hidden(TOKENS))


def logits_of_theirs(folder: Path) -> Tensor:
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found: Tensor = theirs(input_ids=TOKENS).logits
    return found


def moved(name: str, *, adapted: bool) -> CausalLM:
    """Return a model whose weights differ from their initial values, and its adapter's too."""
    torch.manual_seed(1)
    model = build(spec_of(CASES[name], where="config.json"))
    with torch.no_grad():
        for key, each in model.named_parameters():
            each.add_(torch.randn_like(each) * 0.05)
            # As in trained models. With a scale of 1, bf16 changes which token gets all attention.
            each.mul_(0.2 if key.endswith("q_norm.weight") else 1.0)
    if adapted:
        add_adapter(model, AdapterSection(kind="lora", rank=4), seed=1)
        with torch.no_grad():
            for _, each in trainable(model):
                each.add_(torch.randn_like(each) * 0.05)
    return model


@pytest.mark.bf16
@pytest.mark.usefixtures("fresh_memory_is_nan")
@pytest.mark.parametrize(
    ("name", "widest", "adapted"),
    [(SMALL, 256, False), (LARGE, 256, False), (SMALL, 16, False), (LARGE, 16, True)],
)
def test_the_kernels_are_as_near_to_fp32_as_the_reference(
    library: Library, monkeypatch: pytest.MonkeyPatch, name: str, widest: int, adapted: bool
) -> None:
    """With `widest` = 16, the layers without a window have torch's attention."""
    monkeypatch.setattr(kernel_layers, "_WIDEST_HEAD", widest)
    model = moved(name, adapted=adapted)
    exact = gradients(model, nullcontext)
    reference = gradients(model, bf16)
    model.kernels = Kernels(library)
    assert model.speed_notes() == []
    ours = gradients(model, bf16)
    assert ours.keys() == exact.keys()
    for key, true in exact.items():
        near = error(reference[key], true)
        assert error(ours[key], true) < 1.5 * near + 2e-3, key
    model.enable_checkpointing()
    again = gradients(model, bf16)
    assert all(torch.equal(again[key], each) for key, each in ours.items())


@pytest.mark.usefixtures("fresh_memory_is_nan")
@pytest.mark.parametrize(
    ("name", "widest", "adapted"),
    [(SMALL, 256, False), (LARGE, 256, True), (SMALL, 16, False)],
)
def test_in_fp32_the_kernels_differ_from_the_reference_by_rounding(
    library: Library, monkeypatch: pytest.MonkeyPatch, name: str, widest: int, adapted: bool
) -> None:
    monkeypatch.setattr(kernel_layers, "_WIDEST_HEAD", widest)
    model = moved(name, adapted=adapted)
    exact = gradients(model, nullcontext)
    model.kernels = Kernels(library)
    ours = gradients(model, nullcontext)
    assert ours["loss"].item() == pytest.approx(exact["loss"].item(), rel=1e-6)
    for key, true in exact.items():
        assert error(ours[key], true) < 2e-5, key


def gradients(model: CausalLM, precision: Callable[[], Any]) -> dict[str, Tensor]:
    """Return the loss and all gradients by name."""
    model.zero_grad()
    with precision():
        loss = model(TOKENS, TARGETS)
    torch.autograd.backward(loss)
    found = {"loss": loss.detach().float()}
    for name, each in trainable(model):
        assert each.grad is not None
        found[name] = each.grad.clone()
    return found


@pytest.mark.parametrize("name", [SMALL, LARGE])
def test_parameters_are_the_tensors_that_the_spec_counts(name: str) -> None:
    model = build(spec_of(CASES[name], where="config.json"))
    found = {key: tuple(value.shape) for key, value in model.named_parameters()}
    assert list(found.items()) == list(model.spec.tensor_shapes())
    sizes = model.spec.gradient_sizes()
    assert sum(each.elements for each in sizes) == model.spec.num_params()


def test_a_layers_scalar_scales_its_output_and_is_saved(tmp_path: Path) -> None:
    make_folder(CASES[SMALL], tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    for number in range(6):
        tensors[f"model.layers.{number}.layer_scalar"] = torch.tensor([0.4 + 0.3 * number])
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    model = load(tmp_path)
    wanted = logits_of_theirs(tmp_path)
    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=1e-4)
    (tmp_path / "saved").mkdir()
    save_hf(model, tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / WEIGHTS)
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], each) for name, each in tensors.items())


def test_keys_in_a_file_that_no_layer_uses_are_not_read(tmp_path: Path) -> None:
    """Released files have keys and values for the layers that use those of an earlier layer."""
    make_folder(CASES[SMALL], tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    wanted = logits(load(tmp_path))
    for name in ("k_proj", "v_proj", "k_norm"):
        other = tensors[f"model.layers.1.self_attn.{name}.weight"]
        tensors[f"model.layers.5.self_attn.{name}.weight"] = torch.randn_like(other)
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    assert torch.equal(logits(load(tmp_path)), wanted)


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
            | {"moe_intermediate_size": 16},
            "a mixture of experts (enable_moe_block)",
        ),
        ({"hidden_activation": "silu"}, "activation 'silu'"),
    ],
)
def test_a_model_with_another_feature_has_transformers_layers(
    changes: dict[str, Any], feature: str, tmp_path: Path
) -> None:
    make_folder({**CASES[LARGE], **changes}, tmp_path)
    model = load(tmp_path).eval()
    assert isinstance(model, TransformersLM)
    assert any(note.endswith(f"do not support {feature}") for note in model.speed_notes())
    torch.testing.assert_close(logits(model), logits_of_theirs(tmp_path))
    assert read_spec(tmp_path).num_params() == sum(each.numel() for each in model.parameters())


def test_new_tokens_get_rows_in_both_embeddings(tmp_path: Path) -> None:
    make_folder(CASES[SMALL], tmp_path / "base")
    model = load(tmp_path / "base")
    model.add_tokens(1031, 1040)
    assert isinstance(model, Gemma4)
    second = model.model.embed_tokens_per_layer.weight
    assert second.shape == (1040, 48)
    torch.testing.assert_close(second[1039], second[:1031].mean(0))
    (tmp_path / "saved").mkdir()
    save_hf(model, tmp_path / "saved")
    wanted = logits_of_theirs(tmp_path / "saved")
    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=1e-4)


def test_recomputed_layers_have_the_same_gradients_bit_by_bit() -> None:
    found = []
    for checkpoints in (False, True):
        torch.manual_seed(1)
        model = build(spec_of(CASES[SMALL], where="config.json"))
        if checkpoints:
            model.enable_checkpointing()
        torch.autograd.backward(model(TOKENS, TARGETS))
        found.append([each.grad for each in model.parameters()])
    for plain, again in zip(*found, strict=True):
        assert plain is not None and again is not None and torch.equal(plain, again)


def test_the_capped_loss_in_chunks_equals_that_of_all_logits() -> None:
    torch.manual_seed(1)
    model = build(spec_of(CASES[LARGE], where="config.json"))
    targets = TARGETS.clone()
    targets[:, :3] = -100
    # With 10**9 rows, each token is a chunk.
    heads = CappedHead(model.logits, rows=10**9), PlainHead(model.logits)
    found = []
    for head in heads:
        model.zero_grad()
        loss = head.mean_loss(model.hidden(TOKENS), targets)
        torch.autograd.backward(loss)
        gradients = [each.grad for each in model.parameters()]
        found.append((loss.detach(), head.token_losses(model.hidden(TOKENS), targets), gradients))
    (*losses, gradients), (*whole, of_whole) = found
    torch.testing.assert_close(losses, whole, rtol=1e-4, atol=1e-6)
    # An element is a sum whose rounding errors depend on its terms, which can cancel out.
    for chunked, plain in zip(gradients, of_whole, strict=True):
        assert chunked is not None and plain is not None
        assert float((chunked - plain).norm()) <= 1e-5 * float(plain.norm())
