"""`python -m payload.export`: transformers reads back the exported weights, rounded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.architecture_cases import CASES, make_folder
from benchmarks.llama_cpp import add_tokenizer
from payload.core.errors import CheckpointError, ExitCode
from payload.export.hf_weight_reader import atomic_path, rounded
from payload.train.models.hf_weights import save_hf
from payload.train.models.loading import load as load_model
from tests.export.models import (
    VOCAB,
    YARN,
    change_config,
    complaint,
    export,
    load,
    make,
    make_gpt2,
    make_llama,
    write,
)
from tests.generate.models import make_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_folder_for_transformers_has_the_rounded_weights_and_the_tokenizer(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    source, out = make_gpt2(tmp_path / "model"), tmp_path / "out"
    (source / "generation_config.json").write_text('{"top_k": 7}')
    assert export(source, out, "--dtype", dtype, format_="hf") == ExitCode.OK
    assert (out / "generation_config.json").read_text() == '{"top_k": 7}'
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
    assert "the fp32 weights of the run were rounded to bf16" in capsys.readouterr().err
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


def test_q8_0_in_a_folder_for_transformers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = export(tmp_path, tmp_path / "out", "--dtype", "q8_0", format_="hf")
    assert code == ExitCode.USAGE
    assert "the Hugging Face layout does not support q8_0" in complaint(code, capsys)


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


def test_no_key_that_chooses_code_is_exported(tmp_path: Path) -> None:
    source, out = make_llama(tmp_path / "model", "Llama"), tmp_path / "out"
    change_config(source, attn_implementation="evil/kernel", auto_map={"AutoModel": "m.M"})
    assert export(source, out, format_="hf") == ExitCode.OK
    written = json.loads((out / "config.json").read_text())
    assert written["hidden_size"] == 64
    assert not {"attn_implementation", "auto_map"} & written.keys()


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


def test_integers_and_biases_that_choose_experts_are_not_rounded() -> None:
    table = torch.tensor([257, 299])
    bias = torch.tensor([0.3009, 0.3013])
    assert rounded("model.layers.0.ffn.gate.tid2eid", table, "bf16") is table
    for name in ("mlp.gate.e_score_correction_bias", "ffn.gate.bias"):
        assert rounded(f"model.layers.0.{name}", bias, "bf16") is bias
    assert rounded("model.layers.0.mlp.gate.weight", bias, "bf16").dtype == torch.bfloat16
