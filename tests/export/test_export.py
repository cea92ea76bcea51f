"""`python -m payload.export`: transformers reads back the exported weights, rounded."""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.architecture_cases import CASES, make_folder
from benchmarks.llama_cpp import EOS, add_tokenizer
from payload.core.errors import CheckpointError, ExitCode
from payload.data.tokenizers import load_hf_tokenizer
from payload.data.tokenizers.hf import hf_tokenizer
from payload.export.__main__ import main
from payload.export.hf_weight_reader import atomic_path
from payload.export.vocabulary import Vocabulary, read_vocabulary
from payload.models.gguf import plan_gguf, read_gguf
from payload.models.gpt2.spec import Gpt2Spec
from payload.train.models.hf_weights import save_hf
from payload.train.models.loading import build
from payload.train.models.loading import load as load_model
from tests.generate.models import make_model

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = ("bf16", "f16", "q8_0")
SAMPLES = {
    **{"GPT2": "q8_0", "Llama": "f16", "Qwen2": "bf16"},
    **{"Qwen3": "q8_0", "Mistral": "f16", "Gemma3Text": "bf16", "Phi3": "f16"},
    "Qwen3Moe": "bf16",
}
"""The dtype of each kind of model that `make test` exports."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "logits_scaling": 8.0,
}
PROMPT = [464, 206, 758, 218]
VOCAB = EOS + 1
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": None,
}


@functools.lru_cache(maxsize=3)
def files_of_llama(kind: str) -> dict[str, bytes]:
    """Return the files of a small random model of one family, with GPT-2's tokenizer."""
    import transformers

    # transformers' GGUF reader assumes these widths.
    extra: dict[str, dict[str, Any]] = {
        "Qwen3": {"head_dim": 128},
        # With a tied head its scaled embedding would repeat the last token.
        "Gemma3Text": {
            "head_dim": 256,
            "num_hidden_layers": 6,
            "sliding_window": 16,
            "tie_word_embeddings": False,
        },
        "Mistral": {"sliding_window": None},
        "Qwen3Moe": {
            **{"head_dim": 16, "num_experts": 12, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 32, "norm_topk_prob": True},
        },
        "Phi3": {"partial_rotary_factor": 0.5},
        # The fourth layer has no rotary embedding.
        "SmolLM3": {"num_hidden_layers": 5},
        "Olmo3": {"num_hidden_layers": 4, "sliding_window": 16, "rope_scaling": YARN},
        "Granite": MULTIPLIERS,
        "GraniteMoeHybrid": {
            **{"layer_types": ["attention"] * 2, "num_local_experts": 0, **MULTIPLIERS},
            **{"position_embedding_type": "rope", "shared_intermediate_size": 96},
        },
    }
    prefix = kind.removesuffix("Text")
    config = getattr(transformers, f"{kind}Config")(**SIZES | extra.get(kind, {}))
    torch.manual_seed(3)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    with tempfile.TemporaryDirectory() as name:
        model.save_pretrained(name)
        return with_tokenizer(Path(name))


@functools.cache
def files_of_gpt2() -> dict[str, bytes]:
    """Return the files of a small random GPT-2 with its tokenizer."""
    with tempfile.TemporaryDirectory() as name:
        save_hf(make_model(sequence_length=1024, vocab_size=VOCAB, seed=1), Path(name))
        return with_tokenizer(Path(name))


