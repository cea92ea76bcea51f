"""A run can start from a GGUF file of the Llama family, with the same result as its folder."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from payload.core.errors import CheckpointError, ExitCode
from payload.data.tokenizers import load_tokenizer
from payload.data.tokenizers.gguf import gguf_tokenizer_folder, write_tokenizer
from payload.models.gguf import gguf_config, gguf_file, read_gguf
from payload.models.gguf_header import Array, GgufHeader, Value, read_header
from payload.models.llama.spec import DecoderSpec
from payload.models.registry import read_spec
from payload.orchestrate.machine_profiles.code_and_data_uploads import local_weights
from payload.train.models.loading import load
from payload.train.tensors.gguf_to_hf_folder import folder_of_gguf
from payload.weights.source import find_source
from tests.export.models import YARN, change_config, expected_of, export, make, make_llama
from tests.export.models import load as load_with_transformers

KINDS = [
    *(("Llama", "q8_0"), ("Phi3", "f16"), ("Olmo2", "bf16"), ("Olmo3", "fp32")),
    *(("Granite", "bf16"), ("GraniteMoeHybrid", "fp32"), ("Qwen3Moe", "q8_0")),
    *(("Gemma3Text", "bf16"), ("SmolLM3", "fp32"), ("Qwen3", "fp32")),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (("Mistral", "bf16"), ("Qwen2", "f16"), ("Qwen3Moe", "fp32"))
    ),
]
"""Kinds of models, each with the dtype of its file."""


_BETA, _ATTENTION = "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_attn_factor"
_WIDE = {"attention.value_length": 32, "rope.dimension_count": 32}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small Llama as a GGUF file in bf16, with its original folder."""
    root = tmp_path_factory.mktemp("gguf")
    make_llama(root / "model", "Llama")
    assert export(root / "model", root / "small.gguf") == ExitCode.OK
    return root / "small.gguf"


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_a_file_is_read_as_the_folder_that_it_was_exported_from(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    source, file = make(tmp_path / "model", kind), tmp_path / "out.gguf"
    assert export(source, file, "--dtype", dtype) == ExitCode.OK
    spec, known = read_gguf(file), read_spec(source)
    assert isinstance(spec, DecoderSpec) and isinstance(known, DecoderSpec)
    # The file of a Mistral is that of a Llama, and the file of a Granite 4 that of a Granite 3.
    assert replace(spec, model_type=kind, fused_mlp=False) == replace(
        known, model_type=kind, fused_mlp=False
    )
    folder = folder_of_gguf(file, cache=tmp_path / "cache")
    original = load_with_transformers(source)
    expected = expected_of(original, dtype)
    original.load_state_dict(expected)
    read = load_with_transformers(folder)
    if not known.fused_mlp:
        for name, value in read.state_dict().items():
            # Gemma's norms are stored with 1 added, which costs a bit.
            is_shifted = spec.norm_offset and value.dim() == 1
            bound = 1e-7 if is_shifted else 0.0
            torch.testing.assert_close(value, expected[name], rtol=0, atol=bound, msg=name)
    tokens = torch.arange(24).view(1, -1)
    with torch.no_grad():
        logits = original(tokens).logits
        torch.testing.assert_close(read(tokens).logits, logits, rtol=1e-5, atol=1e-5)
        ours = load(folder)
        torch.testing.assert_close(ours.logits(ours.hidden(tokens)), logits, rtol=1e-4, atol=1e-4)


def test_a_file_is_converted_once_and_keeps_its_tokenizer(exported: Path, tmp_path: Path) -> None:
    folder = folder_of_gguf(exported, cache=tmp_path)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert folder_of_gguf(exported, cache=tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    text = "In 1984, it's\n\n  a test"
    places = (folder, exported.parent / "model")
    assert len({load_tokenizer(str(place)).pipeline_sha256 for place in places}) == 1
    ids = [Tokenizer.from_file(str(place / "tokenizer.json")).encode(text).ids for place in places]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("beside", ["tokenizer", "config", "adapter"])
def test_what_lies_beside_a_file_changes_nothing_of_it(
    exported: Path, tmp_path: Path, beside: str
) -> None:
    alone = folder_of_gguf(exported, cache=tmp_path / "alone")
    file = tmp_path / "folder" / exported.name
    file.parent.mkdir()
    file.write_bytes(exported.read_bytes())
    if beside == "tokenizer":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (file.parent / name).write_bytes((alone / name).read_bytes())
        raw = json.loads((alone / "tokenizer.json").read_bytes())
        raw["normalizer"] = {"type": "Lowercase"}
        (file.parent / "tokenizer.json").write_text(json.dumps(raw))
        (file.parent / "chat_template.jinja").write_text("another")
        (file.parent / "special_tokens_map.json").write_text('{"eos_token": "!"}')
    elif beside == "config":
        (file.parent / "config.json").write_text('{"model_type": "llama", "rms_norm_eps": 9}')
        (file.parent / "generation_config.json").write_text('{"eos_token_id": 3}')
    else:
        (file.parent / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        (file.parent / "adapter_model.safetensors").write_bytes(b"")
    found = folder_of_gguf(file, cache=tmp_path / "beside")
    assert found.name == alone.name and not found.name.endswith("-1")
    names = sorted(path.name for path in alone.iterdir())
    assert names == sorted(path.name for path in found.iterdir())
    assert all((found / name).read_bytes() == (alone / name).read_bytes() for name in names)


def test_the_ways_of_cutting_words_that_llama_cpp_names_are_restored(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    content = exported.read_bytes()
    name = b"tokenizer.ggml.pre"
    start = content.index(name) + len(name) + 4
    old = (5).to_bytes(8, "little") + b"gpt-2"
    assert content[start : start + len(old)] == old
    file = tmp_path / "other.gguf"
    # Equal in length, so that later offsets stay valid.
    file.write_bytes(content.replace(old, old.replace(b"gpt-2", b"qwen2"), 1))
    folder = gguf_tokenizer_folder(file)
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("In 1984").tokens
    assert tokens == ["In", "Ġ", "1", "9", "8", "4"]
    assert load_tokenizer(str(file)).name == str(file)
    file.write_bytes(content.replace(old, old.replace(b"gpt-2", b"xyzzy"), 1))
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre = 'xyzzy'"):
        gguf_tokenizer_folder(file)


def test_a_file_and_a_folder_with_one_are_names_of_a_model(exported: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "m.gguf").write_bytes(exported.read_bytes())
    for name in (exported, alone):
        source = find_source(str(name), setting="model.init")
        assert source.kind == "gguf"
        spec = source.spec()
        assert spec is not None and spec.width() == 64
    sent = local_weights(str(alone))
    assert sent is not None and sent.folder == alone and list(sent.files) == ["m.gguf"]
    assert gguf_file(exported.parent / "model") is None
    (alone / "n.gguf").write_bytes(b"another")
    with pytest.raises(
        CheckpointError, match=r"2 GGUF files \(m.gguf, n.gguf\). Use the path of one"
    ):
        find_source(str(alone), setting="model.init")


def test_a_runs_folder_is_a_run_whatever_lies_in_it(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    (tmp_path / "export.gguf").write_bytes(exported.read_bytes())
    with pytest.raises(CheckpointError, match="has no valid checkpoint"):
        find_source(str(tmp_path), setting="model.init")


@pytest.mark.parametrize(
    "dtype", ["fp32", *(pytest.param(each, marks=pytest.mark.slow) for each in ("bf16", "q8_0"))]
)
def test_a_file_of_a_gpt2_is_read_as_the_folder_that_it_was_exported_from(
    dtype: str, tmp_path: Path
) -> None:
    source, file = make(tmp_path / "model", "GPT2"), tmp_path / "out.gguf"
    assert export(source, file, "--dtype", dtype) == ExitCode.OK
    assert read_gguf(file) == read_spec(source)
    folder = folder_of_gguf(file, cache=tmp_path / "cache")
    original = load_with_transformers(source)
    original.load_state_dict(expected_of(original, dtype))
    read = load_with_transformers(folder)
    for name, value in read.state_dict().items():
        assert torch.equal(value, original.state_dict()[name]), name
    tokens = torch.arange(24).view(1, -1)
    with torch.no_grad():
        logits = original(tokens).logits
        assert torch.equal(read(tokens).logits, logits)
        ours = load(folder)
        torch.testing.assert_close(ours.logits(ours.hidden(tokens)), logits, rtol=1e-4, atol=1e-4)
    header = read_header(file)
    changed = replace(header, values={**header.values, "gpt2.attention.scale": 0.5})
    with pytest.raises(CheckpointError, match=r"gpt2\.attention\.scale = 0\.5: not supported"):
        gguf_config(changed, where="m.gguf")


def test_every_cut_is_noticed_in_one_line(exported: Path, tmp_path: Path) -> None:
    content = exported.read_bytes()
    file = tmp_path / "cut.gguf"
    for size in (0, 3, 4, 8, 30, 2_000, 30_000, len(content) // 2, len(content) - 64):
        file.write_bytes(content[:size])
        with pytest.raises(CheckpointError) as refused:
            read_gguf(file)
        assert "\n" not in str(refused.value)


def test_a_file_without_tensors_is_refused_for_that_reason(tmp_path: Path) -> None:
    file = tmp_path / "empty.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + b"\0" * 64)
    with pytest.raises(CheckpointError, match=r"its header lists no tensors\. Download"):
        read_header(file)


def test_a_header_that_lies_is_refused_in_one_line(exported: Path, tmp_path: Path) -> None:
    """Set each byte of the first kilobyte and of the tensor list to the values that overflow."""
    content = exported.read_bytes()
    end = content.index(b"blk.1.attn_q")
    file = tmp_path / "odd.gguf"
    for place in [*range(4, 600, 3), *range(end, end + 200)]:
        changed = bytearray(content)
        changed[place] ^= 0xFF
        file.write_bytes(changed)
        try:
            read_gguf(file)
        except CheckpointError as refused:
            assert "\n" not in str(refused)


def test_a_tensor_that_is_missing_or_scaled_is_named(exported: Path, tmp_path: Path) -> None:
    content = exported.read_bytes()
    file = tmp_path / "changed.gguf"
    old = b"blk.1.ffn_up.weight"
    file.write_bytes(content.replace(old, b"blk.1.ffn_xx.weight"))
    with pytest.raises(CheckpointError, match=r"tensor blk\.1\.ffn_up\S* is missing"):
        read_gguf(file)


LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": 32, "rope_theta": 1e4},
}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.25, 1.5, 2.1],
    "long_factor": [2.0, 3.0, 4.0, 5.3],
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {"rope_parameters": LLAMA3}),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        ("Qwen2", {"rope_parameters": {**YARN, "rope_theta": 1e4}}),
        ("Gemma3Text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        (
            "Phi3",
            {
                "rope_parameters": None,
                "rope_scaling": LONGROPE,
                "original_max_position_embeddings": 32,
                "partial_rotary_factor": 0.5,
            },
        ),
    ],
)
def test_the_scaling_of_positions_is_kept(
    kind: str, changes: dict[str, object], tmp_path: Path
) -> None:
    model, file = make_llama(tmp_path / "model", kind), tmp_path / "scaled.gguf"
    change_config(model, **changes)
    assert export(model, file, "--dtype", "fp32") == ExitCode.OK
    known, found = read_spec(model), read_gguf(file)
    assert isinstance(known, DecoderSpec) and isinstance(found, DecoderSpec)
    assert {layer.rope.kind for layer in known.layers if layer.rope} - {"default"}
    for ours, theirs in zip(found.layers, known.layers, strict=True):
        assert ours.rope is not None and theirs.rope is not None
        factor = pytest.approx(theirs.rope.attention_factor)
        assert ours.rope.attention_factor == factor
        assert replace(ours.rope, attention_factor=1.0) == replace(
            theirs.rope, attention_factor=1.0
        )
    # Longer than the context in pre-training.
    tokens = torch.arange(48).view(1, -1)
    folder = folder_of_gguf(file, cache=tmp_path / "cache")
    with torch.no_grad():
        logits = load_with_transformers(model)(tokens).logits
        torch.testing.assert_close(load_with_transformers(folder)(tokens).logits, logits)


@pytest.mark.parametrize(
    ("kind", "changes", "factors", "words"),
    [
        ("llama", {}, {"rope_freqs.weight": (1.0, 9.0, 1.0)}, "not those of Llama 3's scaling"),
        *(
            ("llama", {"rope.freq_base": base}, {"rope_freqs.weight": (8.0,) * 8}, "rope_freqs")
            for base in ("text", -5.0, 0.0, float("nan"))
        ),
        ("llama", {}, {"rope_freqs.weight": (0.0, float("nan"))}, "rope_freqs"),
        ("llama", {}, {"rope_freqs.weight": (1.0, float("inf"))}, "rope_freqs"),
        ("qwen2", {}, {"rope_freqs.weight": (1.0, 8.0)}, "rope_freqs.weight = 'a tensor'"),
        ("llama", {}, {"rope_factors_long.weight": (1.0,)}, "rope_factors_long.weight"),
        ("llama", {"rope.scaling.type": "yarn"}, {}, "rope.scaling.factor = None"),
        (
            "llama",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, **{_BETA: 16.0}},
            {},
            f"{_BETA} = 16.0: must be 32",
        ),
        (
            "llama",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, **{_ATTENTION: 1.5}},
            {},
            f"{_ATTENTION} = 1.5: must be 1.13863",
        ),
        ("llama", {"rope.scaling.type": "longrope"}, {}, "rope.scaling.type = 'longrope'"),
        ("llama", {_ATTENTION: 1.5}, {}, f"{_ATTENTION} = 1.5: not supported"),
    ],
)
def test_a_scaling_that_a_family_does_not_have_is_refused(
    kind: str,
    changes: dict[str, Value],
    factors: dict[str, tuple[float, ...]],
    words: str,
    exported: Path,
) -> None:
    header = renamed(read_header(exported), kind, changes)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        gguf_config(replace(header, rope_factors=factors), where="m.gguf")


