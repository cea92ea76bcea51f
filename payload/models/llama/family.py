"""The model family of Llama and models with its layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from payload.models.family import Family
from payload.models.gguf_header import GgufHeader
from payload.models.gguf_plan import GgufPlan
from payload.models.llama import gguf_export, gguf_import
from payload.models.llama.config import is_dense_hybrid
from payload.models.llama.gguf_names import ARCHITECTURES
from payload.models.llama.hub_sizes import CONFIGS
from payload.models.llama.spec import MODEL_TYPES, DecoderSpec, read
from payload.models.spec import ModelSpec
from payload.models.transformers import spec as others


class Llama(Family):
    """Llama, SmolLM, Qwen, Mistral, Gemma 3, Phi, OLMo and Granite."""

    model_types = MODEL_TYPES
    tensors = "payload.train.families.llama.model"
    hub_configs = CONFIGS
    gguf_architectures = tuple(dict.fromkeys(ARCHITECTURES.values()))
    gguf_types = tuple(ARCHITECTURES)

    def reads_unknown_type(self, raw: Mapping[str, Any]) -> bool:
        """Return whether this is a Granite 4 that has the layers of a Granite 3."""
        return is_dense_hybrid(raw)

    def read(self, raw: Mapping[str, Any], *, where: str) -> ModelSpec:
        """Return the spec that a config.json describes. Raises CheckpointError."""
        spec = read(raw, where=where)
        # Such a mixture has other tensors than ours, so transformers' family counts them.
        return others.read(raw, where=where) if _is_other_mixture(spec) else spec

    def read_folder(self, raw: Mapping[str, Any], *, folder: Path, where: str) -> ModelSpec:
        """Return the spec of the model in `folder`. Raises CheckpointError."""
        spec = read(raw, where=where)
        is_other = _is_other_mixture(spec)
        return others.read_folder(raw, folder=folder, where=where) if is_other else spec

    def gguf_config(self, header: GgufHeader, *, where: str) -> dict[str, Any]:
        """Return the config.json of a GGUF file. Raises CheckpointError."""
        return gguf_import.gguf_config(header, where=where)

    def plan_gguf(self, raw: Mapping[str, Any], *, where: str) -> GgufPlan:
        """Return the contents of a GGUF file for this model. Raises CheckpointError."""
        return gguf_export.plan_gguf(raw, where=where)


def _is_other_mixture(spec: DecoderSpec) -> bool:
    return spec.mixture is not None and bool(spec.unsupported_features)


FAMILY = Llama()
