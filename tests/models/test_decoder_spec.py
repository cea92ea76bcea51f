"""DecoderSpec against transformers' own modules: parameters, FLOPs, layers, defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from payload.core.errors import CheckpointError
from payload.models.llama.rope import Rope
from payload.models.llama.spec import DecoderSpec, read
from payload.models.llama.type_defaults import DEFAULTS
from payload.models.registry import family_name, spec_of
from payload.models.spec import RankSetting
from payload.train.families.llama.rope import frequencies

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
    "logits_scaling": 8.0,
}
GRANITE_4 = {
    "layer_types": ["attention"] * 3,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 80,
    "position_embedding_type": "rope",
}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-3": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 5e5, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "smollm3": ("smollm3", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "phi-4": ("phi3", {"sliding_window": 8}),
    "phi-4-mini": (
        "phi3",
        {
            "rope_scaling": LONGROPE,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": ("gemma3_text", {"head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 2}),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "olmo3": ("olmo3", {"sliding_window": 8, "rope_scaling": YARN, "rope_theta": 5e5}),
    "granite": (
        "granite",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, **MULTIPLIERS},
    ),
    "granite-4": ("granitemoehybrid", {**GRANITE_4, **MULTIPLIERS}),
}
TOKENS = 24
SMOLLM2_135M = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
QWEN3_0_6B = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
MEASURED = [
    (SMOLLM2_135M, 4, 4_686_516_224),
    (QWEN3_0_6B, 1, 9_334_255_616),
    (QWEN3_0_6B | {"num_hidden_layers": 10}, 1, 5_208_764_416),
]
"""config.json, sequences of 1024 tokens a micro-batch, and the peak of a step in bytes."""


def config(name: str) -> Any:
    """Return transformers' configuration of one of MODELS."""
    kind, own = MODELS[name]
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return CONFIG_MAPPING[kind](**{**SIZES, **ids, **own})


def module_of(name: str) -> Any:
    """Return transformers' module with attention that the FLOP counter supports."""
    build: Any = AutoModelForCausalLM.from_config
    return build(config(name), attn_implementation="eager")


