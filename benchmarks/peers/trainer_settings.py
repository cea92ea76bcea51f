"""Settings of transformers' Trainer that its peers in `benchmarks.gpu` share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from benchmarks.peers.measured_training import Clock
from benchmarks.peers.work import Work

_Callback: Any = transformers.TrainerCallback


class ClockCallback(_Callback):  # type: ignore[misc]  # the class has no types
    """Counts the trainer's steps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Count a step."""
        self._clock.step_done()


def trainer_settings(work: Work, output: Path) -> dict[str, Any]:
    """Return arguments of TrainingArguments: bf16 autocast, fused AdamW, no checkpointing."""
    return {
        "output_dir": str(output),
        "per_device_train_batch_size": work.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "max_steps": work.all_steps(),
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,
        "learning_rate": 3e-5,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "bf16": True,
        "use_cpu": work.device == "cpu",
        "logging_steps": work.all_steps(),
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
