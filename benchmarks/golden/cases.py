"""The compared runs: every strategy and task, and settings that change a step's arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.golden.inputs import MODELS, SEQUENCE_LENGTH, TASKS
from benchmarks.meshes import mesh_settings

STEPS, HALF = 30, 15
"""A run evaluates before its first step, and evaluates and saves after these steps."""
SCRATCH = "scratch"
"""A small GPT-2 with random weights."""

CASES = (
    # One rank: models, tasks and settings.
    "1-replicate-text-scratch",
    "1-replicate-text-gpt2",
    "1-replicate-text-gpt2-torch",
    "1-replicate-text-gpt2-whole",
    "1-replicate-text-gpt2-muon",
    "1-replicate-text-gpt2-dropout-resume",
    "1-replicate-text-gpt2-bf16",
    "1-replicate-text-llama",
    "1-replicate-text-llama-torch",
    "1-replicate-text-gpt_neox-wsd",
    "1-replicate-chat-gemma3_text-recompute",
    "1-replicate-chat-gpt2-dora-dropout",
    "1-replicate-chat-llama-lora-nf4",
    "1-replicate-chat-llama-bf16",
    "1-replicate-classify-gpt2-balanced",
    "1-replicate-classify-gemma3_text-lora",
    "1-replicate-preference-llama",
    "1-replicate-preference-gemma3_text-lora-bf16",
    # Two ranks: strategies and tasks.
    "2-replicate-text-gpt2",
    "2-replicate-text-gpt2-bf16",
    "2-replicate-text-scratch-muon-resume",
    "2-replicate-text-llama-bf16grad",
    "2-replicate-chat-llama-lora-nf4",
    "2-replicate-classify-gpt_neox",
    "2-replicate-preference-llama-lora",
    "2-shard-text-llama-resume",
    "2-shard-text-gpt2-bf16",
    "2-shard-chat-gpt2-lora",
    "2-shard-classify-gemma3_text-recompute",
    "2-shard-preference-gpt2",
    "2-tensor2-text-llama",
    "2-tensor2-chat-gemma3_text-recompute-resume",
    "2-pipeline2-text-gpt2-dropout",
    "2-pipeline2-chat-llama-gpipe-resume",
    # Under zero3, classify and chat on transformers' modules fail in their first step.
    "2-zero3-text-gpt_neox",
    "2-zero3-text-llama-resume",
    "2-zero3-chat-gpt2-lora",
    "2-zero3-preference-llama",
    # Four ranks: combinations.
    "4-shard2-text-gpt2",
    "4-pipeline2-chat-gpt2-recompute",
    "4-pipeline2+shard-text-llama",
    "4-tensor2+shard-chat-gpt2",
    "4-pipeline2+tensor2-text-llama-gpipe",
)
"""Names of the form RANKS-MESH-TASK-MODEL, followed by features."""

FEATURES: Mapping[str, Mapping[str, object]] = {
    "torch": {"engine.kernels": "off"},
    "whole": {"batch.micro_batch_size": 8},
    "muon": {"optimizer.name": "muon"},
    "wsd": {"schedule.kind": "wsd", "schedule.decay_steps": 10},
    "dropout": {"model.dropout": 0.1, "adapter.dropout": 0.1},
    "resume": {},
    "recompute": {"memory.activation_checkpointing": "on"},
    "lora": {"adapter.kind": "lora", "adapter.rank": 4},
    "dora": {"adapter.kind": "lora", "adapter.rank": 4, "adapter.dora": "true"},
    "nf4": {"model.quantize": "nf4"},
    "balanced": {"task.class_weights": "balanced"},
    "gpipe": {"distributed.pipeline_schedule": "gpipe"},
    "bf16": {"precision.dtype": "bf16"},
    "bf16grad": {"distributed.grad_dtype": "bf16"},
}
"""Settings of each feature. `resume` stops the run after `HALF` steps and resumes it."""
_PER_MACHINE = ("bf16", "bf16grad", "muon", "dropout")
"""Features whose losses depend on the CPU, so that they are compared on one machine only.

CPUs round bf16 matmuls differently, and Muon's updates are bf16 matmuls, too. PyTorch draws dropout
masks with MKL on Intel CPUs, and with its own generator on others."""

CONFIG = f"""
[data]
sequence_length = {SEQUENCE_LENGTH}
[device]
kind = "cpu"
[batch]
global_batch_size = 8
micro_batch_size = 2
[optimizer]
lr = 2e-3
min_lr = 2e-4
[schedule]
warmup_steps = 3
decay_steps = {STEPS}
[train]
eval_every = {HALF}
checkpoint_every = {HALF}
sync_check_every = 10
[precision]
dtype = "fp32"
[memory]
activation_checkpointing = "off"
"""
"""Base settings: the run.toml of all runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run of the trainer, started twice if it resumes."""

    name: str
    ranks: int
    mesh: str
    task: str
    model: str
    features: frozenset[str]
    changed: tuple[str, ...] = ()
    """Additional settings that are not in the name."""

    @classmethod
    def parse(cls, name: str) -> Case:
        """Parse a name of `CASES`."""
        ranks, mesh, task, model, *features = name.split("-")
        assert task in TASKS and model in (SCRATCH, *MODELS), name
        return cls(
            name=name,
            ranks=int(ranks),
            mesh=mesh,
            task=task,
            model=model,
            features=frozenset(features),
        )

    def is_portable(self) -> bool:
        """Return whether the losses are equal on all CPUs, within fp32 rounding."""
        return self.features.isdisjoint(_PER_MACHINE)

    def is_zero3(self) -> bool:
        """Return whether the case needs DeepSpeed."""
        return self.mesh == "zero3"

    def inputs(self) -> tuple[str, ...]:
        """Return the names of the case's data folder and model."""
        return (self.task,) if self.model == SCRATCH else (self.task, self.model)

    def starts(self) -> tuple[int, ...]:
        """Return `train.steps` of each start."""
        return (HALF, STEPS) if "resume" in self.features else (STEPS,)

    def settings(self, *, data: Path, models: Path) -> list[str]:
        """Return the overrides of the base settings; `models` has a folder per model."""
        found = {**mesh_settings(self.mesh), "task.kind": self.task, "data.dir": data}
        if self.model == SCRATCH:
            found |= {"model.n_layer": 2, "model.n_head": 4, "model.n_embd": 32}
        else:
            found["model.init"] = models / self.model
        for feature in sorted(self.features):
            found |= FEATURES[feature]
        return [*(f"{key}={value}" for key, value in found.items()), *self.changed]
