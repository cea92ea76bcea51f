"""CONTRACT IN: conflicts between settings of run.toml, a sentence for each."""

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
from payload.models.adapter import NEW_TOKENS, NO_TOKENS
from payload.optimizers.base import Split
from payload.optimizers.registry import find as find_optimizer


def schedule_conflicts(
    optimizer: OptimizerSection, schedule: ScheduleSection, train: TrainSection, *, decay_steps: int
) -> list[str]:
    """Return the conflicts between learning rates, and between settings of the schedule."""
    found = []
    if optimizer.min_lr > optimizer.lr:
        found.append(
            f"optimizer.min_lr = {optimizer.min_lr} is above lr = {optimizer.lr}. Lower min_lr."
        )
    if schedule.warmup_steps >= train.steps and schedule.warmup_steps:
        found.append(
            f"schedule.warmup_steps = {schedule.warmup_steps} is not below train.steps = "
            f"{train.steps}. Lower warmup_steps."
        )
    if schedule.kind == "wsd" and schedule.warmup_steps + decay_steps > train.steps:
        found.append(
            f"schedule.warmup_steps + decay_steps = {schedule.warmup_steps} + {decay_steps} is "
            f"more than train.steps = {train.steps}. Lower warmup_steps or decay_steps."
        )
    if schedule.kind == "cosine" and decay_steps <= schedule.warmup_steps:
        found.append(
            f"schedule.decay_steps = {decay_steps} is not above warmup_steps = "
            f"{schedule.warmup_steps}. Raise decay_steps, or lower warmup_steps."
        )
    return found


def batch_conflicts(batch: BatchSection) -> list[str]:
    """Return a conflict if the global batch is not a multiple of the micro-batch."""
    size = batch.micro_batch_size
    if size == AUTO or not batch.global_batch_size % size:
        return []
    return [
        f"batch.global_batch_size = {batch.global_batch_size} is not a multiple of "
        f"micro_batch_size = {size}. Set micro_batch_size to a divisor of global_batch_size."
    ]


def backend_conflicts(distributed: DistributedSection, device: DeviceSection) -> list[str]:
    """Return a conflict if the backend cannot transfer tensors of the configured device."""
    if device.kind != "cpu" or distributed.backend != "nccl":
        return []
    return [
        'distributed.backend = "nccl" supports only GPU tensors, but device.kind = "cpu". Set '
        'backend to "gloo".'
    ]


def timeout_conflicts(limits: LimitsSection, distributed: DistributedSection) -> list[str]:
    """Return a conflict if ranks would time out before a hang is detected."""
    if limits.hang_timeout_s <= distributed.longest_wait_s():
        return []
    return [
        f"limits.hang_timeout_s = {limits.hang_timeout_s:g} is above nine tenths of "
        f"distributed.timeout_s = {distributed.timeout_s:g}: the ranks would time out "
        "before a hang is detected. Lower hang_timeout_s, or raise timeout_s."
    ]


def strategy_conflicts(
    distributed: DistributedSection,
    *,
    optimizer: OptimizerSection,
    engine: EngineSection,
    adapter: AdapterSection,
    task: TaskSection,
) -> list[str]:
    """Return the conflicts with the run's strategy."""
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
            '"shard". Set that strategy, or leave shard_size out.'
        )
    if distributed.strategy == "replicate":
        return found
    setting = f"distributed.strategy = {strategy}"
    found += _optimizer_conflicts(optimizer, setting, splits="matrices")
    found += _plain_engine_conflicts(setting, engine)
    if distributed.backend == "ccl":
        found.append(
            f'distributed.backend = "ccl": on CPUs, strategy = {strategy} supports only gloo. Set '
            'backend to "gloo".'
        )
    if distributed.strategy == "zero3" and distributed.grad_dtype != "fp32":
        found.append(
            f'distributed.grad_dtype = "{distributed.grad_dtype}": DeepSpeed would sum the '
            'gradients in this dtype. Use fp32 with strategy = "zero3".'
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
    """Return the conflicts with tensor or pipeline parallelism."""
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
            f'{setting} does not run with distributed.strategy = "zero3": DeepSpeed shards '
            'whole models over all ranks. Use strategy = "shard" or "replicate".'
        )
    found += _optimizer_conflicts(optimizer, setting, splits="model")
    found += _plain_engine_conflicts(setting, engine)
    if distributed.backend not in ("auto", "gloo"):
        found.append(
            f'distributed.backend = "{distributed.backend}": {setting} supports only gloo. Set '
            'backend to "gloo".'
        )
    if adapter.is_on():
        found.append(
            f'adapter.kind = "{adapter.kind}" does not run with {setting}. Use '
            f'distributed.strategy = "shard" without {setting}, or set adapter.kind to "none".'
        )
    if not task.splits_model():
        found.append(
            f'task.kind = "{task.kind}" does not run with {setting}. Use distributed.strategy = '
            f'"shard" without {setting}.'
        )
    return found


