"""Reads a stack's config with `pulumi config`."""

from __future__ import annotations

from typing import Any

from payload.core.errors import ConfigError
from payload.core.printable_text import shown
from payload.orchestrate.clouds.pulumi.cli_errors import NEWER
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.stack.stack_settings import CLUSTER_NAME, CLUSTER_NAME_FIX, DEFAULTS

_PROVIDERS_TOO = {"project": "", "region": DEFAULTS.region}
"""Settings that a provider's config can also set, each with its default."""


def settings(pulumi: Pulumi) -> dict[str, Any]:
    """Return the stack's config without namespaces; the project's keys override a provider's keys.

    Exception: if this project's setting `project` or `region` is empty or the default, the
    provider's value is used, if set. Raises PulumiError and ConfigError.
    """
    raw = pulumi.ask_json("config")
    if not isinstance(raw, dict):
        raise ConfigError(f"`pulumi config --json` printed {shown(raw)}, not an object. {NEWER}")
    known: dict[str, Any] = {}
    for key in sorted(raw, key=lambda key: not key.startswith("gcp:")):
        entry = raw[key] if isinstance(raw[key], dict) else {}
        value, name = entry.get("objectValue", entry.get("value")), key.rpartition(":")[2]
        # The cluster program does the same: infra/config_reading.py.
        if known.get(name) and value in ("", _PROVIDERS_TOO.get(name)):
            continue
        known[name] = value
    return known


def cluster_name(pulumi: Pulumi, known: dict[str, Any]) -> str:
    """Return the setting `cluster`, or the stack's name. Raises PulumiError and ConfigError."""
    name = known.get("cluster") or pulumi.ask("stack", "--show-name").strip().rpartition("/")[2]
    # The name becomes the name of a local folder, which holds the cluster's SSH key.
    if not isinstance(name, str) or not CLUSTER_NAME.fullmatch(name):
        raise ConfigError(f"cluster = {shown(name)}{CLUSTER_NAME_FIX}")
    return name
