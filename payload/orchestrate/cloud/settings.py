"""A stack's config, as `pulumi config --json` has it."""

from __future__ import annotations

from typing import Any

from payload.errors import ConfigError
from payload.orchestrate.cloud.pulumi_cli import NEWER, Pulumi
from payload.untrusted import NODE_NAME, parse_json, shown


def settings(pulumi: Pulumi) -> dict[str, Any]:
    """The stack's config by the keys' last part; the project's own keys before a provider's.

    Raises PulumiError and ConfigError.
    """
    raw = pulumi.ask_json("config")
    if not isinstance(raw, dict):
        raise ConfigError(f"`pulumi config --json` printed {shown(raw)}, not an object. {NEWER}")
    known: dict[str, Any] = {}
    for key in sorted(raw, key=lambda key: not key.startswith("gcp:")):
        entry = raw[key] if isinstance(raw[key], dict) else {}
        known[key.rpartition(":")[2]] = entry.get("objectValue", entry.get("value"))
    return known


def cluster_name(pulumi: Pulumi, known: dict[str, Any]) -> str:
    """The cluster that the config means: its key, or the stack's name. Raises PulumiError."""
    name = known.get("cluster") or pulumi.ask("stack", "--show-name").strip().rpartition("/")[2]
    # It names a folder here, with the key that opens the cluster.
    if not isinstance(name, str) or not NODE_NAME.fullmatch(name):
        raise ConfigError(
            f"cluster = {shown(name)}: must be a name of letters, digits and hyphens. "
            "pulumi config set cluster NAME"
        )
    return name


def text_list(value: Any) -> list[str]:
    """A list from a config value, which may be JSON text."""
    if isinstance(value, str):
        try:
            value = parse_json(value, where="a list")
        except ConfigError:
            value = [value] if value else []
    return [str(each) for each in value] if isinstance(value, list) else []
