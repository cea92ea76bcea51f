"""LoRA through transformers' layers: counts, and adapters on experts, embedding, router, head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.architecture_cases import CASES, make_folder
from payload.config.training_sections import AdapterSection
from payload.core.errors import CheckpointError, ConfigError
from payload.models.adapter import AdaptedSpec
from payload.models.registry import read_spec
from payload.train.models.base import CausalLM, trainable
from payload.train.models.loading import load
from payload.train.models.lora import add_adapter, save_adapter
from payload.weights.adapter_files import read_adapter_config
from tests.model_classes.cases import CASES as CLASSES
from tests.support.slow_imports import peft

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {**SIZES, "model_type": "mixtral"},
    # Its experts are stored as (experts, in, out).
    "gpt_oss": {
        **SIZES,
        **{"model_type": "gpt_oss", "head_dim": 8, "layer_types": ["full_attention"] * 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
NATIVE = {"qwen3_moe": {**SIZES, "model_type": "qwen3_moe", "head_dim": 8}}
NATIVE["qwen3_moe"] |= {"num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True}
EXPERTS = "experts.gate_up_proj,experts.down_proj"
TARGETS = ["q_proj," + EXPERTS, "all-linear,lm_head.weight,embed_tokens.weight", EXPERTS]


def adapted(folder: Path, target: str, **changes: Any) -> CausalLM:
    """Return the model in `folder` with an adapter that is not zero."""
    model = load(folder)
    settings = AdapterSection(kind="lora", rank=3, alpha=5, target=target, **changes)
    add_adapter(model, settings, seed=1)
    with torch.no_grad():
        for _, parameter in trainable(model):
            parameter.normal_(std=0.1)
    return model.eval()


def tokens() -> Tensor:
    return torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(3))


def logits(model: CausalLM) -> Tensor:
    with torch.no_grad():
        return model.logits(model.hidden(tokens()))


@pytest.mark.parametrize("name", ["gpt_neox", "qwen2_moe", "granitemoe"])
def test_an_adapter_on_transformers_layers_is_counted_as_it_is_trained(
    name: str, tmp_path: Path
) -> None:
    make_folder(CASES[name], tmp_path)
    spec = adapted(tmp_path, "all-linear").trained_spec()
    model = adapted(tmp_path, "all-linear")
    count = sum(each.numel() for _, each in trainable(model))
    assert count > 0 and spec.num_trainable_params() == count
    assert spec.num_params() == sum(each.numel() for each in model.parameters())
    assert sum(each.elements for each in spec.gradient_sizes()) == count
    assert f"LoRA of rank 3 trains {count:,} of them" in spec.summary()
    assert spec.flops_per_token() < model.spec.flops_per_token()


@pytest.mark.parametrize("name", ["gpt_neox", "qwen2_moe", "gpt_oss", "qwen3_moe"])
def test_a_plan_counts_the_adapter_from_the_headers_of_the_weights(
    name: str, tmp_path: Path
) -> None:
    make_folder({**CASES, **MIXTURES, **NATIVE}[name], tmp_path)
    planned = AdaptedSpec.of(read_spec(tmp_path), rank=3, target="all-linear")
    trained = adapted(tmp_path, "all-linear").trained_spec()
    assert planned.num_trainable_params() == trained.num_trainable_params()


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, target) for name in MIXTURES for target in TARGETS),
        ("qwen3_moe", TARGETS[0]),
        ("qwen3_moe", "all-linear,gate.weight"),
    ],
)
def test_peft_reads_adapters_of_parameters_and_computes_the_same(
    name: str, target: str, tmp_path: Path
) -> None:
    make_folder({**MIXTURES, **NATIVE}[name], tmp_path / "base")
    model = adapted(tmp_path / "base", target)
    save_adapter(model, tmp_path, base=(str(tmp_path / "base"), None))
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft().PeftModel.from_pretrained(base, tmp_path, is_trainable=True).eval()
    count = sum(each.numel() for each in theirs.parameters() if each.requires_grad)
    assert model.trained_spec().num_trainable_params() == count
    with torch.no_grad():
        wanted = theirs(tokens()).logits
    plain = logits(load(tmp_path / "base"))
    assert (wanted - plain).abs().max() > 1e-3 * wanted.abs().max()
    for ours in (model, load(tmp_path).eval()):
        assert (wanted - logits(ours)).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("name", [*MIXTURES, *NATIVE])
def test_adapters_of_parameters_that_peft_wrote_are_read(name: str, tmp_path: Path) -> None:
    make_folder({**MIXTURES, **NATIVE}[name], tmp_path / "base")
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft().LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=["v_proj"],
        target_parameters=EXPERTS.split(","),
        task_type="CAUSAL_LM",
    )
    theirs = peft().get_peft_model(base, config).eval()
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if "lora_" in key:
                parameter.normal_(std=0.1)
        wanted = theirs(tokens()).logits
    theirs.save_pretrained(str(tmp_path))
    assert set(read_adapter_config(tmp_path).settings.target.split(",")) == {
        "v_proj",
        *EXPERTS.split(","),
    }
    assert (wanted - logits(load(tmp_path).eval())).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_ours_and_peft_s_adapter_of_experts_have_equal_gradients(name: str, tmp_path: Path) -> None:
    make_folder({**MIXTURES, **NATIVE}[name], tmp_path / "base")
    model = adapted(tmp_path / "base", EXPERTS)
    save_adapter(model, tmp_path, base=(str(tmp_path / "base"), None))
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft().PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    torch.autograd.backward(model(tokens()[:, :-1], tokens()[:, 1:]))
    torch.autograd.backward(theirs(input_ids=tokens(), labels=tokens()).loss)
    wanted = {
        name.replace(".default", ""): each.grad
        for name, each in theirs.named_parameters()
        if each.requires_grad
    }
    with torch.no_grad():
        for _, parameter in trainable(model):
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    (tmp_path / "gradients").mkdir()
    save_adapter(model, tmp_path / "gradients", base=("base", None))
    found = load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        assert each is not None
        torch.testing.assert_close(found[name], each, rtol=1e-4, atol=1e-6, msg=name)


def test_experts_that_stay_frozen_are_reported_with_the_setting_that_adapts_them(
    tmp_path: Path,
) -> None:
    make_folder(MIXTURES["mixtral"], tmp_path)
    spec = adapted(tmp_path, "all-linear").trained_spec()
    # Two layers of four experts with three matrices.
    frozen = 2 * 4 * 3 * 32 * 48
    assert f"{frozen:,} parameters of experts stay frozen" in spec.summary()
    note = spec.note()
    assert note is not None and f"leaves {frozen:,} parameters of experts frozen" in note
    target = note.rpartition(' = "')[2].rstrip('"')
    whole = adapted(tmp_path, target).trained_spec()
    assert whole.note() is None and "stay frozen" not in whole.summary()
    assert whole.num_trainable_params() > spec.num_trainable_params()


@pytest.mark.parametrize("changes", [{"dropout": 0.1}, {"dora": True}])
def test_what_peft_refuses_for_parameters_is_refused_by_its_key(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    make_folder(MIXTURES["mixtral"], tmp_path)
    with pytest.raises(ConfigError, match=f"adapter.{next(iter(changes))}: PEFT does not support"):
        adapted(tmp_path, EXPERTS, **changes)


def test_an_unknown_target_lists_linears_and_parameters(tmp_path: Path) -> None:
    make_folder(MIXTURES["mixtral"], tmp_path)
    with pytest.raises(ConfigError, match=r"no linear 'w1'.*experts\.down_proj.*q_proj"):
        adapted(tmp_path, "w1")


def test_a_tied_embedding_is_no_target(tmp_path: Path) -> None:
    make_folder({**MIXTURES["mixtral"], "tie_word_embeddings": True}, tmp_path)
    with pytest.raises(ConfigError, match=r"no linear 'embed_tokens\.weight'"):
        adapted(tmp_path, "embed_tokens.weight")


def test_a_damaged_list_of_parameters_is_refused(tmp_path: Path) -> None:
    make_folder(MIXTURES["mixtral"], tmp_path / "base")
    save_adapter(adapted(tmp_path / "base", EXPERTS), tmp_path, base=(str(tmp_path), None))
    path = tmp_path / "adapter_config.json"
    raw = json.loads(path.read_text()) | {"target_parameters": [7]}
    path.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"target_parameters = .* is not a list of names"):
        read_adapter_config(tmp_path)


def test_linears_with_names_that_peft_takes_for_experts_are_read_by_peft(tmp_path: Path) -> None:
    shape = {"shared_expert_intermediate_size": 8, "moe_intermediate_size": 8, "num_experts": 4}
    make_folder({**SIZES, **shape, "model_type": "qwen2_moe"}, tmp_path / "base")
    model = adapted(tmp_path / "base", "all-linear")
    save_adapter(model, tmp_path, base=(str(tmp_path / "base"), None))
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft().PeftModel.from_pretrained(base, tmp_path, is_trainable=True).eval()
    count = sum(each.numel() for each in theirs.parameters() if each.requires_grad)
    assert model.trained_spec().num_trainable_params() == count
    with torch.no_grad():
        wanted = theirs(tokens()).logits
    for ours in (model, load(tmp_path).eval()):
        assert (wanted - logits(ours)).abs().max() < 1e-5 * wanted.abs().max()


def test_a_name_in_the_adapter_s_config_fits_no_other_module(tmp_path: Path) -> None:
    """Gemma 3n has linears in a list, whose last name is a number, as the layers' names are."""
    make_folder(CLASSES["Gemma3n, text"].config(), tmp_path / "base")
    model = adapted(tmp_path / "base", "all-linear")
    save_adapter(model, tmp_path, base=(str(tmp_path / "base"), None))
    names = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert "q_proj" in names and not any(name.isdigit() for name in names)
    assert any(name.endswith("projections.0") for name in names)


@pytest.mark.parametrize(("name", "absent"), [("Llama4, text", "router"), ("FalconH1", "out_proj")])
def test_linears_whose_adapter_would_fail_or_have_no_effect_get_none(
    name: str, absent: str, tmp_path: Path
) -> None:
    make_folder(CLASSES[name].config(), tmp_path / "base")
    model = adapted(tmp_path / "base", "all-linear")
    assert any(absent in path for path, _ in model.named_modules())
    assert not any(absent in path for path, _ in trainable(model))
    planned = AdaptedSpec.of(read_spec(tmp_path / "base"), rank=3, target="all-linear")
    assert planned.num_trainable_params() == model.trained_spec().num_trainable_params()
