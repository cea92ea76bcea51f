"""Stages that compare runs on the device with runs on the CPU, or with other runs on the device."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.gpu.chat_inputs import chat_inputs
from benchmarks.gpu.compare import has_same_checkpoint, largest_difference, started_from_scratch
from benchmarks.gpu.runs import ON_CPU, Runs, Settings
from benchmarks.gpu.visit import Found, NoGpuError, require_package

FP32_ERROR = 1e-5
FP32_LOSS = 1e-4
FP32_NORM = 1e-4
BF16_LOSS = 5e-3
BF16_NORM = 1e-2
FP8_LOSS = 1e-2
MIXTURE_LOSS = 5e-4
"""Rounding decides which experts a token gets if two have nearly equal scores."""
PEAK_DIFFERENCE = 0.1
SHARD_LOSS = 1e-5

_GPT2: Settings = {
    "model.n_layer": 4,
    "model.n_head": 4,
    "model.n_embd": 256,
    # At a rate of 1e-3, rounding alone moves the gradient norms of 20 steps by 5e-4.
    "optimizer.lr": 3e-4,
    "optimizer.min_lr": 3e-5,
}
_FOLDER: Settings = {"optimizer.lr": 3e-4, "optimizer.min_lr": 3e-5}
"""Settings of runs from a model's folder."""
_RESUME_STEPS, _RESUME_FROM = 6, 3


def device(runs: Runs) -> Found:
    """Read the device's facts and the error of an fp32 matmul."""
    facts = runs.facts = _probe(runs, "device", "benchmarks.gpu.probe")
    if "device" not in facts:
        raise NoGpuError(f"torch {facts['torch']} sees no CUDA device")
    error = facts["fp32_error"]
    return Found(text=f"{error:.1e}", passed=error <= FP32_ERROR)


def fp32(runs: Runs) -> Found:
    """Compare fp32 losses and the first gradient norm with the values of the CPU."""
    return _against_cpu(runs, "fp32", loss_bound=FP32_LOSS, norm_bound=FP32_NORM)


def bf16(runs: Runs) -> Found:
    """Compare bf16 losses and the first gradient norm with the values of the CPU."""
    return _against_cpu(runs, "bf16", loss_bound=BF16_LOSS, norm_bound=BF16_NORM)


def llama(runs: Runs) -> Found:
    """Compare losses of a small Llama, all of whose weights are trained."""
    return _folder_against_cpu(runs, "llama-full", runs.llama(), loss_bound=FP32_LOSS)


def mixture(runs: Runs) -> Found:
    """Compare losses of a small mixture of experts."""
    return _folder_against_cpu(runs, "mixture", runs.mixture(), loss_bound=MIXTURE_LOSS)


def chat(runs: Runs) -> Found:
    """Compare losses of packed conversations, several in each sequence, in fp32 and bf16."""
    require_package("tokenizers", setting="the task chat")
    model, data = chat_inputs(runs)
    settings: Settings = {**_FOLDER, "task.kind": "chat", "model.init": model, "data.dir": data}
    in_bf16 = {**settings, "precision.dtype": "bf16"}
    runs.train(
        {
            "chat": settings,
            "chat-cpu": {**settings, **ON_CPU},
            "chat-bf16": in_bf16,
            "chat-bf16-cpu": {**in_bf16, **ON_CPU},
        }
    )
    loss, rounded = _apart(runs, "chat", "chat-cpu"), _apart(runs, "chat-bf16", "chat-bf16-cpu")
    text = f"fp32 losses {loss:.1e}, bf16 losses {rounded:.1e}"
    return Found(text=text, passed=loss <= FP32_LOSS and rounded <= BF16_LOSS)


def deterministic_resume(runs: Runs) -> Found:
    """Compare a resumed run with the uninterrupted run, bit by bit."""
    whole, half = _resume(runs, "deterministic", {"engine.deterministic": "true"})
    loss = _apart(runs, half, whole)
    same = has_same_checkpoint(runs.paths(half), runs.paths(whole), step=_RESUME_STEPS)
    found = "bitwise" if same and loss == 0 else f"losses {loss:.1e}, different bits"
    return Found(text=found, passed=same and loss == 0)


def plain_resume(runs: Runs) -> Found:
    """Compare the losses of a resumed run without `engine.deterministic`."""
    whole, half = _resume(runs, "plain", {})
    loss = _apart(runs, half, whole)
    return Found(text=f"losses {loss:.1e}", passed=loss <= FP32_LOSS)


def resume_on_cpu(runs: Runs) -> Found:
    """Compare the losses after the CPU resumes the device's run."""
    whole, half = _resume(runs, "plain", {}, suffix="cpu", resumed=ON_CPU)
    loss = _apart(runs, half, whole)
    return Found(text=f"losses {loss:.1e}", passed=loss <= FP32_LOSS)


def resume_from_cpu(runs: Runs) -> Found:
    """Compare the losses after the device resumes the CPU's run."""
    on_device: Settings = {"device.kind": runs.device, "engine.kernels": "auto"}
    whole, half = _resume(runs, "on-cpu", ON_CPU, resumed=on_device)
    loss = _apart(runs, half, whole)
    return Found(text=f"losses {loss:.1e}", passed=loss <= FP32_LOSS)


def sync_check(runs: Runs) -> Found:
    """Try the sync check on the device's tensors."""
    found = _probe(runs, "sync-check", "benchmarks.gpu.probe_sync_check")
    text = ", ".join(name if right else f"NOT {name}" for name, right in found.items())
    return Found(text=text, passed=all(found.values()))


