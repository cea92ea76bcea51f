"""CONTRACT: the folder `.cluster` of a project, with this machine's files about the clusters."""

from __future__ import annotations

from pathlib import Path

from payload.core.errors import ConfigError
from payload.core.symlink_safety import refuse_links


def cluster_path(root: Path, *names: str) -> Path:
    """Return the path of `.cluster`, or of a cluster's folder or file in it."""
    try:
        return refuse_links(root.joinpath(".cluster", *names), below=root)
    except OSError as error:
        raise ConfigError(
            f"{error.filename} is a symlink, which is not followed for a cluster's files. Remove "
            "the symlink, or replace it by its target."
        ) from None
