"""A peer of `benchmarks.gpu`: transformers' Trainer with bf16 and SDPA on full sequences."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.peers.measured_training import Clock, causal_model, write_report
from benchmarks.peers.trainer_settings import ClockCallback, trainer_settings
from benchmarks.peers.work import Work


def main(work: Work) -> None:
    """Train, and write the report."""
    clock = Clock(work)
    classes: Any = transformers
    samples = [{"input_ids": row, "labels": row} for row in torch.from_numpy(work.rows())]
    with tempfile.TemporaryDirectory() as folder:
        trainer = classes.Trainer(
            model=causal_model(work),
            args=classes.TrainingArguments(**trainer_settings(work, Path(folder))),
            train_dataset=samples,
            callbacks=[ClockCallback(clock)],
        )
        trained = trainer.train()
    packages = ("transformers", "accelerate", "torch")
    write_report(work, clock, loss=trained.training_loss, packages=packages)


if __name__ == "__main__":
    main(Work.of(sys.argv[1]))
