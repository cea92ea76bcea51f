"""The model family of Qwen3.5's text models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from payload.models.family import Family
from payload.models.qwen3_5.config import MODEL_TYPE, read_config
from payload.models.qwen3_5.spec import read
from payload.models.spec import ModelSpec
from payload.models.transformers import spec as others


class Qwen35(Family):
    """Qwen3.5's dense text models. transformers' layers compute the mixtures of experts."""

    model_types = (MODEL_TYPE,)
    tensors = "payload.train.families.qwen3_5.model"

    def read(self, raw: Mapping[str, Any], *, where: str) -> ModelSpec:
        """Return the spec that a config.json describes. Raises CheckpointError."""
        if _is_other(raw, where):
            return others.read(raw, where=where)
        return read(raw, where=where)

    def read_folder(self, raw: Mapping[str, Any], *, folder: Path, where: str) -> ModelSpec:
        """Return the spec of the model in `folder`. Raises CheckpointError."""
        if _is_other(raw, where):
            return others.read_folder(raw, folder=folder, where=where)
        return read(raw, where=where)


def _is_other(raw: Mapping[str, Any], where: str) -> bool:
    """Return whether transformers' layers compute this model. Raises CheckpointError."""
    return bool(read_config(raw, where=where).unsupported(where=where))


FAMILY = Qwen35()
