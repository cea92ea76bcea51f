"""One process of `benchmarks.step`: this project's step, from the trainer's own parts."""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from benchmarks.step_model import has_weights, model_spec, trained_spec
from payload.config.training_sections import AdapterSection, EngineSection, OptimizerSection
from payload.models.spec import RankSetting
from payload.train.calibration import TORCH_DTYPES, calibrate
from payload.train.models.base import CausalLM
from payload.train.models.loading import build, load
from payload.train.models.lora import add_adapter, cast_base_to_bf16, cast_base_to_fp32
from payload.train.optimizers.optimizer import build_optimizers
from payload.train.ranks.world import World
from payload.train.torch_engines import apply_engine

_PRODUCTS = 50


def main(work: dict[str, Any]) -> None:
    """Take the steps, and print one JSON object."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.manual_seed(1)
    shape = trained_spec(work)
    dtype = work["dtype"]
    alone = World(rank=0, world_size=1, local_rank=0, local_world_size=1, node="here")
    calibration = calibrate(alone, dtype, quantizes=work.get("quantize") == "nf4")
    peak_flops_per_cpu_s = _gemm_flops_per_cpu_s(TORCH_DTYPES[calibration.dtype])
    model = _model(work)
    optimizers = build_optimizers(model, OptimizerSection())
    settings = EngineSection(kernels=work["kernels"])
    passes, micro = work["accumulation"], work["micro_batch_size"]
    setting = RankSetting(
        micro_batch_size=micro,
        dtype=dtype,
        kernels=settings.wants_kernels(),
        alone=True,
        accumulates=passes > 1,
    )
    engaged = apply_engine(model, optimizers, settings=settings, world=alone, setting=setting)
    optimizers.make_state()
    for note in model.speed_notes():
        logging.info(note)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if dtype == "bf16" else "no")
    trained = accelerator.prepare(engaged).train()
    batch = torch.randint(shape.vocab_size, (micro, work["sequence_length"] + 1))
    step_s, cpu_s, loss = [], [], torch.zeros(())
    for _ in range(work["steps"]):
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(passes):
            loss = trained(batch[:, :-1], batch[:, 1:])
            accelerator.backward(loss / passes)
        optimizers.clip(1.0)
        optimizers.step()
        step_s.append(time.perf_counter() - started_s)
        cpu_s.append(time.process_time() - started_cpu_s)
    report = {
        "step_s": step_s,
        "cpu_s": cpu_s,
        "last_loss": loss.item(),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "estimated_bytes": shape.memory_bytes(setting),
        "peak_flops_per_s": calibration.peak_flops_per_s,
        "peak_flops_per_cpu_s": peak_flops_per_cpu_s,
        "dequantized_per_s": calibration.dequantized_per_s,
        "versions": {"torch": version("torch"), "tileforge": version_of_code()},
    }
    print(json.dumps(report))


def _gemm_flops_per_cpu_s(dtype: torch.dtype) -> float:
    """Return the best of many square products of one thread, by its processor time."""
    size, best_s = 1024, float("inf")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    left = torch.full((size, size), 0.5, dtype=dtype)
    out = torch.mm(left, left)
    for _ in range(_PRODUCTS):
        before_s = time.thread_time()
        torch.mm(left, left, out=out)
        best_s = min(best_s, time.thread_time() - before_s)
    torch.set_num_threads(threads)
    return 2 * size**3 / best_s


def _model(work: dict[str, Any]) -> CausalLM:
    """Return the model with its folder's weights, or with random ones; with an adapter if asked."""
    name = work["model"]
    if has_weights(name):
        model = load(Path(name), quantize=work.get("quantize", "none"))
    else:
        model = build(model_spec(name).with_sequence_length(work["sequence_length"]))
    if work.get("adapter"):
        add_adapter(model, AdapterSection(kind="lora", **work["adapter"]), seed=1)
        (cast_base_to_bf16 if work["dtype"] == "bf16" else cast_base_to_fp32)(model)
    return model


def version_of_code() -> str:
    """This project's, installed or not."""
    from payload import __version__

    return __version__


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