def renamed(header: GgufHeader, kind: str, changes: Mapping[str, Value]) -> GgufHeader:
    """Return the header of a Llama as that of another architecture, with changes."""
    values = {key.replace("llama.", f"{kind}."): value for key, value in header.values.items()}
    values |= {"general.architecture": kind, **{f"{kind}.{key}": changes[key] for key in changes}}
    return replace(header, values=values)


_WINDOW = {"attention.sliding_window": 16}
_SLIDES = Array(4, (True, True, True, False))


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        # What llama.cpp's converter writes for a Granite 4 without Mamba layers.
        (
            "granite",
            {
                **{"attention.head_count_kv": Array(2, (2, 2)), "ssm.state_size": 128},
                **{"expert_shared_feed_forward_length": 96, "rope.scaling.finetuned": True},
            },
            {"num_key_value_heads": 2, "attention_multiplier": 0.25, "logits_scaling": 1.0},
        ),
        (
            "granite",
            {"attention.scale": 0.5, "logit_scale": 8.0, "residual_scale": 0.0},
            {"attention_multiplier": 0.5, "logits_scaling": 8.0, "residual_multiplier": 1.0},
        ),
        (
            "olmo2",
            {**_WINDOW, "block_count": 4, "attention.sliding_window_pattern": _SLIDES},
            {"model_type": "olmo3", "sliding_window": 16},
        ),
        ("olmo2", {"rope.freq_base_swa": 10_000.0}, {"model_type": "olmo2"}),
        (
            "gemma3",
            {**_WINDOW, "attention.sliding_window_pattern": 6, "rope.freq_base_swa": 10_000.0},
            {"model_type": "gemma3_text", "query_pre_attn_scalar": 16, "pad_token_id": None},
        ),
        ("gemma3", {**_WINDOW, "block_count": 62}, {"query_pre_attn_scalar": 64 // 4}),
        (
            "qwen3moe",
            {"expert_count": 4, "expert_used_count": 2, "expert_gating_func": 1},
            {"num_experts": 4, "moe_intermediate_size": 48, "norm_topk_prob": True},
        ),
    ],
)
def test_the_keys_of_llama_cpps_own_converter_are_read(
    kind: str, changes: dict[str, Value], expected: dict[str, object], exported: Path
) -> None:
    config = gguf_config(renamed(read_header(exported), kind, changes), where="m.gguf")
    assert {key: config.get(key, "missing") for key in expected} == expected


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("granite", {"rope.scaling.finetuned": False}, "finetuned = False: not supported"),
        ("granite", {"attention.head_count_kv": Array(2, (2, 1))}, "must be a single value"),
        ("granite", {"expert_shared_feed_forward_length": 48}, "feed_forward_length = 48"),
        ("granite", {"attention.key_length": 32, **_WIDE}, "key_length = 32: llama.cpp derives"),
        ("olmo2", {**_WINDOW, "rope.freq_base_swa": 9.0}, "rope.freq_base_swa = 9.0"),
        ("olmo2", {**_WINDOW, "attention.sliding_window_pattern": 2}, "pattern = 2"),
        (
            "olmo2",
            {**_WINDOW, "attention.sliding_window_pattern": Array(4, (False,) * 4)},
            "must be a single value",
        ),
        ("gemma3", {}, "attention.sliding_window = None: must be positive"),
        ("gemma3", {**_WINDOW, "rope.freq_base_swa": 1e6}, "rope.freq_base_swa = 1000000.0"),
        ("qwen3moe", {"expert_gating_func": 2}, "expert_gating_func = 2"),
        ("qwen3", {"attention.sliding_window": 16}, "attention.sliding_window = 16"),
    ],
)
def test_what_a_family_does_not_have_is_refused(
    kind: str, changes: dict[str, Value], words: str, exported: Path
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(words)):
        gguf_config(renamed(read_header(exported), kind, changes), where="m.gguf")


