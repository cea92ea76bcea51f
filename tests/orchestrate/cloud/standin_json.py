"""Converts requests to the JSON that Google's services store and return by GET."""

from __future__ import annotations

from typing import Any

# Google's JSON has integers of 64 bits as text (type string, format int64 or uint64 in the
# discovery documents); an integer of 32 bits is a number. No name is in both groups.
INT64 = frozenset(
    {
        *("archiveSizeBytes", "capacityGb", "defaultDiskSizeGb", "diskSizeGb", "downloadBytes"),
        *("generation", "high", "id", "low", "maximumPersistentDisksSizeGb", "metageneration"),
        *("physicalBlockSizeBytes", "projectNumber", "provisionedIops", "provisionedThroughput"),
        *("seconds", "size", "sizeGb", "storageBytes", "targetId", "uniqueId"),
    }
)
# Used only at creation; no GET returns them.
_INPUT_ONLY = frozenset({"params"})


def as_google(document: dict[str, Any]) -> dict[str, Any]:
    """Return the stored form: 64-bit integers as text, without nulls and input-only fields."""
    return {
        key: str(value) if key in INT64 and isinstance(value, int) else _stored(value)
        for key, value in document.items()
        if value is not None and key not in _INPUT_ONLY
    }


def _stored(value: Any) -> Any:
    if isinstance(value, dict):
        return as_google(value)
    if isinstance(value, list):
        return [_stored(each) for each in value if each is not None]
    return value
