"""Dequantised weights against transformers' own dequantisation, and against the description."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.architecture_cases import make_folder
from payload.config.run_config import parse_run_config
from payload.formats.quantized.weight_headers import dequantized_headers, weight_headers
from payload.formats.tensor_headers import file_headers
from payload.models.registry import read_spec
from payload.orchestrate.runs.run_input_checks import settle_initial
from payload.train.models.loading import load
from payload.train.tensors.lazy_tensors import LazyTensors, Part
from tests.train.dequantize.quantise import (
    CONFIGS,
    QWEN3_MOE,
    Stored,
    change_config,
    fp8,
    gptq,
    make_checkpoint,
    mxfp4,
    quantise_folder,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)) * 0.05


def opened(
    folder: Path, stored: Stored, quantization: Mapping[str, Any], *, dtype: str = "bfloat16"
) -> LazyTensors:
    """Return the tensors of a folder with these stored tensors and this quantization_config."""
    folder.mkdir(exist_ok=True)
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    change_config(folder, dtype=dtype, quantization_config=quantization)
    return LazyTensors(folder)


@pytest.mark.parametrize("method", CONFIGS)
def test_a_checkpoint_loads_with_the_values_of_its_description(method: str, tmp_path: Path) -> None:
    wanted = make_checkpoint(method, tmp_path)
    tensors = LazyTensors(tmp_path)
    assert set(tensors) == set(wanted)
    for name, value in wanted.items():
        assert tensors.kind(name) == "BF16"
        assert torch.equal(tensors[name].float(), value), name
    loaded = load(tmp_path).hf_tensors()
    assert all(torch.equal(loaded[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("method", CONFIGS)
def test_the_plan_counts_the_dequantised_model(method: str, tmp_path: Path) -> None:
    wanted = make_checkpoint(method, tmp_path)
    assert read_spec(tmp_path).num_params() == sum(each.numel() for each in wanted.values())
    headers = file_headers(tmp_path / "model.safetensors")
    config = {"dtype": "bfloat16", "quantization_config": CONFIGS[method]}
    remote = dequantized_headers(headers, config, where="config.json", has_data=False)
    assert {name: each.shape for name, each in remote.items()} == {
        name: tuple(each.shape) for name, each in wanted.items()
    }


_LINEAR = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("method", "scales"),
    [
        ("fp8", "weight_scale_inv"),
        ("gptq", "scales"),
        ("awq", "scales"),
        ("compressed-tensors", "weight_scale"),
    ],
)
def test_a_scale_of_zero_is_the_scale_of_zeros(method: str, scales: str, tmp_path: Path) -> None:
    wanted = make_checkpoint(method, tmp_path)[f"{_LINEAR}.weight"]
    stored = load_file(tmp_path / "model.safetensors")
    stored[f"{_LINEAR}.{scales}"][1, 0] = 0.0
    save_file(stored, tmp_path / "model.safetensors")
    found = LazyTensors(tmp_path)[f"{_LINEAR}.weight"].float()
    changed = found != wanted
    assert bool(changed.any()) and not bool(found[changed].any())
    # A block of 32 x 32, or a group of 32 inputs of one output.
    assert int((found == 0).sum() - (wanted == 0).sum()) == int(changed.sum()) <= 32 * 32


def test_the_plan_reports_the_format(tmp_path: Path) -> None:
    make_checkpoint("gptq", tmp_path)
    text = f'[data]\nsequence_length = 32\n[model]\ninit = "{tmp_path}"\n'
    lines: list[str] = []
    config = parse_run_config(text, where="run.toml")
    settle_initial(config, meta=None, say=lines.append, download=False)
    assert lines == ["weights   GPTQ (4 bits, groups of 32), dequantised to bf16 while loading"]


@pytest.mark.parametrize("method", CONFIGS)
def test_a_rank_reads_a_part_of_a_weight(method: str, tmp_path: Path) -> None:
    wanted = make_checkpoint(method, tmp_path)
    tensors = LazyTensors(tmp_path)
    name = max(wanted, key=lambda each: (wanted[each].dim(), "down_proj" in each))
    whole = wanted[name]
    rows = whole.new_empty(3, *whole.shape[1:])
    first = min(5, len(whole) - 3)
    tensors.copy_to(name, rows, Part(dim=0, first=first))
    assert torch.equal(rows, whole[first : first + 3])
    columns = whole.new_empty(len(whole), 10, *whole.shape[2:])
    tensors.copy_to(name, columns, Part(dim=1, first=13))
    assert torch.equal(columns, whole[:, 13:23])


def test_chunks_of_rows_make_the_same_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from payload.train.tensors import lazy_tensors

    monkeypatch.setattr(lazy_tensors, "_CHUNK_BYTES", 7 * 64 * 4)
    for method in CONFIGS:
        wanted = make_checkpoint(method, tmp_path / method)
        tensors = LazyTensors(tmp_path / method)
        assert all(torch.equal(tensors[name].float(), wanted[name]) for name in wanted), method


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("block", [(128, 128), (32, 64), None])
def test_fp8_has_the_bits_of_transformers(
    block: tuple[int, int] | None, dtype: str, tmp_path: Path
) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    stored, _ = fp8("a", random(256, 384), block=block)
    config = {"quant_method": "fp8", "weight_block_size": block and list(block)}
    ours = opened(tmp_path, stored, config, dtype=dtype)["a.weight"]
    theirs = Fp8Dequantize(None)._dequantize_one(
        stored["a.weight"], stored["a.weight_scale_inv"], output_dtype=getattr(torch, dtype)
    )
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)


def test_fp8_scales_that_are_powers_of_two_have_the_bits_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    stored, _ = fp8("a", random(64, 64), block=(32, 32))
    exponents = torch.tensor([[120, 121], [1, 127]], dtype=torch.uint8)
    for number, scales in enumerate((exponents, exponents.view(torch.float8_e8m0fnu))):
        stored["a.weight_scale_inv"] = scales
        ours = opened(tmp_path / f"{number}", stored, {"quant_method": "fp8"})["a.weight"]
        theirs = Fp8Dequantize(None)._dequantize_one(
            stored["a.weight"], scales, output_dtype=torch.bfloat16
        )
        assert torch.equal(ours, theirs)


def test_experts_of_4_bit_floats_beside_fp8_have_the_bits_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    packed = torch.randint(-128, 128, (64, 32), dtype=torch.int8)
    scales = torch.randint(110, 130, (64, 2), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    stored = {"experts.0.w1.weight": packed, "experts.0.w1.scale": scales}
    ours = opened(tmp_path, stored, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    theirs = Fp8Dequantize(None)._dequantize_one(packed, scales, output_dtype=torch.bfloat16)
    assert torch.equal(ours["experts.0.w1.weight"], theirs)


def test_blocks_at_the_edges_can_be_smaller(tmp_path: Path) -> None:
    """DeepSeek's 576 rows have five blocks of 128, which transformers refuses."""
    stored, value = fp8("a", random(576, 200), block=(128, 128))
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert torch.equal(opened(tmp_path, stored, config)["a.weight"].float(), value.bfloat16())


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
@pytest.mark.parametrize("shape", [(48,), (48, 1), (), (1,)])
def test_a_scale_can_belong_to_an_output_or_to_the_whole_weight(
    shape: tuple[int, ...], method: str, tmp_path: Path
) -> None:
    values = random(48, 80).mul(1000).to(torch.float8_e4m3fn)
    scale = torch.rand(shape) + 0.5
    stored = {"a.weight": values, "a.weight_scale": scale, "a.input_scale": torch.ones(())}
    tensors = opened(tmp_path, stored, {"quant_method": method})
    rows = scale.reshape(-1, 1).expand(48, 1) if scale.numel() > 1 else scale.reshape(1, 1)
    assert list(tensors) == ["a.weight"]
    assert torch.equal(tensors["a.weight"], (values.float() * rows).bfloat16())


