"""The plan of a 4-bit base: saved memory, lost time, and the better base."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from payload.config.run_config import RunConfig, parse_run_config
from payload.estimates.quantized_cost import TYPICAL_DEQUANTIZED_PER_S, quantized_cost
from payload.models.llama.hub_sizes import CONFIGS
from payload.models.registry import preset_of_hub_name, spec_of
from payload.models.spec import ModelSpec
from tests.support.launching import REPO

GIB = 2**30
LARGE = spec_of(CONFIGS["Llama-3.3-70B-Instruct"], where="test").with_sequence_length(512)
BF16_FITS = 'bf16 fits: model.quantize = "none" with precision.dtype = "bf16" is recommended'


def lora(*overrides: str) -> RunConfig:
    given = ("model.init=x", "adapter.kind=lora", "data.sequence_length=512", *overrides)
    return parse_run_config("", overrides=given, where="test")


def cost_sentence(
    spec: ModelSpec, config: RunConfig, *, room: float | None, rate: float | None
) -> str:
    found = quantized_cost(
        config,
        spec,
        world_size=1,
        dtype="bf16",
        core_flops_per_s={"bf16": 1e12, "fp32": 5e11},
        dequantized_per_s=rate,
        cores=1,
        room_bytes=room,
    )
    assert found is not None
    assert found.nf4_step_s > found.whole_step_s
    return found.sentence()


def test_bf16_is_recommended_where_it_fits_and_4_bits_where_it_does_not() -> None:
    much = cost_sentence(LARGE, lora(), room=400 * GIB, rate=1e9)
    little = cost_sentence(LARGE, lora(), room=64 * GIB, rate=None)
    assert 'bf16 fits: model.quantize = "none" is recommended' in much and ", measured)" in much
    assert "bf16 does not fit: use nf4" in little and "typical, not measured" in little
    assert "recommended if it fits" in cost_sentence(LARGE, lora(), room=None, rate=None)


@pytest.mark.parametrize(
    ("length", "room", "device", "bf16", "advice"),
    [
        (512, 280, "cpu", 3e11, BF16_FITS),
        (512, 280, "cpu", 3e10, "fp32 does not fit: use nf4"),
        # The peaks are per core.
        (512, 290, "cuda", 3e10, BF16_FITS),
        # 4 bits do not fit either.
        (8192, 400, "cpu", 3e10, BF16_FITS),
    ],
)
def test_where_fp32_does_not_fit_the_faster_of_4_bits_and_a_whole_base_in_bf16_is_advised(
    length: int, room: int, device: str, bf16: float, advice: str
) -> None:
    costs = [
        quantized_cost(
            lora(f"data.sequence_length={length}", f"device.kind={device}"),
            LARGE.with_sequence_length(length),
            world_size=1,
            dtype="fp32",
            core_flops_per_s={"bf16": bf16, "fp32": 1.6e11},
            dequantized_per_s=None,
            cores=1,
            room_bytes=each * GIB,
        )
        for each in (2000, room, 16)
    ]
    much, some, little = (each for each in costs if each is not None)
    assert 'fp32 fits: model.quantize = "none" is recommended' in much.sentence()
    assert advice in some.sentence()
    assert "fp32 does not fit: use nf4" in little.sentence()
    # 4-bit weights compute in fp32, and are dequantised in addition.
    assert much.nf4_step_s == pytest.approx(much.whole_step_s + much.dequantize_s)


def test_4_bits_in_bf16_are_advised_where_nothing_else_fits() -> None:
    found = quantized_cost(
        lora("precision.dtype=fp32"),
        LARGE,
        world_size=1,
        dtype="fp32",
        core_flops_per_s={"bf16": 3e10, "fp32": 1.6e11},
        dequantized_per_s=None,
        cores=1,
        room_bytes=70 * GIB,
    )
    assert found is not None and (found.nf4_dtype, found.whole_dtype) == ("bf16", "fp32")
    assert 'fp32 does not fit: use nf4 with precision.dtype = "bf16"' in found.sentence()
    assert found.nf4_bytes < 70 * GIB < found.whole_bytes


def test_ranks_that_do_not_divide_the_cores_compute_at_the_cores_own_rate() -> None:
    costs = [
        quantized_cost(
            lora("batch.global_batch_size=24"),
            LARGE,
            world_size=world_size,
            dtype="bf16",
            core_flops_per_s={"bf16": 1e12, "fp32": 5e11},
            dequantized_per_s=None,
            cores=4,
            room_bytes=None,
        )
        for world_size in (1, 3)
    ]
    one, three = (each for each in costs if each is not None)
    assert three.whole_step_s == pytest.approx(one.whole_step_s)
    assert three.nf4_step_s == pytest.approx(one.nf4_step_s)


def test_the_linears_are_dequantised_twice_in_each_pass_and_once_more_with_checkpointing() -> None:
    plain, twice = lora("batch.micro_batch_size=2"), lora("batch.micro_batch_size=1")
    again = lora("batch.micro_batch_size=2", "memory.activation_checkpointing=on")
    seconds = []
    for config in (plain, twice, again):
        found = quantized_cost(
            config,
            LARGE,
            world_size=1,
            dtype="bf16",
            core_flops_per_s={"bf16": 1e12, "fp32": 5e11},
            dequantized_per_s=None,
            cores=1,
            room_bytes=None,
        )
        assert found is not None
        seconds.append(found.dequantize_s)
    linears = sum(each.inputs * each.outputs for each in LARGE.linears())
    assert seconds[0] == pytest.approx(16 * 2 * linears / TYPICAL_DEQUANTIZED_PER_S["bf16"])
    assert seconds[1] == pytest.approx(2 * seconds[0])
    assert seconds[2] == pytest.approx(1.5 * seconds[0])


def test_a_run_without_an_adapter_has_nothing_to_compare() -> None:
    config = parse_run_config("", where="test")
    found = quantized_cost(
        config,
        LARGE,
        world_size=1,
        dtype="bf16",
        core_flops_per_s={"bf16": 1e12, "fp32": 5e11},
        dequantized_per_s=None,
        cores=1,
        room_bytes=None,
    )
    assert found is None


def test_the_sizes_of_packaged_recipes_models_are_known_without_a_network() -> None:
    large = preset_of_hub_name("meta-llama/Llama-3.3-70B-Instruct")
    assert large is not None and large.num_params() == 70_553_706_496
    small = preset_of_hub_name("Qwen/Qwen3-4B@main")
    assert small is not None and round(small.num_params() / 1e6) == 4022


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("quantize", ["nf4", "none"])
def test_the_70b_recipe_is_planned_on_its_machines_without_weights_or_network(
    tmp_path: Path, quantize: str
) -> None:
    recipe = REPO / "payload/configs"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "payload.orchestrate", "plan", "--json"),
            *("--config", str(recipe / "llama70b_lora_nf4_zero3.toml")),
            *("--inventory", str(recipe / "llama70b_machines.json")),
            *("--set", f"model.quantize={quantize}", "--runs-dir", str(tmp_path)),
        ],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)
    numbers, quantized = planned["plan"]["arithmetic"], planned["estimate"]["quantized"]
    assert planned["plan"]["world_size"] == 8
    assert numbers["params"] > 69e9 and planned["estimate"]["seconds"] > 0
    # Half a byte for most weights; or two bytes for each weight, and four while they are read.
    low, high = (35, 130) if quantize == "nf4" else (130, 290)
    assert low * GIB < numbers["memory_bytes_per_rank"] < high * GIB
    assert quantized["whole_bytes"] - quantized["nf4_bytes"] > 90 * GIB
