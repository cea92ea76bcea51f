"""`payload.export --merge` writes one model from a base and its adapter."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPTNeoXConfig

from benchmarks.llama_cpp import add_tokenizer
from payload.config.training_sections import AdapterSection
from payload.core.errors import CheckpointError, ExitCode
from payload.core.file_hash import sha256_of
from payload.evaluate.__main__ import main as evaluate
from payload.export.__main__ import main
from payload.export.merge_rounding import MergeRounding
from payload.export.merged import merged_weights
from payload.formats import checkpoint_listing
from payload.formats.checkpoint_listing import config_sha256, weights_sha256
from payload.generate.__main__ import main as generate
from payload.train.models.base import CausalLM, trainable
from payload.train.models.classifier import Classifier
from payload.train.models.hf_weights import config_folder
from payload.train.models.loading import load
from payload.train.models.lora import add_adapter, save_adapter
from payload.weights.source import BASE_VARIABLE, base_name, find_source
from tests.export.models import change_config, complaint, make
from tests.export.test_export import DAMAGES, damage
from tests.support.chat_data import (
    conversations,
    make_model,
    make_tokenizer,
    prepare,
    write_rows,
)
from tests.support.slow_imports import peft

pytestmark = pytest.mark.usefixtures("one_thread", "own_bases")

TOKENS = torch.tensor([[5, 9, 300, 41, 7, 80]])


def adapted(model: CausalLM, base: Path, folder: Path, **changes: Any) -> CausalLM:
    """Give the model an adapter that is not zero, and save it in `folder`."""
    add_adapter(model, AdapterSection(kind="lora", rank=4, alpha=8, **changes), seed=1)
    with torch.no_grad():
        for _, parameter in trainable(model):
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(2))
    folder.mkdir()
    save_adapter(model, folder, base=(str(base), None))
    return model.eval()


def merge(folder: Path, out: Path, *more: str) -> int:
    return main(["--checkpoint", str(folder), "--merge", "--out", str(out), *more])


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
@pytest.mark.parametrize("changes", [{}, {"rslora": True}])
def test_merged_weights_give_the_logits_of_base_and_adapter(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    base, folder, out = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    make(base, kind)
    (base / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    model = adapted(load(base), base, folder, **changes)
    add_tokenizer(folder)
    assert merge(folder, out, "--dtype", "fp32") == ExitCode.OK
    merged: Any = AutoModelForCausalLM.from_pretrained(out)
    found = merged.eval()(TOKENS).logits
    ours = model.logits(model.hidden(TOKENS))
    torch.testing.assert_close(found, ours, rtol=1e-4, atol=1e-5 * float(ours.detach().abs().max()))
    whole = AutoModelForCausalLM.from_pretrained(base)
    theirs: Any = peft().PeftModel.from_pretrained(whole, folder)
    wanted = theirs.eval().merge_and_unload().state_dict()
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6, msg=name)
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": [3, 4]}


def test_a_merged_adapter_is_written_as_gguf(tmp_path: Path) -> None:
    base, folder, out = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged.gguf"
    make(base, "Llama")
    model = adapted(load(base), base, folder)
    assert merge(folder, out, "--format", "gguf", "--dtype", "fp32") == ExitCode.OK
    read: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="merged.gguf", dtype=torch.float32
    )
    ours = model.logits(model.hidden(TOKENS))
    torch.testing.assert_close(
        read.eval()(TOKENS).logits, ours, rtol=1e-4, atol=1e-5 * float(ours.detach().abs().max())
    )


@pytest.mark.parametrize("format_", ["hf", "gguf"])
def test_a_merge_reports_how_much_of_a_small_update_rounding_removes(
    format_: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, folder = make(tmp_path / "base", "Llama"), tmp_path / "adapter"
    adapted(load(base), base, folder)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    small = {key: each * (0.01 if "lora_B" in key else 1) for key, each in tensors.items()}
    save_file(small, path)
    capsys.readouterr()
    notes = {}
    for dtype in ("bf16", "f16", "fp32"):
        out = tmp_path / f"{dtype}.{format_}"
        assert merge(folder, out, "--format", format_, "--dtype", dtype) == ExitCode.OK
        notes[dtype] = re.findall(r"merged in (\w+): .* by (\d+)%", capsys.readouterr().err)
    assert notes["fp32"] == [] and [each[0] for each in notes["bf16"]] == ["bf16"]
    if format_ == "hf":
        whole, exact, plain = (
            load_file(each / "model.safetensors")
            for each in (tmp_path / "bf16.hf", tmp_path / "fp32.hf", base)
        )
        names = [name for name in exact if not torch.equal(exact[name], plain[name])]
        errors = sum(float((whole[name].float() - exact[name]).square().sum()) for name in names)
        updates = sum(float((exact[name] - plain[name]).square().sum()) for name in names)
        lost = 100 * (errors / updates) ** 0.5
        assert lost > 10 and float(notes["bf16"][0][1]) == pytest.approx(lost, abs=0.6)
    save_file({key: each * 100 for key, each in tensors.items()}, path)
    assert merge(folder, tmp_path / f"large.{format_}", "--format", format_) == ExitCode.OK
    assert "merged in" not in capsys.readouterr().err


def test_a_classifiers_adapter_becomes_a_whole_classifier(tmp_path: Path) -> None:
    base, folder, out = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    make(base, "Llama")
    (base / "generation_config.json").write_text('{"eos_token_id": 3}')
    model = Classifier(load(base), labels=("bad", "good"), pad_token=0)
    adapted(model, base, folder)
    add_tokenizer(folder)
    # Only the labels of an adapter's config are used.
    path = folder / "classifier_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.5, "vocab_size": 7})
    )
    assert merge(folder, out, "--dtype", "fp32") == ExitCode.OK
    found, info = AutoModelForSequenceClassification.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    assert found.config.id2label == {0: "bad", 1: "good"}
    assert not (out / "generation_config.json").exists()
    torch.testing.assert_close(
        found.eval()(TOKENS).logits, model.class_logits(TOKENS), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("changes", [{}, {"dora": True}])
def test_generate_and_evaluate_read_an_adapter_as_they_read_its_merged_weights(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, folder, out = make_model(tmp_path / "base"), tmp_path / "adapter", tmp_path / "merged"
    adapted(load(base), base, folder, **changes)
    make_tokenizer(folder)
    record = {"base": {"sha256": weights_sha256(base)}}
    (folder / "trainer.json").write_text(json.dumps(record))
    assert merge(folder, out, "--dtype", "fp32") == ExitCode.OK
    rows = [{"messages": each} for each in conversations(20)]
    chats = write_rows(tmp_path / "chats.jsonl", rows)
    data = prepare(base, chats, tmp_path / "data", "--sequence-length", 64)
    capsys.readouterr()
    texts, losses = [], []
    for each in (folder, out, base):
        named = ["--checkpoint", str(each), "--json"]
        greedy = ["--prompt", "what is red", "--temperature", "0", "--max-new-tokens", "24"]
        assert generate([*named, *greedy]) == ExitCode.OK
        texts.append(json.loads(capsys.readouterr().out)["samples"])
        assert evaluate([*named, "--data", str(data)], {}) == ExitCode.OK
        losses.append(json.loads(capsys.readouterr().out)["val_loss"])
    assert texts[0] == texts[1] != texts[2]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] != pytest.approx(losses[2], rel=1e-3)


@pytest.mark.processes
@pytest.mark.parametrize("program", ["generate", "evaluate"])
def test_generate_and_evaluate_refuse_a_base_that_is_another_one_or_gone(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, folder = make_model(tmp_path / "base"), tmp_path / "adapter"
    adapted(load(base), base, folder)
    make_tokenizer(folder)
    chats = write_rows(tmp_path / "chats.jsonl", [{"messages": each} for each in conversations(20)])
    data = prepare(base, chats, tmp_path / "data", "--sequence-length", 64)

    def run() -> str:
        capsys.readouterr()
        named = ["--checkpoint", str(folder)]
        if program == "generate":
            return complaint(generate([*named, "--prompt", "red"]), capsys)
        return complaint(evaluate([*named, "--data", str(data)], {}), capsys)

    (folder / "trainer.json").write_text('{"base": {"sha256": "0123456789abcdef"}}')
    said = run()
    assert "was trained with other weights" in said and "0123456789ab" in said
    assert f"Restore the original weights in {base}." in said
    record = {"sha256": weights_sha256(base), "config_sha256": config_sha256(base)}
    (folder / "trainer.json").write_text(json.dumps({"base": record}))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    said = run()
    assert f"{base}/config.json: the adapter {folder} was trained with another config.json" in said
    (base / "config.json").write_text(json.dumps(config))
    (base / "model.safetensors").rename(tmp_path / "weights")
    assert run() == (
        f"error: {base}/model.safetensors: No such file or directory. Restore the file."
    )
    base.rename(tmp_path / "elsewhere")
    said = run()
    assert "its base is missing" in said and f"Restore the base in {base}." in said


def test_an_adapters_base_is_read_once_for_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, folder = make_model(tmp_path / "base"), tmp_path / "adapter"
    adapted(load(base), base, folder)
    for name in ("optimizer.safetensors", "trainer.json"):
        (base / name).write_text("{}")
    entries = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in base.iterdir()
    }
    (base / "manifest.json").write_text(json.dumps({"schema_version": 1, "files": entries}))
    record = {"base": {"sha256": weights_sha256(base)}}
    (folder / "trainer.json").write_text(json.dumps(record))
    hashed = []

    def counted(path: Path) -> str:
        hashed.append(path)
        return sha256_of(path)

    monkeypatch.setattr(checkpoint_listing, "sha256_of", counted)
    assert generate(["--checkpoint", str(folder), "--prompt", "red"]) == ExitCode.OK
    assert hashed == [base / "model.safetensors"]


def test_a_config_beside_an_adapter_does_not_replace_its_bases(tmp_path: Path) -> None:
    base, folder, out = make(tmp_path / "base", "Llama"), tmp_path / "adapter", tmp_path / "merged"
    model = adapted(load(base), base, folder)
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    change_config(
        folder, rms_norm_eps=0.5, rope_parameters={"rope_type": "default", "rope_theta": 9.0}
    )
    change_config(folder, eos_token_id=3)
    assert merge(folder, out, "--dtype", "fp32") == ExitCode.OK
    assert config_sha256(out) == config_sha256(base) == config_sha256(config_folder(folder))
    merged: Any = AutoModelForCausalLM.from_pretrained(out)
    ours = model.logits(model.hidden(TOKENS))
    torch.testing.assert_close(merged.eval()(TOKENS).logits, ours, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_base_that_loading_refuses_is_not_merged(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, folder = make(tmp_path / "base", "Llama"), tmp_path / "adapter"
    adapted(load(base), base, folder, target="q_proj")
    message = damage(base, kind)
    capsys.readouterr()
    assert complaint(merge(folder, tmp_path / "out"), capsys) == message
    assert not (tmp_path / "out").exists()


def test_a_way_of_quantising_that_is_not_known_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, folder = make(tmp_path / "base", "Llama"), tmp_path / "adapter"
    adapted(load(base), base, folder)
    for record, words in (
        ({"quantize": "nf8"}, "quantize = 'nf8': unknown quantisation"),
        (["nf4"], "base = ['nf4'] is not a JSON object"),
    ):
        (folder / "trainer.json").write_text(json.dumps({"base": record}))
        with pytest.raises(CheckpointError, match=re.escape(words)):
            load(folder)
        capsys.readouterr()
        assert words in complaint(merge(folder, tmp_path / "out"), capsys)


def test_an_adapter_without_merge_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    make(base, "GPT2")
    adapted(load(base), base, folder)
    capsys.readouterr()
    for format_ in ("hf", "gguf"):
        code = main(["--checkpoint", str(folder), "--format", format_])
        said = complaint(code, capsys)
        assert "an adapter without the weights of its base. Add --merge" in said
    said = complaint(merge(base, tmp_path / "out"), capsys)
    assert "not an adapter, so there is nothing to merge" in said


def test_a_base_of_another_size_or_without_the_tensors_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    make(base, "GPT2")
    adapted(load(base), base, folder)
    for name in ("model.safetensors", "config.json"):
        (base / name).unlink()
    other = tmp_path / "other"
    make(other, "Llama")
    for name in ("model.safetensors", "config.json"):
        (base / name).write_bytes((other / name).read_bytes())
    capsys.readouterr()
    said = complaint(merge(folder, tmp_path / "out"), capsys)
    assert "does not fit its base" in said and "no linear 'c_attn'" in said
    assert not (tmp_path / "out").exists()


EMBEDDING = "model.embed_tokens.weight"
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def with_bias(adapter: dict[str, Any], _base: Path) -> None:
    adapter[f"{Q}.lora_B.bias"] = torch.ones(64)


def with_another_rank(adapter: dict[str, Any], _base: Path) -> None:
    for part, dim in (("A", 0), ("B", 1)):
        name = f"{Q}.lora_{part}.weight"
        adapter[name] = adapter[name].narrow(dim, 0, 2).contiguous()


def with_an_embedding(adapter: dict[str, Any], base: Path) -> None:
    adapter[f"base_model.model.{EMBEDDING}"] = load_file(base / "model.safetensors")[EMBEDDING]


def with_codes(adapter: dict[str, Any], _base: Path) -> None:
    adapter[f"{Q}.lora_A.weight"] = (100 * adapter[f"{Q}.lora_A.weight"]).to(torch.int8)


def without_a_linear(adapter: dict[str, Any], _base: Path) -> None:
    del adapter[f"{Q}.lora_A.weight"], adapter[f"{Q}.lora_B.weight"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_bias, "1 unknown (first: base_model.model.model.layers.0.self_attn.q_proj.lora_B.b"),
        (with_another_rank, "has the shape (2, 64), but this model needs (4, 64)"),
        (with_an_embedding, "1 unknown (first: base_model.model.model.embed_tokens.weight)"),
        (without_a_linear, "2 missing"),
        (with_codes, "is I8: quantised weights cannot be trained"),
    ],
)
def test_a_merge_refuses_the_adapters_that_loading_refuses(
    change: Callable[[dict[str, Any], Path], None],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base, folder, out = make(tmp_path / "base", "Llama"), tmp_path / "adapter", tmp_path / "merged"
    adapted(load(base), base, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors, base)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError) as refused:
        load(folder)
    capsys.readouterr()
    said = complaint(merge(folder, out), capsys)
    assert said == f"error: {refused.value}" and words in said
    assert not out.exists()


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_the_family_and_not_the_file_decides_how_linears_are_stored(
    kind: str, tmp_path: Path
) -> None:
    base, folder = make(tmp_path / "base", kind), tmp_path / "adapter"
    adapted(load(base), base, folder, target="c_attn" if kind == "GPT2" else "q_proj")
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "fan_in_fan_out": not config["fan_in_fan_out"]}))
    merged, loaded = (
        merged_weights(base, folder, rounding=MergeRounding()),
        load(folder).hf_tensors(),
    )
    for name in merged.shapes():
        torch.testing.assert_close(merged.read(name), loaded[name])


def test_an_adapter_of_a_family_of_transformers_is_merged_as_loading_does(tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "vocab_size": 96,
    }
    causal: Any = AutoModelForCausalLM
    causal.from_config(GPTNeoXConfig(**sizes, num_attention_heads=4)).save_pretrained(base)
    adapted(load(base), base, folder)
    merged, loaded = (
        merged_weights(base, folder, rounding=MergeRounding()),
        load(folder).hf_tensors(),
    )
    assert merged.shapes() == {name: tuple(value.shape) for name, value in loaded.items()}
    for name, value in loaded.items():
        torch.testing.assert_close(merged.read(name), value)


def test_a_merge_refuses_a_base_whose_head_is_not_the_embedding_it_is_tied_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, folder = make(tmp_path / "base", "Llama"), tmp_path / "adapter"
    adapted(load(base), base, folder)
    change_config(base, tie_word_embeddings=True)
    capsys.readouterr()
    said = complaint(merge(folder, tmp_path / "out"), capsys)
    assert "tie_word_embeddings = true, but lm_head.weight differs from" in said


def test_a_pipe_in_the_place_of_an_adapters_weights_does_not_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, folder = make(tmp_path / "base", "Llama"), tmp_path / "adapter"
    adapted(load(base), base, folder)
    add_tokenizer(folder)
    (folder / "trainer.json").write_text(json.dumps({"base": {"sha256": weights_sha256(base)}}))
    for pipe in (folder / "adapter_model.safetensors", base / "model.safetensors"):
        pipe.unlink()
        os.mkfifo(pipe)
        capsys.readouterr()
        said = complaint(merge(folder, tmp_path / "out"), capsys)
        assert f"{pipe}: Not a regular file" in said
        said = complaint(generate(["--checkpoint", str(folder), "--prompt", "a"]), capsys)
        assert f"{pipe}: Not a regular file" in said


def test_an_adapters_weights_behind_a_link_are_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, folder = make(tmp_path / "base", "Llama"), tmp_path / "adapter"
    adapted(load(base), base, folder)
    path = folder / "adapter_model.safetensors"
    path.rename(tmp_path / "secret")
    path.symlink_to("../secret")
    capsys.readouterr()
    said = complaint(merge(folder, tmp_path / "out"), capsys)
    assert f"{path}: a link that leads out of its folder" in said


def test_the_base_has_the_weights_that_training_began_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    make(base, "GPT2")
    adapted(load(base), base, folder)
    capsys.readouterr()
    (folder / "trainer.json").write_text('{"base": {"sha256": "0123456789abcdef"}}')
    said = complaint(merge(folder, tmp_path / "out"), capsys)
    assert "was trained with other weights" in said and "0123456789ab" in said


def test_an_adapter_names_no_model_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attack: a downloaded adapter made export read, and training use, a private model."""
    monkeypatch.delenv(BASE_VARIABLE)
    base, folder, out = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    make(base, "GPT2")
    adapted(load(base), base, folder)
    for named in (None, "", str(folder), str(tmp_path / "bas")):
        if named is not None:
            monkeypatch.setenv(BASE_VARIABLE, named)
        assert merge(folder, out) == ExitCode.CONFIG
        assert f"set {BASE_VARIABLE}={base} in the command's environment" in capsys.readouterr().err
        with pytest.raises(CheckpointError, match="has no hash of the base"):
            load(folder)
        with pytest.raises(CheckpointError, match="has no hash of the base"):
            find_source(str(folder), setting="model.init").spec()
    (tmp_path / "gpt2").symlink_to(base)
    monkeypatch.chdir(tmp_path)
    path = folder / "adapter_config.json"
    for name in ("gpt2", "./gpt2"):
        settings = json.loads(path.read_text()) | {"base_model_name_or_path": name}
        path.write_text(json.dumps(settings))
        assert merge(folder, out) == ExitCode.CONFIG
        may_be_remote = "If the hub model gpt2 is the base" in capsys.readouterr().err
        assert may_be_remote == (name == "gpt2")
    assert not out.exists()
    trainer = folder / "trainer.json"
    trainer.write_text(json.dumps({"base": {"sha256": "0" * 64}}))
    assert merge(folder, out) == ExitCode.CONFIG
    trainer.write_text(json.dumps({"base": {"sha256": weights_sha256(base)}}))
    capsys.readouterr()
    assert merge(folder, out) == ExitCode.OK  # like a run's checkpoint
    assert f"note: the base model is {tmp_path / 'gpt2'}" in capsys.readouterr().err
    trainer.unlink()
    monkeypatch.setenv(BASE_VARIABLE, str(tmp_path))
    for number, name in enumerate(("gpt2", "./gpt2", f"gpt2@{'0' * 40}")):
        settings = json.loads(path.read_text()) | {"base_model_name_or_path": name}
        path.write_text(json.dumps(settings))
        if number == 2:  # the hub's, not a local folder's
            (tmp_path / name).symlink_to(base)
            assert base_name(folder) == name
            break
        assert merge(folder, Path(f"again{number}")) == ExitCode.OK
        assert capsys.readouterr().out == f"./again{number}\n"
