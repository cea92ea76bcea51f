"""A key of config.json that changes the model, but that transformers ignores, is refused."""

from __future__ import annotations

import inspect
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
    sources = {kind: source_of(kind) for kind in CAUSAL_TYPES}
    found = {
        key: {kind for kind, text in sources.items() if re.search(rf"\b{key}\b", text)}
        for key in READERS
    }
    assert found == READERS
    assert not [kind for kind in WITHOUT_ROTARY if re.search("rotary|rope", sources[kind])]


def source_of(kind: str) -> str:
    """Return the code of a model type in transformers, with its configuration."""
    from transformers import CONFIG_MAPPING

    folder = Path(inspect.getfile(CONFIG_MAPPING[kind])).parent
    paths = [*folder.glob("configuration_*.py"), *folder.glob("modeling_*.py")]
    return "".join(path.read_text(encoding="utf-8") for path in paths)
