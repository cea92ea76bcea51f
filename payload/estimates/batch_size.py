"""CONTRACT: the micro-batch size that `batch.micro_batch_size = "auto"` resolves to.

The size is resolved once, when the ranks are placed, and recorded in the run's run.toml. The
choices, in this order:

1. Use the largest size whose memory estimate fits without activation checkpointing.
2. If not even one sequence fits, and `memory.activation_checkpointing` is auto, turn checkpointing
   on and use the largest size that then fits.
3. If not even one sequence fits then, use one sequence, with checkpointing as in step 2; `plan`
   warns.

Micro-batches therefore shrink before layers are recomputed: a smaller micro-batch costs little
time, but a second forward pass costs a third of the step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from payload.config.run_config import RunConfig
from payload.config.settings import AUTO
from payload.core.dtype import Dtype
from payload.models.spec import ModelSpec

USED = 0.9
"""Share of the free memory that the ranks may use. For most runs the estimate is within a tenth of
the measured memory, and other programs also need memory."""

_GIB = 2**30


def resolve_batch(
    config: RunConfig,
    spec: ModelSpec,
    *,
    dtype: Dtype,
    world_size: int,
    ranks_per_node: int,
    free_bytes: int | None,
) -> tuple[RunConfig, str | None]:
    """Return the config with the micro-batch size as a number, and a sentence with the reason.

    `spec` describes the trained model. `free_bytes` is the free memory of the node with the least.
    The ranks of a node share this memory. If the size is already a number, the config is unchanged.
    Raises ConfigError if the ranks cannot divide the global batch evenly.
    """
    batch = config.batch
    if batch.micro_batch_size != AUTO:
        return config, None
    config.require_even(world_size)
    sizes = _divisors(batch.global_batch_size // config.distributed.mesh(world_size).data_ranks)
    setting = f'batch.micro_batch_size = "{AUTO}"'
    if free_bytes is None:
        return with_size(config, 1), (
            f"{setting}: the free memory is unknown, so a micro-batch has 1 sequence"
        )
    room = free_bytes * USED / ranks_per_node
    choices: dict[Literal["off", "auto", "on"], tuple[Literal["off", "auto", "on"], ...]] = {
        "off": ("off",),
        "on": ("on",),
        "auto": ("auto", "on"),
    }
    tried = [
        with_size(config, size, checkpointing=each)
        for each in choices[config.memory.activation_checkpointing]
        for size in reversed(sizes)
    ]
    needs = [each.memory_bytes(spec, dtype=dtype, world_size=world_size) for each in tried]
    fitting = (place for place, need in enumerate(needs) if need <= room)
    place = next(fitting, len(tried) - 1)
    chosen, need = tried[place], needs[place]
    is_on = chosen.memory.activation_checkpointing == "on"
    suffix = " with activation checkpointing" if is_on else ""
    memory = (
        f"{need / _GIB:.1f} of {room / _GIB:.1f} GiB a rank"
        if need <= room
        else f"{need / _GIB:.1f} GiB a rank, more than the {room / _GIB:.1f} GiB available"
    )
    return chosen, (
        f"{setting}: a micro-batch has {chosen.batch.micro_batch()} of at most {sizes[-1]} "
        f"sequences{suffix}; memory: {memory}"
    )


def with_size(
    config: RunConfig, size: int, *, checkpointing: Literal["off", "auto", "on"] | None = None
) -> RunConfig:
    """Return the config with this micro-batch size, and with `checkpointing` if it is not None."""
    memory = config.memory
    if checkpointing is not None:
        memory = replace(memory, activation_checkpointing=checkpointing)
    return replace(config, batch=replace(config.batch, micro_batch_size=size), memory=memory)


def with_auto_size(config: RunConfig, *, auto_size: int | None) -> RunConfig:
    """Return the config with `auto` restored if a plan has resolved it to a number.

    `auto_size` is the resolved number, or None if the user's settings have a number.
    """
    if auto_size is None or config.batch.micro_batch_size != auto_size:
        return config
    return replace(config, batch=replace(config.batch, micro_batch_size=AUTO))


def with_recorded_size(config: RunConfig, recorded: RunConfig, *, world_size: int = 1) -> RunConfig:
    """Return the config of a resume; `auto` becomes the recorded size if it divides the batch.

    With the same micro-batches, a resumed run is bitwise equal to an uninterrupted one.
    """
    size = recorded.batch.micro_batch_size
    if config.batch.micro_batch_size != AUTO or size == AUTO:
        return config
    distributed = config.distributed
    per_model = distributed.tensor_parallel * distributed.pipeline_parallel
    if config.batch.global_batch_size % (size * max(1, world_size // per_model)):
        return config
    is_open = config.memory.activation_checkpointing == AUTO
    kept = recorded.memory.activation_checkpointing if is_open else None
    return with_size(config, size, checkpointing=kept)


def _divisors(number: int) -> list[int]:
    low = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*low, *(number // each for each in low)})
