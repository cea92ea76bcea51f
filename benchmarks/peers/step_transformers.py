"""One process of `benchmarks.step`: the step of transformers' own model, unmodified.

The model is built from the folder's config (and its weights, where it has any) and runs under
autocast to bf16 with torch's fused AdamW. It gets the targets as `shift_labels`, so that its loss
is over the same tokens as this project's.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch


def main(work: dict[str, Any]) -> None:
    """Take the steps, and print one JSON object."""
    import transformers

    torch.manual_seed(1)
    model = transformers_model(Path(work["folder"])).train()
    decayed = [each for each in model.parameters() if each.dim() >= 2]
    others = [each for each in model.parameters() if each.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=3e-5,
        betas=(0.9, 0.95),
        fused=True,
    )
    is_bf16, passes = work["dtype"] == "bf16", work["accumulation"]
    size = (work["micro_batch_size"], work["sequence_length"] + 1)
    batch = torch.randint(work["vocab_size"], size)
    step_s, cpu_s, loss = [], [], torch.zeros(())
    for _ in range(work["steps"]):
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(passes):
            with precision(is_bf16):
                targets = batch[:, 1:].contiguous()
                loss = model(
                    input_ids=batch[:, :-1], labels=targets, shift_labels=targets, use_cache=False
                ).loss
            (loss / passes).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step_s.append(time.perf_counter() - started_s)
        cpu_s.append(time.process_time() - started_cpu_s)
    report = {
        "step_s": step_s,
        "cpu_s": cpu_s,
        "last_loss": loss.item(),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    print(json.dumps(report))


def transformers_model(folder: Path) -> Any:
    """Return transformers' model of a folder, in fp32, with random weights where it has none."""
    import transformers

    classes: Any = transformers.AutoModelForCausalLM
    if any(folder.glob("*.safetensors")):
        return classes.from_pretrained(folder, dtype=torch.float32)
    config = transformers.AutoConfig.from_pretrained(folder)
    return classes.from_config(config, dtype=torch.float32)


def precision(is_bf16: bool) -> AbstractContextManager[object]:
    """Return the context of a forward pass."""
    return torch.autocast("cpu", dtype=torch.bfloat16) if is_bf16 else nullcontext()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
