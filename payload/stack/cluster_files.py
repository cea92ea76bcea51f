"""CONTRACT: `.cluster` in a project's folder, with this machine's files about its clusters."""

from __future__ import annotations

from pathlib import Path

from payload.core.errors import ConfigError
from payload.core.symlink_safety import refuse_links


def cluster_path(root: Path, *names: str) -> Path:
    """Return the path of `.cluster`, of a cluster's folder in it, or of a cluster's file.

    The path need not exist. Raises ConfigError if a part of it is a symlink: in a cloned project, a
    symlink could redirect keys and files of ssh, for example to ~/.ssh.
    """
    try:
        return refuse_links(root.joinpath(".cluster", *names), below=root)
    except OSError as error:
        raise ConfigError(
            f"{error.filename} is a symlink, which is not followed for a cluster's files. Remove "
            "it, or replace it by its target."
        ) from None
