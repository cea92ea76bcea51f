"""A stack's config, as `pulumi config --json` has it."""

from __future__ import annotations

import json
from typing import Any

from payload.errors import ConfigError
from payload.orchestrate.cloud.pulumi_cli import Pulumi


def settings(pulumi: Pulumi) -> dict[str, Any]:
    """The stack's config by the keys' last part; the project's own keys before a provider's.

    Raises PulumiError and ConfigError.
    """
    raw = pulumi.ask_json("config")
    if not isinstance(raw, dict):
        raise ConfigError(f"`pulumi config --json` printed {raw!r}; an object is needed.")
    known: dict[str, Any] = {}
    for key in sorted(raw, key=lambda key: not key.startswith("gcp:")):
        entry = raw[key] if isinstance(raw[key], dict) else {}
        known[key.rpartition(":")[2]] = entry.get("objectValue", entry.get("value"))
    return known


def cluster_name(pulumi: Pulumi, known: dict[str, Any]) -> str:
    """The cluster that the config means: its key, or the stack's name. Raises PulumiError."""
    name = known.get("cluster")
    if isinstance(name, str) and name:
        return name
    return pulumi.ask("stack", "--show-name").strip().rpartition("/")[2]


def text_list(value: Any) -> list[str]:
    """A list from a config value, which may be JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            value = [value] if value else []
    return [str(each) for each in value] if isinstance(value, list) else []
