"""Weights in the Hugging Face layout: in from a name or a folder, out to a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from payload.errors import CheckpointError
from payload.hf_folder import CONFIG_FILE, TOKENIZER_FILES, WEIGHTS_FILE
from payload.train.tensor_file import write_tensors

if TYPE_CHECKING:
    from payload.train.models.base import CausalLM


def save_hf(model: CausalLM, folder: Path, *, progressed: Callable[[], None] = lambda: None) -> str:
    """Write `model.safetensors` and `config.json`: a folder that transformers loads as it is.

    Returns the sha256 of the weights' file. Raises OSError.
    """
    (folder / CONFIG_FILE).write_text(
        json.dumps(model.hf_config(), indent=2) + "\n", encoding="utf-8"
    )
    return write_tensors(
        folder / WEIGHTS_FILE, model.hf_tensors(), metadata={"format": "pt"}, progressed=progressed
    )


def model_folder(source: str) -> Path:
    """Return `source` where it is a folder, else the folder that the hub gave for this name.

    Raises CheckpointError when there is neither.
    """
    folder = Path(source)
    if folder.is_file():
        raise CheckpointError(
            f"model {source!r}: it is a file. Name its folder, in the Hugging Face layout."
        )
    return folder if folder.is_dir() else _download(source)


def train_on_sequences_of(model: CausalLM, sequence_length: int) -> None:
    """Set the tokens of a training sequence; the weights keep all their positions.

    Raises CheckpointError for a sequence longer than the weights' context.
    """
    positions = model.spec.context()
    if sequence_length > positions:
        raise CheckpointError(
            f"data.sequence_length = {sequence_length} is above the {positions} positions of the "
            f"initial model. Use at most {positions}."
        )
    model.spec = model.spec.with_sequence_length(sequence_length)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        wanted = ["*.json", "*.safetensors", *TOKENIZER_FILES]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"model {name!r}: no such folder, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). Check the name or the "
            "network."
        ) from None
