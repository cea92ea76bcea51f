"""A native mixture's sizes come from config.json alone, and what our layers lack is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.architecture_cases import CASES, make_folder
from payload.config.model_checks import require_weights
from payload.models.llama.spec import DecoderSpec
from payload.models.registry import read_spec
from payload.models.spec import ModelSpec, RankSetting
from payload.models.transformers.spec import OtherSpec

CASE = CASES["qwen3_moe"]
# https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
LARGE = {
    "model_type": "qwen3_moe",
    **{"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768},
    **{"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4},
    **{"num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128, "vocab_size": 151_936},
    **{"norm_topk_prob": True, "tie_word_embeddings": False, "mlp_only_layers": []},
}


def spec_of(folder: Path, raw: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return read_spec(folder)


def test_config_json_alone_gives_the_parameters_and_those_of_a_token(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LARGE)
    # The counts on the model's page: 30.5 billion parameters, 3.3 billion of them active.
    assert spec.num_params() == 30_532_122_624
    embedding = 151_936 * 2048
    assert (spec.matmul_size() + embedding) / 1e9 == pytest.approx(3.3, abs=0.06)
    assert spec.expert_params() == 48 * 128 * 3 * 768 * 2048
    assert sum(each.elements for each in spec.gradient_sizes()) == spec.num_params()
    assert not any(".experts." in each.name for each in spec.linears())


def test_the_tensors_are_those_of_the_file_in_which_transformers_saves_them(
    tmp_path: Path,
) -> None:
    make_folder(CASE, tmp_path)
    spec = read_spec(tmp_path)
    assert isinstance(spec, DecoderSpec) and spec.unsupported_features == ()
    require_weights(spec, tmp_path)


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"mlp_only_layers": [0]}, "layers without experts"),
        ({"decoder_sparse_step": 2}, "layers without experts"),
        ({"use_sliding_window": True, "sliding_window": 9}, "use_sliding_window"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7"),
    ],
)
def test_a_mixture_with_a_feature_that_we_lack_uses_transformers_layers(
    changes: dict[str, Any], feature: str, tmp_path: Path
) -> None:
    from payload.models.llama.spec import read

    raw = {**CASE, **changes}
    assert read(raw, where="config.json").unsupported_features == (feature,)
    spec = spec_of(tmp_path, raw)
    assert isinstance(spec, OtherSpec) and spec.experts == 6


def test_experts_are_neither_split_nor_divided_into_stages_nor_quantised(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LARGE)
    assert spec.why_not_tensor(2) == "its experts cannot be split over ranks"
    assert "balancing loss" in (spec.why_not_stages(2) or "")
    assert spec.why_not_quantized() == "its experts are no linears"


def test_the_memory_grows_with_the_experts_of_a_token(tmp_path: Path) -> None:
    setting = RankSetting(
        micro_batch_size=4, dtype="bf16", kernels=True, alone=True, accumulates=True
    )
    few = spec_of(tmp_path, LARGE).with_sequence_length(512)
    many = spec_of(tmp_path, {**LARGE, "num_experts_per_tok": 16}).with_sequence_length(512)
    # Of each pair of a token and an expert: the input, gate and up, in bf16.
    pairs = 4 * 512 * 48 * 8
    assert many.memory_bytes(setting) - few.memory_bytes(setting) == pairs * 2 * (2048 + 2 * 768)
