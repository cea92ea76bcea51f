"""The model family of all other language models that transformers builds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from payload.models.family import Family
from payload.models.transformers.spec import OtherSpec, has_known_sizes, read, read_folder


class Transformers(Family):
    """Reads models that no other family reads, by the field names of transformers' configs."""

    tensors = "payload.train.families.transformers.model"

    def reads_unknown_type(self, raw: Mapping[str, Any]) -> bool:
        """Return whether `raw` looks like a config of transformers; `read` may still reject it."""
        return has_known_sizes(raw)

    def read(self, raw: Mapping[str, Any], *, where: str) -> OtherSpec:
        """Return the spec that a config.json describes. Raises CheckpointError."""
        return read(raw, where=where)

    def read_folder(self, raw: Mapping[str, Any], *, folder: Path, where: str) -> OtherSpec:
        """Return the spec, counted if the folder has weights. Raises CheckpointError."""
        return read_folder(raw, folder=folder, where=where)


FAMILY = Transformers()
