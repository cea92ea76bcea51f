"""The model that `benchmarks.step` measures: a preset's name, or a Hugging Face folder."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from payload.core.errors import CheckpointError
from payload.models.adapter import ALL_LINEAR, AdaptedSpec
from payload.models.gpt2.spec import PRESETS
from payload.models.registry import read_spec
from payload.models.spec import ModelSpec


def model_spec(name: str) -> ModelSpec:
    """Return the spec of a preset or of a folder's config.json. Raises CheckpointError."""
    return PRESETS[name] if name in PRESETS else read_spec(Path(name))


def trained_spec(work: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of the model or adapter that a step with these settings trains."""
    spec = model_spec(work["model"]).with_sequence_length(work["sequence_length"])
    adapter = work.get("adapter")
    if adapter is None:
        return spec
    return AdaptedSpec.of(
        spec,
        rank=adapter["rank"],
        target=ALL_LINEAR,
        dropout=adapter["dropout"],
        is_quantized=work.get("quantize") == "nf4",
    )


def has_weights(name: str) -> bool:
    """Return whether the model is a folder with weights; otherwise they are random."""
    return name not in PRESETS and any(Path(name).glob("*.safetensors"))


def model_argument(name: str) -> str:
    """Return the preset's name or the folder's absolute path. Raises ArgumentTypeError."""
    try:
        model_spec(name)
    except CheckpointError as error:
        known = ", ".join(sorted(PRESETS))
        raise argparse.ArgumentTypeError(
            f"neither a preset ({known}) nor a model: {error}"
        ) from None
    return name if name in PRESETS else str(Path(name).resolve())
