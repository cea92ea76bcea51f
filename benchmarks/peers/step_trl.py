"""One process of `benchmarks.step`: the step of TRL's SFTTrainer on transformers' own model.

The step uses TRL's own trainer, loss and collator, autocast to bf16, torch's fused AdamW and
clipping at 1, but no gradient checkpointing. A row has `sequence_length` random tokens and no
padding.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.step_transformers import transformers_model
from benchmarks.peers.timed_steps import peak_rss_bytes


def main(work: dict[str, Any]) -> None:
    """Take the steps, and print one JSON object."""
    import transformers
    import trl
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    class Clock(transformers.TrainerCallback):
        """Times each step, from before its first micro-batch until after its update."""

        def __init__(self) -> None:
            self.step_s: list[float] = []
            self.cpu_s: list[float] = []
            self._began = (0.0, 0.0)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            """Note when the step began."""
            self._began = (time.perf_counter(), time.process_time())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """Note how long the step took."""
            self.step_s.append(time.perf_counter() - self._began[0])
            self.cpu_s.append(time.process_time() - self._began[1])

    torch.manual_seed(1)
    micro, accumulation = work["micro_batch_size"], work["accumulation"]
    # Token 0 is the padding token.
    tokens = torch.randint(1, work["vocab_size"], (micro, work["sequence_length"]))
    rows = [{"input_ids": row} for row in tokens.tolist()] * (accumulation * work["steps"])
    clock: Any = Clock()
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            max_steps=work["steps"],
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
            train_sampling_strategy="sequential",
            gradient_checkpointing=False,
            learning_rate=3e-5,
            lr_scheduler_type="constant",
            weight_decay=0.1,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            bf16=work["dtype"] == "bf16",
            use_cpu=True,
            logging_steps=work["steps"],
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            model=transformers_model(Path(work["folder"])),
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=padding_tokenizer(),
            callbacks=[clock],
        )
        trained = trainer.train()
    report = {
        "step_s": clock.step_s,
        "cpu_s": clock.cpu_s,
        "last_loss": trained.training_loss,
        "peak_rss_bytes": peak_rss_bytes(),
        "versions": {"torch": torch.__version__, "trl": trl.__version__},
    }
    print(json.dumps(report))


def padding_tokenizer() -> Any:
    """Return a tokenizer that only defines the padding token, which the trainer needs."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<pad>")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
