"""Writes a safetensors file tensor by tensor and hashes it in the same pass.

The library's writer would copy the checkpoint and read the bytes twice. It would also hold the GIL,
and so stop training. Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from payload.train.tensors.copied_parts import CopiedParts

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_CHUNK_BYTES = 16 * 2**20
_ALIGNED_BYTES = 8


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    progressed: Callable[[], None] = lambda: None,
    whole: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    copied: CopiedParts | None = None,
) -> str:
    """Write the file and return its sha256; `progressed` is called after each chunk.

    `whole` returns all elements of a tensor; it is called in the order of `in_file_order`. Tensors
    that are not contiguous are copied, one at a time. For the text model of a multimodal
    checkpoint, `copied` are the other parts, which are also written to the file. Raises OSError.
    """
    ordered = in_file_order(tensors)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        header = _header(ordered, metadata or {}, copied)
        file.write(header)
        digest.update(header)
        trained = (chunk for _, tensor in ordered for chunk in _chunks(whole(tensor)))
        chunks: Iterator[Any] = itertools.chain(trained, _copied_chunks(copied))
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            progressed()
    return digest.hexdigest()


def in_file_order(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Return names and tensors in the order in which the file stores them.

    Tensors with the widest elements come first, so that each tensor is aligned to its element size.
    """
    return sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))


def _header(
    ordered: list[tuple[str, Tensor]], metadata: Mapping[str, str], copied: CopiedParts | None
) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    stored = [
        (
            copied.names.file_name(name) if copied is not None else name,
            _NAMES[tensor.dtype],
            list(tensor.shape),
            tensor.numel() * tensor.element_size(),
        )
        for name, tensor in ordered
    ]
    if copied is not None:
        stored += [
            (name, each.dtype, list(each.shape), each.num_bytes())
            for name, each in copied.tensors.items()
        ]
    offset = 0
    for name, dtype, shape, size in stored:
        end = offset + size
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED_BYTES)
    return len(text).to_bytes(8, "little") + text


def _copied_chunks(copied: CopiedParts | None) -> Iterator[bytes]:
    """Yield the bytes of the parts of a multimodal checkpoint that are copied."""
    if copied is not None:
        for name in copied.tensors:
            yield from copied.chunks(name)


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the tensor's bytes, little-endian like all platforms of torch."""
    # Viewed as integers, since numpy has no bf16; copied by numpy, which uses only one core.
    numbers = tensor.detach().cpu().view(_INTEGERS[tensor.element_size()]).numpy()
    content = np.ascontiguousarray(numbers).reshape(-1).view(np.uint8).data
    for start in range(0, len(content), _CHUNK_BYTES):
        yield content[start : start + _CHUNK_BYTES]
