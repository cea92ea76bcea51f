"""Checkpoints with layers that predict further tokens (MTP), which transformers does not read."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from benchmarks.architecture_cases import CASES, make_folder
from payload.export.__main__ import main as export
from payload.models.registry import read_spec
from payload.models.transformers.causal_types import CAUSAL_TYPES
from payload.models.transformers.ignored_tensors import IGNORED, ignored_tensors
from payload.run_record.run_files import RunPaths
from payload.train.families.transformers.model import TransformersLM
from payload.train.models.loading import load
from tests.model_classes.cases import CASES as CLASSES
from tests.model_classes.multimodal import load_whole, make_whole
from tests.train.alone import train_alone
from tests.train.dequantize.quantise import CONFIGS, change_config, fp8

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, INNER = 32, 48
FP8 = {"dtype": "bfloat16", "quantization_config": CONFIGS["fp8"]}
SHORT = (
    *("data.sequence_length=32", "train.eval_tokens=64", "train.checkpoint_every=2"),
    *("model.n_layer=none", "model.n_head=none", "model.n_embd=none", "train.steps=2"),
)
_QWEN = next(each for name, each in CASES.items() if each["model_type"] == "qwen3_5_text")
TEXT_CASES: Mapping[str, Mapping[str, Any]] = {
    "native": _QWEN,
    "transformers' layers": {**_QWEN, "hidden_act": "gelu"},
    "converted experts": CLASSES["Qwen3Next"].config(),
    "another name": CLASSES["DeepseekV4"].config(),
}


def mtp(*, is_quantised: bool) -> dict[str, Tensor]:
    """Return the tensors of one MTP layer with an expert."""
    generator = torch.Generator().manual_seed(1)
    found: dict[str, Tensor] = {"mtp.norm.weight": torch.ones(WIDTH).bfloat16()}
    for name, shape in {
        "mtp.fc": (WIDTH, 2 * WIDTH),
        "mtp.layers.0.self_attn.q_proj": (64, WIDTH),
        "mtp.layers.0.mlp.experts.0.gate_proj": (INNER, WIDTH),
    }.items():
        weight = torch.randn(shape, generator=generator)
        stored, _ = fp8(name, weight, block=(32, 32))
        found |= stored if is_quantised else {f"{name}.weight": weight.bfloat16()}
    return found


def quantise_layers(folder: Path, *more: Mapping[str, Tensor]) -> None:
    """Quantise some linears of a model's layers, and add further tensors to its file."""
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        is_linear = name.endswith(("self_attn.q_proj.weight", "self_attn.o_proj.weight"))
        own, _ = fp8(name.removesuffix(".weight"), tensor, block=(32, 32)) if is_linear else ({}, 0)
        stored |= own or {name: tensor}
    for each in more:
        stored |= each
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, **FP8)


@pytest.mark.parametrize("is_quantised", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("case", TEXT_CASES)
def test_a_text_model_is_read_without_the_mtp_layers(
    case: str, is_quantised: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    make_folder(TEXT_CASES[case], folder)
    if is_quantised:
        quantise_layers(folder)
    spec, wanted = read_spec(folder), load(folder).hf_tensors()
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, **mtp(is_quantised=is_quantised)}, folder / "model.safetensors")
    model = load(folder)
    assert isinstance(model, TransformersLM) == (case != "native")
    found = model.hf_tensors()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], each) for key, each in wanted.items())
    again = read_spec(folder)
    assert again == spec and again.num_params() == spec.num_params()
    assert again.flops_per_token() == spec.flops_per_token()


