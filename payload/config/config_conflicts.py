"""CONTRACT IN: the settings of run.toml that are each allowed, but not together."""

from __future__ import annotations

from payload.config.launch_sections import DeviceSection, DistributedSection, LimitsSection
from payload.config.settings import AUTO
from payload.config.training_sections import (
    AdapterSection,
    BatchSection,
    EngineSection,
    ModelSection,
    OptimizerSection,
    PrecisionSection,
    ScheduleSection,
    TaskSection,
    TrainSection,
)
from payload.optimizers.base import Split
from payload.optimizers.registry import find as find_optimizer


def schedule_conflicts(
    optimizer: OptimizerSection, schedule: ScheduleSection, train: TrainSection, *, decay_steps: int
) -> list[str]:
    """Say where the learning rates or the parts of the schedule do not go together."""
    found = []
    if optimizer.min_lr > optimizer.lr:
        found.append(
            f"optimizer.min_lr = {optimizer.min_lr} is above lr = {optimizer.lr}; lower it."
        )
    if schedule.warmup_steps >= train.steps and schedule.warmup_steps:
        found.append(
            f"schedule.warmup_steps = {schedule.warmup_steps} leaves nothing of train.steps = "
            f"{train.steps}; lower it."
        )
    if schedule.kind == "wsd" and schedule.warmup_steps + decay_steps > train.steps:
        found.append(
            f"schedule.warmup_steps + decay_steps = {schedule.warmup_steps} + "
            f"{decay_steps} is more than train.steps = {train.steps}; lower one."
        )
    if schedule.kind == "cosine" and decay_steps <= schedule.warmup_steps:
        found.append(
            f"schedule.decay_steps = {decay_steps} is not above warmup_steps = "
            f"{schedule.warmup_steps}. Raise decay_steps, or lower warmup_steps."
        )
    return found


def batch_conflicts(batch: BatchSection) -> list[str]:
    """Say why a global batch is not made of whole micro-batches."""
    size = batch.micro_batch_size
    if size == AUTO or not batch.global_batch_size % size:
        return []
    return [
        f"batch.global_batch_size = {batch.global_batch_size} is not a multiple of "
        f"micro_batch_size = {size}. Set micro_batch_size to a number that divides it."
    ]


def backend_conflicts(distributed: DistributedSection, device: DeviceSection) -> list[str]:
    """Say why the backend cannot move this device's tensors."""
    if device.kind != "cpu" or distributed.backend != "nccl":
        return []
    return [
        'distributed.backend = "nccl" moves GPU tensors only, but device.kind = "cpu". Use gloo.'
    ]


def timeout_conflicts(limits: LimitsSection, distributed: DistributedSection) -> list[str]:
    """Say why ranks would give each other up before a hang is found."""
    if limits.hang_timeout_s <= distributed.longest_wait_s():
        return []
    return [
        f"limits.hang_timeout_s = {limits.hang_timeout_s:g} is above nine tenths of "
        f"distributed.timeout_s = {distributed.timeout_s:g}: the ranks would give each "
        "other up before a hang is found. Lower the one or raise the other."
    ]


def strategy_conflicts(
    distributed: DistributedSection,
    *,
    optimizer: OptimizerSection,
    engine: EngineSection,
    adapter: AdapterSection,
    task: TaskSection,
) -> list[str]:
    """Say what does not go with the run's strategy: a sentence for each."""
    found = (
        _split_conflicts(
            distributed, optimizer=optimizer, engine=engine, adapter=adapter, task=task
        )
        if distributed.splits_model()
        else []
    )
    strategy = f'"{distributed.strategy}"'
    if distributed.strategy != "shard" and distributed.shard_size is not None:
        found.append(
            f"distributed.shard_size = {distributed.shard_size} needs distributed.strategy = "
            '"shard". Set it, or leave shard_size out.'
        )
    if distributed.strategy == "replicate":
        return found
    setting = f"distributed.strategy = {strategy}"
    found += _optimizer_conflicts(optimizer, setting, splits="matrices")
    found += _plain_engine_conflicts(setting, engine)
    if distributed.backend == "ccl":
        found.append(
            f'distributed.backend = "ccl": on CPUs strategy = {strategy} is for gloo alone. Use '
            "gloo."
        )
    if distributed.strategy == "zero3" and distributed.grad_dtype != "fp32":
        found.append(
            f'distributed.grad_dtype = "{distributed.grad_dtype}": DeepSpeed would add gradients '
            'up in it. Use fp32 with strategy = "zero3".'
        )
    return found


