"""One process of `benchmarks.step`: nanoGPT's model and optimizer, or Intel's module, unmodified.

It needs only torch, so that it runs in the peer's own environment. The loop is the loop of
nanoGPT's train.py, with autocast to bf16, which train.py omits on a CPU. Intel's module optimizes
model and optimizer by `ipex.optimize` at O1, in bf16.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch


def main(work: dict[str, Any]) -> None:
    """Take the steps, and print one JSON object."""
    # This file runs as a script: its folder is the first on the path.
    timed: Any = importlib.import_module("timed_steps")
    torch.manual_seed(1)
    sys.path.insert(0, work["folder"])
    source: Any = importlib.import_module("model")
    length, accumulation = work["sequence_length"], work["accumulation"]
    sizes = work["sizes"] | {"block_size": length, "dropout": 0.0, "bias": True}
    model = source.GPT(source.GPTConfig(**sizes)).train()
    optimizer = model.configure_optimizers(0.1, 3e-5, (0.9, 0.95), "cpu")
    versions = {"torch": torch.__version__}
    if work["ipex"]:
        ipex: Any = importlib.import_module("intel_extension_for_pytorch")
        versions["intel_extension_for_pytorch"] = ipex.__version__
        dtype = torch.bfloat16 if work["dtype"] == "bf16" else torch.float32
        model, optimizer = ipex.optimize(
            model, optimizer=optimizer, dtype=dtype, inplace=True, level="O1"
        )
    batch = timed.random_batch(work, sizes["vocab_size"])

    def micro_batch() -> torch.Tensor:
        with timed.precision(work):
            _, loss = model(batch[:, :-1], batch[:, 1:].contiguous())
            mean: torch.Tensor = loss / accumulation
        torch.autograd.backward(mean)
        return mean.mul(accumulation)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    print(json.dumps({**timed.take_steps(work, micro_batch, update), "versions": versions}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
