"""One process of `benchmarks.step`: nanoGPT's model and optimizer, or Intel's module, unmodified.

Needs torch alone, so that it runs in the peer's own environment. The loop is that of nanoGPT's
train.py; autocast, which it leaves out on CPU, is what makes its products bf16 at all. Intel's
module passes model and optimizer through `ipex.optimize` at O1, in bf16.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def main(work: dict[str, Any]) -> None:
    """Take the steps, and print one JSON object."""
    torch.manual_seed(1)
    sys.path.insert(0, work["folder"])
    source: Any = importlib.import_module("model")
    length, is_bf16 = work["sequence_length"], work["dtype"] == "bf16"
    sizes = work["sizes"] | {"block_size": length, "dropout": 0.0, "bias": True}
    model = source.GPT(source.GPTConfig(**sizes)).train()
    optimizer = model.configure_optimizers(0.1, 3e-5, (0.9, 0.95), "cpu")
    versions = {"torch": torch.__version__}
    if work["ipex"]:
        ipex: Any = importlib.import_module("intel_extension_for_pytorch")
        versions["intel_extension_for_pytorch"] = ipex.__version__
        dtype = torch.bfloat16 if is_bf16 else torch.float32
        model, optimizer = ipex.optimize(
            model, optimizer=optimizer, dtype=dtype, inplace=True, level="O1"
        )
    batch = torch.randint(sizes["vocab_size"], (work["micro_batch_size"], length + 1))
    step_s, cpu_s, loss = [], [], torch.zeros(())
    for _ in range(work["steps"]):
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(work["accumulation"]):
            with _precision(is_bf16):
                _, loss = model(batch[:, :-1], batch[:, 1:].contiguous())
                loss = loss / work["accumulation"]
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step_s.append(time.perf_counter() - started_s)
        cpu_s.append(time.process_time() - started_cpu_s)
    report = {
        "step_s": step_s,
        "cpu_s": cpu_s,
        "last_loss": loss.item() * work["accumulation"],
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": versions,
    }
    print(json.dumps(report))


def _precision(is_bf16: bool) -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if is_bf16 else nullcontext()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
