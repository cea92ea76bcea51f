"""The model families, and the lookup of the family for a config.json."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.formats.hf_folder import CONFIG_FILE, FIX, read_config
from payload.formats.quantized.weight_headers import (
    read_format,
    weight_headers,
    without_quantization,
)
from payload.formats.tensor_headers import TensorHeader
from payload.models.family import Family
from payload.models.multimodal_config import Whole, find_whole
from payload.models.multimodal_tensors import split_tensors, with_tensors
from payload.models.spec import ModelSpec
from payload.models.unread_features import require_read_features

FAMILIES: Mapping[str, str] = {
    "gemma4": "payload.models.gemma4.family",
    "gpt2": "payload.models.gpt2.family",
    "llama": "payload.models.llama.family",
    "qwen3_5": "payload.models.qwen3_5.family",
    "transformers": "payload.models.transformers.family",
}
"""The module of each family. The module defines `FAMILY`. To add a family, add one line."""
_OTHERS = "transformers"


def families() -> list[Family]:
    """Return every family."""
    return [importlib.import_module(module).FAMILY for module in FAMILIES.values()]


def named_family(model_type: object) -> Family | None:
    """Return the family that declares this `model_type` of config.json, or None."""
    return next((each for each in families() if model_type in each.model_types), None)


def family_of_spec(spec: ModelSpec) -> Family:
    """Return the family of the model that a spec describes.

    Raises CheckpointError for an unknown family.
    """
    raw = {**spec.config_read(), "model_type": spec.model_type}
    return family_of(raw, where=CONFIG_FILE)


def family_name(spec: ModelSpec) -> str:
    """Return the name in `FAMILIES` of the model's family."""
    raw = {**spec.config_read(), "model_type": spec.model_type}
    own = named_family(spec.model_type) or _family_of_unknown_type(raw)
    named = zip(FAMILIES, families(), strict=True)
    return next((name for name, family in named if family is own), _OTHERS)


def family_of(raw: Mapping[str, Any], *, where: str) -> Family:
    """Return the family that reads a config.json; `where` names the file in messages.

    If no family reads it, raises CheckpointError with the list of families.
    """
    kind = raw.get("model_type")
    family = named_family(kind) or _family_of_unknown_type(raw)
    if family is None:
        raise CheckpointError(
            f"{where}: model_type = {shown(kind)}: not supported; the families are "
            f"{', '.join(FAMILIES)}. {FIX}"
        )
    return family


def _family_of_unknown_type(raw: Mapping[str, Any]) -> Family | None:
    return next((each for each in families() if each.reads_unknown_type(raw)), None)


def spec_of(raw: Mapping[str, Any], *, where: str) -> ModelSpec:
    """Return the spec that a config.json describes; `where` names the file in messages.

    Raises CheckpointError for an unknown family, and for models that the family rejects.
    """
    _require_language_model(raw, where=where)
    raw = without_quantization(raw)
    whole = find_whole(raw, where=where)
    if whole is not None:
        return _text_spec(whole, where=where)
    return family_of(raw, where=where).read(raw, where=where)


def read_spec(folder: Path) -> ModelSpec:
    """Return the spec of the model in `folder`, or of the text model in a multimodal model.

    Raises CheckpointError.
    """
    raw, where = read_config(folder), str(folder / CONFIG_FILE)
    _require_language_model(raw, where=where)
    raw = without_quantization(raw)
    whole = find_whole(raw, where=where)
    if whole is None:
        return family_of(raw, where=where).read_folder(raw, folder=folder, where=where)
    if not any(folder.glob("*.safetensors*")):
        return _text_spec(whole, where=where)
    spec = _text_spec(whole, where=where)
    return with_file_tensors(spec, weight_headers(folder), where=str(folder))


def with_file_tensors(
    spec: ModelSpec, headers: Mapping[str, TensorHeader], *, where: str
) -> ModelSpec:
    """Return the spec with the parameters counted from all tensors of the model's files.

    Raises CheckpointError, naming `where`, for a multimodal model without a known text model.
    """
    if spec.whole is not None:
        tensors = split_tensors(headers, where=where)
        spec = _text_spec(with_tensors(spec.whole, tensors), where=where)
        headers = tensors.text
    if spec.is_counted():
        return spec
    return spec.with_tensors(
        {name: each.shape for name, each in headers.items() if each.is_weight()}
    )


def _text_spec(whole: Whole, *, where: str) -> ModelSpec:
    raw, where = whole.text_config(), f"{where}: text_config"
    require_read_features(raw, where=where)
    spec = family_of(raw, where=where).read(raw, where=where)
    return replace(spec, whole=whole)


def _require_language_model(raw: Mapping[str, Any], *, where: str) -> None:
    """Raise CheckpointError if a key that all families share shows that training is impossible."""
    read_format(raw, where=where)
    require_read_features(raw, where=where)
    if raw.get("transformers_weights") is not None:
        raise CheckpointError(
            f"{where}: transformers_weights = {shown(raw['transformers_weights'])}: transformers "
            "would load this file instead of model.safetensors. Remove the key, or rename the file "
            "to model.safetensors."
        )
    if raw.get("is_causal", True) is not True:
        # transformers also treats null as false: a token would attend to the tokens to predict.
        raise CheckpointError(
            f"{where}: is_causal = {shown(raw['is_causal'])}: the model attends to later tokens, "
            "so it is not a language model. Use another model."
        )


def presets() -> dict[str, ModelSpec]:
    """Return the specs that `model.preset` can select, of all families, by name."""
    return {name: spec for family in families() for name, spec in family.presets.items()}


def from_scratch(preset: str, **changes: object) -> ModelSpec:
    """Return a preset's spec with `changes`; None values are ignored."""
    given: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
    return replace(presets()[preset], **given)


def layers_to_measure() -> ModelSpec:
    """Return the spec of the two layers that are measured to predict times.

    The layers have the default preset's width.

    The head is small, because its matmul would hide the layers.
    """
    return from_scratch("gpt2", n_layer=2, vocab_size=256, sequence_length=512)


def narrow_layers_to_measure(n_layer: int) -> ModelSpec:
    """Return the spec of layers that have almost nothing to compute for a few tokens."""
    return from_scratch(
        "gpt2", n_layer=n_layer, n_embd=64, n_head=1, vocab_size=256, sequence_length=512
    )


def preset_of_hub_name(name: str) -> ModelSpec | None:
    """Return the spec of hub model `NAME` or `OWNER/NAME`; None if its sizes are not packaged."""
    last = name.partition("@")[0].rpartition("/")[2]
    for family in families():
        if last in family.hub_configs:
            return family.read(family.hub_configs[last], where=name)
    return presets().get(last)
