"""Several documents in a row of tokens: each is computed as if it were alone."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.architecture_cases import CASES
from payload.config.training_sections import AdapterSection
from payload.core.errors import ConfigError
from payload.formats.data_folder import IGNORED_TARGET
from payload.kernels.kernels import Kernels
from payload.kernels.library import Library
from payload.models.registry import spec_of
from payload.train.families.transformers.model import TransformersLM
from payload.train.families.transformers.probes import document_leak, mixes_documents
from payload.train.models.base import CausalLM
from payload.train.models.loading import build
from payload.train.models.lora import add_adapter
from tests.train.test_kernels import bf16
from tests.train.test_model import SMALL, make_model

# Longer than a block of the kernels' attention (128), ending with it, and a single token.
ROWS = ((37, 1, 130, 32), (128, 72))
LENGTH = 200
_NATIVE = [
    *("gpt2", "llama", "qwen3", "qwen2, windows", "mistral, window", "gemma3_text", "smollm3"),
    *("phi3", "olmo3", "granite"),
]
_OTHERS = [
    *("gemma4_text, small", "gemma4_text, large", "qwen3_5_text"),
    "transformers: stablelm",
]
"""Models whose layers run without kernels."""


def make(name: str) -> CausalLM:
    """Return a small model in which every weight has an effect."""
    torch.manual_seed(0)
    if name == "gpt2":
        return make_model(sequence_length=LENGTH, vocab_size=SMALL.vocab_size)
    if name.startswith("transformers: "):
        raw = {**CASES["llama"], "model_type": name.removeprefix("transformers: ")}
        model: CausalLM = TransformersLM(spec_of(raw, where="config.json"))
    else:
        model = build(spec_of(CASES[name], where="config.json"))
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn_like(each) * 0.05)
    return model.eval()


def packed(vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, targets and starts of `ROWS`."""
    tokens = torch.randint(
        vocabulary, (len(ROWS), LENGTH), generator=torch.Generator().manual_seed(2)
    )
    targets = torch.full_like(tokens, IGNORED_TARGET)
    starts = torch.zeros_like(tokens)
    for row, start, end in spans():
        starts[row, start:end] = start
        targets[row, start : end - 1] = tokens[row, start + 1 : end]
    return tokens, targets, starts


def spans() -> list[tuple[int, int, int]]:
    """Return row, first token and end of every document."""
    found = []
    for row, lengths in enumerate(ROWS):
        start = 0
        for length in lengths:
            found.append((row, start, start + length))
            start += length
    return found


