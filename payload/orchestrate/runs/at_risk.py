"""Warns about checkpoints that are lost with the head's disk, and about machines that stay
billed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from payload.config.run_config import RunConfig
from payload.core.durations import in_words
from payload.core.errors import ConfigError
from payload.core.suggested_commands import command
from payload.machines.inventory import Source
from payload.stack.cloud_requirements import requirements_of
from payload.stack.stack_settings import DEFAULTS

COPY_EVERY_S = 1800.0
"""Minimum seconds between two copies of a checkpoint, because traffic out of Google Cloud is
billed."""
_KEEP = "pulumi config set bucket create"


def loses_checkpoints(source: Source, config: RunConfig) -> bool:
    """Return whether a run's checkpoints are lost with its machines.

    `source` is the source of the inventory, and `storage.results` of `config` is already resolved.
    Only machines that Pulumi built are deleted.
    """
    return source == "pulumi" and config.storage.address() is None


def run_warning(source: Source, config: RunConfig, *, head: str) -> str | None:
    """Return the warning that `plan` and `run` print for a run without a store, or None."""
    if not loses_checkpoints(source, config):
        return None
    return (
        f"warning: the run has no store. Its checkpoints are on {head}'s disk, and "
        "are lost with that machine: at the end of its lifetime, or when Google preempts a "
        "spot machine. While `run` or `attach` follows the run, the newest checkpoint is copied "
        f"here every {in_words(COPY_EVERY_S)}. To keep all checkpoints: {_KEEP}, then "
        f"{command('orchestrate', 'up')}; or --set storage.results=gs://BUCKET/PREFIX"
    )


def limit_note(source: Source, config: RunConfig) -> str | None:
    """Return the note that `plan` and `run` print for a limit of a run on a cluster, or None."""
    keys = [key for key in ("max_usd", "max_hours") if getattr(config.limits, key) is not None]
    if source != "pulumi" or not keys:
        return None
    return (
        f"note: limits.{keys[0]} stops the run, not its machines: they are billed on until "
        f"{command('orchestrate', 'down')}"
    )


def cluster_warning(known: Mapping[str, Any]) -> str | None:
    """Return the warning that `up` prints if the stack's config has no bucket.

    Returns None if the config has a bucket. Raises ConfigError for an unreadable config.
    """
    need = requirements_of(known)
    if need.has_bucket:
        return None
    lifetime = known.get("maxLifetime") or DEFAULTS.max_lifetime
    ends = f"at the end of maxLifetime ({lifetime}) at the latest"
    if need.spot != "false":
        ends = "whenever Google preempts the spot machines, and " + ends
    return (
        f"bucket = none: checkpoints are only on the head's disk, and are lost {ends}. To keep "
        f"them: {_KEEP}; or set storage.results in every run"
    )


def refuse_spot_without_bucket(known: Mapping[str, Any], *, accepted: bool) -> None:
    """Raise ConfigError for spot machines without a bucket, if the user has not accepted the
    loss."""
    need, warning = requirements_of(known), cluster_warning(known)
    if need.spot == "false" or warning is None or accepted:
        return
    raise ConfigError(
        f"spot = {need.spot!r}, and {warning}. To build the cluster anyway: "
        f"{command('orchestrate', 'up', '--results-may-be-lost')}"
    )
