"""Which weights a `--checkpoint` means: a checkpoint, a run, or a Hugging Face folder or name."""

from __future__ import annotations

import re
from pathlib import Path

from payload.checkpoint_files import MANIFEST_FILE, checkpoint_folders, manifest_problems
from payload.errors import CheckpointError
from payload.results import RunPaths
from payload.train.checkpoint import newest_checkpoint

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def find_weights(source: str) -> str:
    """The folder or hub name to load for `source`.

    A run stands for its newest sound checkpoint. Raises CheckpointError when there is nothing to
    load, or when a checkpoint's files are not those of its manifest.
    """
    folder = Path(source)
    if not folder.is_dir():
        if folder.exists() or not _may_be_on_the_hub(source):
            what = "it is a file, not a folder" if folder.exists() else "no such folder"
            raise CheckpointError(
                f"checkpoint {source!r}: {what}. Name a run, a checkpoint or a folder in the "
                "Hugging Face GPT-2 layout."
            )
        return source
    paths = RunPaths(folder)
    if paths.config.exists() or paths.checkpoints.is_dir():
        return str(_newest(paths.checkpoints))
    if checkpoint_folders(folder):
        return str(_newest(folder))
    if (folder / MANIFEST_FILE).exists():
        problems = manifest_problems(folder)
        if problems:
            raise CheckpointError(f"checkpoint {folder}: {problems[0]} Use another one.")
    return source


def _newest(checkpoints: Path) -> Path:
    found = newest_checkpoint(checkpoints)
    if found is None:
        raise CheckpointError(
            f"{checkpoints}: no sound checkpoint. Let the run reach its first one "
            "(train.checkpoint_every), or name another run."
        )
    return found


def _may_be_on_the_hub(source: str) -> bool:
    """Whether a name that is no folder can be meant for the hub: `runs/typo` is not."""
    first, slash, _ = source.partition("/")
    return _HUB_NAME.fullmatch(source) is not None and not (slash and Path(first).is_dir())
