"""A peer of `benchmarks.gpu`: TRL's SFTTrainer with packing, bf16 and SDPA.

TRL loads the model itself. A document has as many tokens as a sequence, and TRL's strategy
`wrapped` packs the stream of tokens: each sequence is full, and SDPA needs no mask.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from benchmarks.peers.measured_training import Clock, write_report
from benchmarks.peers.step_peft import lora_config
from benchmarks.peers.step_trl import padding_tokenizer
from benchmarks.peers.trainer_settings import ClockCallback, trainer_settings
from benchmarks.peers.work import Work


def main(work: Work) -> None:
    """Train, and write the report."""
    clock = Clock(work)
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            **trainer_settings(work, Path(folder)),
            max_length=work.sequence_length,
            packing=True,
            packing_strategy="wrapped",
            model_init_kwargs={"dtype": work.weights_dtype(), "attn_implementation": "sdpa"},
        )
        trainer = SFTTrainer(
            model=work.folder,
            args=settings,
            train_dataset=Dataset.from_dict({"input_ids": work.rows()}),
            processing_class=padding_tokenizer(),
            callbacks=[ClockCallback(clock)],
            peft_config=None if work.adapter is None else lora_config(dict(work.adapter)),
        )
        trained = trainer.train()
    packages = ("trl", "transformers", "datasets", "torch")
    write_report(work, clock, loss=trained.training_loss, packages=packages)


if __name__ == "__main__":
    main(Work.of(sys.argv[1]))
