"""Weights are read tensor by tensor: equal values, and little more memory than the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from payload.core.errors import CheckpointError
from payload.train.tensors.lazy_tensors import LazyTensors, Part, copy_in, shape_in
from payload.train.tensors.new_rows import TensorsWithNewRows

TENSORS = {
    "matrix": torch.randn(37, 11, generator=torch.Generator().manual_seed(0)),
    "bf16": torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "half": torch.ones(3, 2, dtype=torch.float16),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "mask": torch.tensor([True, False]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def test_every_tensor_is_what_was_saved(folder: Path) -> None:
    tensors = LazyTensors(folder)
    assert set(tensors) == set(TENSORS)
    assert tensors.num_elements() == sum(value.numel() for value in TENSORS.values())
    for name, value in TENSORS.items():
        assert tensors[name].dtype == value.dtype
        assert torch.equal(tensors[name], value)
        assert shape_in(tensors, name) == tuple(value.shape)


def test_new_rows_are_the_mean_of_the_rows_before_them_in_every_part(tmp_path: Path) -> None:
    saved = {"a.wte.weight": TENSORS["matrix"], "a.ln.weight": TENSORS["bf16"]}
    save_file(saved, tmp_path / "model.safetensors")
    for first, rows in ((37, 40), (30, 33)):  # more rows than the file has, and rows within it
        tensors = TensorsWithNewRows(tmp_path, modules={"wte"}, first=first, rows=rows)
        wanted = torch.cat([TENSORS["matrix"], torch.zeros(max(0, rows - 37), 11)])
        wanted[first:rows] = TENSORS["matrix"][:first].mean(0)
        assert shape_in(tensors, "a.wte.weight") == tuple(wanted.shape)
        torch.testing.assert_close(tensors["a.wte.weight"], wanted)
        assert torch.equal(tensors["a.ln.weight"], TENSORS["bf16"])
        for start in (0, 20, 29, 36):
            part = torch.empty(4, 3)[: len(wanted) - start]
            tensors.copy_to("a.wte.weight", part, Part(0, start), Part(1, 5))
            torch.testing.assert_close(part, wanted[start : start + 4, 5:8])


def test_a_tensor_is_converted_and_transposed_on_its_way_in_parts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("payload.train.tensors.lazy_tensors._CHUNK_BYTES", 40)
    tensors = LazyTensors(folder)
    for name in ("matrix", "bf16"):
        rows, columns = TENSORS[name].shape
        turned = torch.empty(columns, rows, dtype=torch.float64)
        copy_in(tensors, name, turned.t())
        assert torch.equal(turned.t(), TENSORS[name].double())
    number = torch.empty((), dtype=torch.float64)
    copy_in(tensors, "scalar", number)
    assert number == 2.5


def test_quantised_weights_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="w is F8_E4M3: quantised weights"):
        LazyTensors(tmp_path)["w"]


def test_a_file_that_shrinks_while_it_is_read_is_refused(folder: Path) -> None:
    tensors = LazyTensors(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="ends before its last tensor"):
        tensors["matrix"]


_LOAD = """
import gc, json, sys
from pathlib import Path
from payload.train.models.loading import load

def kilobytes(name):
    return next(
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(name)
    )

found = []
for small, large, quantize in json.loads(sys.argv[1]):
    load(Path(small), quantize=quantize)  # What the first model imports is not the second's.
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # The peak so far is forgotten.
    before = kilobytes("VmHWM")
    model = load(Path(large), quantize=quantize)
    weights = sum(each.nbytes for each in model.parameters())
    found.append([kilobytes("VmHWM") - before, weights])
    del model
print(json.dumps(found))
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "cases",
    [
        [("llama", "none")],
        pytest.param(
            [("gpt2", "none"), ("stablelm", "nf4"), ("stablelm", "none"), ("llama", "nf4")],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["sample", "others"],
)
def test_loading_peaks_little_above_the_weights(
    cases: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Files are bf16, loaded as fp32 or in 4 bits, by our own layers and by transformers'."""
    for kind, quantize in cases:
        if quantize == "none":  # Half of the weights are one embedding, as in small models.
            sizes = {"small": (100, 32, 2), "large": (20_000, 1024, 2)}
        else:  # Many layers, whose linears are most of the weights.
            sizes = {"small": (100, 64, 2), "large": (8_000, 512, 12)}
        for name, (rows, width, layers) in sizes.items():
            folder = tmp_path / f"{kind}_{quantize}_{name}"
            folder.mkdir()
            write_bf16_model(folder, kind=kind, rows=rows, width=width, layers=layers)
    for (kind, quantize), (peak, weights) in load_in_a_process(tmp_path, cases).items():
        least, ratio = (150e6, 1.2) if quantize == "none" else (30e6, 1.3)
        assert weights > least, kind
        assert peak < ratio * weights, (kind, quantize)


def load_in_a_process(
    folder: Path, cases: list[tuple[str, str]]
) -> dict[tuple[str, str], tuple[int, int]]:
    """Load each large model after the small one: return the extra peak and the weights' bytes."""
    words = [
        [*(str(folder / f"{kind}_{quantize}_{size}") for size in ("small", "large")), quantize]
        for kind, quantize in cases
    ]
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, json.dumps(words)],
        # glibc keeps ten MB of freed memory, a large share of these models' size.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = json.loads(done.stdout.splitlines()[-1])
    return {
        case: (peak_kb * 1024, weights_bytes)
        for case, (peak_kb, weights_bytes) in zip(cases, rows, strict=True)
    }


def write_bf16_model(folder: Path, *, kind: str, rows: int, width: int, layers: int = 2) -> None:
    """Write a model's folder in bf16, in transformers' layout."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes: dict[str, Any] = {"num_attention_heads": 4, "hidden_size": width}
    if kind == "stablelm":  # Its default is 32.
        sizes["num_key_value_heads"] = 4
    sizes["num_hidden_layers"] = layers
    ids: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    own: dict[str, Any] = {
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "vocab_size": rows,
    }
    if kind != "gpt2":
        own["intermediate_size"] = 4 * width
    config = CONFIG_MAPPING[kind](**sizes, **ids, **own)
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    state = {
        name: torch.ones(value.shape, dtype=torch.bfloat16)
        for name, value in module.named_parameters()
    }
    save_file(state, folder / "model.safetensors")
    config.save_pretrained(folder)