def test_a_stack_of_experts_has_a_grid_of_scales_for_each(tmp_path: Path) -> None:
    values, scales = random(3, 64, 96).mul(1000).to(torch.float8_e4m3fn), torch.rand(3, 2, 3) + 0.1
    stored = {"experts.gate_up_proj": values, "experts.gate_up_proj_scale_inv": scales}
    tensors = opened(tmp_path, stored, {"quant_method": "fp8", "weight_block_size": [32, 32]})
    spread = scales.repeat_interleave(32, 1).repeat_interleave(32, 2)
    assert torch.equal(tensors["experts.gate_up_proj"], (values.float() * spread).bfloat16())


def test_mxfp4_has_the_bits_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, value = mxfp4("experts.down_proj", random(4, 96, 40))
    stored["experts.down_proj_scales"][0, 0] = torch.tensor([0, 1, 250], dtype=torch.uint8)
    ours = opened(tmp_path, stored, CONFIGS["mxfp4"])["experts.down_proj"]
    blocks, scales = stored["experts.down_proj_blocks"], stored["experts.down_proj_scales"]
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours[1:].float(), value[1:])


def test_a_whole_mxfp4_model_has_the_weights_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    make_checkpoint("mxfp4", tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    ).state_dict()
    for name, value in load(tmp_path).hf_tensors().items():
        assert torch.equal(value, theirs[name].float()), name


