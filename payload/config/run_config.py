"""CONTRACT IN: a run's settings. All keys of run.toml have defaults; unknown keys are errors."""

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

FIXED = (
    ("run", "seed"),
    ("data", "sequence_length"),
    ("model", "preset"),
    ("model", "quantize"),
    ("model", "router"),
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
    ("adapter", "train_tokens"),
    ("adapter", "rslora"),
    ("adapter", "dora"),
    ("optimizer", "name"),
    ("precision", "fp8"),
)
"""Settings that a resume may not change."""

_MAX_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """All settings of a run: the resolved run.toml."""

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
        """Return the tokens of one step, over all ranks."""
        sequences = self.batch.global_batch_size * self.task.sequences_per_sample()
        return sequences * self.data.sequence_length

    def uses_kernels(self) -> bool:
        """Return whether the layers use the project's kernels, if these can be built.

        The kernels need a CPU; with device.kind = "auto", a CPU is assumed.
        """
        is_plain = self.device.kind != "cuda" and not self.model.dropout
        is_plain = is_plain and self.model.quantize == "none"
        is_plain = is_plain and not (self.adapter.is_on() and self.adapter.dora)
        return self.used_engine().wants_kernels() and is_plain

    def dtype(self) -> Dtype:
        """Return the dtype of the matmuls; `auto` counts as bf16 until it is resolved."""
        return "fp32" if self.precision.dtype == "fp32" else "bf16"

    def computing_in(self, dtype: Dtype) -> RunConfig:
        """Return the config with `dtype` as the resolved compute dtype; fp8 always needs bf16."""
        if self.wants_bf16():
            return self
        return replace(self, precision=replace(self.precision, dtype=dtype))

    def wants_bf16(self) -> bool:
        """Return True if a setting requires bf16, as fp8 does."""
        return self.precision.fp8 != "off"

    def bf16_setting(self) -> str | None:
        """Return the setting that makes the run compute in bf16 on any machine, or None."""
        if self.precision.fp8 != "off":
            return f'precision.fp8 = "{self.precision.fp8}"'
        return 'precision.dtype = "bf16"' if self.precision.dtype == "bf16" else None

    def typical_mfu(self, spec: ModelSpec, *, core_flops_per_s: float | None = None) -> float:
        """Estimate the MFU of a step's forward and backward passes.

        `core_flops_per_s` is the peak of one core; None means the peak of a typical core.
        """
        if self.device.kind == "cuda":
            return GPU_MFU
        dtype = self.dtype()
        peak = core_flops_per_s or typical_core_flops_per_s(dtype, emulates_bf16=False)
        # In fp32, the kernels compute only the head and the update.
        return typical_mfu(
            kernels=self.uses_kernels() and dtype == "bf16",
            core_flops_per_s=peak,
            width=spec.width(),
        )

    def used_engine(self) -> EngineSection:
        """Return the effective engine settings: with `zero3` or `fp8`, the kernels are off."""
        if self.distributed.strategy == "zero3" or self.precision.fp8 != "off":
            return replace(self.engine, kernels="off")
        return self.engine

    def passes(self, world_size: int) -> int:
        """Return each rank's number of micro-batches per step. Raises ConfigError if it is not
        whole."""
        return self.batch.grad_accum_steps(self.distributed.mesh(world_size).data_ranks)

    def require_even(self, world_size: int) -> None:
        """Raise ConfigError if the ranks cannot share the batch in whole micro-batches.

        Also raises ConfigError if no rank would record the step to profile.
        """
        self.batch.require_even(self.distributed.mesh(world_size).data_ranks)
        self.train.require_profiled(world_size)

    def rank_setting(self, *, dtype: Dtype, world_size: int) -> RankSetting:
        """Return the settings of a rank that its memory estimate depends on."""
        optimizer = find_optimizer(self.optimizer.name)
        return RankSetting(
            micro_batch_size=self.batch.micro_batch() * self.task.sequences_per_sample(),
            dtype=dtype,
            kernels=self.uses_kernels(),
            alone=world_size == 1,
            accumulates=self.passes(world_size) > 1,
            shards=self.distributed.shards(world_size),
            tensor=self.distributed.tensor_parallel,
            stages=self.distributed.pipeline_parallel,
            micro_batches_kept=self._micro_batches_kept(world_size),
            state_bytes=optimizer.state_bytes,
            keeps_bf16_gradients=optimizer.keeps_bf16_gradients,
            chunks_loss=self.device.kind == "cuda",
        )

    def on_device(self, kind: Literal["auto", "cpu", "cuda"]) -> RunConfig:
        """Return the config with `device.kind` resolved, for estimates."""
        return replace(self, device=replace(self.device, kind=kind))

    def _micro_batches_kept(self, world_size: int) -> int:
        passes, stages = self.passes(world_size), self.distributed.pipeline_parallel
        return passes if self.distributed.pipeline_schedule == "gpipe" else min(passes, stages)

    def memory_bytes(self, spec: ModelSpec, *, dtype: Dtype, world_size: int) -> int:
        """Estimate a rank's peak memory, with activation checkpointing if it is on."""
        return spec.rank_memory_bytes(
            self.rank_setting(dtype=dtype, world_size=world_size),
            checkpointed=self.memory.activation_checkpointing == "on",
        )

    def checkpoint_bytes(self, spec: ModelSpec) -> int:
        """Return the size of a checkpoint on disk, without the small files."""
        return spec.checkpoint_bytes(state_bytes=find_optimizer(self.optimizer.name).state_bytes)

    def optimizer_state_bytes(self, spec: ModelSpec) -> int:
        """Return the size of the optimizer state in a checkpoint."""
        return spec.num_trainable_params() * find_optimizer(self.optimizer.name).state_bytes

    def malloc(self) -> Literal["tuned", "lean", "tcmalloc", "default"]:
        """Return the resolved malloc setting; `tuned` depends on the strategy."""
        if self.launch.malloc == "tuned" and self.distributed.strategy == "zero3":
            return "lean"
        return self.launch.malloc

    def recomputation(self) -> float:
        """Return the factor by which recomputation raises the FLOPs: 4/3 with activation
        checkpointing."""
        return 4 / 3 if self.memory.activation_checkpointing == "on" else 1.0

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        """Return `spec` as it is trained: as a classifier, with an adapter, or both.

        The number of labels is known only from the data, so the sizes assume two labels. Raises
        ConfigError for an adapter.target that the model does not have.
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
            train_tokens=adapter.train_tokens,
        )

    def decay_steps(self) -> int:
        """Return the resolved `schedule.decay_steps`."""
        if self.schedule.decay_steps is not None:
            return self.schedule.decay_steps
        if self.schedule.kind == "wsd":
            return max(1, math.ceil(self.train.steps / 5))
        return self.train.steps

    def strategy_conflicts(self) -> list[str]:
        """Return the conflicts with the run's strategy, a sentence for each."""
        return strategy_conflicts(
            self.distributed,
            optimizer=self.optimizer,
            engine=self.engine,
            adapter=self.adapter,
            task=self.task,
        )

    def to_toml(self) -> str:
        """Return TOML text from which `parse_run_config` builds an equal config."""
        return render_sections(self)


def fixed_differences(before: RunConfig, after: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, old and new value of each setting that a resume may not change."""
    for section, key in FIXED:
        old, new = (getattr(getattr(each, section), key) for each in (before, after))
        if old != new:
            yield f"{section}.{key}", old, new


def parse_run_config(text: str, *, overrides: Sequence[str] = (), where: str) -> RunConfig:
    """Build a RunConfig from TOML text; `where` names the text's origin. Raises ConfigError."""
    config = parse_sections(RunConfig, text, overrides=overrides, where=where)
    found = problems(config)
    if found:
        raise ConfigError(f"{where}: " + " ".join(found))
    return config


def load_run_config(path: Path, *, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the run.toml at `path`. Raises ConfigError."""
    try:
        text = read_bytes(path, limit_bytes=_MAX_BYTES).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror}. Use an existing TOML file.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"config {path}: byte {error.start} is not UTF-8. Save the file as UTF-8."
        ) from None
    return parse_run_config(text, overrides=overrides, where=str(path))


def problems(config: RunConfig) -> list[str]:
    """Return a sentence for each conflict between settings and each invalid setting."""
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
