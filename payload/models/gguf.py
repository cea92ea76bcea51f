"""GGUF files of every family: finds a file, reads its model and plans an export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.formats.hf_folder import CONFIG_FILE, own_file
from payload.models.family import Family
from payload.models.gguf_errors import FIX, refuse_import
from payload.models.gguf_header import SUFFIX, GgufHeader, read_header
from payload.models.gguf_plan import FileTensor, GgufPlan
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
    config = family.gguf_config(header, where=where)
    spec = family.read(config, where=where)
    _require_tensors(spec, family.plan_gguf(config, where=where), header, where=where)
    return spec


def gguf_config(header: GgufHeader, *, where: str) -> dict[str, Any]:
    """Return a config.json for the model with this header. Raises CheckpointError."""
    return _family_of(header, where=where).gguf_config(header, where=where)


def gguf_tensors(header: GgufHeader, *, where: str) -> list[FileTensor]:
    """Return how the tensors of the model with this header are stored. Raises CheckpointError."""
    family = _family_of(header, where=where)
    config = family.gguf_config(header, where=where)
    shapes = dict(family.read(config, where=where).tensor_shapes())
    return family.plan_gguf(config, where=where).tensors(shapes)


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


def _require_tensors(spec: ModelSpec, plan: GgufPlan, header: GgufHeader, *, where: str) -> None:
    expected = {each.name: each.shape for each in plan.tensors(dict(spec.tensor_shapes()))}
    expected |= {name: (len(factors),) for name, factors in plan.rope_factors.items()}
    for name, shape in expected.items():
        found = header.shapes.get(name)
        if found is None:
            raise CheckpointError(f"{where}: tensor {name} is missing. {FIX}")
        if found != shape:
            raise CheckpointError(
                f"{where}: {name} has the shape {list(found)}, but the metadata require "
                f"{list(shape)}. {FIX}"
            )
    extra = sorted(header.shapes.keys() - expected.keys() - header.rope_factors.keys())
    if extra:
        raise CheckpointError(f"{where}: unknown tensor {shown(extra[0])}. {FIX}")
