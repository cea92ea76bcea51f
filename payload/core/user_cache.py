"""The folder in which this user's caches are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def user_cache(env: Mapping[str, str]) -> Path:
    """Return the folder of this project's caches. Raises RuntimeError without a home folder."""
    base = env.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tileforge"