@pytest.mark.parametrize(
    ("found", "put"),
    [
        (b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_"),
        (b"tokenizer.ggml.merges", b"tokenizer.ggml.merge_"),
        (b"tokenizer.ggml.model", b"tokenizer.ggml.mode_"),
        (b"\xc4\xa0t", b"\xff\xfet"),
        (b"\xc4\xa0 t", b"\xc4\xa0_t"),
        (b"tokenizer.ggml.eos_token_id\x04", b"tokenizer.ggml.eos_token_id\x06"),
    ],
)
def test_a_damaged_vocabulary_is_refused_in_one_line(
    exported: Path, tmp_path: Path, found: bytes, put: bytes
) -> None:
    content = exported.read_bytes()
    assert len(found) == len(put)
    file = tmp_path / "damaged.gguf"
    file.write_bytes(content.replace(found, put))
    (tmp_path / "folder").mkdir()
    try:
        write_tokenizer(file, tmp_path / "folder")
    except CheckpointError as error:
        assert str(error).startswith(f"{file}: ") and "\n" not in str(error)


@pytest.mark.parametrize(
    ("values", "factor"),
    [
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scale_linear": 4.0}, 4.0),
        ({"rope.scale_linear": 4.0, "rope.scaling.factor": 2.0}, 2.0),
        ({"rope.scale_linear": 4.0, "rope.scaling.type": "none"}, None),
        ({"rope.scale_linear": 1.0}, None),
        ({"rope.scaling.factor": 0.0, "rope.scaling.type": "linear"}, None),
    ],
)
def test_a_factor_of_positions_is_read_as_llama_cpp_reads_it(
    values: dict[str, Value], factor: float | None, exported: Path
) -> None:
    header = read_header(exported)
    named = {f"llama.{key}": value for key, value in values.items()}
    changed = replace(header, values={**header.values, **named})
    scaling = gguf_config(changed, where="m.gguf").get("rope_scaling")
    assert scaling == (factor and {"rope_type": "linear", "factor": factor})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.scale", 0.01),
        ("attention.causal", False),
        ("attention.value_length", 8),
        ("logit_scale", 2.0),
        ("final_logit_softcapping", 30.0),
        ("rope.scaling.attn_factor", 2.0),
        ("expert_count", 8),
    ],
)
def test_a_key_that_changes_the_arithmetic_and_is_not_read_is_refused(
    key: str, value: Value, exported: Path
) -> None:
    header = read_header(exported)
    neutral = {"attention.scale": 0.0, "attention.causal": True, "rope.scaling.attn_factor": 1.0}
    for name, each in neutral.items():
        gguf_config(replace(header, values={**header.values, f"llama.{name}": each}), where="m")
    changed = replace(header, values={**header.values, f"llama.{key}": value})
    with pytest.raises(CheckpointError, match=re.escape(f"m.gguf: llama.{key} = {value}")):
        gguf_config(changed, where="m.gguf")


