"""The config.json of a Gemma 4 text model."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.architecture_cases import CASES
from payload.core.errors import CheckpointError
from payload.models.gemma4.config import Rope, read_config
from payload.models.gemma4.spec import Gemma4Spec
from payload.models.registry import spec_of

SMALL, LARGE = CASES["gemma4_text, small"], CASES["gemma4_text, large"]


def spec(raw: Any) -> Gemma4Spec:
    found = spec_of(raw, where="config.json")
    assert isinstance(found, Gemma4Spec)
    return found


def test_layers_with_a_window_and_without_differ() -> None:
    sliding, full, *_, last = spec(SMALL).layers
    assert (sliding.head_dim, sliding.window, full.head_dim, full.window) == (16, 9, 32, None)
    assert sliding.rope == Rope(theta=10_000.0, pairs=8)
    assert full.rope == Rope(theta=1_000_000.0, pairs=4)
    assert (full.keys_from, last.keys_from, last.inner) == (None, 3, 2 * full.inner)
    assert [each.key_heads for each in spec(LARGE).layers] == [2, 1] * 3
    assert [each.has_values for each in spec(LARGE).layers] == [True, False] * 3


def test_per_layer_config_says_the_same_as_the_keys_of_released_files() -> None:
    """transformers reads the released keys and saves per_layer_config."""
    of_full = {"head_dim": 32, "num_key_value_heads": 1}
    raw = {key: each for key, each in LARGE.items() if "global" not in key}
    found = spec({**raw, "per_layer_config": dict.fromkeys("135", of_full)})
    assert found.layers == spec(LARGE).layers


def test_omitted_keys_have_the_defaults_of_transformers() -> None:
    from transformers import AutoConfig

    theirs: Any = AutoConfig.for_model("gemma4_text")
    ours = spec({"model_type": "gemma4_text"})
    assert (ours.num_layers(), ours.width(), ours.ple_width) == (30, 2304, 256)
    for number, layer in enumerate(ours.layers):
        config = theirs.per_layer_config[number]
        is_sliding = theirs.layer_types[number] == "sliding_attention"
        assert (layer.head_dim, layer.key_heads) == (config.head_dim, config.num_key_value_heads)
        assert layer.window == (theirs.sliding_window if is_sliding else None)
    assert ours.context() == theirs.max_position_embeddings
    assert ours.vocab_size == ours.ple_rows == theirs.vocab_size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "must have 6 entries"),
        ({"num_kv_shared_layers": 6}, "no layer of type sliding_attention has keys and values"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads = 3"),
        ({"head_dim": 15}, "must be even"),
        ({"rope_parameters": {}}, "rope_parameters: sliding_attention"),
        ({"per_layer_config": {"0": {"head_dim": "wide"}}}, "must be a positive integer"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec({**SMALL, **changes})


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        (
            {"vocab_size_per_layer_input": 1000},
            "vocab_size_per_layer_input 1000 below vocab_size",
        ),
        ({"layer_types": ["chunked_attention"] * 6}, "layer type 'chunked_attention'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope type 'yarn'"),
        ({"per_layer_config": {"9": {"head_dim": 8}}}, "per_layer_config"),
        ({"per_layer_config": {"0": {"intermediate_size": 8}}}, "per_layer_config"),
    ],
)
def test_features_that_our_layers_lack_are_named(changes: dict[str, Any], feature: str) -> None:
    assert read_config({**SMALL, **changes}, where="config.json").unsupported() == (feature,)
