"""A model that cannot be trained is rejected in one line, with exit code 10, before any write."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from payload.config.run_config import load_run_config
from payload.core.errors import ExitCode, TileforgeError
from payload.data.tokenizer_files import gpt2_files
from payload.formats.prepare_hints import with_tokenizer
from payload.models.registry import spec_of
from payload.models.transformers.causal_types import CAUSAL_TYPES
from payload.orchestrate.__main__ import main as orchestrate
from payload.run_record.run_files import RunPaths
from payload.train.models.hf_weights import save_hf
from payload.train.models.loading import build
from payload.train.setup import pin_initial
from tests.models.fake_model_hub import FIRST, NAME, model_hub, use_hub
from tests.support.launching import rank_env, run, train_program
from tests.train.alone import ALONE, train_alone

WIDTH = 16
CONFIG = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NO_NETWORK = (
    "not a local folder, and could not be downloaded from the Hugging Face hub "
    "(ConnectionRefusedError: [Errno 111] Connection refused). Check the name or the network, or "
    "use a folder."
)
IS_OFFLINE = (
    "HF_HUB_OFFLINE is set, and the model is not in the cache ({cache}). Download it while online "
    "(hf download), or use a folder."
)
A_MATRIX = "model.layers.1.mlp.up_proj.weight"
AGAIN = "Download the model again, or use another model."
LAYOUT = "Use a folder in the Hugging Face layout."
ITS_OWN = "Use a folder in the Hugging Face layout, with its own config.json."
USE_A_WHOLE_MODEL = "Use a folder with the model's config.json and all its weight files."
NO_FOLDER = (
    "the folder does not exist. Correct the path, or use a run, a checkpoint, a folder in the "
    "Hugging Face layout, a GGUF file or a model on the hub."
)
NOT_CAUSAL = (
    "{{model}}/config.json: model_type = '{}': transformers has no causal language model of this "
    "type{}. Use a model that transformers builds from its own code."
)

Spoil = Callable[[Path], str | None]
"""Damages the model in a folder; returns model.init if it is not that folder."""


@dataclass(frozen=True)
class Case:
    """One model that is rejected."""

    spoil: Spoil
    line: str
    """The whole message; {model} is the folder, {tmp} its parent, {data} the data's,
    {prepare} the command that prepares it for the model, {hub} the hub's address."""
    settings: tuple[str, ...] = ()
    is_known_before: bool = True
    """False if only transformers detects it, which plans do not import."""
    has_sizes: bool = False
    """True if config.json gives the sizes for a plan, or if the model is not on this disk."""
    trained: str | None = None
    """The message of training, if it differs."""


