"""Runs on the text model of a multimodal checkpoint, which is saved whole."""

from __future__ import annotations

import json
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from payload.export.__main__ import main as export
from payload.formats.checkpoint_listing import manifest_problems
from payload.run_record.run_files import RunPaths
from payload.train.models.loading import load
from payload.train.tensors.copied_parts import CopiedParts
from payload.train.tensors.tensor_file import write_tensors
from tests.model_classes.multimodal import PROCESSOR, load_whole, make_whole
from tests.support.data_folders import make_data_folder
from tests.support.launching import TINY_RUN, losses, train_several
from tests.support.slow_imports import peft
from tests.train.alone import train_alone

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = (
    *("data.sequence_length=32", "train.eval_tokens=64", "train.checkpoint_every=10"),
    *("model.n_layer=none", "model.n_head=none", "model.n_embd=none", "optimizer.lr=0.01"),
)
LORA = ("adapter.kind=lora", "adapter.rank=4")
WORDS = 512
"""Tokens of the data; a model has eight more, for images and audio."""


def make_base(name: str, folder: Path, *, words: int = WORDS) -> dict[str, torch.Tensor]:
    """Save a multimodal model for data with `words` tokens; return its tensors."""
    sizes = {"vocab_size": words + 8}
    if name == "Gemma4":
        sizes["vocab_size_per_layer_input"] = words + 8
    make_whole(name, folder, **sizes)
    return load_file(folder / "model.safetensors")


def towers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors in bf16, which only the parts without training have."""
    return {name: each for name, each in tensors.items() if each.dtype == torch.bfloat16}


def last(run: Path) -> Path:
    return RunPaths(run).checkpoint(20)


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def computes_the_same(ours: Path, theirs: Any) -> None:
    """Require that transformers' whole model gives our logits."""
    tokens = torch.randint(0, WORDS, (2, 24), generator=torch.Generator().manual_seed(3))
    model = load(ours).eval()
    with torch.no_grad():
        wanted = theirs(input_ids=tokens).logits
        torch.testing.assert_close(model.logits(model.hidden(tokens)), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    ["Gemma3", *(pytest.param(each, marks=pytest.mark.seeds) for each in ("Qwen3_5", "Gemma4"))],
)
def test_ten_steps_and_a_resume_equal_twenty_and_save_the_whole_model(
    name: str, tmp_path: Path, tiny_config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = make_base(name, tmp_path / "base")
    settings = (f"model.init={tmp_path / 'base'}", *SHORT)
    with caplog.at_level(logging.INFO):
        train_alone(tmp_path / "whole", tiny_config, *settings, "train.steps=20")
    (line,) = {each for each in caplog.messages if "not trained, kept unchanged" in each}
    assert "parameters" in line
    train_alone(tmp_path / "parts", tiny_config, *settings, "train.steps=10")
    # From here on, the checkpoint is the only copy of the towers.
    (tmp_path / "base").rename(tmp_path / "away")
    (tmp_path / "base").mkdir()
    train_alone(tmp_path / "parts", tiny_config, *settings, "train.steps=20")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    parts, whole = (last(tmp_path / each) for each in ("parts", "whole"))
    for file in ("model.safetensors", "optimizer.safetensors", "config.json", *PROCESSOR):
        assert (parts / file).read_bytes() == (whole / file).read_bytes()
    assert manifest_problems(whole) == []
    after = load_file(whole / "model.safetensors")
    assert after.keys() == before.keys() and towers(after).keys() == towers(before).keys() != set()
    assert all(torch.equal(after[key], each) for key, each in towers(before).items())
    changed = {key for key in before if not torch.equal(after[key], before[key])}
    constants = dict(load_whole(tmp_path / "away").named_buffers()).keys()
    assert changed == before.keys() - towers(before).keys() - constants
    for file, content in PROCESSOR.items():
        assert json.loads((whole / file).read_text()) == content
    computes_the_same(whole, load_whole(whole, dtype=torch.float32))
    _exports_the_whole_model(whole, tmp_path / "exported", after)


def _exports_the_whole_model(checkpoint: Path, out: Path, trained: dict[str, torch.Tensor]) -> None:
    words = ["--checkpoint", str(checkpoint), "--format", "hf", "--out", str(out)]
    assert export(words) == 0
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == trained.keys()
    copied = CopiedParts.open(checkpoint)
    assert copied is not None
    for key, each in stored.items():
        # The towers of Gemma 4 have constants in fp32.
        wanted = trained[key] if key in copied.tensors else trained[key].bfloat16()
        assert each.dtype == wanted.dtype and torch.equal(each, wanted), key
    assert config_of(out)["architectures"] == config_of(checkpoint)["architectures"]
    assert config_of(out)["dtype"] == "bfloat16"
    assert all((out / file).read_bytes() == (checkpoint / file).read_bytes() for file in PROCESSOR)
    computes_the_same(out, load_whole(out, dtype=torch.float32))


def test_an_adapter_loads_on_the_whole_model_and_merges_into_it(
    tmp_path: Path, tiny_config: Path
) -> None:
    before = make_base("Qwen3VL", tmp_path / "base")
    settings = (f"model.init={tmp_path / 'base'}", *SHORT, *LORA)
    train_alone(tmp_path / "run", tiny_config, *settings, "train.steps=20")
    adapter = last(tmp_path / "run")
    whole = load_whole(tmp_path / "base", dtype=torch.float32)
    adapted = peft().PeftModel.from_pretrained(whole, adapter).eval()
    names = [name for name, _ in adapted.named_parameters() if "lora_" in name]
    assert names and all(".language_model." in name for name in names)
    computes_the_same(adapter, adapted)
    out = tmp_path / "merged"
    words = ["--checkpoint", str(adapter), "--merge", "--dtype", "fp32", "--out", str(out)]
    assert export(words) == 0
    merged = load_file(out / "model.safetensors")
    assert all(torch.equal(merged[key], each) for key, each in towers(before).items())
    changed = {key for key in before if not torch.equal(merged[key], before[key])}
    assert changed and all(key.endswith("_proj.weight") for key in changed)
    computes_the_same(adapter, load_whole(out, dtype=torch.float32))


def test_the_processor_of_a_checkpoint_loads(tmp_path: Path) -> None:
    """Audio needs no further package; the processors of images need Pillow and torchvision."""
    from transformers import AutoProcessor, WhisperFeatureExtractor

    base, config = tmp_path / "base", tmp_path / "run.toml"
    config.write_text(TINY_RUN.format(data=make_data_folder(tmp_path / "data")), encoding="utf-8")
    make_base("Qwen2Audio", base, words=50_257)
    extractor: Any = WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    extractor._processor_class = "Qwen2AudioProcessor"
    extractor.save_pretrained(base)
    train_alone(tmp_path / "run", config, f"model.init={base}", *SHORT, "train.steps=1")
    processor: Any = AutoProcessor.from_pretrained(RunPaths(tmp_path / "run").checkpoint(1))
    assert type(processor).__name__ == "Qwen2AudioProcessor"
    assert processor.feature_extractor.feature_size == 8
    assert processor(text="a word", return_tensors="pt").input_ids.shape == (1, 2)


@pytest.mark.seeds
@pytest.mark.ranks
def test_two_ranks_train_the_text_model_as_one_rank(tmp_path: Path, tiny_config: Path) -> None:
    before = make_base("Gemma3", tmp_path / "base")
    settings = (f"model.init={tmp_path / 'base'}", *SHORT, "train.steps=20")
    train_alone(tmp_path / "alone", tiny_config, *settings)
    runs = {
        tmp_path / "replicate": (*settings, "schedule.warmup_steps=0"),
        tmp_path / "shard": (*settings, "schedule.warmup_steps=0", "distributed.strategy=shard"),
        tmp_path / "tensor": (
            *(*settings, "schedule.warmup_steps=0", "distributed.tensor_parallel=2"),
        ),
    }
    train_several(runs, tiny_config, num_ranks=2)
    for folder in runs:
        assert losses(folder) == pytest.approx(losses(tmp_path / "alone"), abs=1e-5)
        after = load_file(last(folder) / "model.safetensors")
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], each) for key, each in towers(before).items())