def peak(runs: Runs) -> Found:
    """Compare the calibration's GEMM peak with a direct measurement."""
    rates = _probe(runs, "peak", "benchmarks.gpu.probe_peak")
    calibrated, direct = rates["calibrated"], rates["direct"]
    apart = abs(calibrated / direct - 1)
    text = f"{calibrated / 1e12:,.2f} and {direct / 1e12:,.2f} TFLOP/s, {apart:.1%} apart"
    return Found(text=text, passed=runs.rehearsal or apart <= PEAK_DIFFERENCE, numbers=rates)


def lora(runs: Runs) -> Found:
    """Train an adapter of a small Llama."""
    return _adapter(runs, "lora", {})


def nf4(runs: Runs) -> Found:
    """Train an adapter of the same model in 4 bits."""
    require_package("bitsandbytes", setting="model.quantize")
    return _adapter(runs, "nf4", {"model.quantize": "nf4"})


def fp8(runs: Runs) -> Found:
    """Train a small Llama with linears in 8-bit floats."""
    require_package("torchao", setting="precision.fp8")
    settings: Settings = {
        "model.init": runs.llama(),
        "precision.dtype": "bf16",
        "optimizer.lr": 1e-3,
        "optimizer.min_lr": 1e-4,
    }
    on, emulated = ({**settings, "precision.fp8": kind} for kind in (runs.fp8(), "emulated"))
    runs.train({"fp8": on, "fp8-off": settings, "fp8-emulated": emulated})
    off = _apart(runs, "fp8", "fp8-off")
    emulation = _apart(runs, "fp8", "fp8-emulated")
    text = f"losses {off:.1e} from bf16, {emulation:.1e} from the emulation"
    return Found(text=text, passed=max(off, emulation) <= FP8_LOSS)


def shard(runs: Runs) -> Found:
    """Train with FSDP2 on one rank."""
    plain = {**_GPT2, "precision.dtype": "fp32"}
    runs.train({"fp32": plain})
    sharded = {**plain, "distributed.strategy": "shard"}
    runs.train({"shard": sharded}, module="benchmarks.gpu.one_rank_shard")
    loss = _apart(runs, "shard", "fp32")
    return Found(text=f"losses {loss:.1e}", passed=loss <= SHARD_LOSS)


def _folder_against_cpu(runs: Runs, name: str, folder: Path, *, loss_bound: float) -> Found:
    settings: Settings = {**_FOLDER, "model.init": folder}
    runs.train({name: settings, f"{name}-cpu": {**settings, **ON_CPU}})
    loss = _apart(runs, name, f"{name}-cpu")
    return Found(text=f"losses {loss:.1e}", passed=loss <= loss_bound)


def _probe(runs: Runs, name: str, module: str) -> dict[str, Any]:
    """Run a program that writes a JSON object for the device; return the object."""
    path = runs.folder / f"{name}.json"
    runs.programs.run(name, module, runs.device, str(path))
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _against_cpu(runs: Runs, dtype: str, *, loss_bound: float, norm_bound: float) -> Found:
    cpu, settings = f"{dtype}-cpu", {**_GPT2, "precision.dtype": dtype}
    runs.train({dtype: settings, cpu: {**settings, **ON_CPU}})
    loss = _apart(runs, dtype, cpu)
    # Later norms depend on the updates.
    norm = largest_difference(runs.rows(dtype)[:1], runs.rows(cpu)[:1], "grad_norm")
    text = f"losses {loss:.1e}, first gradient norm {norm:.1e}"
    return Found(text=text, passed=loss <= loss_bound and norm <= norm_bound)


def _resume(
    runs: Runs,
    name: str,
    settings: Settings,
    *,
    suffix: str = "resumed",
    resumed: Settings | None = None,
) -> tuple[str, str]:
    """Train, then resume a copy from the middle checkpoint; return both runs' names."""
    every: Settings = {
        **_GPT2,
        **settings,
        "train.steps": _RESUME_STEPS,
        "train.checkpoint_every": _RESUME_FROM,
    }
    runs.train({name: every})
    copy = runs.paths(f"{name}-{suffix}")
    shutil.copytree(runs.paths(name).root, copy.root, symlinks=True)
    shutil.rmtree(copy.checkpoint(_RESUME_STEPS))
    runs.train({copy.run_id: {**every, **(resumed or {})}})
    rows = runs.rows(copy.run_id)
    if started_from_scratch(rows, runs.rows(name)[:_RESUME_FROM]):
        raise RuntimeError(f"{copy.run_id} started at step 1, not after step {_RESUME_FROM}")
    return name, copy.run_id


def _adapter(runs: Runs, name: str, settings: Settings) -> Found:
    every: Settings = {
        "model.init": runs.llama(),
        "adapter.kind": "lora",
        # At a rate of 1e-2, rounding alone moves the losses of 20 steps by 4.5e-4.
        "optimizer.lr": 3e-3,
        "optimizer.min_lr": 3e-4,
        **settings,
    }
    in_bf16 = {**every, "precision.dtype": "bf16"}
    runs.train({name: every, f"{name}-cpu": {**every, **ON_CPU}, f"{name}-bf16": in_bf16})
    loss = _apart(runs, name, f"{name}-cpu")
    rounded = _apart(runs, f"{name}-bf16", name)
    first, last = (runs.rows(name)[index]["loss"] for index in (0, -1))
    text = f"fp32 losses {loss:.1e}, bf16 {rounded:.1e} from fp32, {first:.3f} to {last:.3f}"
    passed = loss <= FP32_LOSS and rounded <= BF16_LOSS and last < first
    return Found(text=text, passed=passed)


def _apart(runs: Runs, ours: str, reference: str) -> float:
    """Return the largest relative difference of the losses."""
    return largest_difference(runs.rows(ours), runs.rows(reference), "loss")
