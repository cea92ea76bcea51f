"""GPT-2 as a model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from payload.models.family import Family
from payload.models.gguf_plan import GgufPlan
from payload.models.gpt2 import gguf_export
from payload.models.gpt2.spec import PRESETS, Gpt2Spec, read


class Gpt2(Family):
    """GPT-2 and models with its layers: config.json of `model_type` gpt2."""

    model_types = ("gpt2",)
    tensors = "payload.train.families.gpt2.model"
    presets = PRESETS
    tokenizer = "gpt2"
    gguf_types = model_types

    def read(self, raw: Mapping[str, Any], *, where: str) -> Gpt2Spec:
        """Return the spec that a config.json describes. Raises CheckpointError."""
        return read(raw, where=where)

    def plan_gguf(self, raw: Mapping[str, Any], *, where: str) -> GgufPlan:
        """Return the contents of a GGUF file for this model. Raises CheckpointError."""
        return gguf_export.plan_gguf(read(raw, where=where), where=where)


FAMILY = Gpt2()
