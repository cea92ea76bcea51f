"""`python -m payload.export`: what transformers reads back is what was exported, rounded."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.llama_cpp import EOS, add_tokenizer
from payload.errors import CheckpointError, ExitCode
from payload.export.__main__ import main
from payload.export.tensors import whole_or_absent
from payload.train.weights import save_hf
from tests.generate.models import make_model

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = ("bf16", "f16", "q8_0")
SAMPLES = {
    **{"GPT2": "q8_0", "Llama": "f16", "Qwen2": "bf16"},
    **{"Qwen3": "q8_0", "Mistral": "f16", "Gemma3Text": "bf16"},
}
"""The dtype of each kind of model that `make test` exports."""
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

    # transformers' GGUF reader takes these widths for granted.
    extra: dict[str, dict[str, Any]] = {
        "Qwen3": {"head_dim": 128},
        # With a tied head its embedding, scaled up, would repeat the last token.
        "Gemma3Text": {
            "head_dim": 256,
            "num_hidden_layers": 6,
            "sliding_window": 16,
            "tie_word_embeddings": False,
        },
        "Mistral": {"sliding_window": None},
        # The fourth layer has no rotation.
        "SmolLM3": {"num_hidden_layers": 5},
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
    """A small random model of one family, with GPT-2's tokenizer."""
    return write(folder, files_of_llama(kind))


def make_gpt2(folder: Path) -> Path:
    """A small random GPT-2 with its tokenizer."""
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
    """The weights as the format says that they are rounded: matrices alone, but for positions."""
    import gguf

    found = {}
    for name, value in model.state_dict().items():
        if value.dim() < 2 or name.endswith("wpe.weight"):
            found[name] = value
        elif dtype == "q8_0":
            kind = gguf.GGMLQuantizationType.Q8_0
            # GPT-2's file has these matrices the other way round than transformers.
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
    kind: str, dtype: str, tmp_path: Path
) -> None:
    source = make(tmp_path / "model", kind)
    file = tmp_path / "out.gguf"
    assert export(source, file, "--dtype", dtype) == ExitCode.OK
    read = load(tmp_path, gguf_file=file.name)
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
    # transformers' reader does not know this model: the package gguf reads it. llama.cpp itself is
    # compared by `python -m benchmarks.llama_cpp`.
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
            # Neighbours of a pair there, halves of a head here.
            value = value.view(-1, 8, 2, value.shape[-1]).transpose(1, 2).reshape(value.shape)
        torch.testing.assert_close(value.view_as(expected[name]), expected[name], rtol=0, atol=1e-6)


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
    assert "transformers' folders have no such weights" in complaint(code, capsys)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes), encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "gpt_neox"}, "cannot be exported to GGUF"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_hidden_layers": 3}, "layers"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "yarn"),
        ({"vocab_size": 100}, "another model's tokenizer"),
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


def test_a_pre_tokenizer_unknown_to_llama_cpp_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_gpt2(tmp_path / "model")
    raw = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    raw["pre_tokenizer"] = {"type": "Whitespace"}
    (source / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    assert "no pre-tokenizer like" in complaint(export(source, tmp_path / "o.gguf"), capsys)
    (source / "tokenizer.json").unlink()
    assert "needs the tokenizer" in complaint(export(source, tmp_path / "o.gguf"), capsys)


@pytest.mark.parametrize(("bad", "expected"), [(torch.nan, "NaN"), (1e30, "beyond f16")])
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
    assert f"'{head}', but {files[norm]} has one too" in said


def test_a_pipe_in_the_place_of_the_weights_does_not_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_gpt2(tmp_path / "model")
    (source / "model.safetensors").unlink()
    os.mkfifo(source / "model.safetensors")
    said = complaint(export(source, tmp_path / "out", format_="hf"), capsys)
    assert f"{source}: it has no weights" in said


def test_a_head_that_gguf_leaves_out_must_be_the_embedding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_llama(tmp_path / "model", "Llama")
    change_config(source, tie_word_embeddings=True)
    capsys.readouterr()
    said = complaint(export(source, tmp_path / "out.gguf"), capsys)
    assert "tie_word_embeddings = true, but lm_head.weight is not model.embed_tokens.weight" in said


def test_an_interrupted_write_leaves_nothing_and_a_file_that_is_there_stays(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), whole_or_absent(tmp_path / "out") as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").write_text("mine")
    with pytest.raises(CheckpointError, match="exists"), whole_or_absent(tmp_path / "out"):
        pass
    assert (tmp_path / "out").read_text() == "mine"
