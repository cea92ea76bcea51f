"""Settings that conflict with each other: an example of each conflict, and its message."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from payload.config.run_config import RunConfig, problems
from payload.config.settings import parse_sections


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Two or more settings with values that a run refuses together."""

    settings: tuple[str, ...]
    """Settings that conflict, written as for `--set`."""
    message: str
    """The error message of a run with these values; it names the values and the fix."""


_SPLITS = ("distributed.tensor_parallel=2", "distributed.pipeline_parallel=2")
_NEED_ADAPTER = ("adapter.dora", "adapter.train_tokens", "model.quantize")

_EXAMPLES: tuple[tuple[str, ...], ...] = (
    ("optimizer.lr=2e-5", "optimizer.min_lr=3e-5"),
    ("train.steps=100", "schedule.warmup_steps=100"),
    ("train.steps=100", "schedule.kind=wsd", "schedule.warmup_steps=50", "schedule.decay_steps=60"),
    ("schedule.kind=cosine", "schedule.warmup_steps=10", "schedule.decay_steps=10"),
    ("batch.global_batch_size=32", "batch.micro_batch_size=5"),
    ("model.n_embd=100", "model.n_head=3"),
    ("limits.hang_timeout_s=120", "distributed.timeout_s=130"),
    ("device.kind=cpu", "distributed.backend=nccl"),
    ("device.kind=cpu", "precision.fp8=on"),
    ("precision.dtype=fp32", "precision.fp8=on"),
    ("adapter.kind=lora", "precision.fp8=on"),
    ("engine.kind=ipex", "precision.fp8=on"),
    ("distributed.strategy=zero3", "precision.fp8=on"),
    *((split, "precision.fp8=on") for split in _SPLITS),
    ("task.kind=preference", "model.init=scratch"),
    ("adapter.kind=lora", "model.init=scratch"),
    ("adapter.kind=lora", "engine.kind=ipex"),
    ("adapter.kind=lora", "engine.compile=true"),
    ("adapter.kind=lora", "model.router=train"),
    ("adapter.dora=true", "model.quantize=nf4"),
    ("adapter.dora=true", "distributed.strategy=shard"),
    ("adapter.train_tokens=7", "distributed.strategy=shard"),
    ("adapter.kind=none", "model.quantize=nf4"),
    ("engine.kind=ipex", "model.quantize=nf4"),
    ("distributed.strategy=shard", "model.quantize=nf4"),
    *((split, "model.quantize=nf4") for split in _SPLITS),
    ("distributed.strategy=replicate", "distributed.shard_size=2"),
    ("distributed.strategy=shard", "distributed.backend=ccl"),
    ("distributed.strategy=zero3", "distributed.grad_dtype=bf16"),
    ("distributed.strategy=shard", "optimizer.name=muon"),
    ("distributed.strategy=shard", "engine.kind=ipex"),
    ("distributed.strategy=shard", "engine.compile=true"),
    *(
        (split, other)
        for split in _SPLITS
        for other in (
            "distributed.strategy=zero3",
            "distributed.backend=ccl",
            "optimizer.name=muon",
            "engine.kind=ipex",
            "engine.compile=true",
            "adapter.kind=lora",
            "task.kind=classify",
        )
    ),
)


def all_conflicts() -> list[Conflict]:
    """Return every conflict between settings that does not depend on the machines."""
    return [conflict for example in _EXAMPLES for conflict in _conflicts_of(example)]


def conflicts_of(name: str) -> list[Conflict]:
    """Return the conflicts of one setting, such as `batch.micro_batch_size`, each message once."""
    examples = (each for each in _EXAMPLES if any(word.startswith(f"{name}=") for word in each))
    return list({x.message: x for example in examples for x in _conflicts_of(example)}.values())


@functools.cache
def _conflicts_of(example: tuple[str, ...]) -> tuple[Conflict, ...]:
    """Return the conflict between all settings of an example."""
    settings = tuple(each.partition("=")[0] for each in example)
    # Without these, some examples would be refused for another reason, too.
    has_adapter = any(each in settings for each in _NEED_ADAPTER)
    overrides = ("model.init=MODEL", *(["adapter.kind=lora"] if has_adapter else []), *example)
    found = problems(parse_sections(RunConfig, "", overrides=overrides, where="example"))
    return tuple(
        Conflict(settings=settings, message=message)
        for message in found
        if len(found) == 1 or all(_names(message, setting) for setting in settings)
    )


def _names(message: str, setting: str) -> bool:
    """Return whether a message names a setting, with or without its section."""
    key = setting.partition(".")[2]
    return setting in message or (key != "kind" and re.search(rf"\b{key}\b", message) is not None)
