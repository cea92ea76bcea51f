"""Finds a model's family by the `model_type` of its config.json.

A family is a file in this package with `MODEL_TYPES`, the names that it reads, and
`read(raw, where=...)`, which returns the ModelSpec or raises CheckpointError. `"*"` in MODEL_TYPES
takes every name that no other family has. A family that needs more than the config also has
`read_folder(raw, folder=..., where=...)`, which may read the headers of the weights. A family may
have PRESETS: specs by name, for models from scratch and for the hub's names. There is no list to
edit.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import payload.models as package
from payload.core.errors import CheckpointError
from payload.core.validation import shown
from payload.formats.hf_folder import CONFIG_FILE, FIX, read_config
from payload.models.llama.hub_sizes import CONFIGS
from payload.models.spec import ModelSpec

ANY = "*"


class Family(Protocol):
    """The members of a family's file."""

    MODEL_TYPES: tuple[str, ...]

    def read(self, raw: Mapping[str, object], *, where: str) -> ModelSpec:
        """Build the spec from the content of a config.json. Raises CheckpointError."""


def families() -> list[Family]:
    """Import the package's files and return those that are families, by name."""
    names = sorted(each.name for each in pkgutil.iter_modules(package.__path__) if each.ispkg)
    modules = [importlib.import_module(f"{package.__name__}.{name}.spec") for name in names]
    return [cast(Family, module) for module in modules if hasattr(module, "MODEL_TYPES")]


def spec_of(raw: Mapping[str, object], *, where: str) -> ModelSpec:
    """Build the spec from the content of a config.json; `where` names it in messages.

    Raises CheckpointError for a family that is not known, and for what the family refuses.
    """
    return _family(raw, where=where).read(raw, where=where)


def read_spec(folder: Path) -> ModelSpec:
    """Build the spec of the model in `folder`. Raises CheckpointError."""
    raw, where = read_config(folder), str(folder / CONFIG_FILE)
    family = _family(raw, where=where)
    count = getattr(family, "read_folder", None)
    if count is not None:
        return cast(ModelSpec, count(raw, folder=folder, where=where))
    return family.read(raw, where=where)


def _family(raw: Mapping[str, object], *, where: str) -> Family:
    if raw.get("quantization_config") is not None:
        raise CheckpointError(
            f"{where}: quantization_config: quantised weights cannot be trained. Name the model's "
            "folder in bf16 or fp32."
        )
    if raw.get("is_causal", True) is not True:
        # transformers takes null for false, too: a token would see those that it has to predict.
        raise CheckpointError(
            f"{where}: is_causal = {shown(raw['is_causal'])}: the model attends to both sides of a "
            "token, so it is no language model. Name another one."
        )
    kind, known = raw.get("model_type"), families()
    for wanted in (kind, ANY):
        for family in known:
            if wanted in family.MODEL_TYPES:
                return family
    names = " or ".join(repr(name) for family in known for name in family.MODEL_TYPES)
    raise CheckpointError(
        f"{where}: model_type is {shown(kind)}; only {names} can be loaded. {FIX}"
    )


def presets() -> dict[str, ModelSpec]:
    """Return every family's named models."""
    found: dict[str, ModelSpec] = {}
    for family in families():
        found |= getattr(family, "PRESETS", {})
    return found


def from_scratch(preset: str, **changes: object) -> ModelSpec:
    """Return a preset's spec with `changes`, those that are None left out."""
    wanted: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
    return replace(presets()[preset], **wanted)


def preset_of_hub_name(name: str) -> ModelSpec | None:
    """Return the spec of a model on the hub, `NAME` or `OWNER/NAME`, where its sizes are here."""
    last = name.partition("@")[0].rpartition("/")[2]
    raw = CONFIGS.get(last)
    return presets().get(last) if raw is None else spec_of(raw, where=name)
