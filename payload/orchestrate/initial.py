"""How large the model of a run is: its config's sizes, or those of the weights it starts from."""

from __future__ import annotations

import json
from pathlib import Path

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
    known = PRESETS.get(init.rpartition("/")[2])
    if not Path(init).is_dir() and known is not None:
        return _sized(configured, known.n_layer, known.n_head, known.n_embd), None
    try:
        raw = json.loads((_folder(Path(init)) / "config.json").read_text(encoding="utf-8"))
        return _sized(configured, raw["n_layer"], raw["n_head"], raw["n_embd"]), None
    except (OSError, ValueError, KeyError, TypeError):
        return configured, (
            f"the sizes of model.init = {init!r} are not known here; the arithmetic is that of "
            f"model.preset = {config.model.preset!r}"
        )


def _folder(init: Path) -> Path:
    """A run stands for its newest checkpoint."""
    return RunPaths(init).newest_checkpoint() or init


def _sized(shape: ModelShape, n_layer: int, n_head: int, n_embd: int) -> ModelShape:
    return ModelShape(
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        sequence_length=shape.sequence_length,
        vocab_size=shape.vocab_size,
        bias=shape.bias,
    )
