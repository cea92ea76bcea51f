"""Small models, and data folders of every task, with the same bytes on every machine.

Python's `random` draws the texts. Weights are integers of PCG64 times a power of two: numpy
guarantees the integers of this generator, while torch's normal numbers depend on the CPU.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.rank_processes import RankProcesses
from tests.support import chat_data, preference_data

SEQUENCE_LENGTH = 64
TASKS = ("text", "chat", "classify", "preference")
_TOKENS: Mapping[str, Any] = {
    "vocab_size": 304,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_SIZES: Mapping[str, Any] = {
    **_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": SEQUENCE_LENGTH,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {**_TOKENS, "n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": SEQUENCE_LENGTH},
    "llama": {**_SIZES, "num_key_value_heads": 2},
    # Norms of queries and keys, a sliding window, tied embeddings, GELU.
    "gemma3_text": {
        **_SIZES,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 9,
        "query_pre_attn_scalar": 12,
    },
    # Not a native family: transformers' own modules train.
    "gpt_neox": {**_SIZES, "rotary_pct": 0.25},
}
"""Sizes of each model by its `model_type`."""
_LABELS = ("first", "second", "third")
_WAIT_S = 300


def make_inputs(root: Path, names: Iterable[str]) -> dict[str, str]:
    """Write these models and data folders below `root`; return the sha256 of each."""
    chosen = sorted(set(names))
    # Libraries print to both streams, so their output is only shown on failure.
    program = ("-m", "benchmarks.golden.inputs", str(root), *chosen)
    with RankProcesses(1, *program) as process:
        process.wait(within_s=_WAIT_S)
    return {name: _sha256(root / name) for name in chosen}


def main(root: Path, names: Sequence[str]) -> None:
    """Write the models and data folders of these names below `root`."""
    tokenizer = chat_data.make_tokenizer(root / "tokenizer")
    for name in names:
        if name in MODELS:
            _make_model(root / name, model_type=name)
            chat_data.make_tokenizer(root / name)
        else:
            _make_data(root, name, tokenizer=tokenizer)


def _make_model(folder: Path, *, model_type: str) -> None:
    """Write a model in the Hugging Face layout, with norms near 1 and other weights below 1/8."""
    import torch
    from safetensors.numpy import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **MODELS[model_type])
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(folder)
    # Gemma's norms multiply by 1 + weight.
    norm = 0 if model_type == "gemma3_text" else 1
    tensors = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        offset = norm if parameter.dim() == 1 and name.endswith("weight") else 0
        tensors[name] = _drawn(tuple(parameter.shape), seed=number) / 8 + offset
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _drawn(shape: tuple[int, ...], *, seed: int) -> NDArray[np.float32]:
    """Return numbers between -1 and 1 that are exact in fp32."""
    count = int(np.prod(shape))
    integers = np.random.PCG64(seed).random_raw(count) >> np.uint64(40)
    return (integers.astype(np.float32) / np.float32(2**23) - np.float32(1)).reshape(shape)


def _make_data(root: Path, task: str, *, tokenizer: Path) -> None:
    rows = chat_data.write_rows(root / f"{task}.jsonl", _rows(task))
    length = ("--sequence-length", SEQUENCE_LENGTH) if task in ("chat", "preference") else ()
    # The stored losses are of data with training rows that also stand in validation.
    chat_data.prepare(tokenizer, rows, root / task, *length, "--dedup", "none", task=task)


def _rows(task: str) -> list[dict[str, Any]]:
    """Return the rows of a task; answers and labels depend on the text."""
    if task == "preference":
        return list(preference_data.pairs(120))
    conversations = chat_data.conversations(400)
    if task == "chat":
        return [{"messages": each} for each in conversations]
    texts = [" ".join(message["content"] for message in each) for each in conversations]
    # A classifier uses a text's last token.
    return [{"text": text, "label": _LABELS[len(text.split()[-1]) % 3]} for text in texts]


def _sha256(folder: Path) -> str:
    """Return the sha256 of a folder's tokens, marks and weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".bin", ".safetensors"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
