"""Adapters with the kernels: as near to fp32 as the reference, or rejected by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.architecture_cases import CASES, random_tokens
from payload.config.training_sections import AdapterSection
from payload.kernels.kernels import Kernels
from payload.kernels.library import Library
from payload.models.registry import spec_of
from payload.train.models.base import CausalLM, trainable
from payload.train.models.loading import build
from payload.train.models.lora import LoraLinear, add_adapter, cast_base_to_bf16, merge_adapter
from tests.train.test_kernels import bf16, error

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

Batch = tuple[Tensor, ...]


def adapted(name: str, **settings: Any) -> CausalLM:
    """Return a small model of that family whose adapter, norms and biases all have an effect."""
    torch.manual_seed(1)
    # With fewer experts a token, rounding would change some tokens' experts.
    experts = {"num_experts_per_tok": 6} if name == "qwen3_moe" else {}
    model = build(spec_of({**CASES[name], **experts}, where="config.json"))
    # alpha / rank is not a power of two.
    add_adapter(model, AdapterSection(kind="lora", **({"rank": 6, "alpha": 8} | settings)), seed=1)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn_like(each) * 0.05)
    return model


def with_kernels(model: CausalLM, library: Library) -> CausalLM:
    """Return the model with kernels and its base in bf16, as in a run."""
    cast_base_to_bf16(model)
    model.kernels = Kernels(library)
    assert model.speed_notes() == []
    return model


def gradients(model: CausalLM, batch: Batch, *, passes: int = 1) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    for _ in range(passes):
        # Dropout draws the same masks in each forward pass.
        torch.manual_seed(2)
        loss = model.train()(*batch)
        (loss / passes).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert set(found) == {name for name, _ in trainable(model)}
    return loss.item(), found


def in_bf16(model: CausalLM, batch: Batch, *, passes: int = 1) -> tuple[float, dict[str, Tensor]]:
    with bf16():
        return gradients(model, batch, passes=passes)


def documents(batch: Batch) -> Tensor:
    """Return the starts of two documents a row."""
    length = batch[0].shape[1]
    starts = torch.zeros(batch[0].shape, dtype=torch.int64)
    starts[:, length // 3 :] = length // 3
    return starts


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt2", {}),
        ("gpt2", {"target": "mlp.c_proj"}),
        ("llama", {}),
        ("llama", {"target": "q_proj,v_proj", "rslora": True}),
        ("llama", {"target": "up_proj"}),
        ("llama, untied, biases", {}),
        ("qwen3", {"rank": 1}),
        ("gemma3_text", {}),
        ("phi3, partial longrope", {}),
        ("qwen3_moe", {}),
        ("phi3, partial longrope", {"target": "qkv_proj", "dropout": 0.25}),
        ("olmo3", {}),
        ("granite 4, dense", {}),
        ("gpt2", {"dropout": 0.25}),
        ("qwen3", {"dropout": 0.25}),
    ],
)
def test_a_pass_is_as_near_to_fp32_as_the_reference_s(
    library: Library, name: str, settings: dict[str, Any], packed: bool
) -> None:
    model = adapted(name, **settings)
    batch: Batch = random_tokens(model.spec.vocab_size)
    if packed:
        batch = (*batch, documents(batch))
    # The weights in bf16, which all three models use as their base.
    cast_base_to_bf16(model)
    exact_model = copy.deepcopy(model).float()
    exact = gradients(exact_model, batch)
    reference = in_bf16(copy.deepcopy(model), batch)
    with_kernels(model, library)

    ours = in_bf16(model, batch)
    twice = in_bf16(model, batch, passes=2)

    assert ours[0] == pytest.approx(exact[0], rel=2e-3)
    for key, true in exact[1].items():
        near = error(reference[1][key], true)
        assert error(ours[1][key], true) < 1.5 * near + 2e-3, key
        assert error(twice[1][key], ours[1][key]) < 1e-3, key


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt2", {}),
        ("llama", {"target": "q_proj,v_proj"}),
        ("llama, untied, biases", {}),
        ("phi3, partial longrope", {"target": "qkv_proj", "dropout": 0.25}),
        ("qwen3", {"dropout": 0.25}),
    ],
)
def test_in_fp32_loss_and_gradients_differ_from_the_reference_s_by_rounding(
    library: Library, name: str, settings: dict[str, Any], packed: bool
) -> None:
    model = adapted(name, **settings)
    batch: Batch = random_tokens(model.spec.vocab_size)
    if packed:
        batch = (*batch, documents(batch))
    exact = gradients(copy.deepcopy(model), batch)
    model.kernels = Kernels(library)
    found = gradients(model, batch)
    assert found[0] == pytest.approx(exact[0], rel=1e-6)
    for key, true in exact[1].items():
        assert error(found[1][key], true) < 2e-5, key


@pytest.mark.bf16
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_base_lies_once_in_bf16_and_no_pass_copies_it(
    library: Library, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_kernels(adapted(name), library)
    weights = [each.weight for each in model.modules() if isinstance(each, LoraLinear)]
    assert weights and all(each.dtype is torch.bfloat16 for each in weights)
    copied = []
    copy_ = Tensor.copy_

    def counted(target: Tensor, source: Tensor, *more: Any) -> Tensor:
        copied.append(source.shape)
        return copy_(target, source, *more)

    monkeypatch.setattr(Tensor, "copy_", counted)
    in_bf16(model, random_tokens(model.spec.vocab_size))
    assert copied and not {each.shape for each in weights} & set(copied)


def test_a_layer_without_an_adapter_keeps_no_input(library: Library) -> None:
    sizes = []
    for target in ("all-linear", "q_proj"):
        model = with_kernels(adapted("llama", target=target), library)
        kept = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
            in_bf16(model, random_tokens(model.spec.vocab_size))
        sizes.append(kept)
    assert sizes[1] < sizes[0]


def test_without_training_nothing_is_dropped(library: Library) -> None:
    tokens, targets = random_tokens(CASES["llama"]["vocab_size"])
    losses = []
    for dropout in (0.0, 0.5):
        model = with_kernels(adapted("llama", dropout=dropout), library).eval()
        with bf16():
            losses.append(model.token_losses(tokens, targets))
    assert torch.equal(*losses)


def test_checkpointed_layers_give_the_same_gradients(library: Library) -> None:
    for name, dropout in (("gpt2", 0.0), ("qwen3", 0.0), ("llama", 0.2)):
        model = with_kernels(adapted(name, dropout=dropout), library)
        batch = random_tokens(model.spec.vocab_size)
        plain = in_bf16(model, batch)
        model.enable_checkpointing()
        again = in_bf16(model, batch)
        assert again[0] == plain[0]
        assert all(torch.equal(again[1][key], plain[1][key]) for key in plain[1])


def test_a_base_in_bf16_merges_to_the_sum(library: Library) -> None:
    model = with_kernels(adapted("llama"), library)
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(layer, LoraLinear)
    wanted = layer.weight.float() + layer.delta()
    merge_adapter(model)
    assert torch.equal(model.get_parameter("model.layers.0.mlp.up_proj.weight"), wanted)


class _Dora(LoraLinear):
    """An unsupported kind of adapter."""


def _another_kind(model: CausalLM) -> None:
    model.get_submodule("model.layers.0.mlp.up_proj").__class__ = _Dora


def _magnitude(model: CausalLM) -> None:
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    layer.register_parameter("lora_magnitude_vector", nn.Parameter(torch.ones(4)))


def _dropout(model: CausalLM) -> None:
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(layer, LoraLinear)
    layer.dropout = 0.1


def _trained(model: CausalLM) -> None:
    model.get_parameter("model.norm.weight").requires_grad_(True)


def _wrapped(model: CausalLM) -> None:
    class Quantised(nn.Parameter):
        """A weight that is not a plain tensor."""

    layer = model.get_submodule("model.layers.1.mlp.up_proj")
    assert isinstance(layer, LoraLinear)
    layer.weight = Quantised(layer.weight.detach(), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_another_kind, "modules of another kind: _Dora"),
        (_magnitude, "more than LoRA's two matrices"),
        (_dropout, "different dropout"),
        (_trained, "1 weights with the wrong requires_grad"),
        (_wrapped, "1 weights of type Quantised, such as layers.1.mlp.up_proj.weight"),
    ],
)
def test_an_adapter_that_the_kernels_do_not_know_is_refused_by_name(
    library: Library, change: Callable[[CausalLM], None], reason: str
) -> None:
    model = with_kernels(adapted("llama"), library)
    change(model)
    assert any(reason in note for note in model.speed_notes())


def test_dora_is_refused_by_name_and_computed_by_the_reference(library: Library) -> None:
    model, alone = (adapted("llama", dora=True) for _ in range(2))
    cast_base_to_bf16(model)
    model.kernels = Kernels(library)
    assert any("modules of another kind: DoraLinear" in note for note in model.speed_notes())
    cast_base_to_bf16(alone)
    batch = random_tokens(CASES["llama"]["vocab_size"])
    with bf16():
        assert model(*batch).item() == pytest.approx(alone(*batch).item(), rel=1e-2)
