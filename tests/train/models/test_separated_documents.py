"""The types that may have several conversations in a block are those whose layers separate them."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch

from payload.models.registry import spec_of
from payload.models.transformers.separated_documents import SEPARATING_TYPES
from payload.train.families.transformers.model import TransformersLM
from payload.train.families.transformers.probes import mixes_documents
from payload.train.models.loading import build
from tests.model_classes.cases import CASES

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, LAYERS, HEADS, INNER = 32, 4, 4, 48
SIZES: dict[str, Any] = {
    **{"vocab_size": 131, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), HEADS),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff"), INNER),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{"num_key_value_heads": HEADS, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"shared_expert_intermediate_size": 16, "kv_lora_rank": 8, "q_lora_rank": 12},
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **{"rotary_dim": 8, "index_head_dim": 16, "index_n_heads": 4, "index_topk": 8},
    "sliding_window": 9,
}
"""Sizes of a small model by the names in different families."""


def small(kind: str) -> Any:
    """Return transformers' module of this type in which every weight has an effect."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    cases = [each for each in CASES.values() if each.model_type == kind]
    known = {*inspect.signature(CONFIG_MAPPING[kind].__init__).parameters}
    known |= {*CONFIG_MAPPING[kind].attribute_map}
    sizes = cases[0].sizes if cases else {key: SIZES[key] for key in SIZES.keys() & known}
    if "kv_lora_rank" not in known and not cases:
        sizes = {**sizes, "num_key_value_heads": HEADS // 2}
    config = CONFIG_MAPPING[kind](**copy.deepcopy(dict(sizes)))
    torch.manual_seed(0)
    made: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return shaken(made._from_config(config, dtype=torch.float32))


def shaken(module: Any) -> Any:
    """Return the module in eval mode, with a random change of every weight."""
    torch.manual_seed(0)
    with torch.no_grad():
        for each in module.parameters():
            each.add_(torch.randn_like(each), alpha=0.05)
    return module.float().eval()


@pytest.mark.slow
def test_every_listed_type_separates_the_documents_of_a_block() -> None:
    assert [kind for kind in sorted(SEPARATING_TYPES) if mixes_documents(small(kind))] == []


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_packed_if_its_layers_separate_the_documents_of_a_block(name: str) -> None:
    model = build(spec_of(CASES[name].config(), where="config.json"))
    is_packed = model.spec.why_not_packed() is None
    if isinstance(model, TransformersLM):
        assert is_packed == (not mixes_documents(shaken(model.module)))
    else:
        assert is_packed, "our own layers separate documents"
