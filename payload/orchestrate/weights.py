"""The weights that a run starts from, where they are a folder here: which files, and their hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from payload.checkpoint_files import MANIFEST_FILE, load_manifest
from payload.errors import ConfigError
from payload.hf_folder import CONFIG_FILE, INDEX_FILE, TOKENIZER_FILES, weight_files
from payload.models.source import find_source


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A folder in the Hugging Face layout on this machine, or one with a GGUF file."""

    folder: Path
    files: Mapping[str, str]
    """sha256 by name, of what a model is loaded from; config.json or the GGUF file is the last."""

    @property
    def digest(self) -> str:
        """Names the weights: equal for equal files."""
        return hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()[:16]

    def size_bytes(self) -> int:
        """Of all files together."""
        return sum((self.folder / name).stat().st_size for name in self.files)


def local_weights(init: str) -> Weights | None:
    """What `model.init` names on this machine; None for `scratch` and for names on a hub.

    A run's folder stands for its newest checkpoint. Raises ConfigError when something lacks, or is
    not what a checkpoint's manifest says.
    """
    # Not verified here: every file that is sent is compared with the manifest below.
    source = find_source(init, setting="model.init", verify=False)
    if (file := source.file) is not None:
        return Weights(folder=file.parent, files={file.name: _sha256(file, init=init)})
    folder = source.folder
    if folder is None:
        return None
    promised = _promised(folder)
    files = {}
    for name in (*_files(folder), CONFIG_FILE):
        files[name] = _sha256(folder / name, init=init)
        if promised is not None and files[name] != promised.get(name):
            raise ConfigError(
                f"model.init = {init!r}: {folder / name} is not what the checkpoint's manifest "
                "says. It is damaged; name another checkpoint."
            )
    return Weights(folder=folder, files=files)


def _files(folder: Path) -> list[str]:
    """Return the names of the weights' and the tokenizer's files."""
    found = (INDEX_FILE, *TOKENIZER_FILES)
    return [*weight_files(folder), *(name for name in found if (folder / name).is_file())]


def _promised(folder: Path) -> dict[str, str] | None:
    """Return the hashes in a checkpoint's manifest, by file; None for a folder that has none."""
    if not (folder / MANIFEST_FILE).exists():
        return None
    return {name: entry.sha256 for name, entry in load_manifest(folder).files.items()}


def _sha256(path: Path, *, init: str) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(
            f"model.init = {init!r}: {path}: {error.strerror}. Name a folder in the Hugging Face "
            "layout, with safetensors, or a checkpoint."
        ) from None
