"""Damaged and hostile quantised checkpoints are refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from payload.core.errors import CheckpointError
from payload.formats.quantized.stored_weight import StoredWeight
from payload.formats.quantized.weight_headers import weight_headers
from payload.models.registry import read_spec
from payload.train.models.loading import load
from payload.train.tensors.lazy_tensors import LazyTensors
from tests.train.dequantize.quantise import CONFIGS, Stored, change_config, make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = {
    "fp8": "model.layers.1.mlp.up_proj.weight",
    "gptq": "model.layers.1.mlp.up_proj.qweight",
    "awq": "model.layers.1.mlp.up_proj.qweight",
    "compressed-tensors": "model.layers.1.mlp.up_proj.weight_packed",
    "mxfp4": "model.layers.1.mlp.experts.down_proj_blocks",
}
"""The tensor with the quantised numbers of one weight."""
_LINEAR = "model.layers.1.mlp.up_proj"
Change = Callable[[Stored], None]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for method in CONFIGS:
        make_checkpoint(method, folder / method)
    return folder


def setting(name: str, place: Any, value: float) -> Change:
    """Change one element of a stored tensor."""

    def change(tensors: Stored) -> None:
        tensors[name][place] = value

    return change


def shape_of(name: str, *shape: int) -> Change:
    def change(tensors: Stored) -> None:
        tensors[name] = torch.ones(shape).to(tensors[name].dtype)

    return change


def dtype_of(name: str, dtype: torch.dtype) -> Change:
    def change(tensors: Stored) -> None:
        tensors[name] = tensors[name].to(dtype)

    return change


def without(name: str) -> Change:
    def change(tensors: Stored) -> None:
        del tensors[name]

    return change


def with_plain(tensors: Stored) -> None:
    tensors[f"{_LINEAR}.weight"] = torch.zeros(192, 64)


_EXPERTS = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("method", "change", "problem"),
    [
        ("fp8", without(f"{_LINEAR}.weight_scale_inv"), "has no scales"),
        ("fp8", setting(f"{_LINEAR}.weight_scale_inv", (1, 0), torch.nan), "has a scale of nan"),
        ("fp8", setting(f"{_LINEAR}.weight_scale_inv", (1, 0), torch.inf), "has a scale of inf"),
        ("fp8", setting(f"{_LINEAR}.weight_scale_inv", (1, 0), 3e38), "too large for BF16"),
        ("fp8", shape_of(f"{_LINEAR}.weight_scale_inv", 5, 2), "does not fit a weight"),
        ("fp8", shape_of(f"{_LINEAR}.weight_scale_inv", 0, 0), "does not fit a weight"),
        # Each would be read with blocks or groups of another size than config.json names.
        ("fp8", shape_of(f"{_LINEAR}.weight_scale_inv", 4, 4), "does not fit a weight"),
        ("gptq", shape_of(f"{_LINEAR}.scales", 1, 192), "1 groups, which do not fit"),
        ("fp8", dtype_of(f"{_LINEAR}.weight_scale_inv", torch.int32), "not a dtype of scales"),
        ("fp8", setting(f"{_LINEAR}.weight", (3, 3), torch.nan), "has NaN"),
        ("mxfp4", without(f"{_EXPERTS}_scales"), "lacks this tensor"),
        ("mxfp4", setting(f"{_EXPERTS}_scales", (0, 0, 0), 255), "has a scale of nan"),
        ("mxfp4", shape_of(f"{_EXPERTS}_scales", 4, 64, 2), "its weight requires"),
        ("mxfp4", shape_of(f"{_EXPERTS}_blocks", 4, 64, 1, 8), "experts x outputs x groups x 16"),
        ("gptq", without(f"{_LINEAR}.scales"), "lacks this tensor"),
        ("gptq", without(f"{_LINEAR}.qzeros"), "lacks this tensor"),
        ("gptq", setting(f"{_LINEAR}.scales", (0, 5), torch.nan), "has a scale of nan"),
        ("gptq", setting(f"{_LINEAR}.g_idx", 7, 2), "names group 2, but the weight has 2 groups"),
        ("gptq", setting(f"{_LINEAR}.g_idx", 7, -1), "names group -1"),
        ("gptq", shape_of(f"{_LINEAR}.g_idx", 63), "its weight requires"),
        ("gptq", shape_of(f"{_LINEAR}.scales", 3, 192), "3 groups, which do not fit"),
        ("gptq", shape_of(f"{_LINEAR}.scales", 0, 192), "0 groups, which do not fit"),
        ("gptq", shape_of(f"{_LINEAR}.qzeros", 2, 23), "its weight requires"),
        ("gptq", shape_of(f"{_LINEAR}.qweight", 8, 0), "is I32 of the shape [8, 0], but"),
        ("gptq", dtype_of(f"{_LINEAR}.qweight", torch.int64), "but must be a matrix of I32"),
        ("gptq", with_plain, "both quantised and as a plain weight"),
        ("awq", without(f"{_LINEAR}.qzeros"), "lacks this tensor"),
        ("awq", setting(f"{_LINEAR}.scales", (1, 5), torch.inf), "has a scale of inf"),
        ("awq", shape_of(f"{_LINEAR}.scales", 2, 184), "its weight requires"),
        ("compressed-tensors", without(f"{_LINEAR}.weight_scale"), "lacks this tensor"),
        ("compressed-tensors", setting(f"{_LINEAR}.weight_scale", (0, 0), torch.nan), "of nan"),
        ("compressed-tensors", setting(f"{_LINEAR}.weight_shape", 1, 2**40), "does not fit"),
        ("compressed-tensors", setting(f"{_LINEAR}.weight_shape", 0, 191), "does not fit"),
        ("compressed-tensors", setting(f"{_LINEAR}.weight_shape", 1, -64), "does not fit"),
        ("compressed-tensors", shape_of(f"{_LINEAR}.weight_shape", 3), "its weight requires"),
        ("compressed-tensors", shape_of(f"{_LINEAR}.weight_packed", 192), "of the shape [192]"),
    ],
)
def test_damaged_tensors_are_refused(
    method: str, change: Change, problem: str, checkpoints: Path, tmp_path: Path
) -> None:
    source = checkpoints / method
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(CheckpointError) as refused:
        load(tmp_path)
    message = str(refused.value)
    assert problem in message
    assert message.startswith(f"{tmp_path / 'model.safetensors'}: model.layers.1.mlp.")
    assert message.endswith("Download the model again, or use the model in bf16.")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("method", "keys", "problem"),
    [
        ("gptq", {"bits": 3}, "bits = 3"),
        ("gptq", {"bits": None}, "bits"),
        ("gptq", {"group_size": 0}, "group_size = 0: must be at least 1, or -1"),
        ("gptq", {"group_size": -2}, "group_size = -2"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ("awq", {"bits": 8}, "bits = 8"),
        ("gptq", {"checkpoint_format": None, "format": "marlin"}, ": format = 'marlin'"),
        ("awq", {"version": "gemv"}, "version = 'gemv'"),
        ("awq", {"version": None, "format": "gemv"}, ": format = 'gemv'"),
        ("awq", {"group_size": 0}, "group_size = 0"),
        ("fp8", {"weight_block_size": [0, 128]}, "weight_block_size"),
        ("fp8", {"weight_block_size": "128"}, "weight_block_size"),
        ("fp8", {"quant_method": "bitsandbytes"}, "quant_method = 'bitsandbytes'"),
        ("fp8", {"quant_method": ["fp8"]}, "quant_method = \\['fp8'\\]"),
        ("compressed-tensors", {"format": "marlin-24"}, "format = 'marlin-24'"),
        ("compressed-tensors", {"sparsity_config": {"format": "sparse-bitmask"}}, "sparse-bitmask"),
        ("compressed-tensors", {"transform_config": {"config_groups": {"u": {}}}}, "transform_con"),
        ("compressed-tensors", {"config_groups": 3}, "config_groups"),
    ],
)
def test_what_cannot_be_dequantised_is_refused_by_its_name(
    method: str, keys: dict[str, Any], problem: str, checkpoints: Path, tmp_path: Path
) -> None:
    source = checkpoints / method
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    change_config(tmp_path, quantization_config={**CONFIGS[method], **keys})
    with pytest.raises(CheckpointError, match=problem) as refused:
        read_spec(tmp_path)
    message = str(refused.value)
    assert message.startswith(f"{tmp_path / 'config.json'}: quantization_config")
    assert message.endswith("Use the model in bf16 or fp32.")
    assert "\n" not in message


def test_each_weight_takes_the_settings_of_compressed_tensors_that_fit_its_groups(
    checkpoints: Path, tmp_path: Path
) -> None:
    """A recipe can give layers of the same bits groups of different sizes."""
    source, config = checkpoints / "compressed-tensors", {**CONFIGS["compressed-tensors"]}
    group = config["config_groups"]["group_0"]
    size = group["weights"]["group_size"]
    other = {**group, "weights": {**group["weights"], "group_size": 2 * size}}
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    change_config(
        tmp_path,
        quantization_config={**config, "config_groups": {"other": other, "group_0": group}},
    )
    found = weight_headers(tmp_path)[f"{_LINEAR}.weight"]
    assert isinstance(found, StoredWeight) and found.block == (1, size)


def test_bits_of_compressed_tensors_that_cross_words_are_refused(
    checkpoints: Path, tmp_path: Path
) -> None:
    config = {**CONFIGS["compressed-tensors"]}
    group = config["config_groups"]["group_0"]
    weights = {**group["weights"], "num_bits": 3}
    config["config_groups"] = {"group_0": {**group, "weights": weights}}
    packed, scale, shape = (
        torch.zeros(64, 6, dtype=torch.int32),
        torch.ones(64, 2),
        torch.tensor([64, 64]),
    )
    save_file(
        {"a.weight_packed": packed, "a.weight_scale": scale, "a.weight_shape": shape},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text("{}")
    change_config(tmp_path, quantization_config=config)
    with pytest.raises(CheckpointError, match="numbers of 3 bits, but only 2, 4 and 8"):
        LazyTensors(tmp_path)


def test_a_quantised_file_without_its_config_is_still_refused(
    checkpoints: Path, tmp_path: Path
) -> None:
    source = checkpoints / "fp8"
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    change_config(tmp_path, quantization_config=None)
    with pytest.raises(CheckpointError, match="14 unknown"):
        load(tmp_path)