def spec_of_raw(name: str, **changed: Any) -> DecoderSpec:
    """Read a config.json in the form of an older transformers."""
    kind, own = MODELS[name]
    return read({"model_type": kind, **SIZES, **own, **changed}, where="config.json")


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_their_names_are_those_of_transformers(name: str) -> None:
    with torch.device("meta"):
        module = module_of(name)
    wanted = {key: tuple(value.shape) for key, value in module.named_parameters()}
    spec = spec_of_raw(name)
    assert dict(spec.tensor_shapes()) == wanted
    assert spec.num_params() == module.num_parameters()
    assert sum(each.elements for each in spec.gradient_sizes()) == module.num_parameters()


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_that_torch_counts(name: str) -> None:
    module = module_of(name)
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        module(input_ids=tokens, use_cache=False).logits.sum().backward()
    spec = spec_of_raw(name).with_sequence_length(TOKENS)
    assert spec.flops_per_token() * TOKENS == pytest.approx(counter.get_total_flops(), rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_a_config_that_transformers_5_wrote_reads_like_an_older_one(name: str) -> None:
    written = json.loads(config(name).to_json_string())
    assert "rope_parameters" in written
    assert read(written, where="config.json") == spec_of_raw(name)


def test_each_layer_knows_its_window_and_its_rotary_embedding() -> None:
    gemma = spec_of_raw("gemma3", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert [layer.window for layer in gemma.layers] == [8, None, 8]
    assert [layer.rope for layer in gemma.layers] == [
        Rope(theta=1e4),
        Rope(theta=1e6, kind="linear", factor=8.0),
        Rope(theta=1e4),
    ]
    smollm3 = spec_of_raw("smollm3", num_hidden_layers=4)
    assert [layer.rope is None for layer in smollm3.layers] == [False, False, False, True]
    qwen = spec_of_raw("qwen2-windows")
    assert [layer.window for layer in qwen.layers] == [None, 8, 8]
    assert [layer.window for layer in spec_of_raw("mistral").layers] == [8, 8, 8]
    (rope, *_) = [layer.rope for layer in spec_of_raw("llama-3").layers]
    assert rope == Rope(theta=5e5, kind="llama3", factor=8.0, original_context=64)


@pytest.mark.parametrize("older", ["longrope", "su", "yarn"])
def test_phi_reads_longrope_under_each_of_its_names(older: str) -> None:
    (rope, *_) = (
        layer.rope
        for layer in spec_of_raw("phi-4-mini", rope_scaling=LONGROPE | {"type": older}).layers
    )
    assert rope is not None and rope.kind == "longrope" and rope.rotated == 12
    assert rope.attention_factor == pytest.approx((1 + 3 / 6) ** 0.5)
    assert (rope.is_long(64), rope.is_long(65)) == (False, True)
    with pytest.raises(CheckpointError, match=r"rope long_factor = .* must have 6 positive"):
        spec_of_raw("phi-4-mini", rope_scaling=LONGROPE | {"long_factor": [1.0]})


def test_the_defaults_of_each_type_are_those_of_transformers() -> None:
    for kind, family in DEFAULTS.items():
        theirs = CONFIG_MAPPING[kind]()
        assert (family.padding, family.rms_norm_eps) == (theirs.pad_token_id, theirs.rms_norm_eps)


@pytest.mark.parametrize(
    ("name", "changed", "feature"),
    [
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope type 'dynamic'"),
        ("phi-4", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope type 'linear'"),
        ("phi-4", {"partial_rotary_factor": 0.7}, "partial_rotary_factor"),
        ("phi-4", {"resid_pdrop": 0.1}, "resid_pdrop"),
        ("olmo2", {"attention_dropout": 0.1}, "attention_dropout"),
        ("granite", {"hidden_act": "relu"}, "activation 'relu'"),
        ("llama", {"hidden_act": "relu"}, "activation 'relu'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("qwen3", {"attention_dropout": 0.1}, "attention_dropout"),
        ("llama", {"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config"),
        ("qwen2", {"kv_sharing_modes": [None, "reuse", None]}, "kv_sharing_modes"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer type 'chunked_attention'"),
    ],
)
def test_a_feature_that_the_modules_lack_is_named(
    name: str, changed: dict[str, Any], feature: str
) -> None:
    assert spec_of_raw(name).unsupported_features == ()
    assert spec_of_raw(name, **changed).unsupported_features == (feature,)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_size": -64}, "hidden_size = -64: must be at least 1"),
        ({"vocab_size": "many"}, "vocab_size = 'many': must be an integer"),
        ({"num_hidden_layers": 10**9}, "must be at most 1000"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads = 3"),
        ({"head_dim": 7}, "head_dim = 7: must be even"),
        ({"head_dim": None, "hidden_size": 66}, "must be a multiple of num_attention_heads = 4"),
        ({"layer_types": ["full_attention"]}, "must have 3 entries"),
        ({"layer_types": ["sliding_attention"] * 3}, "without a sliding_window"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_theta": 0}, "rope_theta = 0: must be at least 1.0"),
        ({"rope_scaling": [8]}, "rope_scaling = [8]: must be an object"),
        (
            {"rope_scaling": {"full_attention": {"rope_type": "default", "rope_theta": 9.0}}},
            "qwen3 has no rope per layer type",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 9.0}}},
            "qwen3 has no rope per layer type",
        ),
    ],
)
def test_a_wrong_size_is_refused_by_its_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        spec_of_raw("qwen3", **changed)
    assert message in str(refused.value)
    assert str(refused.value).startswith("config.json: ")


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("llama", {"sliding_window": 8}, "models of type llama are not trained with"),
        ("llama", {"attention_chunk_size": 8}, "attention_chunk_size = 8: models of"),
        ("llama", {"layer_types": ["sliding_attention"] * 3}, "of a llama are full_attention"),
        ("olmo2", {"sliding_window": 8}, "models of type olmo2 are not trained with"),
        ("granite", {"attention_chunk_size": 8}, "attention_chunk_size = 8: models of"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "of a mistral are sliding_attention"),
        (
            "mistral",
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "of a mistral are sliding_attention",
        ),
    ],
)
def test_windows_that_transformers_cache_alone_would_read_are_refused(
    name: str, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_of_raw(name, **changed)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("llama", {"sliding_window": None}),
        ("llama", {"sliding_window": SIZES["max_position_embeddings"]}),
        ("llama", {"layer_types": ["full_attention"] * 3, "sliding_window": 8}),
        ("mistral", {"layer_types": ["sliding_attention"] * 3}),
        ("granite", {"layer_types": ["attention"] * 3}),
    ],
)
def test_the_layer_types_and_windows_in_effect_change_nothing(
    name: str, changed: dict[str, Any]
) -> None:
    tokens = (torch.arange(TOKENS).view(1, -1) * 7 + 3) % SIZES["vocab_size"]
    assert spec_of_raw(name, **changed) == spec_of_raw(name)
    kind, own = MODELS[name]
    torch.manual_seed(0)
    module = module_of(name).eval()
    other = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**SIZES, **own, **changed}))
    other.load_state_dict(module.state_dict())
    options: Any = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    assert torch.equal(module.generate(tokens, **options), other.eval().generate(tokens, **options))


