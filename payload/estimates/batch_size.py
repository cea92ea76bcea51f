"""CONTRACT: the sequences of a pass that `batch.micro_batch_size = "auto"` stands for.

They are chosen once, where the ranks are placed, and the run's run.toml has the number. The order
of the decisions:

1. The largest size without activation checkpointing whose estimate fits into the memory.
2. Where not even one sequence fits, and `memory.activation_checkpointing` is auto, it is turned on:
   the largest size with it.
3. Where that does not fit either, one sequence with what step 2 chose, and a warning from the plan.

So passes become smaller before layers are computed twice: a smaller pass costs little time, a
second forward pass costs a third of the step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from payload.config.run_config import RunConfig
from payload.config.settings import AUTO
from payload.core.dtype import Dtype
from payload.models.spec import ModelSpec

USED = 0.9
"""The share of the free memory that the ranks may fill: an estimate is within a tenth of most runs,
and other programs need some."""

_GIB = 2**30


def settle_batch(
    config: RunConfig,
    spec: ModelSpec,
    *,
    dtype: Dtype,
    world_size: int,
    ranks_per_node: int,
    free_bytes: int | None,
) -> tuple[RunConfig, str | None]:
    """Return the config with a number for the micro-batch, and a sentence that says why that one.

    `spec` is that of what is trained, `free_bytes` the free memory of the node with the least,
    which its ranks share. A number stays as it is. Raises ConfigError where the ranks cannot share
    the global batch evenly.
    """
    batch = config.batch
    if batch.micro_batch_size != AUTO:
        return config, None
    config.require_even(world_size)
    sizes = _divisors(batch.global_batch_size // config.distributed.mesh(world_size).data_ranks)
    wanted = f'batch.micro_batch_size = "{AUTO}"'
    if free_bytes is None:
        return with_size(config, 1), (
            f"{wanted}: 1 sequence a pass, as the free memory is not known here"
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
    how = " with activation checkpointing" if is_on else ""
    fits = " of the" if need <= room else ", more than the"
    return chosen, (
        f"{wanted}: {chosen.batch.sequences()} of a rank's {sizes[-1]} sequences a pass{how}; "
        f"about {need / _GIB:.1f} GiB a rank{fits} {room / _GIB:.1f} that it may fill"
    )


def with_size(
    config: RunConfig, size: int, *, checkpointing: Literal["off", "auto", "on"] | None = None
) -> RunConfig:
    """Return the config with this micro-batch, and with `checkpointing` where it is given."""
    memory = config.memory
    if checkpointing is not None:
        memory = replace(memory, activation_checkpointing=checkpointing)
    return replace(config, batch=replace(config.batch, micro_batch_size=size), memory=memory)


def left_open(config: RunConfig, *, auto_size: int | None) -> RunConfig:
    """Return the config with `auto` again where its number is the one that a plan chose for it.

    `auto_size` is that number; None where the settings named one.
    """
    if auto_size is None or config.batch.micro_batch_size != auto_size:
        return config
    return replace(config, batch=replace(config.batch, micro_batch_size=AUTO))


def as_recorded(config: RunConfig, recorded: RunConfig, *, world_size: int = 1) -> RunConfig:
    """Return the config of a resume: `auto` is what the run settled on, as long as that divides.

    So a resumed run computes with the same passes, and to the same bits.
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
