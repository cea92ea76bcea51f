"""A plan's facts about a CPU: dtype, peak, and the share of it that a step reaches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import pytest

from payload.config.run_config import parse_run_config
from payload.core.dtype import Dtype
from payload.machines.core_speed import (
    CPU_NAMES,
    EMULATED_BF16_CORE_FLOPS_PER_S,
    GPU_MFU,
    CpuClass,
    cpu_class,
    has_bf16,
    table_source,
    typical_core_flops_per_s,
    typical_mfu,
)
from payload.machines.machine import discover
from payload.models.gpt2.spec import PRESETS
from payload.orchestrate.follow.run_text import estimate
from payload.orchestrate.inventories.chosen import ResolvedInventory
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.compute_settings import slow_bf16
from payload.orchestrate.runs.planning import PlanTarget, resolve
from payload.orchestrate.runs.resolved_plan import ResolvedPlan
from payload.orchestrate.runs.run_request import PlanRequest
from payload.run_record.run_files import RunPaths

DTYPES: tuple[Dtype, ...] = ("bf16", "fp32")
GPT2, SMOLLM2, TINY = 768, 576, 128


@pytest.mark.parametrize(
    ("core_tflops", "width", "kernels", "measured"),
    [
        (0.21, GPT2, True, 0.81),
        (0.21, GPT2, False, 0.60),
        (0.22, SMOLLM2, True, 0.84),
        (0.45, SMOLLM2, True, 0.73),
        # In fp32: with the kernels for the loss and the update, and without them.
        (0.175, SMOLLM2, False, 0.69),
        (0.175, SMOLLM2, False, 0.65),
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


@pytest.mark.parametrize(
    ("flags", "cpu", "bf16", "fp32"),
    [
        ("avx2 avx512f avx512_bf16 amx_bf16 amx_tile", "amx", 1.2e12, 0.16e12),
        ("avx2 avx512f avx512_bf16", "avx512_bf16", 0.27e12, 0.16e12),
        ("avx2 avx512f avx512_vnni", "avx512", EMULATED_BF16_CORE_FLOPS_PER_S, 0.17e12),
        ("avx avx2 f16c", "avx2", EMULATED_BF16_CORE_FLOPS_PER_S, 0.073e12),
        ("asimd sve bf16", "arm_bf16", 0.16e12, 0.08e12),
        ("asimd asimddp", "arm", EMULATED_BF16_CORE_FLOPS_PER_S, 0.04e12),
        # Another CPU counts as the most common one.
        ("altivec", None, 0.27e12, 0.16e12),
    ],
)
def test_each_class_of_cpus_has_its_row_of_typical_speeds(
    flags: str, cpu: CpuClass | None, bf16: float, fp32: float
) -> None:
    assert cpu_class(flags.split()) == cpu
    found = [typical_core_flops_per_s(each, emulates_bf16=False, cpu=cpu) for each in DTYPES]
    assert found == [bf16, fp32]
    # A node without the instructions emulates them, whatever its class.
    assert typical_core_flops_per_s("bf16", emulates_bf16=True, cpu=cpu) == (
        EMULATED_BF16_CORE_FLOPS_PER_S
    )
    assert table_source(cpu) == f"from a table for CPUs with {CPU_NAMES[cpu or 'avx512_bf16']}"


class Planned(Protocol):
    """Plans a run as if this machine's CPU had bf16 matmuls, lacked them, or gave no answer."""

    def __call__(
        self, *words: str, bf16: bool | None, kept_dtype: Dtype | None = None
    ) -> ResolvedPlan: ...


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    def plan(*words: str, bf16: bool | None, kept_dtype: Dtype | None = None) -> ResolvedPlan:
        profile = "payload.orchestrate.machine_profiles.local_profile"
        monkeypatch.setattr(f"{profile}.has_bf16", lambda: bf16)
        # Otherwise the class of this machine's CPU, which can lack bf16.
        monkeypatch.setattr(f"{profile}._cpu_class", lambda: "avx512_bf16" if bf16 else None)
        overrides = ["launch.launcher=torchrun", "device.kind=cpu", *words]
        config = parse_run_config("", overrides=overrides, where="test")
        return resolve(
            PlanRequest(config=config, vocab_size=None, kept_dtype=kept_dtype),
            PlanTarget(
                chosen=ResolvedInventory(inventory=discover().inventory(), why="test", domains={}),
                profile=LocalAccess(os.environ),
                paths=RunPaths(tmp_path / "runs" / "one"),
                work_dir=tmp_path,
                port=20_000,
            ),
        )

    return plan


