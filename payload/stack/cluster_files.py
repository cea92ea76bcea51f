"""CONTRACT: `.cluster` in a project's folder, with what this machine knows of its clusters."""

from __future__ import annotations

from pathlib import Path

from payload.core.errors import ConfigError
from payload.core.links import refuse_links


def cluster_path(root: Path, *names: str) -> Path:
    """Return the path of `.cluster`, of a cluster's folder in it, or of a file in that.

    It need not be there. Raises ConfigError where a part of it is a symlink: in a folder that was
    cloned or unpacked, it would lead keys and files of ssh elsewhere, as into ~/.ssh.
    """
    try:
        return refuse_links(root.joinpath(".cluster", *names), below=root)
    except OSError as error:
        raise ConfigError(
            f"{error.filename} is a symlink. Files of a cluster are written to no other place: "
            "remove it, or put what it leads to in its place."
        ) from None
