"""A decoder with the kernels: as near to fp32 as the reference, or rejected by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.architecture_cases import CASES, random_tokens
from payload.config.training_sections import OptimizerSection
from payload.formats.data_folder import IGNORED_TARGET
from payload.kernels import head as head_file
from payload.kernels.accumulate import TokenGradient
from payload.kernels.kernels import Kernels
from payload.kernels.library import Library
from payload.models.llama.spec import DecoderSpec
from payload.models.registry import spec_of
from payload.models.spec import RankSetting, logits_tokens
from payload.train.families.llama import model as decoder_file
from payload.train.families.llama.kernel_layers import run_layers
from payload.train.families.llama.model import Decoder
from payload.train.optimizers.optimizer import build_optimizers
from tests.train.test_kernels import bf16, error

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

ONE_PASS = RankSetting(
    micro_batch_size=1, dtype="bf16", kernels=True, alone=True, accumulates=False
)
_FAMILIES = [
    *("llama", "llama, untied, biases", "llama, llama3 rope", "smollm3", "qwen2", "qwen3"),
    *("qwen2, windows", "mistral, window", "gemma3_text", "phi3, partial longrope", "qwen3_moe"),
    *("olmo2", "olmo3", "granite", "granite 4, dense"),
]


def make(name: str, *, dropout: float = 0.0) -> Decoder:
    torch.manual_seed(1)
    spec = spec_of(CASES[name], where="config.json")
    assert isinstance(spec, DecoderSpec)
    model = Decoder(spec, dropout=dropout)
    with torch.no_grad():
        for each in model.parameters():
            # Norms and biases without effect would hide errors.
            each.add_(torch.randn_like(each) * 0.05)
    return model


def gradients(
    model: Decoder,
    batch: tuple[Tensor, Tensor],
    precision: Callable[[], AbstractContextManager[object]],
    passes: int = 1,
) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    for _ in range(passes):
        with precision():
            loss = model(*batch)
        (loss / passes).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return loss.item(), found


@pytest.mark.slow
@pytest.mark.bf16
@pytest.mark.parametrize("name", _FAMILIES)
def test_a_pass_over_the_kernels_is_as_near_to_fp32_as_the_reference_s(
    library: Library, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = make(name)
    batch = random_tokens(model.spec.vocab_size)
    exact = gradients(copy.deepcopy(model), batch, nullcontext)
    reference = gradients(copy.deepcopy(model), batch, bf16)
    model.kernels = Kernels(library)
    assert model.speed_notes() == []
    ran = []

    def counted(*given: Any) -> Tensor:
        ran.append(1)
        return run_layers(*given)

    monkeypatch.setattr(decoder_file, "run_layers", counted)

    ours = gradients(model, batch, bf16)
    twice = gradients(model, batch, bf16, passes=2)

    assert ran == [1, 1, 1]
    assert ours[0] == pytest.approx(exact[0], rel=2e-3)
    for key, true in exact[1].items():
        near = error(reference[1][key], true)
        assert error(ours[1][key], true) < 1.5 * near + 2e-3, key
        assert error(twice[1][key], ours[1][key]) < 1e-3, key


@pytest.mark.bf16
@pytest.mark.parametrize("chunk", [2048, 17])
@pytest.mark.parametrize(
    "name", ["llama, untied, biases", "qwen3", "gemma3_text", "olmo3", "granite"]
)
def test_gradients_kept_in_bf16_are_those_in_fp32_rounded_once(
    library: Library, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
) -> None:
    monkeypatch.setattr(head_file, "logits_tokens", lambda _vocabulary: chunk)
    model = make(name)
    batch = random_tokens(model.spec.vocab_size)
    model.kernels = Kernels(library)
    exact = gradients(model, batch, bf16)
    model.zero_grad()
    optimizers = build_optimizers(model, OptimizerSection())
    optimizers.kernels = model.kernels
    optimizers.keep_bf16_gradients(model.bf16_gradients(ONE_PASS))
    found = gradients(model, batch, bf16)
    assert found[0] == exact[0]
    kept = {key for key, value in found[1].items() if value.dtype is torch.bfloat16}
    head = "model.embed_tokens.weight" if model.lm_head is None else "lm_head.weight"
    assert kept == {key for key in exact[1] if key.endswith("_proj.weight")} | {head}
    for key, value in found[1].items():
        wanted = exact[1][key]
        if key == head and model.lm_head is None:
            # The head's part is rounded before the embedding rows are added.
            assert error(value, wanted.double()) < 2**-7
        else:
            assert torch.equal(value, wanted.to(value.dtype)), key

    # No run has two micro-batches in such a step; if it did, the loss is not summed in bf16.
    twice = gradients(model, batch, bf16, passes=2)[1]
    for key, value in twice.items():
        assert value.dtype is torch.float32, key
        assert error(value, exact[1][key].double()) < 2**-7, key


@pytest.mark.bf16
@pytest.mark.parametrize("vocabulary", [64, 77])
def test_a_gradient_made_where_the_logits_lie_is_that_made_beside_them(
    library: Library, monkeypatch: pytest.MonkeyPatch, vocabulary: int
) -> None:
    head = HeadPasses(monkeypatch, vocabulary)
    in_place = head.gradients_of(TokenGradient(library))
    monkeypatch.setattr(head_file, "_shares_memory", lambda *_: False)
    beside = head.gradients_of(TokenGradient(library))
    for found, wanted in zip(in_place, beside, strict=True):
        assert torch.equal(found, wanted)
    assert in_place[2].untyped_storage().nbytes() > beside[2].untyped_storage().nbytes()


@pytest.mark.bf16
def test_a_step_makes_its_logits_where_the_gradient_lay_that_the_update_before_has_read(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, gradient = HeadPasses(monkeypatch, vocabulary=77), TokenGradient(library)
    first = head.gradients_of(gradient)
    # No update has read the first gradient, and a second backward pass does not change it.
    kept, before = first[2], first[2].clone()
    second = head.gradients_of(gradient)
    assert kept.data_ptr() != second[2].data_ptr() and torch.equal(kept, before)
    gradient.updated()
    # It is still the weight's gradient.
    with_grad = head.gradients_of(gradient, drops=False)
    assert torch.equal(second[2], before) and with_grad[2].data_ptr() != second[2].data_ptr()
    gradient.updated()
    place = head.gradients_of(gradient)[2].data_ptr()
    gradient.updated()
    again = head.gradients_of(gradient)
    assert again[2].data_ptr() == place
    for found, wanted in zip(again, (*first[:2], before), strict=True):
        assert torch.equal(found, wanted)


class HeadPasses:
    """A head with slices of 4 vocabulary rows and a bf16 gradient."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, vocabulary: int) -> None:
        # Several groups of slices, of which the last one is full or not.
        monkeypatch.setattr(head_file, "SLICE", 4)
        width = 32
        self.weight = nn.Parameter(torch.randn(vocabulary, width))
        self.start = torch.randn(width - 3, width)
        self.targets = torch.randint(vocabulary, (len(self.start),))
        self.targets[:2] = IGNORED_TARGET

    def gradients_of(
        self, gradient: TokenGradient, *, drops: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss and the gradients of the hidden states and of the weight."""
        hidden = self.start.to(torch.bfloat16).requires_grad_()
        if drops:
            self.weight.grad, self.weight.grad_dtype = None, torch.bfloat16
        loss = head_file.mean_loss(hidden, self.weight, self.weight, self.targets, gradient)
        torch.autograd.backward(loss / 3)
        assert hidden.grad is not None and self.weight.grad is not None
        return loss.detach(), hidden.grad, self.weight.grad


@pytest.mark.parametrize(
    "changed",
    [{"alone": False}, {"accumulates": True}, {"dtype": "fp32"}, {"kernels": False}],
)
def test_gradients_that_are_summed_or_not_of_bf16_matmuls_stay_in_fp32(
    changed: dict[str, Any],
) -> None:
    model = make("qwen3")
    assert model.bf16_gradients(ONE_PASS)
    assert model.bf16_gradients(replace(ONE_PASS, **changed)) == []


def test_a_head_in_chunks_keeps_its_gradient_in_fp32() -> None:
    model = make("qwen3")
    model.spec = model.spec.with_sequence_length(logits_tokens(model.spec.vocab_size) + 1)
    assert model.spec.bf16_gradients(ONE_PASS) == (True, False)
    assert all(each is not model.head_weight() for each in model.bf16_gradients(ONE_PASS))


@pytest.mark.parametrize("name", _FAMILIES)
def test_in_fp32_loss_and_gradients_differ_from_the_reference_s_by_rounding(
    library: Library, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = make(name)
    batch = random_tokens(model.spec.vocab_size)
    exact = gradients(copy.deepcopy(model), batch, nullcontext)
    model.kernels = Kernels(library)
    ran = []

    def counted(*given: Any) -> Tensor:
        ran.append(1)
        return run_layers(*given)

    monkeypatch.setattr(decoder_file, "run_layers", counted)
    found = gradients(model, batch, nullcontext)
    twice = gradients(model, batch, nullcontext, passes=2)
    assert ran == [1, 1, 1]
    assert found[0] == pytest.approx(exact[0], rel=1e-6)
    for key, true in exact[1].items():
        assert error(found[1][key], true) < 2e-5, key
        assert error(twice[1][key], true) < 2e-5, key


def test_weights_that_changed_are_seen_by_the_next_pass(library: Library) -> None:
    model = make("llama")
    batch = random_tokens(model.spec.vocab_size)
    model.kernels = Kernels(library)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with bf16():
        before = model(*batch)
    before.backward()
    model.kernels.adamw(optimizer, grad_scale=1.0)
    with bf16():
        after = model(*batch)
        model.kernels.weights_changed(optimizer)
        again = model(*batch)
    assert after.item() < before.item()
    assert after.item() == again.item()


class _Adapted(nn.Linear):
    """A layer that computes more than its weight."""


def _frozen(model: Decoder) -> None:
    model.get_parameter("model.layers.1.mlp.up_proj.weight").requires_grad_(False)


def _adapted(model: Decoder) -> None:
    attention = model.get_submodule("model.layers.0.self_attn")
    attention.q_proj = _Adapted(8, 8)


def _hooked(model: Decoder) -> None:
    model.get_submodule("model.layers.0.mlp").register_forward_hook(lambda *_: None)


def _half(model: Decoder) -> None:
    model.get_submodule("model.layers.0.mlp").to(torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_frozen, "1 frozen weights, such as layers.1.mlp.up_proj.weight"),
        (_adapted, "modules of another kind: _Adapted"),
        (_hooked, "hooks on layers.0.mlp"),
        (_half, "not fp32"),
    ],
)
def test_layers_that_the_kernels_do_not_recognise_are_refused_by_name(
    library: Library, change: Callable[[Decoder], None], reason: str
) -> None:
    model = make("llama")
    model.kernels = Kernels(library)
    change(model)
    (note,) = model.speed_notes()
    assert reason in note


def test_dropout_and_a_gate_without_a_kernel_run_on_the_reference(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_file, "run_layers", lambda *_: pytest.fail("the kernels ran"))
    exact_gelu = {**CASES["llama"], "hidden_act": "gelu"}
    spec = spec_of(exact_gelu, where="config.json")
    assert isinstance(spec, DecoderSpec)
    for model, reason in ((make("llama", dropout=0.1), "dropout"), (Decoder(spec), "gelu")):
        model.kernels = Kernels(library)
        assert reason in model.speed_notes()[0]
        with bf16():
            assert torch.isfinite(model(*random_tokens(model.spec.vocab_size)))
