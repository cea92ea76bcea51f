"""Prompts for confirmation before a Filestore instance, which can hold data, is deleted."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from payload.orchestrate.terminal.console import confirm_by_name


class MayDelete(Protocol):
    """A function that confirms the deletion of Filestore instances, as `may_delete` does."""

    def __call__(self, names: Iterable[str], *, kept: str) -> bool:
        """Return True if the user confirmed every instance."""
        ...


def may_delete(names: Iterable[str], *, named: Collection[str], kept: str) -> bool:
    """Return whether these instances can be deleted with all data on them.

    `named` comes from the option --delete-filestore. The user must type the name of every instance
    that is not in `named`; --yes does not suffice. `kept` is the text that
    names what is kept if the user does not confirm. Raises UsageError if there is no terminal.
    """
    unnamed = [name for name in dict.fromkeys(names) if name not in named]
    options = " ".join(f"--delete-filestore {name}" for name in unnamed)
    return all(
        confirm_by_name(
            f"This deletes Filestore {name} with all data on it.",
            name=name,
            otherwise=f"--yes does not confirm this deletion, so {kept}. Copy the data if you "
            f"need it, then repeat with {options}",
        )
        for name in unnamed
    )


def filestore_name(cluster: str) -> str:
    """Return the name that the cluster program gives to the cluster's Filestore instance."""
    return f"{cluster}-shared"