def config(**changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        raw = {**CONFIG, **changes}
        (folder / "config.json").write_text(json.dumps(raw))

    return spoil


def content(name: str, text: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).write_text(text)

    return spoil


def without(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()

    return spoil


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS)

    return spoil


def without_text(folder: Path) -> None:
    config(model_type="llava", text_config=CONFIG)(folder)
    tensors(lambda found: found.pop("model.embed_tokens.weight"))(folder)


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")


def cut(name: str = WEIGHTS) -> Spoil:
    def spoil(folder: Path) -> None:
        os.truncate(folder / name, (folder / name).stat().st_size // 2)

    return spoil


def shards(folder: Path) -> None:
    found = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(found)}
    for file in set(names.values()):
        save_file({k: v for k, v in found.items() if names[k] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def sharded(then: Callable[[Path], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        shards(folder)
        then(folder)

    return spoil


def lead_out(folder: Path) -> None:
    text = (folder / INDEX).read_text().replace("model-00002", "../model-00002")
    (folder / INDEX).write_text(text)


def linked_out(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder.parent / "elsewhere.safetensors")
    (folder / WEIGHTS).symlink_to(folder.parent / "elsewhere.safetensors")


def other_tokenizer(folder: Path) -> None:
    raw = json.loads(gpt2_files(context=64)["tokenizer.json"])
    raw["model"]["merges"] = raw["model"]["merges"][:100]
    (folder / "tokenizer.json").write_text(json.dumps(raw))


def small_vocabulary(folder: Path) -> None:
    embedding = "model.embed_tokens.weight"
    tensors(lambda found: found.update({embedding: found[embedding][:300].clone()}))(folder)
    config(vocab_size=300)(folder)


def lying_header(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes().replace(b'"shape":[32,16]', b'"shape":[99,16]'))


def adapter_without_base(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    peft = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": "all-linear"}
    gone = str(folder.parent / "gone")
    (folder / "adapter_config.json").write_text(
        json.dumps({**peft, "base_model_name_or_path": gone})
    )
    save_file({"x": torch.zeros(1)}, folder / "adapter_model.safetensors")


def gguf_of(architecture: bytes, *, cut_bytes: int = 0) -> Spoil:
    """Write a file with a header that ends after its first key."""

    def text(value: bytes) -> bytes:
        return len(value).to_bytes(8, "little") + value

    def spoil(folder: Path) -> str:
        file = folder.parent / "model.gguf"
        head = b"GGUF" + (3).to_bytes(4, "little")
        head += (1).to_bytes(8, "little") * 2
        head += text(b"general.architecture") + (8).to_bytes(4, "little") + text(architecture)
        head += text(b"token_embd.weight") + (1).to_bytes(4, "little") + (8).to_bytes(8, "little")
        head += bytes(12) + bytes(32 * 4)
        file.write_bytes(head[: len(head) - cut_bytes])
        return str(file)

    return spoil


def named(name: str) -> Spoil:
    return lambda _folder: name


CASES = {
    "unknown architecture": Case(config(model_type="madeup"), NOT_CAUSAL.format("madeup", "")),
    "remote code": Case(
        config(model_type="madeup", auto_map={"AutoModelForCausalLM": "modeling.Made"}),
        NOT_CAUSAL.format("madeup", ", and the model's own code (auto_map) is never run"),
    ),
    "no model_type": Case(
        config(model_type=None),
        f"{{model}}/config.json: model_type = None: must be a name. {ITS_OWN}",
    ),
    "half a shard": Case(
        sharded(cut("model-00002-of-00002.safetensors")),
        "{model}/model-00002-of-00002.safetensors: 5,188 bytes, but its header requires "
        f"10,376: the file is truncated or damaged. {AGAIN}",
        has_sizes=True,
    ),
    "missing shard": Case(
        sharded(without("model-00001-of-00002.safetensors")),
        f"{{model}}/{INDEX}: lists model-00001-of-00002.safetensors, which is missing. {AGAIN}",
        has_sizes=True,
    ),
    "shards without index": Case(
        sharded(without(INDEX)),
        f"{{model}}: the folder has shards but no {INDEX}. {AGAIN}",
        has_sizes=True,
    ),
    "index that leads out": Case(
        sharded(lead_out),
        f"{{model}}/{INDEX}: '../model-00002-of-00002.safetensors' does not name a safetensors "
        f"file of its folder. {LAYOUT}",
        has_sizes=True,
    ),
    "weights that lead out": Case(
        linked_out,
        f"{{model}}/{WEIGHTS}: a link that leads out of its folder, to "
        "{tmp}/elsewhere.safetensors. Replace the link with the file.",
        has_sizes=True,
    ),
    "config without weights": Case(
        without(WEIGHTS),
        f"{{model}}: the folder has no weights ({WEIGHTS}, or shards and {INDEX}). {AGAIN}",
        has_sizes=True,
    ),
    "weights without config": Case(
        without("config.json"), f"{{model}}/config.json: No such file or directory. {LAYOUT}"
    ),
    "half the weights": Case(
        cut(),
        f"{{model}}/{WEIGHTS}: 26,768 bytes, but its header requires 53,536: the file is truncated "
        f"or damaged. {AGAIN}",
        has_sizes=True,
    ),
    "text for weights": Case(
        content(WEIGHTS, "<html>Not found</html>"),
        f"{{model}}/{WEIGHTS}: 22 bytes: the file is truncated, or not a safetensors file. {AGAIN}",
        has_sizes=True,
    ),
    "a pointer for weights": Case(
        content(WEIGHTS, "version https://git-lfs.github.com/spec/v1"),
        f"{{model}}/{WEIGHTS}: a Git LFS pointer, not the weights. Run `git lfs pull` in its "
        "folder, or download the model again.",
        has_sizes=True,
    ),
    "lying header": Case(
        lying_header,
        f"{{model}}/{WEIGHTS}: 'model.layers.0.mlp.gate_proj.weight': F32 of shape [99, 16] needs "
        f"6,336 bytes, but the header reserves 2,048: the file is damaged. {AGAIN}",
        has_sizes=True,
    ),
    "pickle": Case(
        pickled,
        "{model}: its weights are a pickle (pytorch_model.bin), which can run code when it is "
        "loaded. If you trust the file, load it once in transformers and call save_pretrained, "
        "which writes safetensors.",
        has_sizes=True,
    ),
    "another tokenizer": Case(
        other_tokenizer,
        "data.dir = '{data}' was prepared with the tokenizer gpt2, but model.init = '{model}' has "
        "another tokenizer. Prepare the data with the tokenizer of model.init: {prepare}",
        has_sizes=True,
    ),
    "context too long": Case(
        config(max_position_embeddings=16),
        "data.sequence_length = 32 is above the 16 positions of model.init = '{model}'. Use at "
        "most 16.",
        has_sizes=True,
    ),
    "vocabulary too small": Case(
        small_vocabulary,
        "model.init = '{model}': its vocabulary has 300 tokens, but the tokenizer of the data has "
        "512. Prepare the data with the model's tokenizer.",
        has_sizes=True,
        trained="model.init = '{model}': its vocabulary has 300 tokens, but the tokenizer of the "
        "data has 512 (gpt2). Prepare the data with the model's tokenizer.",
    ),
    "gated": Case(
        named(NAME),
        f"model.init = '{NAME}': the model is gated: only accounts that accepted its terms can "
        f"download it. Accept the terms at {{hub}}/{NAME}, then log in (hf auth login, or "
        "HF_TOKEN).",
        has_sizes=True,
    ),
    "unknown on the hub": Case(
        named("nobody/nothing"),
        "model.init = 'nobody/nothing': not a local folder, and not on the Hugging Face hub, "
        "or private. Check the name, or log in (hf auth login).",
        has_sizes=True,
    ),
    "no such folder": Case(
        named("./nothing"), f"model.init = './nothing': {NO_FOLDER}", has_sizes=True
    ),
    "GGUF of another family": Case(
        gguf_of(b"falcon"),
        "{tmp}/model.gguf: general.architecture = 'falcon': only gpt2, llama, smollm3, qwen2, "
        "qwen3, gemma3, phi3, qwen3moe, olmo2, granite can be read. "
        "Use a folder in the Hugging Face layout, with safetensors.",
    ),
    "half a GGUF": Case(
        gguf_of(b"llama", cut_bytes=120),
        "{tmp}/model.gguf: 126 bytes, but its header requires 160: the file is truncated or "
        "damaged. Download it again, or use a folder in the Hugging Face layout.",
    ),
    "malformed config": Case(
        content("config.json", '{"model_type": '),
        f"{{model}}/config.json: not JSON (line 1: Expecting value). {LAYOUT}",
    ),
    "config that is a list": Case(
        content("config.json", "[1]"), f"{{model}}/config.json: [1] is not a JSON object. {LAYOUT}"
    ),
    "a string for a size": Case(
        config(hidden_size="16"),
        f"{{model}}/config.json: hidden_size = '16': must be an integer. {ITS_OWN}",
    ),
    "NaN": Case(
        config(rms_norm_eps=float("nan")),
        "{model}/config.json: rms_norm_eps = {{'__float__': 'NaN'}}: must be a finite number. "
        + ITS_OWN,
    ),
    "a negative size": Case(
        config(num_hidden_layers=-1),
        f"{{model}}/config.json: num_hidden_layers = -1: must be at least 1. {ITS_OWN}",
    ),
    "a huge size": Case(
        config(intermediate_size=10**18),
        "{model}/config.json: intermediate_size = 1000000000000000000: must be at most 4194304. "
        f"{ITS_OWN}",
    ),
    "more layers than weights": Case(
        config(num_hidden_layers=3),
        "{model}: has no tensor model.layers.2.input_layernorm.weight, which its config.json "
        f"requires. {USE_A_WHOLE_MODEL}",
        has_sizes=True,
        trained="{model}: does not contain the weights that config.json describes: 9 missing "
        f"(first: model.layers.2.input_layernorm.weight). {USE_A_WHOLE_MODEL}",
    ),
    "heads that do not divide": Case(
        config(num_attention_heads=3),
        "{model}/config.json: hidden_size = 16: must be a multiple of num_attention_heads = 3. "
        f"{ITS_OWN}",
    ),
    "deep nesting": Case(
        content("config.json", "[" * 20_000),
        f"{{model}}/config.json: nested too deeply. {LAYOUT}",
    ),
    "vision model": Case(
        config(model_type="mllama", vision_config={}),
        "{model}/config.json: vision_config: model_type 'mllama' reads more than text. Use a "
        "text-only model, or a type in docs/guides/multimodal.md.",
    ),
    "vision beside no text": Case(
        config(model_type="gemma3"),
        "{model}/config.json: text_config is missing: model_type 'gemma3' needs an object with the "
        "text model's sizes. Use a folder with the model's own config.json.",
    ),
    "text without its towers": Case(
        config(model_type="llava", text_config=CONFIG),
        "{model}: no tensor is outside the text model, but config.json describes a multimodal "
        "model. Use the complete checkpoint, or the text model's own config.json.",
    ),
    "a multimodal model without text": Case(
        without_text,
        "{model}: no tensor is the token embedding of a text model; the known names are "
        "model.language_model.embed_tokens.weight, language_model.model.embed_tokens.weight, "
        "model.text_model.embed_tokens.weight, model.embed_tokens.weight. Save the model with the "
        "class that its config.json names.",
    ),
    "encoder-decoder": Case(
        config(model_type="bart", is_encoder_decoder=True),
        "{model}/config.json: is_encoder_decoder = true: model_type 'bart' is not a causal "
        "language model. Use a decoder-only model.",
    ),
    "no language model": Case(config(model_type="vit"), NOT_CAUSAL.format("vit", "")),
    "another model's weights": Case(
        config(model_type="bert"),
        "{model}: does not contain the weights that config.json describes: 44 missing (first: "
        f"bert.embeddings.LayerNorm.bias). {USE_A_WHOLE_MODEL}",
        is_known_before=False,
    ),
    "quantised": Case(
        config(quantization_config={"quant_method": "hqq"}),
        "{model}/config.json: quantization_config: quant_method = 'hqq': cannot be dequantised; "
        "the methods are fp8, fbgemm_fp8, mxfp4, gptq, awq, compressed-tensors. Use the model in "
        "bf16 or fp32.",
    ),
    "weights of another name": Case(
        config(transformers_weights="other.safetensors"),
        "{model}/config.json: transformers_weights = 'other.safetensors': transformers would load "
        "this file instead of model.safetensors. Remove the key, or rename the file to "
        "model.safetensors.",
    ),
    "quantised tensors": Case(
        tensors(lambda found: found.update({A_MATRIX: torch.zeros(32, WIDTH, dtype=torch.int8)})),
        f"{{model}}: {A_MATRIX} is I8: quantised weights cannot be trained. Use the model in bf16 "
        "or fp32.",
        has_sizes=True,
        trained=f"{{model}}: {A_MATRIX} is I8: quantised weights cannot be trained. Use the model "
        "in bf16 or fp32.",
    ),
    "a tensor's shape": Case(
        tensors(lambda found: found.update({A_MATRIX: torch.zeros(WIDTH, 32)})),
        f"{{model}}: {A_MATRIX} has the shape [16, 32], but its config.json requires [32, 16]. "
        f"{USE_A_WHOLE_MODEL}",
        has_sizes=True,
        trained=f"{{model}}: {A_MATRIX} has the shape (16, 32), but config.json requires (32, 16). "
        f"{USE_A_WHOLE_MODEL}",
    ),
    "a missing tensor": Case(
        tensors(lambda found: found.pop(A_MATRIX)),
        f"{{model}}: has no tensor {A_MATRIX}, which its config.json requires. {USE_A_WHOLE_MODEL}",
        has_sizes=True,
        trained="{model}: does not contain the weights that config.json describes: 1 missing "
        f"(first: {A_MATRIX}). {USE_A_WHOLE_MODEL}",
    ),
    "an unknown tensor": Case(
        tensors(lambda found: found.update({"model.extra": torch.zeros(1)})),
        "{model}: does not contain the weights that config.json describes: 1 unknown (first: "
        f"model.extra). {USE_A_WHOLE_MODEL}",
        is_known_before=False,
    ),
    "missing tensors of transformers' own": Case(
        config(model_type="stablelm"),
        "{model}: does not contain the weights that config.json describes: 5 missing (first: "
        f"model.layers.0.input_layernorm.bias). {USE_A_WHOLE_MODEL}",
        is_known_before=False,
    ),
    "adapter without its base": Case(
        adapter_without_base,
        f"{{model}}/adapter_config.json: base_model_name_or_path = '{{tmp}}/gone': {NO_FOLDER}",
        trained="{model}: its base is missing, and an adapter contains no copy of its base. "
        "Restore the base in {tmp}/gone.",
    ),
    "other sizes": Case(
        lambda _: None,
        "model.n_layer = 5, but the weights of model.init have 2. Leave model.n_layer out, or use "
        'model.init = "scratch".',
        ("model.n_layer=5",),
        has_sizes=True,
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that can be trained."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    folder.mkdir()
    torch.manual_seed(1)
    save_hf(build(spec_of(CONFIG, where="test")), folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """Return a copy of the model to damage."""
    shutil.copytree(whole, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def hub(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Return a hub with one gated model."""
    with model_hub({FIRST: whole}, gated=True) as endpoint:
        use_hub(monkeypatch, endpoint=endpoint, cache=tmp_path_factory.mktemp("cache"))
        yield


def settings_of(init: str, *more: str) -> list[str]:
    sizes = [f"model.{name}=none" for name in ("n_layer", "n_head", "n_embd")]
    return [*sizes, "engine.kernels=off", "train.steps=2", f"model.init={init}", *more]


def message(line: str, tmp: Path, tiny_data: Path) -> str:
    model = tmp / "model"
    prepare = with_tokenizer(tiny_data, source="random phrases", tokenizer=str(model))
    places = {"model": model, "tmp": tmp, "data": tiny_data, "hub": constants.ENDPOINT}
    return line.format(**places, prepare=prepare)


def below(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.fixture
def transformers_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Capture the lines that transformers logs, which do not reach the root logger."""
    theirs = logging.getLogger("transformers")
    theirs.addHandler(caplog.handler)
    yield caplog
    theirs.removeHandler(caplog.handler)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("name", CASES)
def test_training_refuses_it_in_one_line_and_writes_nothing(
    name: str,
    folder: Path,
    tiny_config: Path,
    tiny_data: Path,
    tmp_path: Path,
    transformers_log: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = CASES[name]
    init = case.spoil(folder) or str(folder)
    before = below(tmp_path)
    words = ["schedule.warmup_steps=0", *settings_of(init, *case.settings)]
    config = load_run_config(tiny_config, overrides=words)
    with pytest.raises(TileforgeError) as refused:
        pin_initial(config, paths=RunPaths(tmp_path / "run"), world=ALONE)
        train_alone(tmp_path / "run", tiny_config, *words)
    assert refused.value.exit_code == ExitCode.CONFIG
    assert str(refused.value) == message(case.trained or case.line, tmp_path, tiny_data)
    assert "MISSING" not in transformers_log.text
    assert "Loading weights" not in capsys.readouterr().err
    assert below(tmp_path) == before


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.is_known_before])
def test_a_plan_and_a_run_refuse_it_in_one_line_and_write_nothing(
    name: str,
    folder: Path,
    tiny_config: Path,
    tiny_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = CASES[name]
    init = case.spoil(folder) or str(folder)
    before = below(tmp_path)
    words = ["--inventory", "local", "--runs-dir", str(tmp_path / "runs"), "--config"]
    words += [str(tiny_config), "--set", "schedule.warmup_steps=0"]
    for setting in settings_of(init, *case.settings):
        words += ["--set", setting]
    assert orchestrate(["run", *words], os.environ) == ExitCode.CONFIG, capsys.readouterr()
    said = capsys.readouterr().err.splitlines()
    line = message(case.line, tmp_path, tiny_data)
    assert said[1:] == [f"error: {line}"], said
    assert below(tmp_path) == before
    # A plan prints numbers for a model with known sizes, with a note that the run would stop.
    code = ExitCode.OK if case.has_sizes else ExitCode.CONFIG
    assert orchestrate(["plan", *words], os.environ) == code, capsys.readouterr()
    mark = "note: a run would fail: " if case.has_sizes else "error: "
    assert f"{mark}{line}" in capsys.readouterr().err.splitlines()
    assert below(tmp_path) == before


@pytest.mark.parametrize(
    ("offline", "sentence"),
    [
        (False, NO_NETWORK),
        (True, IS_OFFLINE),
    ],
)
def test_a_run_without_a_network_is_refused_in_one_line_and_writes_nothing(
    offline: bool,
    sentence: str,
    tiny_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The discard port has no listener.
    use_hub(monkeypatch, endpoint="http://127.0.0.1:9", cache=tmp_path / "cache", offline=offline)
    before = below(tmp_path)
    words = ["--inventory", "local", "--runs-dir", str(tmp_path / "runs"), "--config"]
    words += [str(tiny_config), "--set", "schedule.warmup_steps=0"]
    for setting in settings_of(NAME):
        words += ["--set", setting]
    assert orchestrate(["run", *words], os.environ) == ExitCode.CONFIG, capsys.readouterr()
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    sentence = sentence.format(cache=tmp_path / "cache")
    assert said == [f"error: model.init = '{NAME}': {sentence}"]
    assert below(tmp_path) == before


@pytest.mark.processes
def test_nothing_is_refused_that_can_be_trained(
    whole: Path, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["schedule.warmup_steps=0", *settings_of(str(whole))]
    words = [word for setting in settings for word in ("--set", setting)]
    plan = ["plan", "--inventory", "local", "--config", str(tiny_config), *words]
    assert orchestrate(plan, os.environ) == 0, capsys.readouterr()
    train_alone(tmp_path / "run", tiny_config, *settings)
    assert (tmp_path / "run" / "run.toml").exists()


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", ["pickle", pytest.param("another tokenizer", marks=pytest.mark.slow)]
)
def test_a_process_of_its_own_says_it_in_one_line_too(
    name: str, folder: Path, tiny_config: Path, tiny_data: Path, tmp_path: Path
) -> None:
    result = refused_process(name, folder, tiny_config, tmp_path)
    expected = message(CASES[name].line, tmp_path, tiny_data)
    # The printed command has the interpreter as found by each process.
    found, wanted = (
        re.sub(r"\S*python -m", "python -m", each) for each in (result.stderr, expected)
    )
    assert found == f"error: {wanted}\n"


@pytest.mark.slow
@pytest.mark.processes
def test_transformers_table_of_missing_weights_does_not_come_before_the_line(
    folder: Path, tiny_config: Path, tiny_data: Path, tmp_path: Path
) -> None:
    name = "missing tensors of transformers' own"
    result = refused_process(name, folder, tiny_config, tmp_path)
    expected = message(CASES[name].line, tmp_path, tiny_data)
    assert result.stderr.splitlines()[-1] == f"error: {expected}"
    assert "MISSING" not in result.stderr and "Loading weights" not in result.stderr


def refused_process(
    name: str, folder: Path, tiny_config: Path, tmp_path: Path
) -> subprocess.CompletedProcess[str]:
    """Train the damaged model in a new process, which rejects it and writes nothing."""
    CASES[name].spoil(folder)
    words = ["schedule.warmup_steps=0", *settings_of(str(folder))]
    result = run(
        [sys.executable, *train_program(tmp_path / "run", tiny_config, *words)],
        env=rank_env(),
    )
    assert result.returncode == ExitCode.CONFIG
    assert result.stdout == "" and not (tmp_path / "run").exists()
    return result


def test_the_types_that_a_plan_knows_are_those_of_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    text_alone = {k for k, v in NAMES.items() if not v.endswith("ForConditionalGeneration")}
    assert text_alone == CAUSAL_TYPES