def with_tokenizer(folder: Path) -> dict[str, bytes]:
    """Add GPT-2's tokenizer to a folder and return its files."""
    add_tokenizer(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write the files into a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def make_llama(folder: Path, kind: str) -> Path:
    """Write a small random model of one family, with GPT-2's tokenizer."""
    return write(folder, files_of_llama(kind))


def make_gpt2(folder: Path) -> Path:
    """Write a small random GPT-2 with its tokenizer."""
    return write(folder, files_of_gpt2())


def make(folder: Path, kind: str) -> Path:
    return make_gpt2(folder) if kind == "GPT2" else make_llama(folder, kind)


def export(source: Path, out: Path, *arguments: str, format_: str = "gguf") -> int:
    return main(["--checkpoint", str(source), "--format", format_, "--out", str(out), *arguments])


def load(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def greedy(model: Any, *, tokens: int = 20) -> list[int]:
    found = model.generate(torch.tensor([PROMPT]), max_new_tokens=tokens, do_sample=False)
    return list(found[0, len(PROMPT) :].tolist())


def expected_of(model: Any, dtype: str) -> Mapping[str, torch.Tensor]:
    """Return the weights rounded as in the format: matrices except positions."""
    import gguf

    found = {}
    for name, value in model.state_dict().items():
        if value.dim() < 2 or name.endswith(("wpe.weight", "mlp.gate.weight")):
            found[name] = value
        elif dtype == "q8_0":
            kind = gguf.GGMLQuantizationType.Q8_0
            # GPT-2's file transposes these matrices relative to transformers.
            is_turned = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
            matrix = (value.t() if is_turned else value).contiguous().numpy()
            back = torch.from_numpy(gguf.dequantize(gguf.quantize(matrix, kind), kind).copy())
            found[name] = back.t() if is_turned else back
        else:
            kind16 = torch.bfloat16 if dtype == "bf16" else torch.float16
            found[name] = value.to(kind16).float()
    return found


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

    source, file = make(tmp_path / "model", "Phi3"), tmp_path / "out.gguf"
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
    with pytest.raises(CheckpointError, match=r"rope_factors_long\.weight"):
        read_gguf(file)


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


def test_the_file_has_the_tokenizer_and_the_chat_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = make_gpt2(tmp_path / "model")
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    assert export(source, tmp_path / "out.gguf") == ExitCode.OK
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="out.gguf")
    own = AutoTokenizer.from_pretrained(source)
    text = "Grüße, 世界! It's 1234 \n\n  lines<|endoftext|>"
    assert read(text)["input_ids"] == own(text)["input_ids"]
    assert read.chat_template == "{{ messages[0].content }}"
    assert read.eos_token_id == EOS


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_folder_for_transformers_has_the_rounded_weights_and_the_tokenizer(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    source, out = make_gpt2(tmp_path / "model"), tmp_path / "out"
    assert export(source, out, "--dtype", dtype, format_="hf") == ExitCode.OK
    assert capsys.readouterr().out == f"{out}\n"
    kind = torch.bfloat16 if dtype == "bf16" else torch.float16
    found = load(out).state_dict()
    for name, value in load(source).state_dict().items():
        assert torch.equal(found[name], value.to(kind).float()), name
    assert json.loads((out / "config.json").read_text())["dtype"] == str(kind).removeprefix(
        "torch."
    )
    both = [AutoTokenizer.from_pretrained(path)("a b") for path in (source, out)]
    assert both[0]["input_ids"] == both[1]["input_ids"]


def test_rounding_the_weights_of_a_run_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make(tmp_path / "model", "GPT2")
    (source / "trainer.json").write_text('{"dtype": "bf16"}', encoding="utf-8")
    assert export(source, tmp_path / "rounded", format_="hf") == ExitCode.OK
    assert "rounded to bf16 from the fp32 weights" in capsys.readouterr().err
    assert export(source, tmp_path / "exact", "--dtype", "fp32", format_="hf") == ExitCode.OK
    assert "rounded" not in capsys.readouterr().err


def test_an_earlier_export_is_refused_and_any_other_folder_gets_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, exports = make_gpt2(tmp_path / "model"), tmp_path / "exports"
    assert export(source, tmp_path / "mine", format_="hf") == ExitCode.OK
    assert export(source, tmp_path / "mine", format_="hf") == ExitCode.CONFIG
    assert "mine: already exists" in capsys.readouterr().err
    exports.mkdir()
    assert export(source, exports, format_="hf") == ExitCode.OK
    assert [path.name for path in exports.iterdir()] == ["model-bf16"]


@pytest.mark.parametrize("format_", ["hf", "gguf"])
@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_the_umask_decides_who_can_read_exported_files(
    format_: str, umask: int, tmp_path: Path
) -> None:
    source, out = make_gpt2(tmp_path / "model"), tmp_path / "out"
    before = os.umask(umask)
    try:
        assert export(source, out, format_=format_) == ExitCode.OK
    finally:
        os.umask(before)
    files = [path for path in (out, *out.rglob("*")) if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}
    assert out.stat().st_mode & 0o777 == (0o777 if out.is_dir() else 0o666) & ~umask


def complaint(code: int, capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr()
    assert code in (ExitCode.CONFIG, ExitCode.USAGE) and said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("error: ")
    return line


def test_q8_0_in_a_folder_for_transformers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = export(tmp_path, tmp_path / "out", "--dtype", "q8_0", format_="hf")
    assert code == ExitCode.USAGE
    assert "the Hugging Face layout does not support q8_0" in complaint(code, capsys)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes), encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "gpt_neox"}, "cannot be exported to GGUF"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_hidden_layers": 3}, "layers"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic",
        ),
        ({"rope_parameters": {**YARN, "rope_theta": 1e4, "truncate": False}}, "truncate"),
        ({"vocab_size": 100}, "Put the tokenizer of this model next to its weights"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_what_gguf_cannot_hold_is_refused_and_nothing_is_written(
    changes: dict[str, Any], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_llama(tmp_path / "model", "Llama")
    change_config(source, **changes)
    capsys.readouterr()
    assert expected in complaint(export(source, tmp_path / "out.gguf"), capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": 32, "rope_theta": 1e4},
}


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


MATRIX = "model.layers.1.mlp.up_proj.weight"
DAMAGES: Mapping[str, Callable[[dict[str, torch.Tensor], str], object]] = {
    "codes": lambda found, name: found.update({name: (100 * found[name]).to(torch.int8)}),
    "missing": lambda found, name: found.pop(name),
    "shape": lambda found, name: found.update({name: found[name][:, :16].contiguous()}),
    "unknown": lambda found, _: found.update({"model.layers.7.x.weight": torch.ones(3)}),
}


def damage(folder: Path, kind: str, name: str = MATRIX) -> str:
    """Damage the weights in a folder, and return the loading error."""
    tensors = load_file(folder / "model.safetensors")
    DAMAGES[kind](tensors, name)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as refused:
        load_model(folder)
    return f"error: {refused.value}"


@pytest.mark.parametrize("kind", DAMAGES)
def test_weights_that_loading_refuses_are_not_exported(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_llama(tmp_path / "model", "Llama")
    message = damage(source, kind)
    capsys.readouterr()
    for format_ in ("hf", "gguf"):
        assert complaint(export(source, tmp_path / "out", format_=format_), capsys) == message
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("name", "matrix"),
    [
        ("gpt_neox", "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"),
        ("qwen2_moe", "model.layers.1.self_attn.q_proj.weight"),
    ],
)
def test_a_family_of_transformers_is_exported_as_strictly_as_it_is_loaded(
    name: str, matrix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    wanted = make_folder(CASES[name], source).state_dict()
    assert export(source, out, "--dtype", "fp32", format_="hf") == ExitCode.OK
    for key, value in load(out).state_dict().items():
        assert torch.equal(value, wanted[key]), key
    for kind in ("codes", "missing"):
        copy = write(tmp_path / kind, {each.name: each.read_bytes() for each in source.iterdir()})
        message = damage(copy, kind, matrix)
        assert ("is I8: quantised weights" if kind == "codes" else "missing") in message
        capsys.readouterr()
        assert complaint(export(copy, tmp_path / "bad", format_="hf"), capsys) == message


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_buffers_and_a_tied_head_that_files_store_are_no_weights(kind: str, tmp_path: Path) -> None:
    source, out = make(tmp_path / "model", kind), tmp_path / "out"
    tensors = load_file(source / "model.safetensors")
    buffers = {
        "GPT2": {
            "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
            "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
            "lm_head.weight": tensors.get("transformer.wte.weight", torch.ones(1)).clone(),
        },
        "Llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
    }[kind]
    save_file({**tensors, **buffers}, source / "model.safetensors")
    assert export(source, out, "--dtype", "fp32", format_="hf") == ExitCode.OK
    found = load_file(out / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    assert export(source, tmp_path / "out.gguf") == ExitCode.OK


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


def test_no_key_that_chooses_code_is_exported(tmp_path: Path) -> None:
    source, out = make_llama(tmp_path / "model", "Llama"), tmp_path / "out"
    change_config(source, attn_implementation="evil/kernel", auto_map={"AutoModel": "m.M"})
    assert export(source, out, format_="hf") == ExitCode.OK
    written = json.loads((out / "config.json").read_text())
    assert written["hidden_size"] == 64
    assert not {"attn_implementation", "auto_map"} & written.keys()


def change_tokenizer(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    raw = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(raw | changes), encoding="utf-8")


def around(before: list[str], after: list[str], ids: Mapping[str, int]) -> dict[str, Any]:
    """Return a post-processor that puts tokens around a text."""
    single = [{"SpecialToken": {"id": text, "type_id": 0}} for text in before]
    single += [{"Sequence": {"id": "A", "type_id": 0}}]
    single += [{"SpecialToken": {"id": text, "type_id": 0}} for text in after]
    known = {text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in before + after}
    parts = {"single": single, "pair": [], "special_tokens": known}
    return {"type": "TemplateProcessing", **parts}


def test_tokens_around_a_text_are_those_of_the_gguf_file_or_refused(tmp_path: Path) -> None:
    source = make_gpt2(tmp_path / "model")
    ids = {"!": 0, "#": 2, "<|endoftext|>": EOS}

    def vocabulary(*, bos: str, before: list[str], after: list[str]) -> Vocabulary:
        change_tokenizer(source, "tokenizer.json", post_processor=around(before, after, ids))
        change_tokenizer(source, "tokenizer_config.json", bos_token=bos)
        return read_vocabulary(source, rows=VOCAB, eos=None)

    found = vocabulary(bos="!", before=["!"], after=["<|endoftext|>"])
    assert (found.adds_bos, found.adds_eos, found.special["bos"]) == (True, True, 0)
    found = vocabulary(bos="!", before=[], after=[])
    assert not found.adds_bos and not found.adds_eos
    for before, after, words in (
        (["#"], [], "adds '#' before each text, but llama.cpp can add only the bos_token"),
        (["!", "#"], [], "adds '!', '#' before"),
        (["!"], ["#"], "adds '#' after each text, but llama.cpp can add only the eos_token"),
    ):
        with pytest.raises(CheckpointError, match=words):
            vocabulary(bos="!", before=before, after=after)


def test_the_file_ends_texts_with_the_token_that_prepare_ends_them_with(tmp_path: Path) -> None:
    source = make_gpt2(tmp_path / "model")
    raw = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    declared = {**raw["added_tokens"][0], "id": 65, "content": "b"}
    change_tokenizer(source, "tokenizer.json", added_tokens=[declared, *raw["added_tokens"]])
    change_tokenizer(source, "special_tokens_map.json", eos_token="b")
    _, folder = load_hf_tokenizer(str(source))
    tokenizer = hf_tokenizer(folder, name="x")
    found = read_vocabulary(source, rows=VOCAB, eos=EOS)
    assert tokenizer.end == (found.special["eos"],) == (65,)
    (source / "special_tokens_map.json").unlink()
    change_tokenizer(source, "tokenizer_config.json", eos_token=None)
    change_tokenizer(source, "generation_config.json", eos_token_id=[66, EOS])
    assert read_vocabulary(source, rows=VOCAB, eos=EOS).special["eos"] == 66
    (source / "generation_config.json").unlink()
    change_config(source, eos_token_id=None)
    assert read_vocabulary(source, rows=VOCAB, eos=EOS).special["eos"] == EOS


def test_several_chat_templates_keep_their_names(tmp_path: Path) -> None:
    import gguf

    source, file = make_gpt2(tmp_path / "model"), tmp_path / "out.gguf"
    templates = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    change_tokenizer(source, "tokenizer_config.json", chat_template=templates)
    assert export(source, file) == ExitCode.OK
    fields = gguf.GGUFReader(file).fields
    assert fields["tokenizer.chat_template"].contents() == "one"
    assert fields["tokenizer.chat_template.tool_use"].contents() == "two"
    (source / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: cannot be read"):
        read_vocabulary(source, rows=VOCAB, eos=None)


def test_a_pre_tokenizer_unknown_to_llama_cpp_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_gpt2(tmp_path / "model")
    raw = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    raw["pre_tokenizer"] = {"type": "Whitespace"}
    (source / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    assert "llama.cpp does not support its pre-tokenizer" in complaint(
        export(source, tmp_path / "o.gguf"), capsys
    )
    (source / "tokenizer.json").unlink()
    assert "needs the tokenizer" in complaint(export(source, tmp_path / "o.gguf"), capsys)


@pytest.mark.parametrize(("bad", "expected"), [(torch.nan, "NaN"), (1e30, "too large for f16")])
def test_weights_that_the_format_cannot_hold_leave_no_file(
    bad: float, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "model"
    source.mkdir()
    model = make_model(sequence_length=1024, vocab_size=VOCAB, seed=1)
    with torch.no_grad():
        next(model.parameters())[5, 3] = bad
    save_hf(model, source)
    add_tokenizer(source)
    code = export(source, tmp_path / "out.gguf", "--dtype", "f16")
    assert expected in complaint(code, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("format_", ["hf", "gguf"])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_no_link_that_leads_out_of_the_models_folder_is_followed(
    name: str, format_: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_gpt2(tmp_path / "model")
    (source / name).rename(tmp_path / "secret")
    (source / name).symlink_to("../secret")
    said = complaint(export(source, tmp_path / "out", format_=format_), capsys)
    assert f"{source / name}: a link that leads out of its folder" in said
    assert not (tmp_path / "out").exists()


def test_the_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    whole = make_gpt2(tmp_path / "model")
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    whole.rename(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert export(snapshot, tmp_path / "out", format_="hf") == ExitCode.OK
    assert export(snapshot, tmp_path / "out.gguf") == ExitCode.OK
    content = (tmp_path / "out" / "tokenizer.json").read_bytes()
    assert content == (blobs / "tokenizer.json").read_bytes()


def test_shards_that_both_have_a_tensor_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_llama(tmp_path / "model", "Llama")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    head, norm = "lm_head.weight", "model.norm.weight"
    files = {name: "model-00001-of-00002.safetensors" for name in tensors}
    files[norm] = "model-00002-of-00002.safetensors"
    save_file({head: torch.ones_like(tensors[head]), norm: tensors.pop(norm)}, source / files[norm])
    save_file(tensors, source / files[head])
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    said = complaint(export(source, tmp_path / "out", format_="hf"), capsys)
    assert f"and {files[norm]} both have '{head}'" in said


def test_a_pipe_in_the_place_of_the_weights_does_not_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_gpt2(tmp_path / "model")
    (source / "model.safetensors").unlink()
    os.mkfifo(source / "model.safetensors")
    said = complaint(export(source, tmp_path / "out", format_="hf"), capsys)
    assert f"{source}: the folder has no weights" in said


def test_a_head_that_gguf_leaves_out_must_be_the_embedding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_llama(tmp_path / "model", "Llama")
    change_config(source, tie_word_embeddings=True)
    capsys.readouterr()
    said = complaint(export(source, tmp_path / "out.gguf"), capsys)
    tied = "tie_word_embeddings = true, but lm_head.weight differs from model.embed_tokens.weight"
    assert tied in said


def test_an_interrupted_write_leaves_nothing_and_a_file_that_is_there_stays(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_path(tmp_path / "out") as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").write_text("mine")
    with pytest.raises(CheckpointError, match="exists"), atomic_path(tmp_path / "out"):
        pass
    assert (tmp_path / "out").read_text() == "mine"


def test_a_link_in_the_place_of_the_unfinished_file_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    (tmp_path / f".model.gguf.{os.getpid()}.partial").symlink_to(victim)
    path = tmp_path / "model.gguf"
    with atomic_path(path) as partial:
        partial.write_text("weights")
    assert victim.read_text() == "theirs"
    assert path.read_text() == "weights" and not path.is_symlink()
