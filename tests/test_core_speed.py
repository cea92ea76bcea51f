"""The facts that a plan has of a CPU: dtype, peak, and the share of it that a step reaches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from payload.core_speed import (
    EMULATED_BF16_CORE_FLOPS_PER_S,
    GPU_MFU,
    has_bf16,
    typical_core_flops_per_s,
    typical_mfu,
)
from payload.machine import discover
from payload.models.gpt2 import PRESETS
from payload.models.spec import Dtype
from payload.orchestrate.planning import PlannedRun, plan_run
from payload.orchestrate.sites.choose import Chosen
from payload.orchestrate.sites.local import LocalAccess
from payload.results import RunPaths
from payload.run_config import parse_run_config
from payload.training_sections import DtypeChoice

GPT2, SMOLLM2, TINY = 768, 576, 128


@pytest.mark.parametrize(
    ("core_tflops", "width", "kernels", "measured"),
    [
        (0.21, GPT2, True, 0.81),
        (0.21, GPT2, False, 0.60),
        (0.22, SMOLLM2, True, 0.84),
        (0.45, SMOLLM2, True, 0.73),
        (1.16, GPT2, True, 0.45),
        (1.16, GPT2, False, 0.23),
        (1.20, SMOLLM2, True, 0.54),
        (1.20, SMOLLM2, False, 0.26),
        (1.20, 1024, True, 0.50),
        (0.21, TINY, True, 0.65),
        (0.21, TINY, False, 0.31),
    ],
)
def test_the_expected_share_is_near_every_one_that_was_measured(
    core_tflops: float, width: int, kernels: bool, measured: float
) -> None:
    found = typical_mfu(kernels=kernels, core_flops_per_s=core_tflops * 1e12, width=width)
    assert found == pytest.approx(measured, rel=0.2)


def test_a_model_that_does_not_say_its_width_counts_as_a_wide_one() -> None:
    wide, unknown = (
        typical_mfu(kernels=True, core_flops_per_s=1e12, width=each) for each in (4096, 0)
    )
    assert wide == unknown == 0.5


def test_fp32_and_gpus_have_the_share_of_steps_without_kernels() -> None:
    auto, fp32, off, gpu = (
        parse_run_config("", overrides=words, where="test")
        for words in ([], ["precision.dtype=fp32"], ["engine.kernels=off"], ["device.kind=cuda"])
    )
    spec = PRESETS["gpt2"]
    plain = off.typical_mfu(spec, core_flops_per_s=2e11)
    assert auto.typical_mfu(spec, core_flops_per_s=2e11) > plain
    assert fp32.typical_mfu(spec, core_flops_per_s=2e11) == plain
    assert gpu.typical_mfu(spec, core_flops_per_s=2e11) == GPU_MFU


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model name\t: X\nflags\t\t: fpu avx512f avx512_bf16 amx_int8\n", True),
        ("flags\t\t: fpu avx512f amx_bf16\n", True),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni\n", False),
        ("Features\t: fp asimd sve bf16 i8mm\n", True),
        ("Features\t: fp asimd\n", False),
        ("model name\t: X\n", None),
    ],
)
def test_a_cpus_flags_say_whether_it_multiplies_bf16(
    tmp_path: Path, text: str, expected: bool | None
) -> None:
    (tmp_path / "cpuinfo").write_text(text, encoding="ascii")
    assert has_bf16(tmp_path / "cpuinfo") is expected
    assert has_bf16(tmp_path / "missing") is None


class OfCpu(LocalAccess):
    """This machine, as if its CPU had instructions for bf16, or none."""

    def __init__(self, *, emulates: bool) -> None:
        super().__init__(os.environ)
        self._emulates = emulates

    def dtype(self, choice: DtypeChoice) -> Dtype:
        if choice != "auto":
            return choice
        return "fp32" if self._emulates else "bf16"

    def core_flops_per_s(self, dtype: Dtype) -> float:
        return typical_core_flops_per_s(dtype, emulates_bf16=self._emulates)


def planned(folder: Path, *words: str, emulates: bool) -> PlannedRun:
    return plan_run(
        RunPaths(folder / "runs" / "one"),
        config=parse_run_config("", overrides=["launch.launcher=torchrun", *words], where="test"),
        chosen=Chosen(inventory=discover().inventory(), why="test", domains={}),
        access=OfCpu(emulates=emulates),
        vocab_size=None,
        work_dir=folder,
        port=20_000,
    )


def test_a_plan_counts_the_memory_of_fp32_where_the_cpu_has_no_bf16(tmp_path: Path) -> None:
    words = ("model.preset=gpt2", "batch.micro_batch_size=2")
    without, with_bf16 = (planned(tmp_path, *words, emulates=each) for each in (True, False))
    named = planned(tmp_path, *words, "precision.dtype=fp32", emulates=False)
    assert with_bf16.predicted.dtype() == "bf16" and without.predicted.dtype() == "fp32"
    needs = [each.plan.arithmetic.memory_bytes_per_rank for each in (with_bf16, without, named)]
    assert needs[0] < needs[1] == needs[2]
    # The run measures before it chooses.
    assert without.config.precision.dtype == "auto"
    assert without.core_flops_per_s["bf16"] == EMULATED_BF16_CORE_FLOPS_PER_S


def test_a_plan_notes_settings_that_compute_in_bf16_on_a_cpu_that_emulates_it(
    tmp_path: Path,
) -> None:
    def said(*words: str, emulates: bool) -> str:
        return "\n".join(planned(tmp_path, *words, emulates=emulates).notes())

    slow = 'precision.dtype = "bf16" computes in bf16, which is slower than fp32 on CPUs like these'
    assert slow in said("precision.dtype=bf16", emulates=True)
    assert "slower than fp32" not in said("precision.dtype=bf16", emulates=False)
    assert "slower than fp32" not in said(emulates=True)
