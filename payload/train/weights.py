"""Weights in the Hugging Face layout: in from a name or a folder, out to a folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from payload.errors import CheckpointError
from payload.hf_folder import CONFIG_FILE, WEIGHTS_FILE
from payload.models.hub import HubName, fetch
from payload.models.source import find_source
from payload.train.gguf_folder import folder_of_gguf
from payload.train.tensor_file import write_tensors

if TYPE_CHECKING:
    from payload.train.models.base import CausalLM

log = logging.getLogger(__name__)


def save_hf(model: CausalLM, folder: Path, *, progressed: Callable[[], None] = lambda: None) -> str:
    """Write `model.safetensors` and `config.json`: a folder that transformers loads as it is.

    Returns the sha256 of the weights' file. Raises OSError.
    """
    save_hf_config(model, folder)
    return write_tensors(
        folder / WEIGHTS_FILE, model.hf_tensors(), metadata={"format": "pt"}, progressed=progressed
    )


def save_hf_config(model: CausalLM, folder: Path) -> None:
    """Write `config.json`, by which transformers builds the same model. Raises OSError."""
    content = json.dumps(model.hf_config(), indent=2) + "\n"
    (folder / CONFIG_FILE).write_text(content, encoding="utf-8")


def model_folder(name: str, *, setting: str = "model.init") -> Path:
    """Return the folder with the weights that `name` stands for, downloaded if it is on the hub.

    `setting` is what messages call it. Raises CheckpointError when there is nothing to load.
    """
    source = find_source(name, setting=setting, passed_over=warn_passed_over)
    if source.folder is not None:
        return source.folder
    if source.file is not None:
        log.info(f"reading {source.file}")
        return folder_of_gguf(source.file)
    wanted = HubName.parse(name)
    if wanted is None:
        raise CheckpointError(f"{setting} = {name!r}: it has no weights. Name a checkpoint.")
    return fetch(wanted, setting=setting, say=log.info)


def warn_passed_over(folder: Path, problem: str) -> None:
    """Log that a damaged checkpoint is not used, and why."""
    log.warning(f"checkpoint {folder} is passed over: {problem}")