SIZES = ("model.preset=gpt2", "batch.micro_batch_size=2")


def test_a_plan_counts_the_memory_of_fp32_where_the_cpu_has_no_bf16(planned: Planned) -> None:
    with_bf16, unknown, without = (planned(*SIZES, bf16=each) for each in (True, None, False))
    named = planned(*SIZES, "precision.dtype=fp32", bf16=True)
    runs = (with_bf16, unknown, without, named)
    assert [each.predicted.dtype() for each in runs] == ["bf16", "bf16", "fp32", "fp32"]
    needs = [each.plan.arithmetic.memory_bytes_per_rank for each in runs]
    assert needs[0] == needs[1] < needs[2] == needs[3]
    # The run measures before it resolves the dtype.
    assert without.config.precision.dtype == "auto"
    assert without.core_flops_per_s["bf16"] == EMULATED_BF16_CORE_FLOPS_PER_S


def test_a_plan_of_a_resume_counts_in_the_checkpoint_s_dtype_unless_one_is_set(
    planned: Planned,
) -> None:
    kept = planned(*SIZES, bf16=True, kept_dtype="fp32")
    fresh = planned(*SIZES, bf16=False)
    assert kept.predicted.dtype() == kept.auto_dtype == "fp32"
    assert kept.plan.arithmetic == fresh.plan.arithmetic
    assert planned(*SIZES, bf16=False, kept_dtype="bf16").predicted.dtype() == "bf16"
    named = planned(*SIZES, "precision.dtype=bf16", bf16=True, kept_dtype="fp32")
    assert named.predicted.dtype() == "bf16"


def test_a_plan_notes_settings_that_compute_in_bf16_on_a_cpu_that_emulates_it(
    planned: Planned,
) -> None:
    def said(*words: str, bf16: bool) -> str:
        return "\n".join(planned(*words, bf16=bf16).notes())

    slow = 'precision.dtype = "bf16" computes in bf16, which is slower than fp32 on CPUs like these'
    assert slow in said("precision.dtype=bf16", bf16=False)
    assert "slower than fp32" not in said("precision.dtype=bf16", bf16=True)
    assert "slower than fp32" not in said(bf16=False)


def test_a_resume_that_stays_in_bf16_where_fp32_is_faster_is_noted_with_what_changes_it(
    planned: Planned,
) -> None:
    said = [
        "\n".join(planned(*words, bf16=bf16, kept_dtype="bf16").notes())
        for words, bf16 in (((), False), ((), True), (("precision.dtype=fp32",), False))
    ]
    assert "as before; --set precision.dtype=fp32 is faster, but needs more memory" in said[0]
    assert "slower than fp32" not in said[1] + said[2]


def test_an_unmeasured_estimate_counts_checkpointing_s_forward_pass_and_the_dequantising(
    planned: Planned, tmp_path: Path
) -> None:
    def seconds(*words: str) -> float:
        run = planned(*SIZES, *words, bf16=False)
        return estimate(run, data=tmp_path, earlier=[], is_local=True).time.training_s

    off, on = (seconds(f"memory.activation_checkpointing={each}") for each in ("off", "on"))
    assert on == pytest.approx(off * 4 / 3, rel=0.1)  # the update takes no longer
    lora = ("model.init=Qwen/Qwen3-4B", "adapter.kind=lora", "memory.activation_checkpointing=off")
    whole, quantized = (seconds(*lora, f"model.quantize={each}") for each in ("none", "nf4"))
    assert quantized > whole


@pytest.mark.parametrize(("bf16", "fp32", "noted"), [(3e10, 1.6e11, True), (1.7e11, 1.6e11, False)])
def test_measured_speeds_decide_whether_bf16_is_noted_as_slower(
    bf16: float, fp32: float, noted: bool
) -> None:
    config = parse_run_config("", overrides=["precision.dtype=bf16"], where="test")
    assert bool(slow_bf16(config, {"bf16": bf16, "fp32": fp32})) is noted
