"""Settings of the run that made a checkpoint. They decide whether two losses are comparable."""

from __future__ import annotations

from pathlib import Path

from payload.config.run_config import parse_run_config
from payload.core.dtype import Dtype
from payload.core.errors import ConfigError
from payload.formats.checkpoint_listing import checkpoint_config, checkpoint_dtype


def trained_length(checkpoint: Path) -> int | None:
    """Return data.sequence_length of the checkpoint's run, or None if it is not recorded."""
    text = checkpoint_config(checkpoint)
    try:
        return None if text is None else parse_run_config(text, where="").data.sequence_length
    except ConfigError:  # the settings of another version
        return None


def different_settings(checkpoint: Path, *, dtype: Dtype, length: int | None = None) -> list[str]:
    """Return a line with the options of the run's own evaluations, or [] if the options are the
    same.

    `length` is the length of blocks or the length at which texts are cut, and None for pairs.
    """
    options = []
    run_length, run_dtype = trained_length(checkpoint), checkpoint_dtype(checkpoint)
    if length is not None and run_length not in (None, length):
        options.append(f"--sequence-length {run_length}")
    if run_dtype not in (None, dtype):
        options.append(f"--dtype {run_dtype}")
    if not options:
        return []
    return [f"note        the run's own evaluations used: {' '.join(options)}"]