@pytest.mark.parametrize(
    "key",
    [
        *("llama.rope.freq_base", "llama.attention.head_count", "llama.context_length"),
        *("llama.attention.layer_norm_rms_epsilon", "llama.rope.scaling.factor"),
        *("llama.rope.dimension_sections", "tokenizer.ggml.eos_token_id"),
        *("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template"),
    ],
)
def test_an_array_is_never_taken_for_a_number(key: str, exported: Path) -> None:
    header = read_header(exported)
    for length in (0, 1):
        changed = replace(header, values={**header.values, key: Array(length)})
        with pytest.raises(CheckpointError, match=re.escape(f"m.gguf: {key} = Array")):
            gguf_config(changed, where="m.gguf")


def test_an_array_of_one_number_is_an_array_in_the_file(exported: Path, tmp_path: Path) -> None:
    content, file = exported.read_bytes(), tmp_path / "m.gguf"
    key = b"llama.rope.freq_base"
    start = content.index(key) + len(key)
    # The type of a float is 6, of an array 9.
    array = struct.pack("<IIQf", 9, 6, 1, 5000.0)
    file.write_bytes(content[:start] + array + content[start + 8 :] + bytes(64))
    with pytest.raises(CheckpointError, match=r"rope\.freq_base = Array\(length=1\)"):
        read_gguf(file)
    assert read_header(file).values["llama.rope.freq_base"] == Array(1)
    assert isinstance(read_header(exported).values["tokenizer.ggml.tokens"], Array)


@pytest.mark.parametrize(
    ("found", "put", "words"),
    [
        (b"llama.context_length", b"llama.rope.freq_base", "two values of 'llama.rope.freq_base'"),
        (b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight", "two tensors of one name"),
    ],
)
def test_a_name_that_comes_twice_is_refused(
    found: bytes, put: bytes, words: str, exported: Path, tmp_path: Path
) -> None:
    assert len(found) == len(put)
    file = tmp_path / "m.gguf"
    file.write_bytes(exported.read_bytes().replace(found, put))
    with pytest.raises(CheckpointError, match=words):
        read_gguf(file)


def test_a_file_behind_a_link_out_of_its_folder_is_refused(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").symlink_to(exported)
    assert gguf_file(tmp_path / "m.gguf") == tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match="a link that leads out of its folder"):
        gguf_file(tmp_path)
