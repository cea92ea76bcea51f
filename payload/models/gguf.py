"""GGUF files of the Llama family: which file a name stands for, and the model that it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from payload.core.errors import CheckpointError
from payload.core.validation import shown
from payload.formats.hf_folder import CONFIG_FILE, own_file
from payload.models.gguf_header import SUFFIX, Array, GgufHeader, Value, read_header
from payload.models.llama import spec as decoder
from payload.models.llama.spec import DecoderSpec

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""llama.cpp's names; SmolLM2 and Mistral are `llama` to it."""
_FIX = "Name a folder in the Hugging Face layout, with safetensors."
_KEYS: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""config.json's name of each key below the architecture's."""
_READ = frozenset(
    {*_KEYS, "attention.key_length", "attention.value_length", "rope.dimension_count"}
    | {"rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"}
    # These change nothing here: the tensors say the vocabulary, only YaRN reads the last two.
    | {"vocab_size", "tensor_data_layout"}
    | {"rope.scaling.original_context_length", "rope.scaling.finetuned"}
)
"""Keys below the architecture's that a file may have with any value."""
_NEUTRAL: Mapping[str, float] = {"attention.causal": True, "rope.scaling.attn_factor": 1.0}
"""Value of another key that changes nothing, where that is not 0."""
_DEFAULTS: Mapping[str, float] = {"rope_theta": 10_000.0}
_SINGLE = (
    *("_token_id", ".add_bos_token", ".add_eos_token", ".add_space_prefix", ".chat_template"),
    *("tokenizer.ggml.model", "tokenizer.ggml.pre"),
)
"""Ends of the tokenizer's keys that are no arrays; transformers takes an array of one for one."""
_TOKENS: Mapping[str, str] = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
_PARTS: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""llama.cpp's name of each module."""


def gguf_file(source: Path) -> Path | None:
    """Return the GGUF file that `source` is or has, or None for a folder of another kind.

    Raises CheckpointError for a folder with several, or with a link to one elsewhere.
    """
    if source.is_file():
        return source if source.suffix == SUFFIX else None
    if (source / CONFIG_FILE).exists():
        return None
    found = sorted(source.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:3])
        raise CheckpointError(f"{source}: it has {len(found)} GGUF files ({names}). Name one.")
    return own_file(source, found[0].name) if found else None


def read_gguf(path: Path) -> DecoderSpec:
    """Return the numbers of the model in a GGUF file.

    Raises CheckpointError for a file that is damaged, that lacks a tensor, or whose model is of
    another family.
    """
    header = read_header(path)
    spec = decoder.read(gguf_config(header, where=str(path)), where=str(path))
    _require_tensors(spec, header, where=str(path))
    return spec


def gguf_config(header: GgufHeader, *, where: str) -> dict[str, Any]:
    """Return the content of config.json for the model of this header. Raises CheckpointError."""
    values = header.values
    kind = values.get("general.architecture")
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        _refuse(where, "general.architecture", kind, f"only {', '.join(_ARCHITECTURES)} are read")
    width = values.get(f"{kind}.attention.key_length", values.get(f"{kind}.rope.dimension_count"))
    _refuse_variants(header, kind, width, where=where)
    found = {name: values.get(f"{kind}.{key}") for key, name in _KEYS.items()}
    config: dict[str, Any] = {key: value for key, value in found.items() if value is not None}
    config = {**_DEFAULTS, **config, "model_type": kind}
    if "token_embd.weight" in header.shapes:
        config["vocab_size"] = header.shapes["token_embd.weight"][0]
    config["tie_word_embeddings"] = "output.weight" not in header.shapes
    if width is not None:
        config["head_dim"] = width
    config |= {name: values[key] for name, key in _TOKENS.items() if key in values}
    factor = values.get(f"{kind}.rope.scaling.factor", values.get(f"{kind}.rope.scale_linear"))
    # As in llama.cpp a factor is of linear scaling unless a type says otherwise, and 0 is none.
    is_linear = values.get(f"{kind}.rope.scaling.type", "linear") == "linear"
    if is_linear and factor not in (None, 0, 1):
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return config


def _refuse_variants(header: GgufHeader, kind: str, width: Value | None, *, where: str) -> None:
    """Refuse what would be read without an error and compute something else."""
    values = header.values
    for key, value in values.items():
        if isinstance(value, Array) and (key.startswith(f"{kind}.") or key.endswith(_SINGLE)):
            _refuse(where, key, value, "one value is read here, and no array of them")
    if "rope_freqs.weight" in header.shapes:
        _refuse(where, "rope_freqs.weight", "a tensor", "transformers' reader leaves it out")
    scaling = values.get(f"{kind}.rope.scaling.type")
    if scaling not in (None, "none", "linear"):
        _refuse(where, f"{kind}.rope.scaling.type", scaling, "transformers' reader leaves it out")
    for full, found in values.items():
        key = full.removeprefix(f"{kind}.")
        if key != full and key not in _READ and found != _NEUTRAL.get(key, 0):
            _refuse(where, full, found, "it is not read here")
    for key in ("rope.dimension_count", "attention.value_length"):
        other = values.get(f"{kind}.{key}")
        if other not in (None, width):
            _refuse(where, f"{kind}.{key}", other, f"heads are {shown(width)} wide")


def _require_tensors(spec: DecoderSpec, header: GgufHeader, *, where: str) -> None:
    for name, shape in spec.tensor_shapes():
        theirs = _gguf_name(name)
        found = header.shapes.get(theirs)
        if found is None:
            raise CheckpointError(f"{where}: it has no tensor {theirs}. {_FIX}")
        if found != shape:
            raise CheckpointError(
                f"{where}: {theirs} is {list(found)}, its own sizes say {list(shape)}. {_FIX}"
            )
    known, held = spec.num_params(), sum(math.prod(each) for each in header.shapes.values())
    if known != held:
        expected = {_gguf_name(name) for name, _ in spec.tensor_shapes()}
        extra = sorted(set(header.shapes) - expected)
        raise CheckpointError(f"{where}: unknown tensor {shown(extra[0])}. {_FIX}")


def _gguf_name(name: str) -> str:
    """Return llama.cpp's name of a tensor that transformers calls `name`."""
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        number, _, part = module.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{_PARTS[part]}.{kind}"
    return f"{_PARTS[module]}.{kind}"


def _refuse(where: str, key: str, value: object, problem: str) -> NoReturn:
    raise CheckpointError(f"{where}: {key} = {shown(value)}: {problem}. {_FIX}")
