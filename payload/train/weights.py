"""Weights in the Hugging Face GPT-2 layout: in from a name or a folder, out to a folder.

GPT-2's matrices are stored as (in, out), torch's Linear keeps (out, in): four matrices a layer are
transposed on the way. Source: transformers, models/gpt2/modeling_gpt2.py (Conv1D).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from payload.errors import CheckpointError
from payload.model_shape import ModelShape
from payload.train.model import GPT, Activation
from payload.train.tensor_file import write_tensors

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"

_PREFIX = "transformer."
_ARITHMETIC = {
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "layer_norm_epsilon": 1e-5,
    "n_inner": None,
}
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
    folder = Path(source)
    if not folder.is_dir():
        folder = _download(source)
    config = _read_config(folder)
    _refuse_variants(config, folder)
    tensors = _read_tensors(folder)
    bias = bool(config.get("tileforge_bias", True))
    shape = ModelShape(
        n_layer=_size(config, "n_layer", folder),
        n_head=_size(config, "n_head", folder),
        n_embd=_size(config, "n_embd", folder),
        sequence_length=_size(config, "n_positions", folder),
        vocab_size=_size(config, "vocab_size", folder),
        bias=bias,
    )
    model = GPT(shape, dropout=dropout, activation=_activation(config, folder), random=False)
    _assign(model, tensors, folder=folder)
    return model


def crop_sequence_length(model: GPT, sequence_length: int) -> GPT:
    """The same weights with a shorter longest context. Raises CheckpointError for a longer one."""
    longest = model.shape.sequence_length
    if sequence_length > longest:
        raise CheckpointError(
            f"data.sequence_length = {sequence_length} is above the {longest} positions of the "
            f"initial model. Use at most {longest}."
        )
    if sequence_length == longest:
        return model
    shape = model.shape
    cropped = GPT(
        ModelShape(
            n_layer=shape.n_layer,
            n_head=shape.n_head,
            n_embd=shape.n_embd,
            sequence_length=sequence_length,
            vocab_size=shape.vocab_size,
            bias=shape.bias,
        ),
        dropout=model.dropout,
        activation=model.activation,
        random=False,
    )
    state = model.state_dict()
    state["wpe.weight"] = state["wpe.weight"][:sequence_length].clone()
    cropped.load_state_dict(state)
    return cropped


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
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": model.activation,
        "n_layer": shape.n_layer,
        "n_head": shape.n_head,
        "n_embd": shape.n_embd,
        "n_positions": shape.sequence_length,
        "n_ctx": shape.sequence_length,
        "vocab_size": shape.vocab_size,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "attn_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "tileforge_bias": shape.bias,
    }


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"model {name!r}: no such folder, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). Check the name or the "
            "network."
        ) from None


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}. Name a folder in the Hugging Face GPT-2 layout."
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error}). The folder is damaged.") from None
    if not isinstance(config, dict) or config.get("model_type") != "gpt2":
        kind = config.get("model_type") if isinstance(config, dict) else None
        raise CheckpointError(f"{path}: model_type is {kind!r}; only 'gpt2' can be loaded.")
    return config


def _refuse_variants(config: dict[str, Any], folder: Path) -> None:
    """GPT-2s of another arithmetic would load without an error and compute something else."""
    for key, wanted in _ARITHMETIC.items():
        if config.get(key, wanted) != wanted:
            raise CheckpointError(
                f"{folder / CONFIG_FILE}: {key} = {config[key]!r}; only {wanted!r}, as in GPT-2 "
                "itself, can be loaded."
            )


def _size(config: dict[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {key} = {value!r} is no size.")
    return value


def _activation(config: dict[str, Any], folder: Path) -> Activation:
    name = config.get("activation_function", "gelu_new")
    if name not in ("gelu_new", "gelu"):
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: activation_function = {name!r}; gelu_new and gelu are known."
        )
    return cast(Literal["gelu_new", "gelu"], name)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    index = folder / f"{WEIGHTS_FILE}.index.json"
    names = [WEIGHTS_FILE]
    tensors: dict[str, Tensor] = {}
    try:
        if index.exists():
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        for name in names:
            tensors |= load_file(folder / name)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
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
