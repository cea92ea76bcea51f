"""The config.json of a Qwen3.5 text model."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.architecture_cases import CASES
from payload.core.errors import CheckpointError
from payload.models.llama.rope import Rope
from payload.models.qwen3_5.config import read_config
from payload.models.qwen3_5.spec import Qwen35Spec
from payload.models.registry import spec_of

SMALL = CASES["qwen3_5_text"]


def spec(raw: Any) -> Qwen35Spec:
    found = spec_of(raw, where="config.json")
    assert isinstance(found, Qwen35Spec)
    return found


def test_omitted_keys_have_the_defaults_of_transformers() -> None:
    from transformers import AutoConfig

    theirs: Any = AutoConfig.for_model("qwen3_5_text")
    ours = spec({"model_type": "qwen3_5_text"})
    kinds = ["full_attention" if each else "linear_attention" for each in ours.are_full]
    assert kinds == theirs.layer_types
    assert (ours.context(), ours.width()) == (theirs.max_position_embeddings, theirs.hidden_size)
    assert ours.rope == Rope(theta=theirs.rope_parameters["rope_theta"], rotated=64)
    assert (ours.vocab_size, ours.linear.value_heads) == (theirs.vocab_size, 32)


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_parameters": {"rope_theta": 1e7}}, Rope(theta=1e7, rotated=8)),
        ({"rope_theta": 5e5, "partial_rotary_factor": 0.5}, Rope(theta=5e5, rotated=16)),
        (
            {"rope_parameters": {"mrope_section": [11, 11, 10], "mrope_interleaved": True}},
            Rope(theta=1e4, rotated=8),
        ),
    ],
)
def test_the_rope_is_that_of_transformers(changes: dict[str, Any], rope: Rope) -> None:
    from transformers import AutoConfig

    found: Any = AutoConfig.for_model(**{**SMALL, **changes}).rope_parameters
    assert spec({**SMALL, **changes}).rope == rope
    assert rope.theta == found["rope_theta"]
    assert rope.rotated == int(SMALL["head_dim"] * found["partial_rotary_factor"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "must have 4 entries"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads = 3"),
        ({"linear_num_key_heads": 3}, "must be a multiple of linear_num_key_heads = 3"),
        ({"partial_rotary_factor": 0.1}, "must rotate an even number"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec({**SMALL, **changes})


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer type 'sliding_attention'"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
    ],
)
def test_features_that_our_layers_lack_are_named(changes: dict[str, Any], feature: str) -> None:
    where = "config.json"
    assert read_config({**SMALL, **changes}, where=where).unsupported(where=where) == (feature,)


def test_neither_heads_nor_stages_are_split() -> None:
    found = spec(SMALL)
    assert found.why_not_tensor(2) == found.why_not_stages(2) != None  # noqa: E711
