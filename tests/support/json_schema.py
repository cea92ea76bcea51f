"""A validator of the JSON Schema keywords that the project's schemas use.

The package jsonschema is in no extra of the lock. An unknown keyword is an error, so that none is
ignored.
"""

from __future__ import annotations

import re
from typing import Any

_ANNOTATIONS = {"$schema", "title", "description", "default", "x-unit"}
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "number": (int, float),
    "integer": (int,),
}


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    """Return whether a JSON value is valid. Raises KeyError for an unknown keyword."""
    return all(
        _CHECKS[keyword](schema, wanted, value)
        for keyword, wanted in schema.items()
        if keyword not in _ANNOTATIONS
    )


def _is_type(schema: dict[str, Any], wanted: str, value: Any) -> bool:
    if isinstance(value, bool):
        return wanted == "boolean"
    # In JSON Schema a whole float is an integer; TOML and run.toml keep them apart.
    is_whole = wanted == "integer" and isinstance(value, float) and value.is_integer()
    return is_whole or isinstance(value, _TYPES[wanted])


def _has_no_other_keys(schema: dict[str, Any], wanted: bool, value: Any) -> bool:
    assert wanted is False
    return not isinstance(value, dict) or set(value) <= set(schema["properties"])


def _has_properties(schema: dict[str, Any], wanted: dict[str, Any], value: Any) -> bool:
    if not isinstance(value, dict):
        return True
    return all(is_valid(wanted[key], each) for key, each in value.items() if key in wanted)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _equals(left: Any, right: Any) -> bool:
    return left == right and isinstance(left, bool) == isinstance(right, bool)


_CHECKS: dict[str, Any] = {
    "type": _is_type,
    "properties": _has_properties,
    "additionalProperties": _has_no_other_keys,
    "required": lambda _, wanted, value: not isinstance(value, dict) or set(wanted) <= set(value),
    "anyOf": lambda _, wanted, value: any(is_valid(each, value) for each in wanted),
    "enum": lambda _, wanted, value: any(_equals(each, value) for each in wanted),
    "minimum": lambda _, wanted, value: not _is_number(value) or value >= wanted,
    "exclusiveMinimum": lambda _, wanted, value: not _is_number(value) or value > wanted,
    "maximum": lambda _, wanted, value: not _is_number(value) or value <= wanted,
    "maxLength": lambda _, wanted, value: not isinstance(value, str) or len(value) <= wanted,
    "maxItems": lambda _, wanted, value: not isinstance(value, list) or len(value) <= wanted,
    "pattern": lambda _, wanted, value: not isinstance(value, str) or re.search(wanted, value),
    "items": lambda _, wanted, value: (
        not isinstance(value, list) or all(is_valid(wanted, each) for each in value)
    ),
}
