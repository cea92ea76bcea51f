"""The table of GPU memory by model and method, from the estimate that `plan` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from payload.config.run_config import RunConfig, parse_run_config
from payload.models.llama.spec import read

COMMON = (
    *(
        "device.kind=cuda",
        "model.init=./MODEL",
        "data.sequence_length=1024",
        "memory.activation_checkpointing=on",
    ),
    *("batch.global_batch_size=1", "batch.micro_batch_size=1"),
)
"""Settings of every row."""
METHODS: Mapping[str, tuple[str, ...]] = {
    "full": (),
    "LoRA": ("adapter.kind=lora",),
    "LoRA, 4-bit base": ("adapter.kind=lora", "model.quantize=nf4"),
}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_MODELS: Mapping[str, tuple[tuple[int, ...], int, int, bool]] = {
    "SmolLM2-135M": ((576, 1536, 30, 9), 3, 49152, True),
    "SmolLM2-1.7B": ((2048, 8192, 24, 32), 32, 49152, True),
    "Llama-3.1-8B": ((4096, 14336, 32, 32), 8, 128256, False),
    "Llama-3.1-70B": ((8192, 28672, 80, 64), 8, 128256, False),
}
"""The sizes of `_SIZES`, key-value heads, vocabulary, and whether the head is the embedding."""


def model_config(name: str) -> dict[str, Any]:
    """Return the keys of a model's config.json that its memory depends on."""
    sizes, heads, vocabulary, is_tied = _MODELS[name]
    return {
        "model_type": "llama",
        **dict(zip(_SIZES, sizes, strict=True)),
        "num_key_value_heads": heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": is_tied,
        "max_position_embeddings": 8192,
    }


def run_config(method: str) -> RunConfig:
    """Return the settings of a run."""
    return parse_run_config("", overrides=[*COMMON, *METHODS[method]], where="the table")


def memory_gib(name: str, method: str) -> float:
    """Return the estimated memory of the only rank in GiB."""
    config = run_config(method)
    spec = read(model_config(name), where=name).with_sequence_length(config.data.sequence_length)
    return config.memory_bytes(config.adapted(spec), dtype="bf16", world_size=1) / 2**30


def memory_table() -> str:
    """Return the table."""
    rows = [
        " | ".join([f"| {name}", *(f"{memory_gib(name, method):,.1f}" for method in METHODS)])
        for name in _MODELS
    ]
    return "\n".join(
        [
            f"| GiB | {' | '.join(METHODS)} |",
            "|---|" + "--:|" * len(METHODS),
            *(f"{r} |" for r in rows),
        ]
    )
