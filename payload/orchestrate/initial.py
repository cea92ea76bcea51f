"""How large the model of a run is: its config's sizes, or those of the weights it starts from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from payload.errors import CheckpointError
from payload.hf_folder import read_config
from payload.model_shape import PRESETS, ModelShape
from payload.results import RunPaths
from payload.run_config import RunConfig


def initial_shape(config: RunConfig, *, vocab_size: int) -> tuple[ModelShape, str | None]:
    """The model's sizes before it is loaded, and a note where they are a guess."""
    configured = config.model.shape(
        sequence_length=config.data.sequence_length, vocab_size=vocab_size
    )
    init = config.model.init
    if init == "scratch":
        return configured, None
    weights = PRESETS.get(init.rpartition("/")[2])
    if Path(init).is_dir() or weights is None:
        try:
            weights = read_config(_folder(Path(init))).shape()
        except CheckpointError:
            return configured, (
                f"the sizes of model.init = {init!r} are not known here; the arithmetic is that of "
                f"model.preset = {config.model.preset!r}"
            )
    shape = replace(
        weights,
        sequence_length=configured.sequence_length,
        vocab_size=vocab_size,
        n_positions=weights.positions(),
    )
    return shape, None


def _folder(init: Path) -> Path:
    """A run stands for its newest checkpoint."""
    return RunPaths(init).newest_checkpoint() or init
