"""CONTRACT: names on the Hugging Face hub: NAME or OWNER/NAME, optionally with @REVISION.

The path of a local folder can have the same form. For example, a cloned project could contain a
folder with the name of a model. The folder would then be used instead of the model on the hub.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath, PurePosixPath
from typing import Literal

from payload.core.errors import TileforgeError
from payload.core.printable_text import shown
from payload.core.regular_files import can_see, home_path
from payload.core.validation.names import GIT_COMMIT

# https://github.com/huggingface/huggingface_hub/blob/main/src/huggingface_hub/utils/_validators.py
_NAME = r"[A-Za-z0-9_][\w.-]{0,95}(?:/[A-Za-z0-9_][\w.-]{0,95})?"
_SPEC = re.compile(rf"(?P<name>{_NAME})(?:@(?P<revision>[\w][\w./-]{{0,254}}))?", re.ASCII)
_OWN_FOLDERS = ("runs", "data")
"""Folders of Tileforge: `runs/first` is a run, not a model of an owner `runs`."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the hub. Without a revision, it means the model's newest commit."""

    name: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Return the name in `text`, or None if it does not have the form of a hub name."""
        found = _SPEC.fullmatch(text)
        if found is None or ".." in text or "--" in found["name"]:
            return None
        return cls(found["name"], found["revision"])

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    def commit(self) -> str | None:
        """Return the revision if it is a commit, which never changes, otherwise None."""
        return self.revision if GIT_COMMIT.fullmatch(self.revision or "") else None


def pinned_name(text: str) -> HubName | None:
    """Return the hub name in `text` if it has a commit, otherwise None.

    A name with a commit cannot be a local folder.
    """
    found = HubName.parse(text)
    return found if found is not None and found.commit() else None


def hub_name(text: str) -> HubName | None:
    """Return the hub name in `text`; None for an existing local path, or an invalid name."""
    if (found := pinned_name(text)) is not None:
        return found
    return None if can_see(home_path(text)) else HubName.parse(text)


def local_name(path: PurePath) -> str:
    """Return `path` in a form that commands do not confuse with a name on the hub."""
    return f"./{path}" if _could_be_on_hub(str(path)) else str(path)


def is_ambiguous(text: str) -> bool:
    """Return True if `text` is a local folder and could also be a model or dataset on the hub.

    A name with a commit always means the hub.
    """
    path = home_path(text)
    is_name = _could_be_on_hub(text) and pinned_name(text) is None
    return is_name and can_see(path) and path.is_dir()


def require_one_meaning(
    text: str, *, setting: str, kind: Literal["model", "dataset"], error: type[TileforgeError]
) -> None:
    """Raise `error` if `text` is a local folder and could also be a name on the hub.

    The message names `setting`, which has the value `text`, and the `kind` of the hub's repository.
    """
    if not is_ambiguous(text):
        return
    remote = f", or {text.partition('@')[0]}@COMMIT"
    if kind == "dataset":
        remote = "; for the hub dataset, run the command in another folder"
    raise error(
        f"{setting} = {shown(text)} is ambiguous: a local folder, and possibly a hub {kind}. "
        f"Use ./{text}{remote}."
    )


def _could_be_on_hub(text: str) -> bool:
    return HubName.parse(text) is not None and PurePosixPath(text).parts[0] not in _OWN_FOLDERS
