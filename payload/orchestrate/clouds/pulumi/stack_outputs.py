"""Reads a stack's outputs, which describe the cluster that the stack built."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import payload
from payload.core.errors import (
    ConfigError,
)
from payload.core.printable_text import shown
from payload.core.regular_files import read_bytes
from payload.core.suggested_commands import command
from payload.core.validation.json_text import parse_json
from payload.machines.inventory import ClusterInventory
from payload.orchestrate.clouds.cluster_records import (
    MOST_USD,
    ClusterRecord,
    cluster_folder,
    keep_record,
    load_cluster_record,
)
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.endpoints import Endpoints
from payload.orchestrate.clouds.gcp.host_keys import CACHE_FILE, cached_inventory, pin_host_keys
from payload.orchestrate.clouds.pulumi.cli_errors import PulumiError
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.stack.cluster_files import cluster_path
from payload.stack.google_name_patterns import CLOUD_NAME

_PROJECT_FILES = tuple(
    f"Pulumi.{kind}{packed}" for kind in ("yaml", "yml", "json") for packed in ("", ".gz")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOutputs:
    """Outputs of the cluster program."""

    inventory: ClusterInventory
    """The cluster's inventory, without host keys; `project` is set."""
    project: str
    region: str
    hourly_usd: float | None
    expires: str | None
    """Expiry time: ISO 8601, UTC."""

    def price_and_end(self) -> str:
        """Return text such as `$1.59/h until 2026-11-21 20:00 UTC`."""
        price = "price unknown" if self.hourly_usd is None else f"${self.hourly_usd:.2f}/h"
        if self.expires is None:
            return price
        return f"{price} until {datetime.fromisoformat(self.expires):%Y-%m-%d %H:%M} UTC"


def read_outputs(pulumi: Pulumi) -> StackOutputs:
    """Return the stack's outputs. Raises PulumiError and ConfigError."""
    outputs = pulumi.ask_json("stack", "output")
    name = f"stack {pulumi.stack}" if pulumi.stack else "the selected stack"
    if not isinstance(outputs, dict) or "inventory" not in outputs:
        raise PulumiError(
            f"{name} has no output `inventory`, so it has no cluster. Build the cluster: "
            + command("orchestrate", "up"),
            "no stack",
        )
    raw = outputs["inventory"]
    where = f"{name}: output inventory"
    known = parse_json(raw, where=where) if isinstance(raw, str) else raw
    if isinstance(known, dict):
        known = {**known, "project": outputs.get("project")}
    return StackOutputs(
        inventory=ClusterInventory.from_json(json.dumps(known), where=where),
        project=_text(outputs, "project", name),
        region=_text(outputs, "region", name),
        hourly_usd=_number(outputs.get("hourly_usd"), name),
        expires=_time(outputs.get("expires"), name),
    )


def outputs_if_any(pulumi: Pulumi) -> StackOutputs | None:
    """Return the outputs, or None if the stack was never fully built.

    Raises PulumiError and ConfigError.
    """
    try:
        return read_outputs(pulumi)
    except PulumiError as error:
        if error.trouble != "no stack" or "has no output" not in str(error):
            raise
        return None


def default_stack(env: Mapping[str, str], *, folder: Path) -> StackOutputs | str:
    """Return the selected stack's outputs, or the reason why there is no stack.

    Raises ConfigError if a stack exists but its outputs cannot be read: training must not silently
    use another machine.
    """
    found = _project_files(folder)
    if not found:
        return "no Pulumi project here"
    if not _is_own_project(found):
        return (
            f"{found[0]} belongs to another project; to use a stack of that project: --inventory "
            "stack:NAME"
        )
    try:
        return read_outputs(Pulumi(env, folder=folder))
    except PulumiError as error:
        if error.is_fault:
            raise ConfigError(f"{error} (or use this machine: --inventory local)") from None
        if error.trouble == "no stack":
            return "no Pulumi stack is selected, or the selected stack has no cluster"
        return "Pulumi is " + error.trouble if error.trouble != "no project" else error.trouble


