"""Weights are read tensor by tensor: the same numbers, and little more memory than the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from payload.errors import CheckpointError
from payload.train.lazy_tensors import LazyTensors, copy_in, shape_in

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


def test_a_tensor_is_converted_and_transposed_on_its_way_in_parts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("payload.train.lazy_tensors._CHUNK_BYTES", 40)
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
