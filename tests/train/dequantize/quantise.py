"""Quantises weights by each format's description, and writes checkpoints in the format.

Bits are placed one number at a time, so that no code is shared with the dequantisation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.architecture_cases import CASES, make_folder

Stored = dict[str, Tensor]
FP8_MAX = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of each place of an int32, from the low bits on, in AutoAWQ's layout `gemm`."""


def fp8(
    name: str, weight: Tensor, *, block: tuple[int, int] | None, scale: str = "weight_scale_inv"
) -> tuple[Stored, Tensor]:
    """Return a weight in 8-bit floats with a scale for each block, or one scale; and its value."""
    rows, columns = weight.shape
    high, wide = block or (rows, columns)
    stored, value = torch.empty_like(weight), torch.empty_like(weight)
    scales = torch.empty(-(-rows // high), -(-columns // wide))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = (
                slice(row * high, (row + 1) * high),
                slice(column * wide, (column + 1) * wide),
            )
            scales[row, column] = weight[place].abs().max() / FP8_MAX
            stored[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn).float()
            value[place] = stored[place] * scales[row, column]
    found = {
        f"{name}.weight": stored.to(torch.float8_e4m3fn),
        f"{name}.{scale}": scales if block else scales[0, 0].clone(),
    }
    return found, value


def mxfp4(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """Return experts (experts, inputs, outputs) in 4-bit floats, and their value."""
    experts, inputs, outputs = weight.shape
    groups = inputs // 32
    blocks = torch.zeros(experts, outputs, groups, 16, dtype=torch.uint8)
    scales = torch.zeros(experts, outputs, groups, dtype=torch.uint8)
    grouped = weight.transpose(1, 2).reshape(experts, outputs, groups, 32)
    exponents = grouped.abs().amax(-1).log2().floor().int() - 2
    scales[:] = exponents + 127
    levels = torch.tensor([*E2M1, *(-each for each in E2M1)])
    scaled = grouped / 2.0 ** exponents.unsqueeze(-1)
    codes = (scaled.unsqueeze(-1) - levels).abs().argmin(-1).to(torch.uint8)
    for place in range(32):
        blocks[..., place // 2] |= codes[..., place] << (4 * (place % 2))
    value = levels[codes.long()] * 2.0 ** exponents.unsqueeze(-1)
    value = value.reshape(experts, outputs, inputs).transpose(1, 2).contiguous()
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, value


def integers(weight: Tensor, *, bits: int, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return numbers (O, I), scales and zeros (G, O) in asymmetric groups of inputs; the value.

    `groups` is the group of each input.
    """
    most, count = 2**bits - 1, int(groups.max()) + 1
    scales = torch.empty(count, len(weight), dtype=torch.float16)
    zeros = torch.empty(count, len(weight), dtype=torch.int64)
    numbers, value = torch.empty_like(weight, dtype=torch.int64), torch.empty_like(weight)
    for group in range(count):
        own = weight[:, groups == group]
        low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
        scales[group] = (high - low) / most
        zeros[group] = (-low / scales[group].float()).round().clamp(0, most)
        scale = scales[group].float()[:, None]
        found = ((own / scale).round() + zeros[group][:, None]).clamp(0, most)
        numbers[:, groups == group] = found.long()
        # One product in the dtype of the scales, as the packages' torch code computes it.
        value[:, groups == group] = ((found - zeros[group][:, None]).half() * scale.half()).float()
    return numbers, scales, zeros, value


def packed(numbers: Tensor, *, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return the numbers of each row in int32s. Place p of an int32 has its number order[p]."""
    per_word = 32 // bits
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // per_word, dtype=torch.int64)
    for place, number in enumerate(order or range(per_word)):
        words |= numbers[:, number::per_word] << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def gptq(
    name: str,
    weight: Tensor,
    *,
    bits: int = 4,
    group_size: int = 32,
    is_reordered: bool = False,
    is_second: bool = False,
) -> tuple[Stored, Tensor]:
    """Return a linear in GPTQ's layout and its value; `is_second` = the format `gptq_v2`."""
    inputs = weight.shape[1]
    groups = torch.arange(inputs) // group_size
    if is_reordered:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(5))]
    numbers, scales, zeros, value = integers(weight, bits=bits, groups=groups)
    return {
        f"{name}.qweight": packed(numbers, bits=bits).t().contiguous(),
        f"{name}.qzeros": packed(zeros if is_second else (zeros - 1) % 2**bits, bits=bits),
        f"{name}.scales": scales,
        f"{name}.g_idx": groups.int(),
    }, value


def awq(name: str, weight: Tensor, *, group_size: int = 32) -> tuple[Stored, Tensor]:
    """Return a linear in AutoAWQ's layout `gemm`, and its value."""
    groups = torch.arange(weight.shape[1]) // group_size
    numbers, scales, zeros, value = integers(weight, bits=4, groups=groups)
    return {
        f"{name}.qweight": packed(numbers.t(), bits=4, order=AWQ_OUTPUTS),
        f"{name}.qzeros": packed(zeros, bits=4, order=AWQ_OUTPUTS),
        f"{name}.scales": scales,
    }, value


def pack_quantized(name: str, weight: Tensor, *, group_size: int = 32) -> tuple[Stored, Tensor]:
    """Return a linear in compressed-tensors' symmetric 4-bit layout, and its value."""
    outputs, inputs = weight.shape
    grouped = weight.reshape(outputs, -1, group_size)
    scales = (grouped.abs().amax(-1) / 7).bfloat16()
    numbers = (grouped / scales.float().unsqueeze(-1)).round().clamp(-8, 7)
    value = (numbers.bfloat16() * scales.unsqueeze(-1)).float().reshape(outputs, inputs)
    return {
        f"{name}.weight_packed": packed(numbers.long().reshape(outputs, inputs) + 8, bits=4),
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": torch.tensor([outputs, inputs]),
    }, value


Quantise = Callable[[str, Tensor], tuple[Stored, Tensor]]
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
            }
        },
    },
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
QUANTISERS: Mapping[str, Quantise] = {
    "fp8": lambda name, weight: fp8(name, weight, block=(32, 32)),
    "gptq": lambda name, weight: gptq(name, weight, is_reordered=True),
    "awq": awq,
    "compressed-tensors": pack_quantized,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 1031,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
QWEN3_MOE = {
    **CASES["qwen3"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_LINEARS = ("_proj.weight",)


def make_checkpoint(method: str, folder: Path, **sizes: Any) -> Stored:
    """Write a small model in a quantised format; return its dequantised tensors by name.

    MXFP4 is a small gpt-oss, every other format a Llama.
    """
    case = GPT_OSS if method == "mxfp4" else {**CASES["llama"], "intermediate_size": 192}
    make_folder({**case, "num_hidden_layers": 2, **sizes}, folder)
    return quantise_folder(method, folder)


def quantise_folder(method: str, folder: Path) -> Stored:
    """Replace the linears (or experts) of a model's folder; return the dequantised tensors."""
    path = folder / "model.safetensors"
    values: Stored = {}
    stored: Stored = {}
    for name, tensor in load_file(path).items():
        if method == "mxfp4" and tensor.dim() == 3:
            found, value = mxfp4(name, tensor)
        elif method != "mxfp4" and name.endswith(_LINEARS):
            found, value = QUANTISERS[method](name.removesuffix(".weight"), tensor)
        else:
            found, value = {name: tensor.bfloat16()}, tensor.bfloat16().float()
        stored |= found
        values[name] = value.bfloat16().float()
    save_file(stored, path, metadata={"format": "pt"})
    change_config(folder, dtype="bfloat16", quantization_config=CONFIGS[method])
    return values


def change_config(folder: Path, **keys: Any) -> None:
    """Change keys of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys), encoding="utf-8")
