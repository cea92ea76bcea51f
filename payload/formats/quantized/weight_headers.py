"""Lists the weights in a model's folder, as they are after dequantisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.formats.hf_folder import CONFIG_FILE, read_config
from payload.formats.quantized.awq import Awq
from payload.formats.quantized.compressed_tensors import CompressedTensors
from payload.formats.quantized.fp8 import Fp8
from payload.formats.quantized.gptq import Gptq
from payload.formats.quantized.mxfp4 import Mxfp4
from payload.formats.quantized.stored_weight import CONFIG_FIX, Format, refuse
from payload.formats.tensor_headers import TensorHeader, tensor_headers

KEY = "quantization_config"
_TEXT = "text_config"
"""The text model's part of a multimodal config.json; it can have the key instead of the top."""
_FORMATS: Mapping[str, Callable[..., Format]] = {
    "fp8": lambda config, where, has_data: Fp8(config, where=where),
    "fbgemm_fp8": lambda config, where, has_data: Fp8(config, where=where),
    "mxfp4": lambda config, where, has_data: Mxfp4(),
    "gptq": lambda config, where, has_data: Gptq(config, where=where),
    "awq": lambda config, where, has_data: Awq(config, where=where),
    "compressed-tensors": lambda config, where, has_data: CompressedTensors(
        config, where=where, has_data=has_data
    ),
}
"""The format of each `quant_method` of config.json."""
_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_NAMES = {"F16": "f16", "BF16": "bf16", "F32": "fp32"}


def weight_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return every tensor of the model in `folder` by name. A quantised weight is a `StoredWeight`.

    Raises CheckpointError like `tensor_headers`, and for quantised weights that are damaged or
    cannot be dequantised.
    """
    headers = tensor_headers(folder)
    if not (folder / CONFIG_FILE).exists():
        return headers
    return dequantized_headers(headers, read_config(folder), where=str(folder / CONFIG_FILE))


def dequantized_headers(
    headers: Mapping[str, TensorHeader],
    config: Mapping[str, Any],
    *,
    where: str,
    has_data: bool = True,
) -> dict[str, TensorHeader]:
    """Return the dequantised weights of a checkpoint with these tensors and this config.json.

    `has_data` is True if the tensors' files can be read. Raises CheckpointError, which names
    `where`.
    """
    found = read_format(config, where=where, has_data=has_data)
    if found is None:
        return dict(headers)
    weights: dict[str, TensorHeader] = {}
    used: set[int] = set()
    for name, weight in found.weights(headers, dtype=_target(config)):
        if name in headers and headers[name] is not weight.parts["values"]:
            refuse(weight, name, "is stored both quantised and as a plain weight")
        weights[name] = weight
        used |= {id(each) for each in weight.parts.values()}
    plain = {
        name: header
        for name, header in headers.items()
        if id(header) not in used and not (weights and name.endswith(found.unused))
    }
    return {**plain, **weights}


def read_format(config: Mapping[str, Any], *, where: str, has_data: bool = True) -> Format | None:
    """Return the format that a config.json names, or None if the weights are not quantised.

    Raises CheckpointError, which names `where`, for a format that cannot be dequantised.
    """
    raw, text = config.get(KEY), config.get(_TEXT)
    place = KEY
    # As in transformers, quantizers/auto.py, `get_hf_quantizer`.
    if not raw and isinstance(text, Mapping) and text.get(KEY) is not None:
        raw, place = text[KEY], f"{_TEXT}: {KEY}"
    if raw is None:
        return None
    where = f"{where}: {place}"
    if not isinstance(raw, Mapping):
        raise CheckpointError(f"{where} = {shown(raw)}: must be an object. {CONFIG_FIX}")
    method = raw.get("quant_method")
    if not isinstance(method, str) or method not in _FORMATS:
        raise CheckpointError(
            f"{where}: quant_method = {shown(method)}: cannot be dequantised; the methods are "
            f"{', '.join(_FORMATS)}. {CONFIG_FIX}"
        )
    return _FORMATS[method](raw, where, has_data)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json for weights that are dequantised."""
    kept = {key: value for key, value in config.items() if key != KEY}
    text = kept.get(_TEXT)
    if isinstance(text, Mapping):
        kept[_TEXT] = {key: value for key, value in text.items() if key != KEY}
    return kept


def stored_format(folder: Path) -> str | None:
    """Describe the quantisation of a folder's weights, and their dtype in memory.

    Returns None if the weights are not quantised.

    Raises CheckpointError.
    """
    config = read_config(folder)
    found = read_format(config, where=str(folder / CONFIG_FILE))
    if found is None:
        return None
    return f"{found.describe()}, dequantised to {_NAMES[_target(config)]} while loading"


def _target(config: Mapping[str, Any]) -> str:
    """Return the dtype of the dequantised weights, in the spelling of safetensors files.

    This is the model's own dtype, or BF16.
    """
    name = config.get("dtype") or config.get("torch_dtype")
    text = config.get(_TEXT)
    if name is None and isinstance(text, Mapping):
        return _target(text)
    return _DTYPES.get(name, "BF16") if isinstance(name, str) else "BF16"