def _project_files(folder: Path) -> list[Path]:
    """Return the Pulumi project files of `folder`, or of the nearest parent that has any."""
    for each in (folder, *folder.parents):
        if found := [each / name for name in _PROJECT_FILES if (each / name).is_file()]:
            return found
    return []


def _is_own_project(found: Sequence[Path]) -> bool:
    """Return whether the file found is the cluster program's project file, or a copy of it.

    A project file can name a backend, and `pulumi` sends its token to this backend. So `pulumi`
    must not run in a folder with an unknown project file, such as a cloned repository, except on
    the user's request.
    """
    own = Path(payload.__file__).parents[1] / _PROJECT_FILES[0]
    if len(found) > 1 or not own.is_file():
        return False
    try:
        return found[0].samefile(own) or read_bytes(found[0]) == read_bytes(own)
    except OSError:
        return False


def load_stack(
    outputs: StackOutputs, env: Mapping[str, str], *, folder: Path, say: Callable[[str], None]
) -> ClusterInventory:
    """Return the stack's cluster with the host keys that its machines published.

    Raises CloudAuthError, RankLostError, BootstrapError, CloudError.
    """
    record_outputs(outputs, folder=folder)
    google = Google(outputs.project, endpoints=Endpoints.from_env(env))
    return pin_host_keys(
        outputs.inventory,
        google,
        cache=cluster_folder(folder, outputs.inventory.cluster) / CACHE_FILE,
        say=say,
    )


def record_outputs(outputs: StackOutputs, *, folder: Path, made_bucket: str | None = None) -> None:
    """Record the outputs and the new bucket, so that `sweep` works after the stack is gone."""
    before = load_cluster_record(folder, outputs.inventory.cluster)
    kept = before.bucket if before is not None and before.project == outputs.project else None
    known = ClusterRecord(
        cluster=outputs.inventory.cluster,
        bucket=made_bucket or kept,
        project=outputs.project,
        region=outputs.region,
        node_usd={node.name: node.hourly_usd for node in outputs.inventory.nodes},
    )
    keep_record(known, folder=folder)


def recorded_outputs(folder: Path, cluster: str, *, project: str) -> StackOutputs | None:
    """Return the outputs recorded when this folder last reached the cluster's nodes.

    The recorded outputs have no price and no expiry time. Return None if the nodes were never
    reached from this folder in this project.
    """
    known = load_cluster_record(folder, cluster)
    inventory = cached_inventory(cluster_path(folder, cluster, CACHE_FILE))
    if known is None or inventory is None:
        return None
    # The project's record is written again before the nodes in that project are reached.
    if {(inventory.cluster, each) for each in (known.project, inventory.project)} != {
        (cluster, project)
    }:
        return None
    return StackOutputs(
        inventory=inventory, project=project, region=known.region, hourly_usd=None, expires=None
    )


def _text(outputs: Mapping[str, Any], key: str, name: str) -> str:
    value = outputs.get(key)
    if not isinstance(value, str) or not CLOUD_NAME.fullmatch(value):
        raise ConfigError(
            f"{name}: output {key} = {shown(value)}: must be a name. Update the stack: pulumi up"
        )
    return value


def _number(value: Any, name: str) -> float | None:
    if value is None:
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MOST_USD:
        return value
    raise ConfigError(
        f"{name}: output hourly_usd = {shown(value)}: must be a number of dollars. Update the "
        "stack: pulumi up"
    )


def _time(value: Any, name: str) -> str | None:
    if value is None:
        return None
    try:
        return datetime.fromisoformat(value).astimezone(UTC).isoformat()
    except (OverflowError, TypeError, ValueError):
        raise ConfigError(
            f"{name}: output expires = {shown(value)}: must be a time in ISO 8601. Update the "
            "stack: pulumi up"
        ) from None
