"""CONTRACT: reads and writes samples.json: texts for the same prompts before and after a run.

After a run that `payload.finetune` started, payload/finetune/samples_before_and_after.py writes the
file. Any other script can write the file with `write_samples`. The report shows the texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from payload.core.errors import ConfigError
from payload.core.files import write_whole
from payload.core.regular_files import read_bytes
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build, check_schema

SCHEMA_VERSION = 1
_MOST = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A prompt and the texts that the model generated from it."""

    prompt: str
    before: str | None = None
    """Text from the initial weights; None for a model from scratch."""
    after: str | None = None
    """Text from the run's last checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Samples:
    samples: tuple[Sample, ...] = checked(max_items=_MOST)
    schema_version: int = SCHEMA_VERSION


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write samples.json atomically. Raises OSError."""
    write_whole(path, json.dumps(asdict(_Samples(samples=tuple(samples))), indent=2) + "\n")


def read_samples(path: Path) -> Sequence[Sample]:
    """Return the samples; empty if the file is absent or damaged."""
    try:
        raw = parse_json(read_bytes(path), where=str(path))
        check_schema(raw, SCHEMA_VERSION, where=str(path))
        return build(_Samples, raw, where=str(path)).samples
    except (OSError, ConfigError):
        return ()
