"""Families without a file in this project: counted from their tensors, against transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from payload.core.errors import CheckpointError
from payload.models.transformers.spec import OtherSpec, read, read_folder

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "max_position_embeddings": 300,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gpt_neox": {},
    "olmo2": {},
    "phi3": {},
    "falcon": {"alibi": False},
    "stablelm": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "head_dim": 16, **EXPERTS},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}
TOKENS = 24


def saved(name: str, folder: Path) -> Any:
    """Return transformers' module with random weights, saved; torch can count all its matmuls."""
    config = CONFIG_MAPPING[name](**{**SIZES, **FAMILIES[name]})
    config._experts_implementation = "eager"
    build: Any = AutoModelForCausalLM.from_config
    module = build(config, attn_implementation="eager")
    module.save_pretrained(folder)
    return module


def spec_of(folder: Path) -> OtherSpec:
    raw = json.loads((folder / "config.json").read_text())
    return read_folder(raw, folder=folder, where=str(folder))


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_and_flops_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    module = saved(name, tmp_path)
    spec = spec_of(tmp_path).with_sequence_length(TOKENS)
    assert spec.num_params() == module.num_parameters()
    assert sum(each.elements for each in spec.gradient_sizes()) == module.num_parameters()
    tokens = torch.randint(0, 200, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        module(input_ids=tokens, use_cache=False).logits.sum().backward()
    assert spec.flops_per_token() * TOKENS == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_head_layers_and_embeddings_are_in_the_order_of_the_backward_pass(tmp_path: Path) -> None:
    saved("gpt_neox", tmp_path)
    sizes = spec_of(tmp_path).gradient_sizes()
    assert sizes[0].kind == "head"
    assert sizes[-1].kind == "embedding"
    assert sizes[-1].elements == spec_of(tmp_path).embedding_size() == 200 * 64


def test_a_dense_config_of_a_family_of_mixtures_has_no_experts() -> None:
    raw = {"model_type": "granitemoehybrid", **SIZES}
    spec = read({**raw, "num_local_experts": 0, "num_experts_per_tok": 0}, where="config.json")
    assert (spec.experts, spec.active_share) == (0, 1.0)


def test_a_saved_buffer_is_no_parameter() -> None:
    shapes: dict[str, tuple[int, ...]] = {"model.layers.0.layer_scalar": (1,)}
    spec = read({"model_type": "gemma4_text", **SIZES}, where="config.json").with_tensors(shapes)
    assert spec.num_params() == 0


def test_without_weights_it_says_that_it_does_not_know() -> None:
    spec = read({"model_type": "olmo2", **SIZES}, where="config.json")
    assert (spec.num_layers(), spec.num_heads(), spec.width(), spec.context()) == (2, 4, 64, 300)
    for ask in (spec.num_params, spec.flops_per_token, spec.gradient_sizes):
        with pytest.raises(CheckpointError, match="does not determine the number of parameters"):
            ask()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vocab_size": -1}, "vocab_size = -1: must be at least 1"),
        ({"vocab_size": None}, "must be an integer"),
        ({"num_hidden_layers": 1.5}, "must be an integer"),
        ({"model_type": 7}, "model_type = 7"),
    ],
)
def test_a_wrong_size_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read({"model_type": "olmo2", **SIZES, **changed}, where="config.json")


def test_a_model_without_a_vocabulary_is_no_language_model() -> None:
    with pytest.raises(CheckpointError, match="not a text-only language model"):
        read({"model_type": "olmo2"}, where="config.json")


def test_experts_stacked_in_one_tensor_are_experts_whatever_it_is_called() -> None:
    config = {"model_type": "granitemoe", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 1}
    shapes = {"model.layers.0.block_sparse_moe.input_linear.weight": (4, 8, 16)}
    counts = read(config, where="config.json").with_tensors(shapes).counts
    assert counts is not None
    assert (counts.params, counts.multiplying) == (4 * 8 * 16, 8 * 16)


def test_a_recurrence_has_a_note_and_only_layers_with_attention_count_it() -> None:
    config = {"model_type": "jamba", **SIZES}
    shapes = {
        "model.layers.0.mamba.A_log": (16, 4),
        "model.layers.1.self_attn.q_proj.weight": (16, 16),
    }
    spec = read(config, where="config.json").with_tensors(shapes)
    note = spec.note()
    assert note is not None and "jamba's recurrent layers (model.layers.0.mamba.A_log)" in note
    assert spec.counts is not None and spec.counts.attention_layers == 1
    without = read({"model_type": "olmo2", **SIZES}, where="config.json").with_tensors(
        {"model.layers.0.self_attn.q_proj.weight": (16, 16)}
    )
    assert without.note() is None
