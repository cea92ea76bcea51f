"""Qwen3.5's dense text models against transformers', beyond what `test_families` compares."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks.architecture_cases import CASES, make_folder, random_tokens
from payload.config.training_sections import AdapterSection
from payload.kernels.kernels import Kernels
from payload.kernels.library import Library
from payload.models.qwen3_5.spec import CHUNK, Qwen35Spec
from payload.models.registry import spec_of
from payload.train.families.transformers.model import TransformersLM
from payload.train.models.base import CausalLM, trainable
from payload.train.models.loading import build, load
from payload.train.models.lora import add_adapter
from tests.train.test_kernels import bf16, error

SMALL, UNTIED = "qwen3_5_text", "qwen3_5_text, untied, biases"
WEIGHTS = "model.safetensors"
TOKENS, TARGETS = random_tokens(1031)


def make(name: str, *, adapted: bool = False) -> CausalLM:
    """Return a small model in which every weight has an effect."""
    torch.manual_seed(1)
    model = build(spec_of(CASES[name], where="config.json"))
    if adapted:
        add_adapter(model, AdapterSection(kind="lora", rank=4), seed=1)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn_like(each) * 0.05)
    return model


def gradients(model: CausalLM, precision: Callable[[], Any]) -> dict[str, Tensor]:
    """Return the loss, and the gradients of all layers' parameters of the same name."""
    model.zero_grad()
    with precision():
        loss = model(TOKENS, TARGETS)
    torch.autograd.backward(loss)
    found = {"loss": [loss.detach().float().flatten()]}
    for name, each in trainable(model):
        assert each.grad is not None
        kind = name.removeprefix("model.layers.").lstrip("0123456789")
        found.setdefault(kind, []).append(each.grad.flatten().clone())
    return {kind: torch.cat(each) for kind, each in found.items()}


@pytest.mark.bf16
@pytest.mark.usefixtures("fresh_memory_is_nan")
@pytest.mark.parametrize(("name", "adapted"), [(SMALL, False), (UNTIED, False), (UNTIED, True)])
def test_the_kernels_are_as_near_to_fp32_as_the_reference(
    library: Library, name: str, adapted: bool
) -> None:
    model = make(name, adapted=adapted)
    exact, reference = gradients(model, nullcontext), gradients(model, bf16)
    model.kernels = Kernels(library)
    assert model.speed_notes() == []
    ours, exact_of_kernels = gradients(model, bf16), gradients(model, nullcontext)
    for key, true in exact.items():
        near = error(reference[key], true)
        # The decays' gradients are small differences of products that are rounded to bf16.
        rounding = 5e-2 if key.endswith(("dt_bias", "A_log")) else 2e-3
        assert error(ours[key], true) < 2 * near + rounding, key
        assert error(exact_of_kernels[key], true) < 1e-4, key
    model.enable_checkpointing()
    again = gradients(model, bf16)
    assert all(torch.equal(again[key], each) for key, each in ours.items())


def test_recomputed_layers_have_the_same_gradients_bit_by_bit() -> None:
    model = make(SMALL)
    plain = gradients(model, nullcontext)
    model.enable_checkpointing()
    again = gradients(model, nullcontext)
    assert all(torch.equal(again[key], each) for key, each in plain.items())


@pytest.mark.parametrize("name", [SMALL, UNTIED])
def test_parameters_are_the_tensors_that_the_spec_counts(name: str) -> None:
    model = make(name)
    found = {key: tuple(value.shape) for key, value in model.named_parameters()}
    assert list(found.items()) == list(model.spec.tensor_shapes())
    sizes = model.spec.gradient_sizes()
    assert sum(each.elements for each in sizes) == model.spec.num_params()


def test_flops_are_those_that_torch_counts(tmp_path: Path) -> None:
    """torch counts everything in whole chunks except the triangular systems."""
    length = 2 * CHUNK
    theirs = make_folder(CASES[SMALL], tmp_path)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        theirs(input_ids=torch.zeros(1, length, dtype=torch.int64))
    spec = spec_of(CASES[SMALL], where="config.json").with_sequence_length(length)
    assert isinstance(spec, Qwen35Spec)
    linear = spec.linear
    systems = linear.value_heads * CHUNK * (linear.key_dim + linear.value_dim)
    layers = spec.num_layers() - sum(spec.are_full)
    ours = spec.flops_per_token() // 3 - layers * systems
    # torch also counts the three tokens that the convolution computes behind the text.
    assert ours == pytest.approx(counter.get_total_flops() / length, rel=1e-3)


def test_layers_that_predict_several_tokens_are_not_read(tmp_path: Path) -> None:
    make_folder(CASES[SMALL], tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    wanted = load(tmp_path).hf_tensors()
    save_file({**tensors, "mtp.norm.weight": torch.ones(3)}, tmp_path / WEIGHTS)
    found = load(tmp_path).hf_tensors()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], each) for key, each in wanted.items())


def test_a_model_with_another_feature_has_transformers_layers(tmp_path: Path) -> None:
    make_folder({**CASES[SMALL], "hidden_act": "gelu"}, tmp_path)
    model = load(tmp_path).eval()
    assert isinstance(model, TransformersLM)
    assert any(note.endswith("do not support activation 'gelu'") for note in model.speed_notes())
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = theirs(input_ids=TOKENS).logits
        torch.testing.assert_close(model.logits(model.hidden(TOKENS)), wanted)


def test_a_classifier_has_the_names_of_transformers_class() -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    model = make(UNTIED)
    model.drop_head()
    with torch.device("meta"):
        config = AutoConfig.for_model(**CASES[UNTIED])
        theirs: Any = AutoModelForSequenceClassification.from_config(config)
    assert type(theirs).__name__ == model.classifier_architecture()
    assert theirs.state_dict().keys() == {*model.state_dict(), "score.weight"}
