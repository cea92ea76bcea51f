"""A cluster from a Pulumi stack's outputs, and what is remembered of it once they are gone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from payload.errors import ConfigError, TileforgeError
from payload.hints import command
from payload.inventory import ClusterInventory
from payload.orchestrate.cloud.endpoints import Endpoints
from payload.orchestrate.cloud.need import Need
from payload.orchestrate.cloud.pulumi_cli import Pulumi, PulumiError
from payload.orchestrate.cloud.resources import CLOUD_NAME
from payload.results import write_whole
from payload.untrusted import NODE_NAME, build, check_schema, checked, parse_json, read_bytes, shown

_MEMORY_VERSION = 1
_MOST_USD = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOutputs:
    """What the cluster program exports."""

    inventory: ClusterInventory
    """Without host keys; `project` is filled in."""
    project: str
    region: str
    hourly_usd: float | None
    expires: str | None
    """ISO 8601, UTC."""

    def price_and_end(self) -> str:
        """`$1.59/h until 2026-11-21 20:00 UTC`."""
        price = "price unknown" if self.hourly_usd is None else f"${self.hourly_usd:.2f}/h"
        if self.expires is None:
            return price
        return f"{price} until {datetime.fromisoformat(self.expires):%Y-%m-%d %H:%M} UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """What is known of a cluster after `pulumi destroy`, which takes the outputs with it."""

    cluster: str = checked(pattern=NODE_NAME)
    project: str = checked(pattern=CLOUD_NAME)
    region: str = checked(pattern=CLOUD_NAME)
    node_usd: Mapping[str, float | None] = checked(low=0, high=_MOST_USD)
    """Dollars per hour by node; of nothing while it has only been planned."""

    @property
    def came_up(self) -> bool:
        """Whether the cluster has been seen up, and not only planned."""
        return bool(self.node_usd)


def read_outputs(pulumi: Pulumi) -> StackOutputs:
    """The stack's outputs. Raises PulumiError and ConfigError."""
    outputs = pulumi.ask_json("stack", "output")
    name = f"stack {pulumi.stack}" if pulumi.stack else "the selected stack"
    if not isinstance(outputs, dict) or "inventory" not in outputs:
        raise PulumiError(
            f"{name} has no output `inventory`: nothing is up. Build the cluster: "
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
    """The same; None of a stack that never came up whole. Raises PulumiError and ConfigError."""
    try:
        return read_outputs(pulumi)
    except PulumiError as error:
        if error.trouble != "no stack" or "has no output" not in str(error):
            raise
        return None


def default_stack(env: Mapping[str, str], *, folder: Path) -> StackOutputs | str:
    """The selected stack's outputs, or why there is none to be had.

    A stack whose outputs cannot be used is an error and no reason to train elsewhere. Raises
    ConfigError.
    """
    if not any((each / "Pulumi.yaml").is_file() for each in (folder, *folder.parents)):
        return "no Pulumi project here"
    try:
        return read_outputs(Pulumi(env, folder=folder))
    except PulumiError as error:
        if error.trouble == "other":
            raise ConfigError(f"{error} (or name the cluster: --inventory local)") from None
        if error.trouble == "no stack":
            return "no Pulumi stack is selected, or nothing is up in it"
        return "Pulumi is " + error.trouble if error.trouble != "no project" else error.trouble


def load_stack(
    outputs: StackOutputs, env: Mapping[str, str], *, folder: Path, say: Callable[[str], None]
) -> ClusterInventory:
    """The stack's cluster with host keys that its machines have published.

    Raises CloudAuthError, RankLostError, BootstrapError, CloudError.
    """
    from payload.orchestrate.cloud.google import Google
    from payload.orchestrate.cloud.host_keys import pin_host_keys

    remember(outputs, folder=folder)
    google = Google(outputs.project, endpoints=Endpoints.from_env(env))
    return pin_host_keys(
        outputs.inventory,
        google,
        cache=cluster_folder(folder, outputs.inventory.cluster) / "host_keys.json",
        say=say,
    )


def cluster_folder(folder: Path, cluster: str) -> Path:
    """Where this machine keeps what belongs to a cluster; made if need be, for us alone."""
    own = folder / ".cluster" / cluster
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    return own


def remember(outputs: StackOutputs, *, folder: Path) -> None:
    """Keep what `sweep` needs when the outputs are gone."""
    known = Remembered(
        cluster=outputs.inventory.cluster,
        project=outputs.project,
        region=outputs.region,
        node_usd={node.name: node.hourly_usd for node in outputs.inventory.nodes},
    )
    _keep(known, folder=folder)


def remember_plan(cluster: str, known: dict[str, Any], *, folder: Path) -> None:
    """The same by the settings, before anything is built: an `up` that fails has no outputs."""
    project = str(known.get("project") or "")
    before = recall(folder, cluster)
    if not project or (before is not None and before.project == project):
        return
    region = str(known.get("region") or Need().region)
    _keep(Remembered(cluster=cluster, project=project, region=region, node_usd={}), folder=folder)


def _keep(known: Remembered, *, folder: Path) -> None:
    path = cluster_folder(folder, known.cluster) / "stack.json"
    write_whole(path, json.dumps({"schema_version": _MEMORY_VERSION, **asdict(known)}, indent=2))


def recall(folder: Path, cluster: str) -> Remembered | None:
    """What was kept of a cluster, or None."""
    path = folder / ".cluster" / cluster / "stack.json"
    try:
        raw = parse_json(read_bytes(path), where=str(path))
        check_schema(raw, _MEMORY_VERSION, where=str(path))
        return build(Remembered, raw, where=str(path))
    except (OSError, TileforgeError):
        return None


def remembered_clusters(folder: Path) -> list[Remembered]:
    """Every cluster that this folder has built, or begun to."""
    names = sorted(path.parent.name for path in (folder / ".cluster").glob("*/stack.json"))
    return [known for name in names if (known := recall(folder, name)) is not None]


def _text(outputs: Mapping[str, Any], key: str, name: str) -> str:
    value = outputs.get(key)
    if not isinstance(value, str) or not CLOUD_NAME.fullmatch(value):
        raise ConfigError(
            f"{name}: output {key} is {shown(value)}; a name is needed. Bring the stack up to "
            "date: pulumi up"
        )
    return value


def _number(value: Any, name: str) -> float | None:
    if value is None:
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _MOST_USD:
        return value
    raise ConfigError(f"{name}: output hourly_usd is {shown(value)}; dollars or nothing is needed.")


def _time(value: Any, name: str) -> str | None:
    if value is None:
        return None
    try:
        return datetime.fromisoformat(value).astimezone(UTC).isoformat()
    except (OverflowError, TypeError, ValueError):
        raise ConfigError(
            f"{name}: output expires is {shown(value)}; a time in ISO 8601 is needed."
        ) from None
