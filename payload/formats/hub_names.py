"""CONTRACT: names on the Hugging Face hub: NAME, OWNER/NAME or either with @REVISION.

A folder here may have the form of such a name. Whoever made the current folder, as of a project
that was cloned, could give one the name of a model or a dataset, to be taken in its place.
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
"""Folders that this program makes: `runs/first` is a run, and no model of an owner `runs`."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the hub; without a revision it is the newest one."""

    name: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Return the name in `text`, or None where it can be none."""
        found = _SPEC.fullmatch(text)
        if found is None or ".." in text or "--" in found["name"]:
            return None
        return cls(found["name"], found["revision"])

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    def commit(self) -> str | None:
        """Return the revision where it is a commit, which is the same files for ever."""
        return self.revision if GIT_COMMIT.fullmatch(self.revision or "") else None


def pinned_name(text: str) -> HubName | None:
    """Return the name in `text` where it has a commit: it is the hub's whatever lies here."""
    found = HubName.parse(text)
    return found if found is not None and found.commit() else None


def hub_name(text: str) -> HubName | None:
    """Return the hub name that `text` stands for; None for a path that exists here, or no name."""
    if (found := pinned_name(text)) is not None:
        return found
    return None if can_see(home_path(text)) else HubName.parse(text)


def local_name(path: PurePath) -> str:
    """Return the name by which a command takes the folder `path`, never a hub model of its name."""
    return f"./{path}" if _could_be_on_hub(str(path)) else str(path)


def is_ambiguous(text: str) -> bool:
    """Return True where `text` names a folder here, and could name a model or dataset of the hub.

    A name with a commit is the hub's alone.
    """
    place = home_path(text)
    is_name = _could_be_on_hub(text) and pinned_name(text) is None
    return is_name and can_see(place) and place.is_dir()


def require_one_meaning(
    text: str, *, setting: str, kind: Literal["model", "dataset"], error: type[TileforgeError]
) -> None:
    """Raise `error` where `text`, the value of `setting`, is ambiguous; `kind` is the hub's."""
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