def _optimizer_conflicts(optimizer: OptimizerSection, setting: str, *, splits: Split) -> list[str]:
    """Return a conflict if the optimizer cannot update weights that `setting` splits."""
    conflict = find_optimizer(optimizer.name).conflict(setting, splits=splits)
    return [] if conflict is None else [conflict]


def quantize_conflicts(
    model: ModelSection,
    *,
    adapter: AdapterSection,
    engine: EngineSection,
    distributed: DistributedSection,
) -> list[str]:
    """Return the conflicts between 4-bit weights and other settings."""
    if model.quantize == "none":
        return []
    found, setting = [], f'model.quantize = "{model.quantize}"'
    if not adapter.is_on():
        found.append(
            f'{setting}: 4-bit weights cannot be trained. Set adapter.kind = "lora", or '
            'model.quantize = "none" for full training.'
        )
    found += _engine_conflicts(setting, engine)
    if distributed.splits_model():
        found.append(
            f"{setting} does not run with distributed.tensor_parallel or pipeline_parallel: 4-bit "
            "blocks cannot be split. Remove these two settings."
        )
    if distributed.strategy != "replicate":
        found.append(
            f'{setting} does not run with distributed.strategy = "{distributed.strategy}". Set '
            'strategy to "replicate".'
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
    """Return the conflicts between 8-bit matmuls and other settings."""
    if precision.fp8 == "off":
        return []
    found, setting = [], f'precision.fp8 = "{precision.fp8}"'
    if precision.fp8 == "on" and device.kind == "cpu":
        found.append(
            f'{setting} needs a GPU, but device.kind = "cpu". Set fp8 to "emulated" for the same '
            'rounding, or to "off".'
        )
    if precision.dtype == "fp32":
        found.append(
            f'{setting} needs bf16 for the other operations, but precision.dtype = "fp32". Set '
            'dtype to "bf16" or "auto".'
        )
    if adapter.is_on():
        found.append(
            f'{setting} is for full training, but adapter.kind = "{adapter.kind}". Set fp8 to '
            '"off", or set adapter.kind to "none".'
        )
    found += _engine_conflicts(setting, engine)
    if distributed.strategy == "zero3" or distributed.splits_model():
        found.append(
            f'{setting} does not run with distributed.strategy = "zero3", tensor_parallel or '
            'pipeline_parallel. Use "replicate" or "shard" alone, or set fp8 to "off".'
        )
    return found


def _engine_conflicts(setting: str, engine: EngineSection) -> list[str]:
    """Return a conflict if this engine does not support `setting`."""
    if engine.kind == "native":
        return []
    return [
        f'{setting} does not run with engine.kind = "{engine.kind}". Set engine.kind to "native".'
    ]


def _plain_engine_conflicts(setting: str, engine: EngineSection) -> list[str]:
    """Return the conflicts of `setting` with the engine and with compilation."""
    found = _engine_conflicts(setting, engine)
    if engine.compile:
        found.append(f"{setting} does not run with engine.compile = true. Set compile to false.")
    return found


def preference_conflicts(task: TaskSection, model: ModelSection) -> list[str]:
    """Return a conflict if preference training has no model to start from."""
    if task.data() != "preference" or model.init != "scratch":
        return []
    return [
        f'task.kind = "{task.kind}" fine-tunes a model that already answers, but model.init = '
        '"scratch" starts from random weights. Set model.init to a model.'
    ]


def adapter_conflicts(
    adapter: AdapterSection,
    *,
    model: ModelSection,
    engine: EngineSection,
    distributed: DistributedSection,
) -> list[str]:
    """Return the conflicts between an adapter and other settings."""
    if not adapter.is_on():
        return []
    found, kind = [], adapter.kind
    if model.init == "scratch":
        found.append(
            f'adapter.kind = "{kind}" needs existing weights, but model.init = "scratch" starts '
            "from random weights. Set model.init to a model."
        )
    if model.router == "train":
        found.append(
            f'adapter.kind = "{kind}" does not run with model.router = "train". Name the router in '
            "adapter.target, for example mlp.gate.weight."
        )
    if adapter.dora and model.quantize != "none":
        found.append(
            f'adapter.dora = true does not run with model.quantize = "{model.quantize}". Set '
            'adapter.dora to false, or set model.quantize to "none".'
        )
    if adapter.dora and distributed.strategy != "replicate":
        found.append(
            "adapter.dora = true does not run with distributed.strategy = "
            f'"{distributed.strategy}". Set strategy to "replicate".'
        )
    if adapter.train_tokens not in (NEW_TOKENS, NO_TOKENS) and distributed.strategy != "replicate":
        found.append(
            f'adapter.train_tokens = "{adapter.train_tokens}" does not run with '
            f'distributed.strategy = "{distributed.strategy}". Set strategy to "replicate".'
        )
    return [*found, *_plain_engine_conflicts(f'adapter.kind = "{kind}"', engine)]