def one_by_one(model: CausalLM, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the losses of documents computed in separate batches."""
    tokens, targets, _ = batch
    losses = torch.zeros(tokens.shape)
    for row, start, end in spans():
        some = slice(row, row + 1), slice(start, end)
        losses[some] = model.token_losses(tokens[some], targets[some])
    return losses


@pytest.mark.parametrize("name", [*_NATIVE, *_OTHERS, "transformers: gemma2"])
def test_packed_documents_have_the_losses_that_each_has_alone(name: str) -> None:
    model = make(name)
    batch = packed(model.spec.vocab_size)
    with torch.inference_mode():
        torch.testing.assert_close(
            model.token_losses(*batch), one_by_one(model, batch), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3_5_text", "transformers: stablelm"])
def test_packed_documents_have_the_gradients_that_they_have_alone(name: str) -> None:
    model = make(name)
    batch = packed(model.spec.vocab_size)
    count = int((batch[1] != IGNORED_TARGET).sum())
    model(*batch).backward()
    found = {
        key: each.grad.clone() for key, each in model.named_parameters() if each.grad is not None
    }
    model.zero_grad()
    tokens, targets, _ = batch
    for row, start, end in spans():
        some = slice(row, row + 1), slice(start, end)
        share = int((targets[some] != IGNORED_TARGET).sum()) / count
        if share:
            (model(tokens[some], targets[some]) * share).backward()
    for key, each in model.named_parameters():
        assert each.grad is not None
        torch.testing.assert_close(found[key], each.grad, atol=1e-5, rtol=1e-4, msg=key)


@pytest.mark.parametrize("name", [*_NATIVE, *_OTHERS])
@pytest.mark.parametrize("fast", [False, True], ids=["fp32", "bf16"])
def test_no_token_attends_to_another_document(library: Library, name: str, fast: bool) -> None:
    model = make(name)
    precision: Any = nullcontext
    if fast:
        model.kernels, precision = Kernels(library), bf16
    tokens, _, starts = packed(model.spec.vocab_size)
    found = hidden(model, tokens, starts, precision())
    for row, start, end in spans():
        others = torch.randint(model.spec.vocab_size, tokens.shape)
        others[row, start:end] = tokens[row, start:end]
        again = hidden(model, others, starts, precision())
        assert torch.equal(found[row, start:end], again[row, start:end])
        if end - start < LENGTH:
            assert not torch.equal(found, again)


def hidden(
    model: CausalLM, tokens: Tensor, starts: Tensor, precision: AbstractContextManager[object]
) -> Tensor:
    with torch.inference_mode(), precision:
        return model.hidden(tokens, starts=starts)


@pytest.mark.parametrize("name", _NATIVE)
def test_the_kernels_are_as_near_to_fp32_as_the_reference(library: Library, name: str) -> None:
    model = make(name)
    batch = packed(model.spec.vocab_size)
    with torch.inference_mode():
        exact = one_by_one(model, batch)
        with bf16():
            reference = model.token_losses(*batch)
            model.kernels = Kernels(library)
            assert model.speed_notes() == []
            ours = model.token_losses(*batch)
    assert (ours - exact).norm() < 1.5 * (reference - exact).norm()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_adapter_is_trained_on_documents_alike(name: str) -> None:
    model = make(name)
    add_adapter(model, AdapterSection(kind="lora", rank=4), seed=1)
    batch = packed(model.spec.vocab_size)
    with torch.inference_mode():
        torch.testing.assert_close(
            model.token_losses(*batch), one_by_one(model, batch), atol=1e-5, rtol=1e-5
        )


MIXTURES = ["mixtral", "qwen2_moe", "granitemoe"]


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("fast", [False, True], ids=["fp32", "bf16"])
def test_rounding_in_the_matmuls_of_experts_is_no_leak(name: str, fast: bool) -> None:
    for seed in range(3):
        with bf16() if fast else nullcontext():
            assert not mixes_documents(mixture(name, seed).module)


@pytest.mark.seeds
@pytest.mark.parametrize("name", MIXTURES)
def test_no_seed_s_rounding_is_a_leak(name: str) -> None:
    leaks = [document_leak(mixture(name, seed).module) for seed in range(40)]
    assert max(leaks) < 1e-5


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("fast", [False, True], ids=["fp32", "bf16"])
def test_a_small_leak_in_one_layer_of_a_mixture_is_found(name: str, fast: bool) -> None:
    model = mixture(name, seed=0)

    def leak(_: object, __: object, made: Any) -> Any:
        hidden = made[0] if isinstance(made, tuple) else made
        hidden += 1e-3 * hidden[:, :1]
        return made

    model.layers()[1].register_forward_hook(leak)
    with bf16() if fast else nullcontext():
        assert mixes_documents(model.module)


def mixture(name: str, seed: int) -> TransformersLM:
    torch.manual_seed(seed)
    return TransformersLM(spec_of(CASES[name], where="config.json"))


@pytest.mark.parametrize("model_type", ["mamba", "bloom"])
def test_layers_that_mix_documents_are_refused(model_type: str) -> None:
    raw = {
        **{"model_type": model_type, "vocab_size": 128, "hidden_size": 32, "n_head": 2},
        **{"num_hidden_layers": 2, "n_layer": 2, "state_size": 8, "intermediate_size": 64},
    }
    model = TransformersLM(spec_of(raw, where="config.json"))
    tokens, targets, starts = packed(128)
    padding = starts.new_zeros(starts.shape)
    padding[:, 150:] = torch.arange(150, LENGTH)
    targets[:, 149:] = IGNORED_TARGET
    alone = model.token_losses(tokens[:, :150], targets[:, :150])
    torch.testing.assert_close(model.token_losses(tokens, targets, padding)[:, :150], alone)
    with pytest.raises(ConfigError, match="do not separate the conversations of a block"):
        model.token_losses(tokens, targets, starts)
