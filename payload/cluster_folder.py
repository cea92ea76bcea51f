"""CONTRACT: `.cluster/`, where a project's folder keeps what belongs to its clusters."""

from __future__ import annotations

from pathlib import Path

from payload.errors import ConfigError
from payload.untrusted import refuse_links

FOLDER = ".cluster"


def cluster_place(root: Path, *parts: str) -> Path:
    """Return a place below `.cluster` in the project's folder `root`: a cluster's, or a file of it.

    Raises ConfigError where a part of it is a link: whoever made the project's folder could have
    this user's `~/.ssh` overwritten, or a key in it used.
    """
    try:
        return refuse_links(root.joinpath(FOLDER, *parts), below=root)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}.") from None
