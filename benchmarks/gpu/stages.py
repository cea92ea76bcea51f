"""The stages of a visit, the most valuable first."""

from __future__ import annotations

from benchmarks.gpu import correctness as check
from benchmarks.gpu import speed
from benchmarks.gpu.beside_peer import beside_peer
from benchmarks.gpu.speed_cases import SPEED_CASES
from benchmarks.gpu.visit import Stage


def _bound(number: float) -> str:
    """Return a power of ten as 1e-4, not as Python's 1e-04."""
    return f"{number:.0e}".replace("e-0", "e-")


_FP32_LOSSES = f"losses within {_bound(check.FP32_LOSS)}"
_BF16_LOSSES = f"losses within {_bound(check.BF16_LOSS)}"
_MIXTURE_LOSSES = f"losses within {_bound(check.MIXTURE_LOSS)}"
_ADAPTER = f"fp32 {_FP32_LOSSES}, bf16 {_BF16_LOSSES}, the loss falls"

STAGES: tuple[Stage, ...] = (
    Stage(
        name="device",
        compared="an fp32 matmul with float64",
        wanted=f"relative error within {_bound(check.FP32_ERROR)} (TF32: 3e-4)",
        estimate_s=45,
        run=check.device,
    ),
    Stage(
        name="fp32",
        compared="GPT-2 of 4 layers with the CPU's run without kernels",
        wanted=f"{_FP32_LOSSES}, first gradient norm within {_bound(check.FP32_NORM)}",
        estimate_s=40,
        run=check.fp32,
    ),
    Stage(
        name="bf16",
        compared="GPT-2 of 4 layers in bf16 autocast with the CPU's run in bf16",
        wanted=f"{_BF16_LOSSES}, first gradient norm within {_bound(check.BF16_NORM)}",
        estimate_s=40,
        run=check.bf16,
    ),
    *map(beside_peer, SPEED_CASES),
    Stage(
        name="Llama",
        compared="a Llama of 4 layers in fp32 with the CPU's run",
        wanted=_FP32_LOSSES,
        estimate_s=25,
        run=check.llama,
    ),
    Stage(
        name="mixture of experts",
        compared="a Qwen3 mixture of 8 experts and 4 layers in fp32 with the CPU's run",
        wanted=_MIXTURE_LOSSES,
        estimate_s=30,
        run=check.mixture,
    ),
    Stage(
        name="packed chat",
        compared="several conversations in a sequence with the CPU's run, in fp32 and in bf16",
        wanted=f"fp32 {_FP32_LOSSES}, bf16 {_BF16_LOSSES}",
        estimate_s=35,
        run=check.chat,
    ),
    Stage(
        name="deterministic resume",
        compared="engine.deterministic: a resumed run with an uninterrupted one",
        wanted="bitwise",
        estimate_s=30,
        run=check.deterministic_resume,
    ),
    Stage(
        name="resume",
        compared="a resumed run with an uninterrupted one",
        wanted=_FP32_LOSSES,
        estimate_s=30,
        run=check.plain_resume,
    ),
    Stage(
        name="resume on the CPU",
        compared="a run resumed on the CPU with the uninterrupted one",
        wanted=_FP32_LOSSES,
        estimate_s=20,
        run=check.resume_on_cpu,
    ),
    Stage(
        name="resume from the CPU",
        compared="the CPU's run resumed on the device with the uninterrupted run",
        wanted=_FP32_LOSSES,
        estimate_s=20,
        run=check.resume_from_cpu,
    ),
    Stage(
        name="peak",
        compared="the calibration's bf16 GEMM peak with a direct measurement",
        wanted=f"at most {check.PEAK_DIFFERENCE:.0%} apart; in a rehearsal any",
        estimate_s=20,
        run=check.peak,
    ),
    Stage(
        name="sync check",
        compared="digests of the device's tensors with the CPU's; a flipped bit and a NaN",
        wanted="equal digests, both found",
        estimate_s=15,
        run=check.sync_check,
    ),
    Stage(
        name="LoRA",
        compared="an adapter on a Llama of 4 layers with the CPU's run; bf16 with fp32",
        wanted=_ADAPTER,
        estimate_s=40,
        run=check.lora,
    ),
    Stage(
        name="nf4",
        compared="an adapter on 4-bit weights with the CPU's run; bf16 with fp32",
        wanted=_ADAPTER,
        estimate_s=45,
        run=check.nf4,
    ),
    speed.at_micro_batch(32, judged=True, estimate_s=30),
    speed.at_micro_batch(8, estimate_s=25),
    speed.at_micro_batch(64, estimate_s=30),
    speed.at_micro_batch("auto", estimate_s=35),
    Stage(
        name="fp8",
        compared="a Llama with 8-bit matmuls with bf16 and with emulated fp8",
        wanted=f"losses within {_bound(check.FP8_LOSS)}",
        estimate_s=45,
        run=check.fp8,
    ),
    Stage(
        name="shard on one rank",
        compared="FSDP2 and NCCL in a group of one with the fp32 run",
        wanted=f"losses within {_bound(check.SHARD_LOSS)}",
        estimate_s=25,
        run=check.shard,
    ),
    speed.at_micro_batch(32, also="engine.compile", settings=speed.compiled, estimate_s=90),
    speed.at_micro_batch(32, also="fp8", settings=speed.in_fp8, estimate_s=30),
)
