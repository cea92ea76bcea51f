"""The parts of a multimodal checkpoint that are not trained, copied byte for byte.

The bytes go from file to file in chunks, so no part is ever in memory. The source files stay open,
so a checkpoint can be written after the source was removed.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from payload.core.errors import CheckpointError
from payload.core.regular_files import open_regular, read_bytes
from payload.formats.hf_folder import CONFIG_FILE, PROCESSOR_FILES, own_file, read_config
from payload.formats.quantized.weight_headers import weight_headers
from payload.formats.tensor_headers import DTYPE_BYTES, TensorHeader
from payload.models.multimodal_config import find_whole
from payload.models.multimodal_tensors import TextNames, split_tensors

_CHUNK_BYTES = 16 * 2**20


@dataclass(slots=True, kw_only=True)
class CopiedParts:
    """The tensors of all parts except the text model, and the processor's files."""

    names: TextNames
    """The names of the text model's tensors in the files."""
    tensors: Mapping[str, TensorHeader]
    """The copied tensors by name, the tensors with the widest elements first."""
    files: Mapping[str, bytes]
    """The processor's files by name."""
    _opened: Mapping[Path, io.BufferedReader]

    @classmethod
    def open(cls, folder: Path) -> CopiedParts | None:
        """Open the parts of the checkpoint in `folder`; None if it is not multimodal.

        Raises CheckpointError.
        """
        if find_whole(read_config(folder), where=str(folder / CONFIG_FILE)) is None:
            return None
        found = split_tensors(weight_headers(folder), where=str(folder))
        # Aligned as in `in_file_order`.
        ordered = sorted(
            found.copied.items(), key=lambda item: (-DTYPE_BYTES[item[1].dtype], item[0])
        )
        files: dict[str, bytes] = {}
        try:
            for name in PROCESSOR_FILES:
                with suppress(FileNotFoundError):
                    files[name] = read_bytes(own_file(folder, name))
            opened = {path: open_regular(path) for path in {each.path for _, each in ordered}}
        except OSError as error:
            raise CheckpointError(
                f"{error.filename or folder}: {error.strerror}. Restore the file."
            ) from None
        return cls(names=found.names, tensors=dict(ordered), files=files, _opened=opened)

    def move_to(self, folder: Path) -> None:
        """From now on, read the same parts from `folder`, a checkpoint that was just written."""
        moved = CopiedParts.open(folder)
        assert moved is not None, "a checkpoint keeps the multimodal config.json"
        self.close()
        self.tensors, self._opened = moved.tensors, moved._opened

    def close(self) -> None:
        """Close the source files."""
        for file in self._opened.values():
            file.close()

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a tensor. Raises OSError if the file was truncated."""
        header = self.tensors[name]
        file, missing = self._opened[header.path], header.num_bytes()
        file.seek(header.start)
        while missing:
            chunk = file.read(min(missing, _CHUNK_BYTES))
            if not chunk:
                raise OSError(f"{header.path} ends before {name}")
            missing -= len(chunk)
            yield chunk
