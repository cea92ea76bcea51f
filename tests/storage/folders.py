"""Checkpoint folders in the project's format, small and without tensors."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

from payload.formats.checkpoint_listing import (
    MANIFEST_FILE,
    MODEL_FILES,
    NEEDED_FILES,
    TRAINER_FILE,
)
from payload.run_record.run_identity import RunIdentity
from tests.support.identities import MINE

FILES = (*MODEL_FILES, *NEEDED_FILES)


def write_checkpoint(
    checkpoints: Path,
    step: int,
    *,
    seed: int,
    most_bytes: int = 20_000,
    run: RunIdentity = MINE,
) -> Path:
    """Write a valid checkpoint of random bytes, then rename it, as the trainer does.

    `run` is the recorded run.
    """
    draw = random.Random(f"{seed} {step}")
    folder = checkpoints / f"step_{step:08d}"
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True)
    files = {}
    for name in FILES:
        content = draw.randbytes(draw.randrange(1, most_bytes))
        if name == TRAINER_FILE:
            content = json.dumps({"identity": run.identity, "random": content.hex()}).encode()
        (partial / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (partial / MANIFEST_FILE).write_text(json.dumps({"schema_version": 1, "files": files}))
    partial.rename(folder)
    return folder


def content_of(folder: Path) -> dict[str, bytes]:
    """Return the content of every file by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
