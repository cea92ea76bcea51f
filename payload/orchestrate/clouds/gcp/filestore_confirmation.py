"""The question before a Filestore instance is deleted, as data may be on it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from payload.orchestrate.terminal.console import confirm_by_name


class MayDelete(Protocol):
    """Asks whether instances may be deleted, as `may_delete` does."""

    def __call__(self, names: Iterable[str], *, kept: str) -> bool:
        """Return True if they may."""
        ...


def may_delete(names: Iterable[str], *, named: Collection[str], kept: str) -> bool:
    """Return whether these instances may be deleted, with the data that may be on them.

    The option --delete-filestore has `named`; the name of every other one has to be typed. --yes
    answers neither. `kept` says what is not done otherwise. Raises UsageError where nobody can be
    asked.
    """
    unnamed = [name for name in dict.fromkeys(names) if name not in named]
    options = " ".join(f"--delete-filestore {name}" for name in unnamed)
    return all(
        confirm_by_name(
            f"This deletes Filestore {name} with all data on it.",
            name=name,
            otherwise=f"--yes does not answer this, so {kept}. Copy what you need from it, then "
            f"repeat with {options}",
        )
        for name in unnamed
    )


def filestore_name(cluster: str) -> str:
    """Return the name that the cluster program gives to the instance."""
    return f"{cluster}-shared"
