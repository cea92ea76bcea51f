"""Converts the metadata of a GGUF file to the config.json of a GPT-2."""

from __future__ import annotations

from typing import Any

from payload.models.gguf_errors import refuse_import, require_single_values
from payload.models.gguf_header import GgufHeader
from payload.models.gpt2.gguf_export import ARCHITECTURE, KEYS

_UNUSED = ("vocab_size", "tensor_data_layout")


def gguf_config(header: GgufHeader, *, where: str) -> dict[str, Any]:
    """Return a config.json for the header of a GPT-2. Raises CheckpointError."""
    values = header.of_architecture(ARCHITECTURE)
    require_single_values(header, values, ARCHITECTURE, where=where)
    for key, value in values.items():
        if key not in (*KEYS.values(), *_UNUSED) and value:
            refuse_import(where, f"{ARCHITECTURE}.{key}", value, "not supported")
    config: dict[str, Any] = {name: values[key] for name, key in KEYS.items() if key in values}
    if "token_embd.weight" in header.shapes:
        config["vocab_size"] = header.shapes["token_embd.weight"][0]
    return {"model_type": "gpt2", **config, **header.tokens()}
