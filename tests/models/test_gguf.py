"""A run can start from a GGUF file of the Llama family, with the same result as its folder."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from payload.core.errors import CheckpointError, ExitCode
from payload.data.tokenizers import load_tokenizer
from payload.data.tokenizers.gguf import gguf_tokenizer_folder, write_tokenizer
from payload.models.gguf import gguf_config, gguf_file, read_gguf
from payload.models.gguf_header import Array, Value, read_header
from payload.models.llama.spec import DecoderSpec
from payload.models.registry import read_spec
from payload.orchestrate.machine_profiles.code_and_data_uploads import local_weights
from payload.train.models.loading import load
from payload.train.tensors.gguf_to_hf_folder import folder_of_gguf
from payload.weights.source import find_source
from tests.export.models import change_config, export, make, make_llama

KINDS = [
    "Llama",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Mistral", "Qwen2")),
    "Qwen3",
    "Phi3",
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small Llama as a GGUF file in bf16, with its original folder."""
    root = tmp_path_factory.mktemp("gguf")
    make_llama(root / "model", "Llama")
    assert export(root / "model", root / "small.gguf") == ExitCode.OK
    return root / "small.gguf"


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_read_as_the_folder_that_it_was_exported_from(kind: str, tmp_path: Path) -> None:
    source, file = make(tmp_path / "model", kind), tmp_path / "out.gguf"
    assert export(source, file, "--dtype", "bf16") == ExitCode.OK
    spec, known = read_gguf(file), read_spec(source)
    assert list(spec.tensor_shapes()) == list(known.tensor_shapes())
    assert spec.flops_per_token() == known.flops_per_token()
    folder = folder_of_gguf(file, cache=tmp_path / "cache")
    found, expected = load(folder), load(source)
    weights = dict(expected.named_parameters())
    assert [name for name, _ in found.named_parameters()] == list(weights)
    with torch.no_grad():
        for name, value in found.named_parameters():
            rounded = weights[name].to(torch.bfloat16 if value.dim() == 2 else torch.float32)
            assert torch.equal(value, rounded.float()), name
            weights[name].copy_(rounded)
        tokens = torch.arange(24).view(1, -1)
        # The file stores its epsilon and base in fp32.
        torch.testing.assert_close(
            found.logits(found.hidden(tokens)),
            expected.logits(expected.hidden(tokens)),
            rtol=1e-5,
            atol=1e-5,
        )


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


def test_a_file_of_another_family_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "out.gguf"
    assert export(make(tmp_path / "model", "GPT2"), file) == ExitCode.OK
    with pytest.raises(CheckpointError, match=r"general\.architecture = 'gpt2': only llama"):
        read_gguf(file)


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
    change = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    change |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    model = make_llama(tmp_path / "model", "Llama")
    change_config(model, rope_parameters=change)
    assert export(model, tmp_path / "scaled.gguf") == ExitCode.OK
    with pytest.raises(CheckpointError, match="rope_freqs"):
        read_gguf(tmp_path / "scaled.gguf")


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


def test_linear_scaling_of_positions_is_kept(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model", "Llama")
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    change_config(model, rope_parameters=rope)
    assert export(model, tmp_path / "scaled.gguf") == ExitCode.OK
    known = read_spec(model)
    found = read_gguf(tmp_path / "scaled.gguf")
    assert isinstance(known, DecoderSpec) and isinstance(found, DecoderSpec)
    assert found.layers == known.layers


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