def test_gemmas_older_name_of_a_scaling_which_transformers_does_not_read_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"rope_scaling = .* needs rope_type instead of type"):
        spec_of_raw("gemma3", rope_scaling={"type": "linear", "factor": 8.0})
    with pytest.raises(CheckpointError, match="model type olmo3 needs rope_type instead of type"):
        spec_of_raw("olmo3", rope_scaling={"type": "yarn", "factor": 8.0})
    both = spec_of_raw("gemma3", rope_scaling={"type": "x", "rope_type": "linear", "factor": 8.0})
    assert both == spec_of_raw("gemma3", rope_scaling={"rope_type": "linear", "factor": 8.0})


def test_a_config_without_its_sizes_names_them() -> None:
    with pytest.raises(CheckpointError, match="missing: num_hidden_layers, hidden_size"):
        read({"model_type": "llama"}, where="config.json")


def test_the_memory_estimate_follows_batch_vocabulary_and_gradients() -> None:
    spec = spec_of_raw("llama", vocab_size=262_144, tie_word_embeddings=True)
    spec = spec.with_sequence_length(512)

    def estimate(size: int, *, alone: bool = True, accumulates: bool = False) -> int:
        return spec.memory_bytes(
            RankSetting(
                micro_batch_size=size,
                dtype="bf16",
                kernels=True,
                alone=alone,
                accumulates=accumulates,
            )
        )

    # The batch size does not change the logits: width 64, 4 heads, 2 key heads, 96 inside the MLP.
    kept = 4 * 2 * 64 + 2 * (2 * 64 + 2 * 64 + 2 * 32 + 2 * 96)
    assert estimate(8) - estimate(4) == 4 * 512 * 3 * kept
    # Later micro-batches hold the first one's gradients; rounded gradients leave smaller gaps.
    inner = spec.num_params() - spec.embedding_size()
    added = estimate(8, accumulates=True) - estimate(8)
    assert added == 4 * spec.num_params() + inner
    # With other ranks, the first micro-batch makes the head in its bucket, a later in new memory.
    head = 4 * spec.embedding_size()
    assert estimate(8, alone=False, accumulates=True) - estimate(8, alone=False) == head


def test_the_memory_estimate_is_near_what_was_measured() -> None:
    """Peaks of `python -m benchmarks.step --model FOLDER`, 2026-11-25."""
    for raw, micro_batch_size, measured_bytes in MEASURED:
        spec = read(raw, where="config.json")
        found = spec.with_sequence_length(1024).memory_bytes(
            RankSetting(
                micro_batch_size=micro_batch_size,
                dtype="bf16",
                kernels=True,
                alone=True,
                accumulates=False,
            )
        )
        assert found == pytest.approx(measured_bytes, rel=0.15)


@pytest.mark.parametrize(
    ("changed", "family"),
    [
        ({}, "llama"),
        ({"position_embedding_type": None}, "llama"),
        ({"layer_types": ["attention", "full_attention", "attention"]}, "llama"),
        ({"layer_types": ["attention", "mamba", "attention"]}, "transformers"),
        ({"layer_types": None}, "transformers"),
        ({"num_local_experts": 4}, "transformers"),
    ],
)
def test_a_granite_4_with_experts_or_mamba_layers_is_left_to_transformers(
    changed: dict[str, Any], family: str
) -> None:
    raw = {"model_type": "granitemoehybrid", **SIZES, **GRANITE_4, **changed}
    assert family_name(spec_of(raw, where="config.json")) == family


def test_a_granite_4_without_positions_has_no_rotary_embedding() -> None:
    layers = spec_of_raw("granite-4", position_embedding_type=None).layers
    assert [layer.rope for layer in layers] == [None] * 3


def test_yarns_parameters_are_those_of_transformers() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for more in (
        {},
        {"attention_factor": 1.5, "beta_fast": 12.0, "beta_slow": 2.0},
        {"mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
        {"factor": 1.0},
    ):
        scaling = {**YARN, **more}
        (layer, *_) = spec_of_raw("llama", rope_scaling=scaling, rope_theta=1e6).layers
        assert layer.rope is not None
        raw: dict[str, Any] = {**SIZES, "rope_parameters": {**scaling, "rope_theta": 1e6}}
        angles, factor = ROPE_INIT_FUNCTIONS["yarn"](CONFIG_MAPPING["llama"](**raw))
        assert layer.rope.attention_factor == pytest.approx(factor)
        found = frequencies(layer.rope, head_dim=16)
        torch.testing.assert_close(found, angles, rtol=1e-6, atol=0)
    with pytest.raises(CheckpointError, match="must be above 1 for yarn"):
        spec_of_raw("llama", rope_scaling=YARN, rope_theta=1)
