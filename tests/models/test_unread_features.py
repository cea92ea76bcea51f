"""A key of config.json that changes the model, but that transformers ignores, is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import CheckpointError
from payload.models.registry import spec_of
from payload.models.transformers.causal_types import CAUSAL_TYPES
from payload.models.unread_features import READERS, WITHOUT_ROTARY

GPT_NEO: dict[str, Any] = {
    "model_type": "gpt_neo",
    "vocab_size": 64,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "attention_types": [[["global"], 2]],
    "max_position_embeddings": 32,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize(
    ("config", "change"),
    [
        # The GPT-J of 2021, before transformers had its class.
        (GPT_NEO, {"rotary": True, "rotary_dim": 8, "jax": True}),
        (GPT_NEO, {"alibi": True}),
        (LLAMA, {"final_logit_softcapping": 30.0}),
        (LLAMA, {"residual_multiplier": 0.22}),
        (LLAMA, {"clip_qkv": 8}),
    ],
)
def test_a_feature_that_transformers_ignores_is_refused(
    config: dict[str, Any], change: dict[str, Any]
) -> None:
    key, value = next(iter(change.items()))
    words = f"c.json: {key} = {value}: transformers ignores this key for model_type"
    with pytest.raises(CheckpointError, match=re.escape(words)) as refused:
        spec_of(config | change, where="c.json")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (GPT_NEO, {"rotary": False, "alibi": None}),
        (LLAMA, {"rotary": True, "final_logit_softcapping": None, "residual_multiplier": 1.0}),
    ],
)
def test_a_feature_that_is_off_or_built_in_is_accepted(
    config: dict[str, Any], change: dict[str, Any]
) -> None:
    spec_of(config | change, where="c.json")


def test_the_types_that_read_a_feature_are_those_of_transformers() -> None:
    found: dict[str, set[str]] = {key: set() for key in READERS}
    for kind in CAUSAL_TYPES:
        source = source_of(kind)
        # The search for a string is much faster than that for words.
        for key in (key for key in READERS if key in source):
            if re.search(rf"\b{key}\b", source):
                found[key].add(kind)
        assert kind not in WITHOUT_ROTARY or not re.search("rotary|rope", source), kind
    assert found == READERS


def source_of(kind: str) -> str:
    """Return the code of a model type in transformers, with its configuration."""
    from transformers import models
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    # gpt-sw3 has the classes of GPT-2.
    name = "gpt2" if kind == "gpt-sw3" else model_type_to_module_name(kind)
    folder = Path(models.__file__).parent / name
    paths = [*folder.glob("configuration_*.py"), *folder.glob("modeling_*.py")]
    return "".join(path.read_text(encoding="utf-8") for path in paths)
