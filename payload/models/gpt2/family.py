"""GPT-2 as a model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from payload.models.family import Family
from payload.models.gguf_header import GgufHeader
from payload.models.gguf_plan import GgufPlan
from payload.models.gpt2 import gguf_export, gguf_import
from payload.models.gpt2.spec import PRESETS, Gpt2Spec, read


class Gpt2(Family):
    """GPT-2 and models with its layers: config.json of `model_type` gpt2."""

    model_types = ("gpt2",)
    tensors = "payload.train.families.gpt2.model"
    presets = PRESETS
    tokenizer = "gpt2"
    gguf_architectures = (gguf_export.ARCHITECTURE,)
    gguf_types = model_types

    def read(self, raw: Mapping[str, Any], *, where: str) -> Gpt2Spec:
        """Return the spec that a config.json describes. Raises CheckpointError."""
        return read(raw, where=where)

    def gguf_config(self, header: GgufHeader, *, where: str) -> dict[str, Any]:
        """Return the config.json of a GGUF file. Raises CheckpointError."""
        return gguf_import.gguf_config(header, where=where)

    def plan_gguf(self, raw: Mapping[str, Any], *, where: str) -> GgufPlan:
        """Return the contents of a GGUF file for this model. Raises CheckpointError."""
        return gguf_export.plan_gguf(read(raw, where=where), where=where)


FAMILY = Gpt2()
