"""JSON Schemas of run.toml and of inventory files, made from the fields that read these files.

The schemas use only keywords that drafts 6 to 2020-12 share, because editors validate TOML by old
drafts.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from payload.config.setting_reference import (
    SectionReference,
    Setting,
    field_docstrings,
    sections,
    sentence,
)
from payload.config.settings import MAX_INTEGER
from payload.core.printable_text import PLAIN_TEXT
from payload.core.validation.fields import MAX_TEXT_CHARS
from payload.core.validation.readers import DeclaredField, fields_of, members_of
from payload.machines.inventory import SCHEMA_VERSION, ClusterInventory

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_ONE_LINE = r"^[^\u0000-\u0008\u000a-\u001f\u007f-\u009f]*$"
"""Matches text without control characters. It allows some rare characters that a run refuses."""
_LIMITS = {"low": "minimum", "above": "exclusiveMinimum", "high": "maximum"}
SCHEMAS = ("run", "inventory")
"""Names of the files that have a schema."""

_FILES = Path(__file__).parents[1] / "configs"

Schema = dict[str, Any]


def schema_file(name: str) -> Path:
    """Return the packaged file with a schema; `make docs` writes it."""
    return _FILES / f"{name}.schema.json"


def schema_line() -> str:
    """Return a comment that is the first line of a run.toml in any folder of this machine.

    Editors find the schema by this comment. Returns "" if the schema's path cannot be written in a
    comment.
    """
    path = str(schema_file("run"))
    return f"#:schema {path}\n" if PLAIN_TEXT.fullmatch(path) else ""


def schema_text(name: str) -> str:
    """Return the schema of one kind of file, as the text of a JSON file."""
    made = run_schema() if name == "run" else inventory_schema()
    return json.dumps(made, indent=2, ensure_ascii=False) + "\n"


def run_schema() -> Schema:
    """Return the schema of run.toml; unknown sections and keys are errors."""
    return {
        "$schema": _DRAFT,
        "title": "Settings of a Tileforge run",
        "description": "The file run.toml. Every setting has a default.",
        **_object(
            {
                name: {
                    "title": f"[{name}]",
                    "description": _described(section),
                    **_object({each.key: _of_setting(each) for each in section.settings}),
                }
                for name, section in sections().items()
            }
        ),
    }


def _described(section: SectionReference) -> str:
    about = f"{sentence(section.meaning)} " if section.meaning else ""
    return f"{about}See {section.page}."


def _of_setting(setting: Setting) -> Schema:
    unit = setting.unit
    default = "none" if setting.default is None else setting.default
    found: Schema = {
        "title": setting.name,
        "description": f"{setting.meaning} Unit: {unit}." if unit else setting.meaning,
        "default": list(default) if isinstance(default, tuple) else default,
    }
    if unit:
        found["x-unit"] = unit
    kind, words = setting.plain_kind(), setting.words()
    if kind is None:
        return {**found, "enum": words}
    plain = _of_value(kind, setting.limits, one_line=True)
    if kind is tuple:
        # A text lists its items between commas.
        texts = _of_value(str, {}, one_line=True)
        return {**found, "anyOf": [{"type": "array", "items": texts}, texts]}
    if kind is int and setting.limits.get("high") is None:
        plain["maximum"] = MAX_INTEGER
    if words and kind is not str:
        return {**found, "anyOf": [plain, {"enum": words}]}
    return {**found, **plain}


def inventory_schema() -> Schema:
    """Return the schema of an inventory file."""
    return {
        "$schema": _DRAFT,
        "title": "Inventory",
        "description": "The machines of a cluster, for --inventory FILE.",
        **_inventory(),
    }


def _inventory() -> Schema:
    found = _record(ClusterInventory)
    # The default of schema_version is for the program alone: a file without a version is refused.
    found["properties"]["schema_version"] = {"title": "schema_version", "enum": [SCHEMA_VERSION]}
    found["required"].append("schema_version")
    return found


def _record(cls: Any) -> Schema:
    """Return the schema of a dataclass that is a JSON object."""
    described, known = field_docstrings(cls), fields_of(cls)
    return {
        **_object(
            {key: _of_field(each, described.get(each.name, "")) for key, each in known.items()}
        ),
        "required": [key for key, each in known.items() if each.is_required],
    }


def _of_field(each: DeclaredField, described: str) -> Schema:
    found: Schema = {"title": each.name}
    if described:
        found["description"] = described.replace("None", "null")
    if each.default is not dataclasses.MISSING:
        found["default"] = each.default
    members = members_of(each.hint)
    kinds = [kind for kind in members if kind is not types.NoneType]
    (value,) = (_of_type(kind, each.limits) for kind in kinds)
    if len(kinds) < len(members):
        return {**found, "anyOf": [value, {"type": "null"}]}
    return {**found, **value}


def _of_type(kind: Any, limits: Mapping[str, Any]) -> Schema:
    if typing.get_origin(kind) is typing.Literal:
        return {"enum": list(typing.get_args(kind))}
    if typing.get_origin(kind) is tuple:
        items = _of_type(typing.get_args(kind)[0], limits)
        most = limits.get("max_items")
        return {"type": "array", "items": items, **({} if most is None else {"maxItems": most})}
    if dataclasses.is_dataclass(kind):
        return _record(kind)
    return _of_value(kind, limits, one_line=False)


def _of_value(kind: Any, limits: Mapping[str, Any], *, one_line: bool) -> Schema:
    """Return the schema of a text, a number or a boolean within its limits."""
    if kind is bool:
        return {"type": "boolean"}
    if kind is str:
        pattern: re.Pattern[str] | None = limits.get("pattern")
        if pattern is not None:
            return {"type": "string", "pattern": f"^(?:{pattern.pattern})$"}
        found: Schema = {"type": "string", "maxLength": limits.get("max_chars", MAX_TEXT_CHARS)}
        return {**found, "pattern": _ONE_LINE} if one_line else found
    bounds = {word: limits[key] for key, word in _LIMITS.items() if limits.get(key) is not None}
    return {"type": "integer" if kind is int else "number", **bounds}


def _object(properties: Mapping[str, Schema]) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": dict(properties)}