@pytest.mark.parametrize("is_quantised", [False, True], ids=["plain", "fp8"])
def test_a_run_says_that_its_checkpoints_leave_the_mtp_layers_out(
    is_quantised: bool, tmp_path: Path, tiny_config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = tmp_path / "base"
    make_folder({**_QWEN, "vocab_size": 50_257, "pad_token_id": None}, base)
    tensors = mtp(is_quantised=is_quantised)
    names = load_file(base / "model.safetensors").keys()
    if is_quantised:
        quantise_layers(base, tensors)
    else:
        stored = load_file(base / "model.safetensors")
        save_file({**stored, **tensors}, base / "model.safetensors")
    with caplog.at_level(logging.INFO):
        train_alone(tmp_path / "run", tiny_config, *SHORT, f"model.init={base}")
    line = (
        "weights   4 tensors that transformers does not read (first: mtp.fc.weight): not trained "
        "and not in checkpoints"
    )
    assert caplog.messages.count(line) == 1
    checkpoint = RunPaths(tmp_path / "run").checkpoint(2)
    assert load_file(checkpoint / "model.safetensors").keys() == names


@pytest.mark.parametrize("place", [(), ("text_config",)], ids=["top", "text_config"])
@pytest.mark.parametrize("is_quantised", [False, True], ids=["plain", "fp8"])
def test_a_multimodal_checkpoint_keeps_mtp_layers_that_are_not_quantised(
    is_quantised: bool,
    place: tuple[str, ...],
    tmp_path: Path,
    tiny_config: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    base, tensors = tmp_path / "base", mtp(is_quantised=is_quantised)
    make_whole("Qwen3_5", base, vocab_size=520)
    names = set(load_file(base / "model.safetensors"))
    quantise_layers(base, tensors)
    if place:
        raw = json.loads((base / "config.json").read_text())
        method = raw.pop("quantization_config")
        raw["text_config"]["quantization_config"] = method
        (base / "config.json").write_text(json.dumps(raw))
    with caplog.at_level(logging.INFO):
        train_alone(tmp_path / "run", tiny_config, *SHORT, f"model.init={base}")
    assert (
        caplog.messages.count("weights   fp8 (block 32x32), dequantised to bf16 while loading") == 1
    )
    (note,) = {each for each in caplog.messages if "not trained, kept unchanged" in each}
    left_out = "4 tensors of mtp (quantised): transformers does not read them, and checkpoints"
    assert (left_out in note) == is_quantised
    assert ("mtp 5," in note) == (not is_quantised)
    checkpoint = RunPaths(tmp_path / "run").checkpoint(2)
    for folder in (checkpoint, tmp_path / "exported"):
        if folder != checkpoint:
            words = ["--checkpoint", str(checkpoint), "--format", "hf", "--out", str(folder)]
            assert export(words) == 0
        stored = load_file(folder / "model.safetensors")
        assert stored.keys() == (names if is_quantised else names | tensors.keys())
        kept = {} if is_quantised else tensors
        assert all(torch.equal(stored[key], each) for key, each in kept.items())
        assert "quantization_config" not in (folder / "config.json").read_text()
    tokens = torch.arange(40).reshape(2, 20)
    ours = load(checkpoint).eval()
    with torch.no_grad():
        wanted = load_whole(checkpoint, dtype=torch.float32)(input_ids=tokens).logits
        torch.testing.assert_close(ours.logits(ours.hidden(tokens)), wanted, rtol=0, atol=1e-4)


def test_the_ignored_tensors_are_those_of_transformers() -> None:
    found = {}
    for kind in CAUSAL_TYPES & set(CONFIG_MAPPING):
        model = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[kind], None)
        patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        # All others are buffers, or a norm of a converted checkpoint.
        if any("mtp" in each or "layers" in each for each in patterns):
            found[kind] = tuple(patterns)
    assert found == dict(IGNORED)


def test_a_layer_of_the_model_is_read_whatever_its_number() -> None:
    names = ["model.layers.60.a.weight", "model.layers.61.a.weight", "mtp.layers.0.a.weight"]
    assert ignored_tensors(names, model_type="deepseek_v3", layers=61) == {names[1]}
    assert ignored_tensors(names, model_type="deepseek_v3", layers=62) == set()
    assert ignored_tensors(names, model_type="qwen3_next", layers=9) == {names[2]}
    assert ignored_tensors(names, model_type="llama", layers=9) == set()
