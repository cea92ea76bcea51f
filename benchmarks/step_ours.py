"""One process of `benchmarks.step`: this project's step, built from the trainer's modules."""

from __future__ import annotations

import json
import logging
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from benchmarks.peers.timed_steps import random_batch, take_steps
from benchmarks.step_model import has_weights, model_spec, trained_spec
from payload import __version__
from payload.config.training_sections import AdapterSection, EngineSection, OptimizerSection
from payload.kernels.cpu_allocator import use_plain_malloc
from payload.models.spec import RankSetting
from payload.train.gemm_and_network_benchmark import TORCH_DTYPES, calibrate
from payload.train.models.base import CausalLM
from payload.train.models.loading import build, load
from payload.train.models.lora import add_adapter, cast_base_to_bf16, cast_base_to_fp32
from payload.train.optimizers.optimizer import build_optimizers
from payload.train.ranks.world import World
from payload.train.torch_engines import apply_engine

_MATMULS = 50


def main(work: dict[str, Any]) -> None:
    """Take the steps, and print one JSON object."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if work.get("plain_malloc"):
        use_plain_malloc()
    torch.manual_seed(1)
    spec = trained_spec(work)
    dtype, accumulation = work["dtype"], work["accumulation"]
    world = World(rank=0, world_size=1, local_rank=0, local_world_size=1, node="here")
    calibration = calibrate(world, dtype, quantizes=work.get("quantize") == "nf4")
    peak_flops_per_cpu_s = _gemm_flops_per_cpu_s(TORCH_DTYPES[calibration.dtype])
    model = _model(work)
    optimizers = build_optimizers(model, OptimizerSection())
    settings = EngineSection(kernels=work["kernels"])
    setting = RankSetting(
        micro_batch_size=work["micro_batch_size"],
        dtype=dtype,
        kernels=settings.wants_kernels(),
        alone=True,
        accumulates=accumulation > 1,
    )
    engaged = apply_engine(model, optimizers, settings=settings, world=world, setting=setting)
    optimizers.make_state()
    for note in model.speed_notes():
        logging.info(note)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if dtype == "bf16" else "no")
    trained = accelerator.prepare(engaged).train()
    batch = random_batch(work, spec.vocab_size)

    def micro_batch() -> torch.Tensor:
        loss: torch.Tensor = trained(batch[:, :-1], batch[:, 1:])
        accelerator.backward(loss / accumulation)
        return loss

    def update() -> None:
        optimizers.clip(1.0)
        optimizers.step()

    report = take_steps(work, micro_batch, update) | {
        "estimated_bytes": spec.memory_bytes(setting),
        "peak_flops_per_s": calibration.peak_flops_per_s,
        "peak_flops_per_cpu_s": peak_flops_per_cpu_s,
        "dequantized_per_s": calibration.dequantized_per_s,
        "versions": {"torch": version("torch"), "tileforge": __version__},
    }
    print(json.dumps(report))


def _gemm_flops_per_cpu_s(dtype: torch.dtype) -> float:
    """Return the highest rate of a square matmul on one thread, by its CPU time."""
    size, best_s = 1024, float("inf")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    left = torch.full((size, size), 0.5, dtype=dtype)
    out = torch.mm(left, left)
    for _ in range(_MATMULS):
        before_s = time.thread_time()
        torch.mm(left, left, out=out)
        best_s = min(best_s, time.thread_time() - before_s)
    torch.set_num_threads(threads)
    return 2 * size**3 / best_s


def _model(work: dict[str, Any]) -> CausalLM:
    """Return the model, with its adapter if there is one."""
    name = work["model"]
    if has_weights(name):
        model = load(Path(name), quantize=work.get("quantize", "none"))
    else:
        model = build(model_spec(name).with_sequence_length(work["sequence_length"]))
    if work.get("adapter"):
        add_adapter(model, AdapterSection(kind="lora", **work["adapter"]), seed=1)
        (cast_base_to_bf16 if work["dtype"] == "bf16" else cast_base_to_fp32)(model)
    return model


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