def test_a_whole_fp8_model_has_the_weights_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    make_checkpoint("fp8", tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True),
        dtype=torch.bfloat16,
    ).state_dict()
    for name, value in load(tmp_path).hf_tensors().items():
        assert torch.equal(value, theirs[name].float()), name


@pytest.mark.parametrize(
    ("kind", "prefix"), [("qwen3_moe", ""), ("qwen2_moe", "module.")], ids=["native", "other"]
)
@pytest.mark.parametrize("method", ["fp8", "gptq"])
def test_experts_are_dequantised_before_they_are_merged(
    method: str, kind: str, prefix: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    case = {**QWEN3_MOE, "model_type": kind, "shared_expert_intermediate_size": 64}
    make_folder(case, tmp_path / "quantised")
    values = quantise_folder(method, tmp_path / "quantised")
    assert any(".experts.3.down_proj." in name for name in values)
    make_folder(case, tmp_path / "plain")
    save_file(values, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    model = load(tmp_path / "quantised")
    for name, value in theirs.named_parameters():
        assert torch.equal(model.get_parameter(f"{prefix}{name}"), value), name
    assert read_spec(tmp_path / "quantised").num_params() == sum(
        each.numel() for each in theirs.parameters()
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("is_reordered", [False, True])
@pytest.mark.parametrize("group_size", [32, -1])
def test_gptq_of_every_width_and_order(
    *, bits: int, is_second: bool, is_reordered: bool, group_size: int, tmp_path: Path
) -> None:
    weight = random(64, 128)
    stored, value = gptq(
        "a",
        weight,
        bits=bits,
        group_size=group_size if group_size > 0 else weight.shape[1],
        is_reordered=is_reordered,
        is_second=is_second,
    )
    if not is_reordered:
        del stored["a.g_idx"]
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size}
    config["checkpoint_format"] = "gptq_v2" if is_second else "gptq"
    tensors = opened(tmp_path, stored, config, dtype="float16")
    assert list(tensors) == ["a.weight"]
    assert tensors.kind("a.weight") == "F16"
    assert torch.equal(tensors["a.weight"].float(), value)
    assert (value - weight).abs().max() < 0.5 / 2**bits


def test_golden_weights_of_the_packages_are_reproduced(tmp_path: Path) -> None:
    """`golden/make_golden.py` computed the values with the packages' own code."""
    golden = Path(__file__).with_name("golden")
    cases = sorted(golden.glob("*.safetensors"))
    assert len(cases) > 10
    for path in cases:
        found = load_file(path)
        wanted = found.pop("wanted")
        folder = tmp_path / path.stem
        folder.mkdir()
        save_file(found, folder / "model.safetensors")
        (folder / "config.json").write_bytes(path.with_suffix(".json").read_bytes())
        tensors = LazyTensors(folder)
        assert list(weight_headers(folder)) == ["a.weight"], path.stem
        assert torch.equal(tensors["a.weight"], wanted), path.stem
