"""One process of `benchmarks.step`: the step of PEFT's LoRA on transformers' own model, unmodified.

The base is the model in the folder, in fp32 under autocast to bf16 as in transformers' trainer, or
in 4 bits by bitsandbytes, computed in the step's dtype. torch's fused AdamW trains the adapter.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.step_transformers import steps_of, transformers_model


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
    report = steps_of(model, work, optimizer=optimizer, trained=trained)
    versions = {"torch": torch.__version__, "peft": peft.__version__}
    if is_quantized:
        versions["bitsandbytes"] = version("bitsandbytes")
    print(json.dumps(report | {"versions": versions}))


def quantized_model(folder: Path, dtype: str) -> Any:
    """Return transformers' model of the folder with its linears in 4 bits, the rest in `dtype`."""
    import transformers

    classes: Any = transformers
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    settings = classes.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=kind,
    )
    return classes.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=settings, dtype=kind, device_map="cpu"
    )


def peft_model(base: Any, adapter: dict[str, Any]) -> Any:
    """Return transformers' model with PEFT's adapter, ready to train."""
    import peft

    untyped: Any = peft
    return untyped.get_peft_model(base, lora_config(adapter)).train()


def lora_config(adapter: dict[str, Any]) -> Any:
    """Return PEFT's settings of an adapter on all linears of the layers."""
    import peft

    return peft.LoraConfig(
        r=adapter["rank"],
        lora_alpha=adapter["alpha"],
        lora_dropout=adapter["dropout"],
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