def _split_conflicts(
    distributed: DistributedSection,
    *,
    optimizer: OptimizerSection,
    engine: EngineSection,
    adapter: AdapterSection,
    task: TaskSection,
) -> list[str]:
    """Say what does not go with ranks that make a pass together."""
    found = []
    names = [
        f"distributed.{name} = {size}"
        for name, size in (
            ("tensor_parallel", distributed.tensor_parallel),
            ("pipeline_parallel", distributed.pipeline_parallel),
        )
        if size > 1
    ]
    setting = " with ".join(names)
    if distributed.strategy == "zero3":
        found.append(
            f'{setting} does not run with distributed.strategy = "zero3": DeepSpeed takes all '
            'ranks for shards of a whole model. Use strategy = "shard" or "replicate" with it.'
        )
    found += _optimizer_conflicts(optimizer, setting, splits="model")
    found += _plain_engine_conflicts(setting, engine)
    if distributed.backend not in ("auto", "gloo"):
        found.append(
            f'distributed.backend = "{distributed.backend}": {setting} is for gloo alone. Use gloo.'
        )
    if adapter.is_on():
        found.append(
            f'adapter.kind = "{adapter.kind}" does not run with {setting}. Set that to 1, or '
            'adapter.kind to "none".'
        )
    if not task.splits_model():
        found.append(
            f'task.kind = "{task.kind}" does not run with {setting}. Use '
            'distributed.strategy = "shard" without it.'
        )
    return found


def _optimizer_conflicts(optimizer: OptimizerSection, setting: str, *, splits: Split) -> list[str]:
    """Say why the optimizer does not run where `setting` splits the weights."""
    why = find_optimizer(optimizer.name).conflict(setting, splits=splits)
    return [] if why is None else [why]


def quantize_conflicts(
    model: ModelSection,
    *,
    adapter: AdapterSection,
    engine: EngineSection,
    distributed: DistributedSection,
) -> list[str]:
    """Say what does not go with weights of 4 bits."""
    if model.quantize == "none":
        return []
    found, setting = [], f'model.quantize = "{model.quantize}"'
    if not adapter.is_on():
        found.append(
            f'{setting}: weights of 4 bits cannot be trained. Set adapter.kind = "lora", or '
            'model.quantize = "none" for full training.'
        )
    found += _engine_conflicts(setting, engine)
    if distributed.splits_model():
        found.append(
            f"{setting} does not run with distributed.tensor_parallel or pipeline_parallel: blocks "
            "of 4 bits cannot be split. Leave these out."
        )
    if distributed.strategy != "replicate":
        found.append(
            f"{setting} does not run with distributed.strategy = "
            f'"{distributed.strategy}". Set it to "replicate".'
        )
    return found


def fp8_conflicts(
    precision: PrecisionSection,
    *,
    device: DeviceSection,
    adapter: AdapterSection,
    engine: EngineSection,
    distributed: DistributedSection,
) -> list[str]:
    """Say what does not go with 8-bit matmuls."""
    if precision.fp8 == "off":
        return []
    found, setting = [], f'precision.fp8 = "{precision.fp8}"'
    if precision.fp8 == "on" and device.kind == "cpu":
        found.append(
            f'{setting} needs a GPU, but device.kind = "cpu". Set it to "emulated" for the same '
            'rounding, or "off".'
        )
    if precision.dtype == "fp32":
        found.append(
            f'{setting} computes all else in bf16, but precision.dtype = "fp32". Set it to "bf16" '
            'or "auto".'
        )
    if adapter.is_on():
        found.append(
            f'{setting} is for full training, but adapter.kind = "{adapter.kind}". Set fp8 '
            'to "off", or adapter.kind to "none".'
        )
    found += _engine_conflicts(setting, engine)
    if distributed.strategy == "zero3" or distributed.splits_model():
        found.append(
            f'{setting} does not run with distributed.strategy = "zero3", tensor_parallel or '
            'pipeline_parallel. Use "replicate" or "shard" alone, or set fp8 to "off".'
        )
    return found


def _engine_conflicts(setting: str, engine: EngineSection) -> list[str]:
    """Say why what `setting` asks for does not run on this engine."""
    if engine.kind == "native":
        return []
    return [f'{setting} does not run on engine.kind = "{engine.kind}". Set it to "native".']


def _plain_engine_conflicts(setting: str, engine: EngineSection) -> list[str]:
    """Say why what `setting` asks for does not run on this engine, or not compiled."""
    found = _engine_conflicts(setting, engine)
    if engine.compile:
        found.append(f"{setting} does not run with engine.compile = true. Set it to false.")
    return found


def preference_conflicts(task: TaskSection, model: ModelSection) -> list[str]:
    """Say why there is no model for preference pairs to start from."""
    if task.data() != "preference" or model.init != "scratch":
        return []
    return [
        f'task.kind = "{task.kind}" trains away from a model that answers already, but model.init '
        '= "scratch" has none. Name a model.'
    ]


def adapter_conflicts(
    adapter: AdapterSection,
    *,
    model: ModelSection,
    engine: EngineSection,
    distributed: DistributedSection,
) -> list[str]:
    """Say what does not go with training an adapter."""
    if not adapter.is_on():
        return []
    found, kind = [], adapter.kind
    if model.init == "scratch":
        found.append(
            f'adapter.kind = "{kind}" trains beside weights that exist, but model.init = "scratch" '
            "has none. Name a model."
        )
    if adapter.dora and model.quantize != "none":
        found.append(
            "adapter.dora = true does not run with model.quantize = "
            f'"{model.quantize}". Set adapter.dora to false, or model.quantize to "none".'
        )
    if adapter.dora and distributed.strategy != "replicate":
        found.append(
            "adapter.dora = true does not run with distributed.strategy = "
            f'"{distributed.strategy}". Set it to "replicate".'
        )
    return [*found, *_plain_engine_conflicts(f'adapter.kind = "{kind}"', engine)]
