"""Weights in the Hugging Face GPT-2 layout: in from a name or a folder, out to a folder.

GPT-2's matrices are stored as (in, out), torch's Linear keeps (out, in): four matrices a layer are
transposed on the way. Source: transformers, models/gpt2/modeling_gpt2.py (Conv1D).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from payload.data.tokenizer import END_OF_TEXT
from payload.errors import CheckpointError
from payload.hf_folder import CONFIG_FILE, TOKENIZER_FILES, WEIGHTS_FILE, read_config, weight_files
from payload.model_shape import ModelShape
from payload.train.model import GPT, Activation
from payload.train.tensor_file import write_tensors

_PREFIX = "transformer."
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# Buffers that old releases saved, and the head, which is the token embedding.
_NOT_PARAMETERS = (".attn.bias", ".attn.masked_bias", "lm_head.weight")


def save_hf(model: GPT, folder: Path, *, progressed: Callable[[], None] = lambda: None) -> str:
    """Write `model.safetensors` and `config.json`: a folder that transformers loads as it is.

    Returns the sha256 of the weights' file. Raises OSError.
    """
    state = {_PREFIX + name: _to_hf(name, value) for name, value in model.state_dict().items()}
    if not model.shape.bias:
        # GPT2LMHeadModel always has biases; zeros are what having none means.
        state |= {
            _PREFIX + name: torch.zeros(size) for name, size in _absent_biases(model.shape).items()
        }
    (folder / CONFIG_FILE).write_text(
        json.dumps(_hf_config(model), indent=2) + "\n", encoding="utf-8"
    )
    return write_tensors(
        folder / WEIGHTS_FILE, state, metadata={"format": "pt"}, progressed=progressed
    )


def load_hf(source: str, *, dropout: float = 0.0) -> GPT:
    """Read a folder in the Hugging Face GPT-2 layout, or a model by its name on the hub.

    Raises CheckpointError when it is absent, damaged or no GPT-2.
    """
    folder = model_folder(source)
    config = read_config(folder)
    shape = config.shape()
    tensors = _read_tensors(folder)
    _require_enough(tensors, shape, folder)
    activation = cast(Activation, config.activation_function)
    model = GPT(shape, dropout=dropout, activation=activation, random=False)
    _assign(model, tensors, folder=folder)
    return model


def model_folder(source: str) -> Path:
    """Return `source` where it is a folder, else the folder that the hub gave for this name.

    Raises CheckpointError when there is neither.
    """
    folder = Path(source)
    if folder.is_file():
        raise CheckpointError(
            f"model {source!r}: it is a file. Name its folder, in the Hugging Face GPT-2 layout."
        )
    return folder if folder.is_dir() else _download(source)


def train_on_sequences_of(model: GPT, sequence_length: int) -> None:
    """Set the tokens of a training sequence; the weights keep all their positions.

    Raises CheckpointError for a sequence longer than the weights' context.
    """
    positions = model.shape.positions()
    if sequence_length > positions:
        raise CheckpointError(
            f"data.sequence_length = {sequence_length} is above the {positions} positions of the "
            f"initial model. Use at most {positions}."
        )
    model.shape = replace(model.shape, sequence_length=sequence_length, n_positions=positions)


def _to_hf(name: str, value: Tensor) -> Tensor:
    return value.t() if name.endswith(_TRANSPOSED) else value


def _absent_biases(shape: ModelShape) -> dict[str, int]:
    width = shape.n_embd
    sizes = {"ln_f.bias": width}
    for layer in range(shape.n_layer):
        sizes |= {
            f"h.{layer}.ln_1.bias": width,
            f"h.{layer}.ln_2.bias": width,
            f"h.{layer}.attn.c_attn.bias": 3 * width,
            f"h.{layer}.attn.c_proj.bias": width,
            f"h.{layer}.mlp.c_fc.bias": 4 * width,
            f"h.{layer}.mlp.c_proj.bias": width,
        }
    return sizes


def _hf_config(model: GPT) -> dict[str, Any]:
    shape = model.shape
    # A vocabulary of another tokenizer may not have the token.
    end_of_text = END_OF_TEXT if shape.vocab_size > END_OF_TEXT else None
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": model.activation,
        "n_layer": shape.n_layer,
        "n_head": shape.n_head,
        "n_embd": shape.n_embd,
        "n_positions": shape.positions(),
        "n_ctx": shape.positions(),
        "vocab_size": shape.vocab_size,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "attn_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "tileforge_bias": shape.bias,
    }


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


def _require_enough(tensors: dict[str, Tensor], shape: ModelShape, folder: Path) -> None:
    """Refuse sizes that the weights do not have, before memory is taken for them."""
    held = sum(value.numel() for value in tensors.values())
    if shape.num_matrix_params() > 2 * held:
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: its sizes make {shape.num_params():,} parameters, but the "
            f"files with the weights have {held:,}. The folder is damaged; name another one."
        )


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    names = weight_files(folder)
    try:
        for name in names:
            tensors |= load_file(folder / name)
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: its weights cannot be read ({error}). Only safetensors files are loaded: "
            "the pickle format can run code."
        ) from None
    named = {name.removeprefix(_PREFIX): value for name, value in tensors.items()}
    head = named.get("lm_head.weight")
    if head is not None and not torch.equal(head, named.get("wte.weight", head)):
        raise CheckpointError(
            f"{folder}: its output head is not its token embedding; only tied ones can be loaded."
        )
    return {name: value for name, value in named.items() if not name.endswith(_NOT_PARAMETERS)}


def _assign(model: GPT, tensors: dict[str, Tensor], *, folder: Path) -> None:
    wanted = model.state_dict()
    missing = sorted(set(wanted) - set(tensors))
    known = set(wanted) | (set() if model.shape.bias else set(_absent_biases(model.shape)))
    extra = sorted(set(tensors) - known)
    if missing or extra:
        raise CheckpointError(
            f"{folder}: not a GPT-2's weights: {len(missing)} missing (first: {missing[:1]}), "
            f"{len(extra)} unknown (first: {extra[:1]})."
        )
    for name, target in wanted.items():
        value = tensors[name].t() if name.endswith(_TRANSPOSED) else tensors[name]
        if value.shape != target.shape:
            raise CheckpointError(
                f"{folder}: {name} is {tuple(value.shape)}, config.json says {tuple(target.shape)}."
            )
        target.copy_(value)
