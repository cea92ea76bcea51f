"""GGUF files of every family: finds a file, reads its model and plans an export."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.formats.hf_folder import CONFIG_FILE, own_file
from payload.models.family import Family
from payload.models.gguf_errors import FIX, refuse_import
from payload.models.gguf_export_plan import GgufPlan
from payload.models.gguf_header import SUFFIX, GgufHeader, read_header
from payload.models.registry import families
from payload.models.spec import ModelSpec


def gguf_file(source: Path) -> Path | None:
    """Return the GGUF file at or in `source`, or None for a folder without a GGUF file.

    Raises CheckpointError for a folder with several GGUF files, or if the file is a link that leads
    outside the folder.
    """
    if source.is_file():
        return source if source.suffix == SUFFIX else None
    if (source / CONFIG_FILE).exists():
        return None
    found = sorted(source.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:3])
        raise CheckpointError(
            f"{source}: the folder has {len(found)} GGUF files ({names}). Use the path of one of "
            "these files."
        )
    return own_file(source, found[0].name) if found else None


def read_gguf(path: Path) -> ModelSpec:
    """Return the spec of the model in a GGUF file.

    Raises CheckpointError for a damaged file, a missing tensor, or a family that cannot be read
    from GGUF.
    """
    header, where = read_header(path), str(path)
    family = _family_of(header, where=where)
    spec = family.read(family.gguf_config(header, where=where), where=where)
    _require_tensors(spec, header, family, where=where)
    return spec


def gguf_config(header: GgufHeader, *, where: str) -> dict[str, Any]:
    """Return a config.json for the model with this header. Raises CheckpointError."""
    return _family_of(header, where=where).gguf_config(header, where=where)


def plan_gguf(raw: Mapping[str, Any], *, folder: Path) -> GgufPlan:
    """Return a GGUF file's contents for this config.json. Raises CheckpointError if unsupported."""
    where, kind = str(folder / CONFIG_FILE), raw.get("model_type")
    for family in families():
        if kind in family.gguf_types and (
            kind in family.model_types or family.reads_unknown_type(raw)
        ):
            return family.plan_gguf(raw, where=where)
    known = ", ".join(sorted(name for family in families() for name in family.gguf_types))
    raise CheckpointError(
        f"{where}: model_type = {shown(kind)} cannot be exported to GGUF. Use a model of one "
        f"of these types: {known}; or use llama.cpp's own converter."
    )


def _family_of(header: GgufHeader, *, where: str) -> Family:
    """Return the family of a header's architecture. Raises CheckpointError."""
    kind = header.values.get("general.architecture")
    for family in families():
        if isinstance(kind, str) and kind in family.gguf_architectures:
            return family
    known = ", ".join(name for family in families() for name in family.gguf_architectures)
    refuse_import(where, "general.architecture", kind, f"only {known} can be read")


def _require_tensors(spec: ModelSpec, header: GgufHeader, family: Family, *, where: str) -> None:
    for name, shape in spec.tensor_shapes():
        theirs = family.gguf_name(name)
        found = header.shapes.get(theirs)
        if found is None:
            raise CheckpointError(f"{where}: tensor {theirs} is missing. {FIX}")
        if found != shape:
            raise CheckpointError(
                f"{where}: {theirs} has the shape {list(found)}, but the metadata require "
                f"{list(shape)}. {FIX}"
            )
    known, held = spec.num_params(), sum(math.prod(each) for each in header.shapes.values())
    if known != held:
        expected = {family.gguf_name(name) for name, _ in spec.tensor_shapes()}
        extra = sorted(set(header.shapes) - expected)
        raise CheckpointError(f"{where}: unknown tensor {shown(extra[0])}. {FIX}")
