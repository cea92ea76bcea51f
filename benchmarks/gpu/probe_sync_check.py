"""Try the sync check on tensors of the device, as JSON: its digests, and the errors that it finds.

python -m benchmarks.gpu.probe_sync_check cuda FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from payload.config.training_sections import OptimizerSection
from payload.models.gpt2.spec import PRESETS
from payload.train.models.loading import build
from payload.train.optimizers.optimizer import Optimizers, build_optimizers
from payload.train.strategies.sync_check import inspect_each, rank_state


def main(device: str, path: Path) -> None:
    """Write whether each of three checks on `device` gave the right result, by its name."""
    optimizers = _trained(device)
    tensors = dict(optimizers.model.named_parameters()) | optimizers.state_tensors()
    on_device, on_cpu = (
        inspect_each((name, tensor.detach().to(place)) for name, tensor in tensors.items())
        for place in (device, "cpu")
    )
    before = rank_state(optimizers)
    name, weight = next(iter(optimizers.model.named_parameters()))
    bits = weight.detach().view(-1).view(torch.int32)
    bits[0] ^= 1
    flipped = rank_state(optimizers)
    bits[0] ^= 1
    weight.detach().view(-1)[-1] = float("nan")
    spoiled = rank_state(optimizers, is_alone=True)
    found = {
        "digests equal to the CPU's": on_device == on_cpu and before.not_finite is None,
        "a flipped bit found": flipped.weights != before.weights,
        "a NaN found": spoiled.not_finite == name,
    }
    path.write_text(json.dumps(found), encoding="utf-8")


def _trained(device: str) -> Optimizers:
    """Return the optimizers of a small model after one step on the device."""
    torch.manual_seed(1)
    spec = PRESETS["tiny"]
    model = build(spec).to(device)
    optimizers = build_optimizers(model, OptimizerSection())
    optimizers.make_state()
    tokens = torch.randint(spec.vocab_size, (2, 33), device=device)
    torch.autograd.backward(model(tokens[:, :-1], tokens[:, 1:]))
    optimizers.clip(1.0)
    optimizers.step()
    return optimizers


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
