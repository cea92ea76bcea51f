"""The GGUF files of each family: llama.cpp's names and order, or a refusal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.llama_cpp import add_tokenizer
from payload.core.errors import CheckpointError, ExitCode
from payload.models.gguf import plan_gguf
from payload.models.gpt2.spec import Gpt2Spec
from payload.train.models.hf_weights import save_hf
from payload.train.models.loading import build
from payload.train.models.loading import load as load_model
from tests.export.models import (
    VOCAB,
    YARN,
    change_config,
    complaint,
    expected_of,
    export,
    files_of_llama,
    load,
    make,
    make_llama,
)

pytestmark = pytest.mark.usefixtures("one_thread")


LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": 32, "rope_theta": 1e4},
}
DTYPES = ("bf16", "f16", "q8_0")
SAMPLES = {
    **{"GPT2": "q8_0", "Llama": "f16", "Qwen2": "bf16"},
    **{"Qwen3": "q8_0", "Mistral": "f16", "Gemma3Text": "bf16", "Phi3": "f16"},
    "Qwen3Moe": "bf16",
}
"""The dtype of each kind of model that `make test` exports."""
PROMPT = [464, 206, 758, 218]


def greedy(model: Any, *, tokens: int = 20) -> list[int]:
    found = model.generate(torch.tensor([PROMPT]), max_new_tokens=tokens, do_sample=False)
    return list(found[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=() if dtype == sample else pytest.mark.slow)
        for kind, sample in SAMPLES.items()
        for dtype in DTYPES
    ],
)
def test_transformers_reads_the_exported_weights_and_gives_their_tokens(
    kind: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make(tmp_path / "model", kind)
    file = tmp_path / "out.gguf"
    assert export(source, file, "--dtype", dtype) == ExitCode.OK
    options: dict[str, Any] = {}
    if kind == "Phi3":
        # transformers' reader does not read this setting, as the command says.
        rope = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5}
        assert f"pass rope_parameters={rope} to from_pretrained" in capsys.readouterr().err
        options = {"rope_parameters": rope, "pad_token_id": None}
    if kind == "Qwen3Moe":
        # Nor this one, and the reader always normalises the experts' weights.
        assert "pass moe_intermediate_size=32 to from_pretrained" in capsys.readouterr().err
        options = {"moe_intermediate_size": 32}
    read = load(tmp_path, gguf_file=file.name, **options)
    original = load(source)
    expected = expected_of(original, dtype)
    for name, value in read.state_dict().items():
        # Gemma's norms are stored with 1 added, which costs a bit.
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=name)
    original.load_state_dict(expected)
    tokens = greedy(original)
    assert len(set(tokens)) > 3, "a model that repeats itself shows nothing"
    assert greedy(read) == tokens


@pytest.mark.parametrize(
    "dtype", ["bf16", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[1:])]
)
def test_a_smollm3_has_llama_cpps_names_and_order_of_rows(dtype: str, tmp_path: Path) -> None:
    # transformers' reader does not support this model, so the package gguf reads it. `python -m
    # benchmarks.llama_cpp` compares with llama.cpp itself.
    import gguf

    source, file = make(tmp_path / "model", "SmolLM3"), tmp_path / "out.gguf"
    assert export(source, file, "--dtype", dtype) == ExitCode.OK
    reader = gguf.GGUFReader(file)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["general.architecture"] == "smollm3"
    assert fields["smollm3.block_count"] == 5
    assert fields["smollm3.rope.freq_base"] == 2_000_000.0
    assert fields["smollm3.attention.head_count_kv"] == 2
    found = {
        each.name: torch.from_numpy(gguf.dequantize(each.data, each.tensor_type).copy())
        for each in reader.tensors
    }
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.SMOLLM3, 5)
    expected = expected_of(load(source), dtype)
    tied = {"lm_head.weight"}
    assert len(found) == len(expected.keys() - tied)
    for name in expected.keys() - tied:
        value = found[names.get_name(name, try_suffixes=(".weight",)) or ""]
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # Adjacent rows of a pair in the file, halves of a head here.
            value = value.view(-1, 8, 2, value.shape[-1]).transpose(1, 2).reshape(value.shape)
        torch.testing.assert_close(value.view_as(expected[name]), expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "q8_0"])
def test_the_experts_of_a_layer_are_one_tensor_in_their_order(dtype: str, tmp_path: Path) -> None:
    import gguf

    source, file = make(tmp_path / "model", "Qwen3Moe"), tmp_path / "out.gguf"
    assert export(source, file, "--dtype", dtype) == ExitCode.OK
    reader = gguf.GGUFReader(file)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["general.architecture"] == "qwen3moe"
    keys = ("expert_count", "expert_used_count", "expert_feed_forward_length")
    assert [fields[f"qwen3moe.{key}"] for key in keys] == [12, 2, 32]
    found = {each.name: gguf.dequantize(each.data, each.tensor_type) for each in reader.tensors}
    tensors = load_file(source / "model.safetensors")
    # Ten comes after nine.
    for number in (0, 2, 9, 10, 11):
        for theirs, ours in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
            wanted = tensors[f"model.layers.1.mlp.experts.{number}.{ours}.weight"]
            value = torch.from_numpy(found[f"blk.1.ffn_{theirs}_exps.weight"][number].copy())
            bound = {"fp32": 0.0, "bf16": 2e-2, "q8_0": 2e-2}[dtype]
            torch.testing.assert_close(value, wanted, rtol=0, atol=bound)
    gate = torch.from_numpy(found["blk.0.ffn_gate_inp.weight"].copy())
    assert gate.shape == tensors["model.layers.0.mlp.gate.weight"].shape
    change_config(source, norm_topk_prob=False)
    with pytest.raises(CheckpointError, match="norm_topk_prob = False"):
        plan_gguf(json.loads((source / "config.json").read_text()), folder=tmp_path)


def test_a_phi_has_the_long_and_short_factors_that_llama_cpp_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import gguf

    source, file = make(tmp_path / "Phi-3-mine", "Phi3"), tmp_path / "out.gguf"
    short, long = [1.0, 1.25, 1.5, 2.0], [2.0, 3.0, 4.0, 5.0]
    scaling = {"type": "longrope", "short_factor": short, "long_factor": long}
    change_config(
        source, rope_parameters=None, rope_scaling=scaling, original_max_position_embeddings=32
    )
    assert export(source, file, "--dtype", "f16") == ExitCode.OK
    said = capsys.readouterr().err
    assert "long factors to every text if its context (-c) is above 32 tokens" in said
    reader = gguf.GGUFReader(file)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["phi3.rope.dimension_count"] == 8
    assert fields["phi3.rope.scaling.original_context_length"] == 32
    # A context of 4 times 32 tokens; source: https://arxiv.org/abs/2402.13753.
    factor = (1 + math.log(4) / math.log(32)) ** 0.5
    assert fields["phi3.rope.scaling.attn_factor"] == pytest.approx(factor)
    tensors = {each.name: each.data for each in reader.tensors}
    assert tensors["rope_factors_short.weight"].tolist() == short
    assert tensors["rope_factors_long.weight"].tolist() == long
    assert tensors["blk.1.attn_qkv.weight"].shape == (64 + 2 * 32, 64)
    assert tensors["blk.1.ffn_up.weight"].shape == (2 * 96, 64)
    # llama.cpp has its own tokenizer for files with "phi-3" in their names.
    assert fields["general.name"] == "Phi 3-mine"


@pytest.mark.parametrize(
    ("kind", "architecture", "values"),
    [
        ("Olmo2", "olmo2", {"rope.freq_base": 10_000.0}),
        (
            "Olmo3",
            "olmo2",
            {
                **{"attention.sliding_window": 16, "rope.freq_base": 500_000.0},
                **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
                "rope.scaling.original_context_length": 32,
            },
        ),
        (
            "Granite",
            "granite",
            {
                **{"embedding_scale": 12.0, "residual_scale": pytest.approx(0.22)},
                **{"attention.scale": 0.0625, "logit_scale": 8.0},
            },
        ),
        ("GraniteMoeHybrid", "granite", {"feed_forward_length": 96, "logit_scale": 8.0}),
    ],
)
def test_an_olmo_and_a_granite_have_llama_cpps_names_keys_and_order_of_rows(
    kind: str, architecture: str, values: dict[str, Any], tmp_path: Path
) -> None:
    # `python -m benchmarks.llama_cpp` compares with llama.cpp itself.
    import gguf

    source, file = make(tmp_path / "model", kind), tmp_path / "out.gguf"
    assert export(source, file, "--dtype", "bf16") == ExitCode.OK
    reader = gguf.GGUFReader(file)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["general.architecture"] == architecture
    wanted = {f"{architecture}.{key}": value for key, value in values.items()}
    assert {key: fields.get(key) for key in wanted} == wanted
    found = {
        each.name: torch.from_numpy(gguf.dequantize(each.data, each.tensor_type).copy())
        for each in reader.tensors
    }
    (arch,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, 4)
    expected = dict(expected_of(load(source), "bf16"))
    for name in [name for name in expected if "shared_mlp" in name]:
        weight, prefix = expected.pop(name), name.partition("shared_mlp")[0]
        if name.endswith("output_linear.weight"):
            expected[f"{prefix}mlp.down_proj.weight"] = weight
        else:
            gate, up = weight.chunk(2)
            expected |= {f"{prefix}mlp.gate_proj.weight": gate, f"{prefix}mlp.up_proj.weight": up}
    assert len(found) == len(expected)
    for name, weight in expected.items():
        value = found[names.get_name(name, try_suffixes=(".weight",)) or ""]
        if architecture == "granite" and name.endswith(("q_proj.weight", "k_proj.weight")):
            value = value.view(-1, 8, 2, value.shape[-1]).transpose(1, 2).reshape(value.shape)
        assert torch.equal(value.view_as(weight), weight), name


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("Olmo2", {"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        ("Olmo2", {"head_dim": 32}, "head_dim = 32"),
        ("Olmo3", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "layer_types"),
        (
            "Olmo3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 9.0}}},
            "rope of the layers with a window",
        ),
        (
            "Olmo3",
            {"rope_parameters": {"full_attention": {**YARN, "attention_factor": 1.5}}},
            "attention_factor = 1.5",
        ),
        ("Granite", {"head_dim": 32}, "head_dim = 32"),
        (
            "GraniteMoeHybrid",
            {"position_embedding_type": None},
            "position_embedding_type = None",
        ),
        ("GraniteMoeHybrid", {"num_local_experts": 4}, "cannot be exported to GGUF"),
    ],
)
def test_an_olmo_or_a_granite_that_llama_cpp_would_compute_otherwise_is_refused(
    kind: str,
    changes: dict[str, Any],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = make_llama(tmp_path / "model", kind)
    change_config(source, **changes)
    capsys.readouterr()
    assert expected in complaint(export(source, tmp_path / "out.gguf"), capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"no_rope_layers": [1, 0, 1, 1, 1]}, "no_rope_layers"),
        ({"no_rope_layers": [0, 0, 0, 0, 0]}, "no_rope_layers"),
        (
            {
                "rope_scaling": {
                    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
                    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
                }
            },
            "rope_type = 'llama3'",
        ),
    ],
)
def test_a_smollm3_that_llama_cpp_would_compute_otherwise_is_refused(
    changes: dict[str, Any], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_llama(tmp_path / "model", "SmolLM3")
    change_config(source, **changes)
    capsys.readouterr()
    assert expected in complaint(export(source, tmp_path / "out.gguf"), capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("Qwen2", {"rope_parameters": LLAMA3}, "rope_type = 'llama3'"),
        ("Gemma3Text", {"rope_parameters": {"full_attention": LLAMA3}}, "rope_type = 'llama3'"),
        ("Gemma3Text", {"hidden_activation": "gelu"}, "hidden_act = 'gelu'"),
        ("Phi3", {"head_dim": 32}, "head_dim = 32"),
        (
            "Gemma3Text",
            {"num_hidden_layers": 62, "layer_types": None},
            "query_pre_attn_scalar = 256",
        ),
    ],
)
def test_what_llama_cpp_has_in_its_code_for_a_family_must_be_the_models(
    kind: str, changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    config = json.loads(files_of_llama(kind)["config.json"])
    plan_gguf(config, folder=tmp_path)
    with pytest.raises(CheckpointError, match=expected):
        plan_gguf(config | changes, folder=tmp_path)


def test_a_gpt2_without_biases_has_no_others_than_zeros(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "model"
    source.mkdir()
    spec = Gpt2Spec(n_layer=2, n_head=2, n_embd=32, vocab_size=VOCAB, bias=False)
    save_hf(build(spec), source)
    add_tokenizer(source)
    assert export(source, tmp_path / "out", format_="hf") == ExitCode.OK
    assert export(source, tmp_path / "out.gguf") == ExitCode.OK
    tensors = load_file(source / "model.safetensors")
    assert tensors.keys() == load_file(tmp_path / "out" / "model.safetensors").keys()
    name = "transformer.h.0.mlp.c_fc.bias"
    for change, words in (
        ({name: tensors[name] + 1}, f"{name} is not zero, but tileforge_bias = false"),
        ({"wte.weight": tensors["transformer.wte.weight"] + 1}, "one tensor under two names"),
    ):
        save_file({**tensors, **change}, source / "model.safetensors")
        with pytest.raises(CheckpointError, match=words):
            load_model(source)
        capsys.readouterr()
        assert words in complaint(export(source, tmp_path / "bad", format_="hf"), capsys)
