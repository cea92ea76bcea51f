"""Runs from quantised checkpoints: training, exact resume, LoRA, export, and reading by parts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from payload.export.__main__ import main as export
from payload.train.models.loading import load
from tests.support.launching import losses, train_several
from tests.train.alone import train_alone
from tests.train.dequantize.quantise import CONFIGS, make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


def methods(*usual: str) -> list[Any]:
    """Return every format; `make test` runs only the usual ones."""
    return [
        pytest.param(method, marks=() if method in usual else pytest.mark.seeds)
        for method in CONFIGS
    ]


DESCRIPTIONS = {
    "fp8": "fp8 (block 32x32)",
    "gptq": "GPTQ (4 bits, groups of 32)",
    "awq": "AWQ (4 bits, groups of 32)",
    "compressed-tensors": "compressed-tensors (pack-quantized)",
    "mxfp4": "MXFP4",
}
SHORT = (
    *("data.sequence_length=32", "train.eval_tokens=64", "schedule.decay_steps=4"),
    *("model.n_layer=none", "model.n_head=none", "model.n_embd=none", "train.checkpoint_every=2"),
)
LORA = ("adapter.kind=lora", "adapter.rank=4", "optimizer.lr=0.01")
VOCAB_SIZE = 50_257


@pytest.mark.slow
@pytest.mark.parametrize("method", methods("gptq", "mxfp4"))
def test_a_run_trains_resumes_bitwise_and_exports(
    method: str, tmp_path: Path, tiny_config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = tmp_path / "base"
    wanted = make_checkpoint(method, base, vocab_size=VOCAB_SIZE)
    settings = (f"model.init={base}", *SHORT)
    with caplog.at_level(logging.INFO):
        train_alone(tmp_path / "whole", tiny_config, *settings, "train.steps=4")
    line = f"weights   {DESCRIPTIONS[method]}, dequantised to bf16 while loading"
    assert caplog.messages.count(line) == 1
    train_alone(tmp_path / "parts", tiny_config, *settings, "train.steps=2")
    train_alone(tmp_path / "parts", tiny_config, *settings, "train.steps=4")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    name = "checkpoints/step_00000004"
    found, trained = (load_file(tmp_path / run / name / "model.safetensors") for run in RUNS)
    assert found.keys() == trained.keys() == wanted.keys()
    assert all(torch.equal(found[key], trained[key]) for key in trained)
    assert all(each.dtype == torch.float32 for each in trained.values())
    assert not all(torch.equal(trained[key], wanted[key]) for key in trained)
    assert "quantization_config" not in config_of(tmp_path / "whole" / name)
    transformers_computes_the_same(exported(tmp_path / "whole" / name, tmp_path / "exported"))


RUNS = ("parts", "whole")


@pytest.mark.parametrize("method", methods("fp8"))
def test_an_adapter_trains_on_the_dequantised_base_and_merges_into_it(
    method: str, tmp_path: Path, tiny_config: Path
) -> None:
    base = tmp_path / "base"
    wanted = make_checkpoint(method, base, vocab_size=VOCAB_SIZE)
    settings = (f"model.init={base}", *SHORT, *LORA)
    train_alone(tmp_path / "whole", tiny_config, *settings, "train.steps=4")
    train_alone(tmp_path / "parts", tiny_config, *settings, "train.steps=2")
    train_alone(tmp_path / "parts", tiny_config, *settings, "train.steps=4")
    name = "checkpoints/step_00000004"
    found, trained = (
        load_file(tmp_path / run / name / "adapter_model.safetensors") for run in RUNS
    )
    assert all(torch.equal(found[key], trained[key]) for key in trained)
    merged = exported(tmp_path / "whole" / name, tmp_path / "merged", "--merge")
    stored = load_file(merged / "model.safetensors")
    changed = {key for key in wanted if not torch.equal(stored[key].float(), wanted[key])}
    assert any("q_proj" in key for key in changed)
    assert not any("norm" in key or "embed" in key for key in changed)
    transformers_computes_the_same(merged)


def test_the_checkpoint_itself_exports_as_bf16(tmp_path: Path) -> None:
    wanted = make_checkpoint("fp8", tmp_path / "base")
    out = exported(tmp_path / "base", tmp_path / "exported")
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == wanted.keys()
    assert all(each.dtype == torch.bfloat16 for each in stored.values())
    assert all(torch.equal(stored[name].float(), wanted[name]) for name in wanted)
    transformers_computes_the_same(out)


@pytest.mark.seeds
@pytest.mark.ranks
@pytest.mark.parametrize("method", ["fp8", "gptq"])
def test_ranks_that_read_parts_train_as_one_rank(
    method: str, tmp_path: Path, tiny_config: Path
) -> None:
    base = tmp_path / "base"
    make_checkpoint(method, base, vocab_size=VOCAB_SIZE)
    settings = (f"model.init={base}", *SHORT, "train.steps=2", "schedule.warmup_steps=0")
    train_alone(tmp_path / "alone", tiny_config, *settings)
    runs = {
        tmp_path / "shard": (*settings, "distributed.strategy=shard"),
        tmp_path / "tensor": (*settings, "distributed.tensor_parallel=2"),
    }
    printed = train_several(runs, tiny_config, num_ranks=2)
    for folder, text in printed.items():
        assert "each rank reads its own part" in text
        assert losses(folder) == pytest.approx(losses(tmp_path / "alone"), abs=1e-5)


def exported(checkpoint: Path, out: Path, *options: str) -> Path:
    words = ["--checkpoint", str(checkpoint), "--format", "hf", "--out", str(out), *options]
    assert export(words) == 0
    assert "quantization_config" not in config_of(out)
    assert config_of(out)["dtype"] == "bfloat16"
    return out


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def transformers_computes_the_same(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(0, 1000, (2, 24), generator=torch.Generator().manual_seed(3))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = load(folder).eval()
    with torch.no_grad():
        wanted = theirs(input_ids=tokens).logits
        torch.testing.assert_close(ours.logits(ours.hidden(tokens)), wanted, rtol=0, atol=1e-4)