def test_packed_documents_have_the_logits_of_the_whole_model_on_each(tmp_path: Path) -> None:
    make_whole("Qwen3VL", tmp_path)
    theirs, ours = load_whole(tmp_path, dtype=torch.float32), load(tmp_path).eval()
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randint(0, 100, (1, size), generator=generator) for size in (9, 14))
    starts = torch.tensor([[0] * 9 + [9] * 14])
    with torch.no_grad():
        packed = ours.logits(ours.hidden(torch.cat((first, second), dim=1), starts=starts))
        wanted = torch.cat([theirs(input_ids=each).logits for each in (first, second)], dim=1)
    torch.testing.assert_close(packed, wanted, rtol=0, atol=1e-5)


def test_copying_needs_no_memory_for_the_parts(tmp_path: Path) -> None:
    size = 200 * 2**20
    make_whole("Gemma3", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["vision_tower.large"] = torch.zeros(size, dtype=torch.int8)
    save_file(stored, tmp_path / "model.safetensors")
    copied = CopiedParts.open(tmp_path)
    assert copied is not None
    tracemalloc.start()
    try:
        write_tensors(tmp_path / "copy.safetensors", {}, copied=copied)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size / 4
    found = load_file(tmp_path / "copy.safetensors")
    assert found.keys() == copied.tensors.keys()
    assert all(torch.equal(found[name], stored[name]) for name in found)


def test_a_truncated_source_is_reported_instead_of_a_short_checkpoint(tmp_path: Path) -> None:
    make_whole("Gemma3", tmp_path)
    copied = CopiedParts.open(tmp_path)
    assert copied is not None
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(OSError, match=r"model\.safetensors ends before "):
        write_tensors(tmp_path / "copy.safetensors", {}, copied=copied)
