"""Small models with a tokenizer, and their export."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.llama_cpp import EOS, add_tokenizer
from payload.core.errors import ExitCode
from payload.export.__main__ import main
from payload.train.models.hf_weights import save_hf
from tests.generate.models import make_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "logits_scaling": 8.0,
}
VOCAB = EOS + 1
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": None,
}


@functools.lru_cache(maxsize=3)
def files_of_llama(kind: str) -> dict[str, bytes]:
    """Return the files of a small random model of one family, with GPT-2's tokenizer."""
    import transformers

    # transformers' GGUF reader assumes these widths.
    extra: dict[str, dict[str, Any]] = {
        "Qwen3": {"head_dim": 128},
        # With a tied head its scaled embedding would repeat the last token.
        "Gemma3Text": {
            "head_dim": 256,
            "num_hidden_layers": 6,
            "sliding_window": 16,
            "tie_word_embeddings": False,
        },
        "Mistral": {"sliding_window": None},
        "Qwen3Moe": {
            **{"head_dim": 16, "num_experts": 12, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 32, "norm_topk_prob": True},
        },
        "Phi3": {"partial_rotary_factor": 0.5},
        # The fourth layer has no rotary embedding.
        "SmolLM3": {"num_hidden_layers": 5},
        "Olmo3": {"num_hidden_layers": 4, "sliding_window": 16, "rope_scaling": YARN},
        "Granite": MULTIPLIERS,
        "GraniteMoeHybrid": {
            **{"layer_types": ["attention"] * 2, "num_local_experts": 0, **MULTIPLIERS},
            **{"position_embedding_type": "rope", "shared_intermediate_size": 96},
        },
    }
    prefix = kind.removesuffix("Text")
    config = getattr(transformers, f"{kind}Config")(**SIZES | extra.get(kind, {}))
    torch.manual_seed(3)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    with tempfile.TemporaryDirectory() as name:
        model.save_pretrained(name)
        return with_tokenizer(Path(name))


@functools.cache
def files_of_gpt2() -> dict[str, bytes]:
    """Return the files of a small random GPT-2 with its tokenizer."""
    with tempfile.TemporaryDirectory() as name:
        save_hf(make_model(sequence_length=1024, vocab_size=VOCAB, seed=1), Path(name))
        return with_tokenizer(Path(name))


def with_tokenizer(folder: Path) -> dict[str, bytes]:
    """Add GPT-2's tokenizer to a folder and return its files."""
    add_tokenizer(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write the files into a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def make_llama(folder: Path, kind: str) -> Path:
    """Write a small random model of one family, with GPT-2's tokenizer."""
    return write(folder, files_of_llama(kind))


def make_gpt2(folder: Path) -> Path:
    """Write a small random GPT-2 with its tokenizer."""
    return write(folder, files_of_gpt2())


def make(folder: Path, kind: str) -> Path:
    return make_gpt2(folder) if kind == "GPT2" else make_llama(folder, kind)


def export(source: Path, out: Path, *arguments: str, format_: str = "gguf") -> int:
    return main(["--checkpoint", str(source), "--format", format_, "--out", str(out), *arguments])


def load(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def expected_of(model: Any, dtype: str) -> Mapping[str, torch.Tensor]:
    """Return the weights rounded as in the format: matrices except positions."""
    import gguf

    found = {}
    for name, value in model.state_dict().items():
        is_kept = value.dim() < 2 or name.endswith(("wpe.weight", "mlp.gate.weight"))
        if is_kept or dtype == "fp32":
            found[name] = value
        elif dtype == "q8_0":
            kind = gguf.GGMLQuantizationType.Q8_0
            # GPT-2's file transposes these matrices relative to transformers.
            is_turned = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
            matrix = (value.t() if is_turned else value).contiguous().numpy()
            back = torch.from_numpy(gguf.dequantize(gguf.quantize(matrix, kind), kind).copy())
            found[name] = back.t() if is_turned else back
        else:
            kind16 = torch.bfloat16 if dtype == "bf16" else torch.float16
            found[name] = value.to(kind16).float()
    return found


def complaint(code: int, capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr()
    assert code in (ExitCode.CONFIG, ExitCode.USAGE) and said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("error: ")
    return line


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes), encoding="utf-8")
