"""One process of `benchmarks.step`: the step of transformers' own model, unmodified.

The model comes from the folder's config (and its weights, if there are any) and runs under autocast
to bf16 with torch's fused AdamW. It gets the targets as `shift_labels`, so that its loss covers the
same tokens as the loss of this project.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.timed_steps import precision, random_batch, take_steps


def main(work: dict[str, Any]) -> None:
    """Take the steps, and print one JSON object."""
    import transformers

    torch.manual_seed(1)
    model = transformers_model(Path(work["folder"])).train()
    weights = list(model.parameters())
    report = steps_of(model, work, optimizer=_adamw(weights), trained=weights)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(report | {"versions": versions}))


def steps_of(
    model: Any,
    work: dict[str, Any],
    *,
    optimizer: torch.optim.Optimizer,
    trained: Sequence[torch.nn.Parameter],
) -> dict[str, Any]:
    """Take the steps of a model with transformers' forward; return their report."""
    batch = random_batch(work, work["vocab_size"])

    def micro_batch() -> torch.Tensor:
        targets = batch[:, 1:].contiguous()
        with precision(work):
            loss: torch.Tensor = model(
                input_ids=batch[:, :-1], labels=targets, shift_labels=targets, use_cache=False
            ).loss
        torch.autograd.backward(loss / work["accumulation"])
        return loss

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return take_steps(work, micro_batch, update)


def transformers_model(folder: Path) -> Any:
    """Return transformers' model of a folder in fp32; without weights they are random."""
    import transformers

    classes: Any = transformers.AutoModelForCausalLM
    if any(folder.glob("*.safetensors")):
        return classes.from_pretrained(folder, dtype=torch.float32)
    config = transformers.AutoConfig.from_pretrained(folder)
    return classes.from_config(config, dtype=torch.float32)


def _adamw(weights: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [each for each in weights if each.dim() >= 2], "weight_decay": 0.1},
        {"params": [each for each in weights if each.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-5, betas=(0.9, 0.95), fused=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
