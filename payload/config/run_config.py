"""CONTRACT IN: what to train, from run.toml. Every key has a default; unknown keys are errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from payload.config.config_conflicts import (
    adapter_conflicts,
    backend_conflicts,
    batch_conflicts,
    fp8_conflicts,
    preference_conflicts,
    quantize_conflicts,
    schedule_conflicts,
    strategy_conflicts,
    timeout_conflicts,
)
from payload.config.launch_sections import (
    DeviceSection,
    DistributedSection,
    LaunchSection,
    LimitsSection,
    MonitorSection,
    StorageSection,
    TrackSection,
)
from payload.config.settings import parse_sections, render_sections
from payload.config.slurm_section import SlurmSection
from payload.config.training_sections import (
    AdapterSection,
    BatchSection,
    DataSection,
    EngineSection,
    MemorySection,
    ModelSection,
    OptimizerSection,
    PrecisionSection,
    RunSection,
    ScheduleSection,
    TaskSection,
    TrainSection,
)
from payload.core.dtype import Dtype
from payload.core.errors import ConfigError
from payload.core.regular_files import read_bytes
from payload.machines.core_speed import GPU_MFU, typical_core_flops_per_s, typical_mfu
from payload.models.adapter import AdaptedSpec
from payload.models.classifier import ClassifierSpec
from payload.models.spec import ModelSpec, RankSetting
from payload.optimizers.registry import find as find_optimizer

_FIXED = (
    ("run", "seed"),
    ("data", "sequence_length"),
    ("model", "preset"),
    ("model", "quantize"),
    ("model", "bias"),
    ("model", "n_layer"),
    ("model", "n_head"),
    ("model", "n_embd"),
    ("task", "kind"),
    ("task", "beta"),
    ("task", "class_weights"),
    ("adapter", "kind"),
    ("adapter", "rank"),
    ("adapter", "alpha"),
    ("adapter", "target"),
    ("adapter", "rslora"),
    ("adapter", "dora"),
    ("optimizer", "name"),
    ("precision", "fp8"),
)

_MAX_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run, whole: the resolved run.toml."""

    run: RunSection = field(default_factory=RunSection)
    data: DataSection = field(default_factory=DataSection)
    model: ModelSection = field(default_factory=ModelSection)
    task: TaskSection = field(default_factory=TaskSection)
    adapter: AdapterSection = field(default_factory=AdapterSection)
    device: DeviceSection = field(default_factory=DeviceSection)
    batch: BatchSection = field(default_factory=BatchSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    train: TrainSection = field(default_factory=TrainSection)
    precision: PrecisionSection = field(default_factory=PrecisionSection)
    engine: EngineSection = field(default_factory=EngineSection)
    memory: MemorySection = field(default_factory=MemorySection)
    distributed: DistributedSection = field(default_factory=DistributedSection)
    track: TrackSection = field(default_factory=TrackSection)
    monitor: MonitorSection = field(default_factory=MonitorSection)
    launch: LaunchSection = field(default_factory=LaunchSection)
    limits: LimitsSection = field(default_factory=LimitsSection)
    storage: StorageSection = field(default_factory=StorageSection)
    slurm: SlurmSection = field(default_factory=SlurmSection)

    def tokens_per_step(self) -> int:
        """Tokens that one step trains on, over all ranks."""
        sequences = self.batch.global_batch_size * self.task.sequences_per_sample()
        return sequences * self.data.sequence_length

    def uses_kernels(self) -> bool:
        """Return whether the project's own kernels do the layers, where they can be built."""
        is_plain = not self.model.dropout and self.model.quantize == "none"
        is_plain = is_plain and not (self.adapter.is_on() and self.adapter.dora)
        return self.used_engine().wants_kernels() and is_plain

    def dtype(self) -> Dtype:
        """Return the dtype of the matmuls; `auto` is bf16 here, see `computing_in`."""
        return "fp32" if self.precision.dtype == "fp32" else "bf16"

    def computing_in(self, dtype: Dtype) -> RunConfig:
        """Return the config with the dtype that `precision.dtype = "auto"` takes on the nodes.

        fp8 computes in bf16 wherever it is.
        """
        if self.wants_bf16():
            return self
        return replace(self, precision=replace(self.precision, dtype=dtype))

    def wants_bf16(self) -> bool:
        """Say whether something that is set computes in bf16 alone: fp8."""
        return self.precision.fp8 != "off"

    def bf16_setting(self) -> str | None:
        """Return the setting for which the run computes in bf16 wherever it is; None without."""
        if self.precision.fp8 != "off":
            return f'precision.fp8 = "{self.precision.fp8}"'
        return 'precision.dtype = "bf16"' if self.precision.dtype == "bf16" else None

    def typical_mfu(self, spec: ModelSpec, *, core_flops_per_s: float | None = None) -> float:
        """Return a guess at the share of the measured peak that a step's passes reach.

        `core_flops_per_s` is the peak of one core; None is a typical core's.
        """
        if self.device.kind == "cuda":
            return GPU_MFU
        dtype = self.dtype()
        peak = core_flops_per_s or typical_core_flops_per_s(dtype, emulates_bf16=False)
        # In fp32 the kernels do the head and the update alone.
        return typical_mfu(
            kernels=self.uses_kernels() and dtype == "bf16",
            core_flops_per_s=peak,
            width=spec.width(),
        )

    def used_engine(self) -> EngineSection:
        """Return the engine that ranks run: zero3 and fp8 run torch's modules, without kernels."""
        if self.distributed.strategy == "zero3" or self.precision.fp8 != "off":
            return replace(self.engine, kernels="off")
        return self.engine

    def passes(self, world_size: int) -> int:
        """Return the passes of a step on each rank. Raises ConfigError for uneven shares."""
        return self.batch.grad_accum_steps(self.distributed.mesh(world_size).data_ranks)

    def require_even(self, world_size: int) -> None:
        """Raise ConfigError when the ranks cannot share the batch in whole passes.

        The same holds for a step to profile that no rank will record.
        """
        self.batch.require_even(self.distributed.mesh(world_size).data_ranks)
        self.train.require_profiled(world_size)

    def rank_setting(self, *, dtype: Dtype, world_size: int) -> RankSetting:
        """Return how each of `world_size` ranks trains, for the estimate of its memory."""
        return RankSetting(
            micro_batch_size=self.batch.sequences() * self.task.sequences_per_sample(),
            dtype=dtype,
            kernels=self.uses_kernels(),
            alone=world_size == 1,
            accumulates=self.passes(world_size) > 1,
            shards=self.distributed.shards(world_size),
            tensor=self.distributed.tensor_parallel,
            stages=self.distributed.pipeline_parallel,
            passes_kept=self._passes_kept(world_size),
            state_bytes=find_optimizer(self.optimizer.name).state_bytes,
        )

    def _passes_kept(self, world_size: int) -> int:
        passes, stages = self.passes(world_size), self.distributed.pipeline_parallel
        return passes if self.distributed.pipeline_schedule == "gpipe" else min(passes, stages)

    def memory_bytes(self, spec: ModelSpec, *, dtype: Dtype, world_size: int) -> int:
        """Estimate a rank's peak memory, with activation checkpointing where it is on."""
        return spec.rank_memory_bytes(
            self.rank_setting(dtype=dtype, world_size=world_size),
            checkpointed=self.memory.activation_checkpointing == "on",
        )

    def checkpoint_bytes(self, spec: ModelSpec) -> int:
        """Return what a checkpoint takes on disk, without the small files."""
        return spec.checkpoint_bytes(state_bytes=find_optimizer(self.optimizer.name).state_bytes)

    def malloc(self) -> Literal["tuned", "lean", "sharded", "tcmalloc", "default"]:
        """Return how ranks allocate memory: not as `tuned` where it would keep what shards free."""
        if self.launch.malloc != "tuned" or self.distributed.strategy == "replicate":
            return self.launch.malloc
        return "sharded" if self.distributed.strategy == "shard" else "lean"

    def recomputation(self) -> float:
        """Return what a step's computing is multiplied by: with checkpointing, a second forward."""
        return 4 / 3 if self.memory.activation_checkpointing == "on" else 1.0

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        """Return the spec of what is trained: `spec`, as a classifier or with an adapter or both.

        The data alone knows the labels; a classifier is counted with two.

        Raises ConfigError for an adapter.target that the model does not have.
        """
        if self.task.data() == "classify":
            spec = ClassifierSpec.of(spec, num_labels=2)
        if not self.adapter.is_on():
            return spec
        adapter = self.adapter
        return AdaptedSpec.of(
            spec,
            rank=adapter.rank,
            target=adapter.target,
            dropout=adapter.dropout,
            is_quantized=self.model.quantize != "none",
            is_dora=adapter.dora,
        )

    def decay_steps(self) -> int:
        """`schedule.decay_steps`, or what it stands for when it is none."""
        if self.schedule.decay_steps is not None:
            return self.schedule.decay_steps
        if self.schedule.kind == "wsd":
            return max(1, math.ceil(self.train.steps / 5))
        return self.train.steps

    def strategy_conflicts(self) -> list[str]:
        """Say what does not go with the run's strategy: a sentence for each."""
        return strategy_conflicts(
            self.distributed,
            optimizer=self.optimizer,
            engine=self.engine,
            adapter=self.adapter,
            task=self.task,
        )

    def to_toml(self) -> str:
        """The text that `parse_run_config` turns back into this config."""
        return render_sections(self)


def fixed_differences(before: RunConfig, after: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, old and new value of each setting that a resume may not change."""
    for section, key in _FIXED:
        old, new = (getattr(getattr(each, section), key) for each in (before, after))
        if old != new:
            yield f"{section}.{key}", old, new


def parse_run_config(text: str, *, overrides: Sequence[str] = (), where: str) -> RunConfig:
    """Build a RunConfig from TOML text; `where` names the text's origin. Raises ConfigError."""
    config = parse_sections(RunConfig, text, overrides=overrides, where=where)
    problems = _problems(config)
    if problems:
        raise ConfigError(f"{where}: " + " ".join(problems))
    return config


def load_run_config(path: Path, *, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the run.toml at `path`. Raises ConfigError."""
    try:
        text = read_bytes(path, limit_bytes=_MAX_BYTES).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror}. Name an existing TOML file.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"config {path}: byte {error.start} is not UTF-8.") from None
    return parse_run_config(text, overrides=overrides, where=str(path))


def _problems(config: RunConfig) -> list[str]:
    """Return a sentence for each setting that is wrong with the others, or by a rule of its own."""
    adapter, distributed, engine = config.adapter, config.distributed, config.engine
    device, model, precision, task = config.device, config.model, config.precision, config.task
    return [
        *adapter_conflicts(adapter, model=model, engine=engine, distributed=distributed),
        *preference_conflicts(task, model),
        *quantize_conflicts(model, adapter=adapter, engine=engine, distributed=distributed),
        *fp8_conflicts(
            precision, device=device, adapter=adapter, engine=engine, distributed=distributed
        ),
        *config.strategy_conflicts(),
        *config.slurm.problems(),
        *_address_problems(config),
        *backend_conflicts(distributed, device),
        *model.problems(),
        *schedule_conflicts(
            config.optimizer, config.schedule, config.train, decay_steps=config.decay_steps()
        ),
        *batch_conflicts(config.batch),
        *timeout_conflicts(config.limits, distributed),
        *config.track.problems(),
        *config.run.problems(),
    ]


def _address_problems(config: RunConfig) -> list[str]:
    try:
        config.storage.address()
        config.data.folder()
    except ConfigError as error:
        return [str(error)]
    return []
