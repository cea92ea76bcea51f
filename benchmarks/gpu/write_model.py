"""Write random bf16 weights for the config.json in a folder, drawn on the device.

The device draws the numbers: for the 16 GB of an 8B model, numpy would take minutes.

    python -m benchmarks.gpu.write_model FOLDER cuda
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.gpu.models import STD, tensor_shapes

_FILE_BYTES = 4 * 10**9
"""Bytes of a file of weights; safetensors copies them in memory."""

_Shapes = Mapping[str, tuple[int, ...]]


def main(folder: Path, device: str) -> None:
    """Write the weights, and their index if there are several files."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    files = list(_files(tensor_shapes(config)))
    if len(files) == 1:
        _write(folder / "model.safetensors", files[0], device)
        return
    places: dict[str, str] = {}
    for number, shapes in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        _write(folder / name, shapes, device)
        places |= dict.fromkeys(shapes, name)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _files(shapes: _Shapes) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield the shapes of each file's tensors."""
    found: dict[str, tuple[int, ...]] = {}
    used_bytes = 0
    for name, shape in shapes.items():
        size_bytes = 2 * torch.Size(shape).numel()
        if found and used_bytes + size_bytes > _FILE_BYTES:
            yield found
            found, used_bytes = {}, 0
        found[name] = shape
        used_bytes += size_bytes
    yield found


def _write(path: Path, shapes: _Shapes, device: str) -> None:
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16, device=device)
        .normal_(float(len(shape) == 1), STD)
        .cpu()
        for name, shape in shapes.items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
