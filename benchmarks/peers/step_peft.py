"""One process of `benchmarks.step`: the step of PEFT's LoRA on transformers' own model, unmodified.

The base is the folder's, in fp32 under autocast to bf16 as transformers' trainer has it, or in 4
bits by bitsandbytes, which compute in the step's dtype. torch's fused AdamW trains the adapter.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.step_transformers import precision, transformers_model


def main(work: dict[str, Any]) -> None:
    """Take the steps, and print one JSON object."""
    import peft

    torch.manual_seed(1)
    folder = Path(work["folder"])
    is_quantized = work["quantize"] == "nf4"
    base = quantized_model(folder, work["dtype"]) if is_quantized else transformers_model(folder)
    model = peft_model(base, work["adapter"])
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
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
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step_s.append(time.perf_counter() - started_s)
        cpu_s.append(time.process_time() - started_cpu_s)
    versions = {"torch": torch.__version__, "peft": peft.__version__}
    if is_quantized:
        versions["bitsandbytes"] = version("bitsandbytes")
    report = {
        "step_s": step_s,
        "cpu_s": cpu_s,
        "last_loss": loss.item(),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": versions,
    }
    print(json.dumps(report))


def quantized_model(folder: Path, dtype: str) -> Any:
    """Return transformers' model of the folder with its linears in 4 bits, the rest in `dtype`."""
    import transformers

    classes: Any = transformers
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    how = classes.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=kind,
    )
    return classes.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=how, dtype=kind, device_map="cpu"
    )


def peft_model(base: Any, adapter: dict[str, Any]) -> Any:
    """Return transformers' model with PEFT's adapter, ready to train."""
    import peft

    config = peft.LoraConfig(
        r=adapter["rank"],
        lora_alpha=adapter["alpha"],
        lora_dropout=adapter["dropout"],
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    anything: Any = peft
    return anything.get_peft_model(base, config).train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
