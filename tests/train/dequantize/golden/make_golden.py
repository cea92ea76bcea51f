"""Writes small quantised weights, each with the value that a public package computes from it.

Run in an environment that also has compressed-tensors 0.20.1 (with loguru), and where PYTHONPATH
has the unpacked packages auto-gptq 0.7.1 and autoawq 0.2.9, of which only two files are imported:

    python tests/train/dequantize/golden/make_golden.py AUTO_GPTQ_FOLDER AUTOAWQ_FOLDER
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HERE = Path(__file__).parent
ROWS, COLUMNS = 32, 64


def main() -> None:
    """Write every case."""
    torch.manual_seed(11)
    _compressed_tensors()
    _gptq(Path(sys.argv[1], "auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py"))
    _awq(Path(sys.argv[2], "awq/utils/packing_utils.py"))


def _write(
    case: str, stored: dict[str, Tensor], wanted: Tensor, config: dict[str, Any], dtype: str
) -> None:
    tensors = {name: value.contiguous().clone() for name, value in stored.items()}
    save_file({**tensors, "wanted": wanted.contiguous().clone()}, HERE / f"{case}.safetensors")
    content = {"dtype": dtype, "quantization_config": config}
    (HERE / f"{case}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _compressed_tensors() -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    integers: dict[str, Any] = {"type": "int", "strategy": "group", "group_size": 16}
    block = {"strategy": "block", "block_structure": [16, 16]}
    nvfp4 = {"strategy": "tensor_group", "group_size": 16, "symmetric": True}
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "int4_groups": ("pack-quantized", {**integers, "num_bits": 4}),
        "int4_asymmetric": ("pack-quantized", {**integers, "num_bits": 4, "symmetric": False}),
        "int8_groups": ("pack-quantized", {**integers, "num_bits": 8}),
        "int8_packed_asymmetric": (
            "pack-quantized",
            {"type": "int", "strategy": "channel", "num_bits": 8, "symmetric": False},
        ),
        "int4_channel": ("pack-quantized", {"type": "int", "strategy": "channel", "num_bits": 4}),
        "int8_channel": ("int-quantized", {"type": "int", "strategy": "channel", "num_bits": 8}),
        "int8_tensor": ("naive-quantized", {"type": "int", "strategy": "tensor", "num_bits": 8}),
        "int8_asymmetric": (
            "int-quantized",
            {"type": "int", "strategy": "channel", "num_bits": 8, "symmetric": False},
        ),
        "fp8_channel": (
            "float-quantized",
            {"type": "float", "strategy": "channel", "num_bits": 8},
        ),
        "fp8_tensor": ("float-quantized", {"type": "float", "strategy": "tensor", "num_bits": 8}),
        "fp8_block": ("float-quantized", {"type": "float", "num_bits": 8, **block}),
        "nvfp4": ("nvfp4-pack-quantized", {"type": "float", "num_bits": 4, **nvfp4}),
        "mxfp4": (
            "mxfp4-pack-quantized",
            {"type": "float", "strategy": "group", "group_size": 32, "num_bits": 4},
        ),
    }
    for number, (case, (name, weights)) in enumerate(cases.items()):
        dtype = torch.float32 if number % 3 == 2 else torch.bfloat16
        arguments = QuantizationArgs(**weights)
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        compressor = BaseCompressor.get_value_from_registry(name)
        state = {"weight": torch.randn(ROWS, COLUMNS).to(dtype), **_scales(arguments, dtype)}
        stored = compressor.compress(state, scheme)
        wanted = compressor.decompress(dict(stored), scheme)["weight"].to(torch.bfloat16)
        config = {
            "quant_method": "compressed-tensors",
            "format": name,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }
        stored = {f"a.{key}": value for key, value in stored.items() if value is not None}
        _write(f"compressed_tensors_{case}", stored, wanted, config, "bfloat16")


def _scales(arguments: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return random scales and zero points of the shapes of a strategy."""
    shape: tuple[int, ...] = (1,)
    if arguments.strategy == "channel":
        shape = (ROWS, 1)
    elif arguments.strategy in ("group", "tensor_group"):
        shape = (ROWS, COLUMNS // arguments.group_size)
    elif arguments.strategy == "block":
        shape = (ROWS // 16, COLUMNS // 16)
    levels = 2.0 ** (arguments.num_bits - 1) if arguments.type == "int" else 6.0
    if arguments.type == "float" and arguments.num_bits == 8:
        levels = 448.0
    found = {"weight_scale": ((torch.rand(shape) + 0.5) * 2.5 / levels).to(dtype)}
    if arguments.strategy == "tensor_group":
        found["weight_global_scale"] = torch.tensor([123.0])
        found["weight_scale"] = found["weight_scale"] * 123
    if arguments.type == "float" and arguments.group_size == 32:
        found["weight_scale"] = 2.0 ** torch.randint(-4, 2, shape).to(dtype)
    if not arguments.symmetric:
        found["weight_zero_point"] = torch.randint(-3, 4, shape).to(torch.int8)
    return found


def _gptq(source: Path) -> None:
    """Unpack random bits with AutoGPTQ's layer: its product with the unit matrix is the weight."""
    module = _module(source)
    for bits in (2, 4, 8):
        layer = module.QuantLinear(bits, 32, COLUMNS, ROWS, False)
        for name in ("qweight", "qzeros"):
            buffer = getattr(layer, name)
            setattr(layer, name, torch.randint(-(2**31), 2**31, buffer.shape).int())
        layer.scales = (torch.rand(layer.scales.shape) * 0.1 + 0.01).half()
        layer.autogptq_cuda_available = False
        wanted = layer(torch.eye(COLUMNS).half()).t()
        stored = {f"a.{name}": value for name, value in layer.state_dict().items()}
        config = {"quant_method": "gptq", "bits": bits, "group_size": 32}
        _write(f"gptq_{bits}_bits", stored, wanted, config, "float16")


def _awq(source: Path) -> None:
    module = _module(source)
    stored = {
        "a.qweight": torch.randint(-(2**31), 2**31, (COLUMNS, ROWS // 8)).int(),
        "a.qzeros": torch.randint(-(2**31), 2**31, (2, ROWS // 8)).int(),
        "a.scales": (torch.rand(2, ROWS) * 0.1 + 0.01).half(),
    }
    parts = SimpleNamespace(**{name.removeprefix("a."): value for name, value in stored.items()})
    wanted = module.dequantize_gemm(parts.qweight, parts.qzeros, parts.scales, 4, 32).t()
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    _write("awq", stored, wanted, config, "float16")


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
