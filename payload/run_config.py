"""CONTRACT IN: what to train, from run.toml. Every key has a default; unknown keys are errors."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from payload.errors import ConfigError
from payload.mesh import Mesh, make_mesh
from payload.models.adapter import AdaptedSpec
from payload.models.classifier import ClassifierSpec
from payload.models.registry import from_scratch
from payload.models.spec import Dtype, ModelSpec, RankSetting
from payload.settings import parse_sections, render_sections, setting
from payload.store_address import NONE as NO_STORE
from payload.store_address import StoreAddress, is_bucket_address, parse_store_address
from payload.tasks import TaskKind
from payload.untrusted import read_bytes, shown

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

TRACKERS = ("trackio", "tensorboard", "wandb", "mlflow", "csv")
"""Files of `payload/report/trackers`."""
AUTO_TRACKER = "trackio"

Preset = Literal["tiny", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
DtypeChoice = Literal["auto", "bf16", "fp32"]
Quantize = Literal["none", "nf4"]


AUTO: Literal["auto"] = "auto"
"""A setting that the run decides by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """[run]"""

    name: str = "run"
    """Start of the run id."""
    seed: int = setting(1337, low=0, high=2**32 - 1)
    """Weights, dropout and data order follow from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """[data]"""

    dir: str = "data/openwebtext"
    """Folder with train.bin, val.bin and meta.json, written by `python -m payload.data prepare`; or
    `gs://BUCKET/PREFIX` of such a folder, which is brought to a cache once."""
    sequence_length: int = setting(1024, low=1, high=2**20)
    """Tokens per sequence."""

    def folder(self) -> Path:
        """Return the data folder; of one in a bucket, the copy of it in this user's cache."""
        if not is_bucket_address(self.dir):
            return Path(self.dir)
        address = parse_store_address(self.dir, setting="data.dir")
        return Path.home() / ".cache" / "tileforge" / "data" / str(address.bucket) / address.path


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """[model]"""

    preset: Preset = "gpt2"
    """Sizes of a model from scratch; weights of `init` have their own."""
    init: str = "scratch"
    """`scratch`, a Hugging Face name or folder, a GGUF file, a run or one of its checkpoints."""
    quantize: Quantize = "none"
    """`nf4`: the layers' linears in 4 bits below an adapter, computed in bf16; needs the extra
    `quant`."""
    dropout: float = setting(0.0, low=0.0, high=0.99)
    bias: bool = True
    """Biases of a model from scratch."""
    n_layer: int | None = setting(None, low=1, high=1000)
    """Layers; none = the preset's. Likewise the next two."""
    n_head: int | None = setting(None, low=1, high=1000)
    n_embd: int | None = setting(None, low=1, high=2**16)

    def spec(self, *, sequence_length: int, vocab_size: int | None) -> ModelSpec:
        """Return the preset's model from scratch, with this section's own sizes in their place.

        A vocabulary of None is the preset's own.
        """
        return from_scratch(
            self.preset,
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_embd=self.n_embd,
            bias=self.bias,
            sequence_length=sequence_length,
            vocab_size=vocab_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSection:
    """[task]; data.dir was prepared for it with `prepare --task`"""

    kind: TaskKind = "text"
    """`text`: the next token of plain text. `chat`: the assistant's tokens of conversations.
    `classify`: a label for each text. `preference`: the better one of two answers (DPO)."""
    beta: float = setting(0.1, above=0.0, high=1e3)
    """preference: how strongly the model is held to the reference; 0.1 is DPO's and TRL's."""
    class_weights: str = "none"
    """classify: `none`; `balanced`, so that every label weighs the same in the loss; or a number
    for each label, in their order: `1,2.5`."""

    def sequences_per_sample(self) -> int:
        """Return the sequences that a sample of a batch has: a preference pair has two."""
        return 2 if self.kind == "preference" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSection:
    """[adapter]; the weights of model.init stay as they are, and a small adapter is trained"""

    kind: Literal["none", "lora"] = "none"
    """`lora`: two low-rank matrices beside each target linear; checkpoints are PEFT's."""
    rank: int = setting(16, low=1, high=4096)
    alpha: float = setting(32.0, above=0.0)
    """The adapter's output is multiplied by alpha / rank."""
    dropout: float = setting(0.0, low=0.0, high=0.99)
    """Dropout of the adapter's input."""
    target: str = "all-linear"
    """`all-linear`, or names of linears with commas between: `q_proj,v_proj`."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, which keeps the scale for high ranks."""
    dora: bool = False
    """DoRA: train the length of each output's weights as well. The kernels do not run it."""

    def is_on(self) -> bool:
        """Say whether an adapter is trained instead of the model."""
        return self.kind != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSection:
    """[device]"""

    kind: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the ranks compute. auto: on CUDA where torch sees a device, a rank on each, else on the
    CPU. The project's kernels are for CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSection:
    """[batch], in sequences"""

    global_batch_size: int = setting(32, low=1, high=10**9)
    """Sequences per step over all ranks."""
    micro_batch_size: int | Literal["auto"] = setting(4, low=1, high=10**6)
    """Sequences per rank per forward and backward pass; lower it when memory runs out. `auto`: the
    most that fit the estimate, chosen when the ranks are placed; run.toml then has the number."""

    def sequences(self) -> int:
        """Return `micro_batch_size` as a number, after planning or rank 0 has settled it."""
        assert self.micro_batch_size != AUTO, "settle_batch() comes first"
        return self.micro_batch_size

    def per_pass(self, world_size: int) -> int:
        """Return the sequences of one pass of all ranks; before `auto` is settled, a whole step."""
        if self.micro_batch_size == AUTO:
            return max(1, self.global_batch_size // world_size) * world_size
        return self.micro_batch_size * world_size

    def require_even(self, world_size: int) -> None:
        """Raise ConfigError when the ranks cannot share the batch in whole passes."""
        if self.micro_batch_size == AUTO:
            self._require_multiple(world_size, f"world_size = {world_size}")
        else:
            self.grad_accum_steps(world_size)

    def grad_accum_steps(self, world_size: int) -> int:
        """Passes per step on each rank. Raises ConfigError when it is no whole number."""
        size = self.sequences()
        per_pass = size * world_size
        self._require_multiple(
            per_pass, f"micro_batch_size x world_size = {size} x {world_size} = {per_pass}"
        )
        return self.global_batch_size // per_pass

    def _require_multiple(self, number: int, words: str) -> None:
        if self.global_batch_size % number:
            below = self.global_batch_size // number * number
            fitting = [size for size in (below, below + number) if size]
            raise ConfigError(
                f"batch.global_batch_size = {self.global_batch_size} is not a multiple of "
                f"{words}. Use {' or '.join(map(str, fitting))}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    """[optimizer]"""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for hidden matrices, scaled to AdamW's step size, and AdamW for the rest."""
    lr: float = setting(3e-5, above=0.0)
    """Highest learning rate. 3e-5 is nanoGPT's for fine-tuning GPT-2."""
    min_lr: float = setting(3e-6, low=0.0)
    """Learning rate at the end of the decay."""
    weight_decay: float = setting(0.1, low=0.0)
    """For matrices and embeddings only."""
    beta1: float = setting(0.9, low=0.0, high=0.9999)
    beta2: float = setting(0.95, low=0.0, high=0.99999)
    grad_clip: float = setting(1.0, low=0.0)
    """Highest gradient norm; 0 = no clipping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSection:
    """[schedule]"""

    kind: Literal["cosine", "constant", "wsd"] = "cosine"
    """`wsd`: warm up, stay, decay linearly over the last `decay_steps`."""
    warmup_steps: int = setting(0, low=0)
    decay_steps: int | None = setting(None, low=1)
    """cosine: the step at which min_lr is reached, none = the last. wsd: length of the decay at
    the end, none = a fifth of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSection:
    """[train]; a step is one optimizer update"""

    steps: int = setting(100, low=1)
    log_every: int = setting(10, low=1)
    """Steps between printed lines; metrics.jsonl has every step."""
    eval_every: int = setting(100, low=0)
    """0 = only at the start and the end."""
    eval_tokens: int | None = setting(None, low=1)
    """Validation tokens per evaluation; none = all."""
    checkpoint_every: int = setting(100, low=0)
    """0 = only at the end."""
    keep_checkpoints: int = setting(2, low=1)
    """How many of the newest are kept; the one with the lowest val_loss is kept besides."""
    sync_check_every: int = setting(100, low=0)
    """Steps between comparisons of all ranks' weights and optimizer state; 0 = only at checkpoints
    and the end."""
    profile_step: int | None = setting(None, low=1)
    """Step that the torch profiler records on one rank; `run --profile STEP` sets it."""
    profile_rank: int = setting(0, low=0)
    """The rank that records."""

    def require_profiled(self, world_size: int) -> None:
        """Raise ConfigError when none of the ranks would record the step that is to be profiled.

        A checkpoint's own settings are not held to this: the run that it goes on may change them.
        """
        if self.profile_step is None:
            return
        if self.profile_step > self.steps:
            raise ConfigError(
                f"train.profile_step = {self.profile_step} is above train.steps = {self.steps}: "
                "nothing would be recorded. Choose an earlier step."
            )
        if self.profile_rank >= world_size:
            raise ConfigError(
                f"train.profile_rank = {self.profile_rank}: the ranks are 0 to {world_size - 1}, "
                "so nothing would be recorded. Name one of them."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSection:
    """[precision]"""

    dtype: DtypeChoice = "auto"
    """auto: bf16 where the calibration finds it faster, else fp32; which one is said."""
    fp8: Literal["off", "on", "emulated"] = "off"
    """on: the layers' linears multiply in 8-bit floats, all else in bf16. It needs the extra `fp8`
    and a GPU of compute capability 8.9 or higher. emulated: the same rounding on any device, slower
    than bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSection:
    """[engine]"""

    kind: Literal["native", "ipex"] = "native"
    """`ipex` needs the extra `intel`."""
    compile: bool = False
    """Pass the model through torch.compile; needs a C++ compiler on every node."""
    kernels: Literal["auto", "off"] = "auto"
    """auto: the project's own kernels where they can be built, but not with `compile` or `ipex`.
    `off`: stock torch alone."""
    deterministic: bool = False
    """On CUDA: deterministic algorithms alone, so that a resume is bitwise; slower. On CPUs it is
    bitwise anyway."""

    def wants_kernels(self) -> bool:
        """Return whether `kernels` applies to this engine."""
        return self.kernels == "auto" and self.kind == "native" and not self.compile


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySection:
    """[memory]"""

    activation_checkpointing: Literal["off", "auto", "on"] = "auto"
    """`on`: keep a layer's input alone and compute the layer again in the backward pass, which
    takes a third more time. auto: where the estimate of a rank's memory is above what is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedSection:
    """[distributed]"""

    backend: Literal["auto", "gloo", "ccl", "nccl"] = "auto"
    """auto: nccl between CUDA devices, else gloo. `ccl` needs the extra `ccl`, `nccl` CUDA."""
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients travel."""
    strategy: Literal["replicate", "shard", "zero3"] = "replicate"
    """`replicate`: each rank holds the whole model. `shard`: each holds a part of the weights,
    gradients and optimizer state, and a layer's weights are gathered for its passes (FSDP2).
    `zero3`: the same by DeepSpeed's ZeRO stage 3; needs the extra `deepspeed`."""
    shard_size: int | None = setting(None, low=1, high=2**20)
    """shard: ranks that share out one model, or one part of it; gradients are averaged over such
    groups. none = all that have it."""
    tensor_parallel: int = setting(1, low=1, high=2**10)
    """Ranks that compute each layer together, on the same data: each has a part of its heads, of
    its MLP and of the vocabulary. They share a node."""
    pipeline_parallel: int = setting(1, low=1, high=2**10)
    """Stages, each with some of the layers. What is left of the ranks is data parallel: replicas,
    or shards with `strategy = "shard"`."""
    pipeline_schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of a stage's passes. `1f1b`: backward passes begin early, and a stage keeps the
    activations of as many passes as stages follow. `gpipe`: all forward passes come first."""
    timeout_s: float = setting(600.0, above=0.0, high=1e7)
    """Longest wait of one rank for another."""

    def mesh(self, world_size: int) -> Mesh:
        """Return the mesh of `world_size` ranks. Raises ConfigError when they do not divide."""
        return make_mesh(
            world_size,
            shards=self.strategy != "replicate",
            shard_size=self.shard_size,
            tensor=self.tensor_parallel,
            pipeline=self.pipeline_parallel,
        )

    def shards(self, world_size: int) -> int:
        """Return how many parts each weight is in. Raises ConfigError when ranks do not divide."""
        return self.mesh(world_size).shard

    def splits_model(self) -> bool:
        """Say whether several ranks make one pass over the same data together."""
        return self.tensor_parallel > 1 or self.pipeline_parallel > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackSection:
    """[track]; docs/report.md has what each one keeps, and where"""

    to: tuple[str, ...] = ("auto",)
    """Where metrics, settings, results and the report go besides the run's folder: `trackio`,
    `tensorboard`, `wandb`, `mlflow`, `csv`. `auto`: trackio where it is installed. All stay on this
    machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorSection:
    """[monitor]; docs/monitoring.md has the metrics, the dashboards and the alerts"""

    enabled: Literal["auto", "on", "off"] = "auto"
    """Serve the run's metrics to Prometheus, on the head's loopback address alone. auto: on a head
    that `monitoring: prometheus` has set up. Needs the extra `monitor`."""
    port: int = setting(9464, low=1024, high=65535)
    """Port on 127.0.0.1. Where it is in use, the run reports that and continues without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSection:
    """[launch]"""

    launcher: str = "auto"
    """`mpirun`, `torchrun`, or `auto`: mpirun where Intel MPI runs (x86-64 Linux), else torchrun.
    Each starts ranks on one machine or on a cluster. In a Slurm job `auto` is `srun`. A run says
    which one it takes."""
    ranks_per_node: int | None = setting(None, low=1, high=4096)
    """none = one per NUMA domain."""
    threads_per_rank: int | None = setting(None, low=1, high=4096)
    """none = the node's physical cores shared out evenly."""
    malloc: Literal["tuned", "lean", "tcmalloc", "default"] = "tuned"
    """`tuned`: glibc kept from giving large blocks back to the kernel between uses. `lean`: made to
    give them back at once; a sharded run does so under `tuned`, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsSection:
    """[limits]; the supervisor on the head keeps them"""

    hang_timeout_s: float = setting(120.0, low=1.0)
    """A run in which no rank made progress for so long, or for ten times the median step if that is
    longer, is a hang. Loading, compiling and saving may take nine tenths of distributed.timeout_s,
    which is also the most that the limit grows to."""
    max_restarts: int = setting(3, low=0)
    """How often a run goes on from its last checkpoint after a lost rank or node or a hang, while
    each attempt gets at least a step further; 0 = never."""
    max_hours: float | None = setting(None, above=0.0)
    """Hours that the run may take, all attempts and resumes together. Before they are over it saves
    a checkpoint and stops."""
    max_usd: float | None = setting(None, above=0.0)
    """The same in dollars; the inventory needs every node's hourly_usd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSection:
    """[storage]; docs/storage.md"""

    results: str = AUTO
    """Where the head keeps checkpoints, metrics and logs besides its disk: `gs://BUCKET/PREFIX`, or
    the absolute path of a mounted folder. Each run has a folder of its own there. `auto`: the
    cluster's bucket, if it has one. `none`: nowhere."""
    final_wait_s: float = setting(300.0, low=0.0, high=1e6)
    """Longest wait for the store at a run's end; training itself never waits for it."""

    def address(self) -> StoreAddress | None:
        """Return where runs are kept; None where they are not. Raises ConfigError."""
        if self.results in (AUTO, NO_STORE):
            return None
        return parse_store_address(self.results)


_SLURM_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:+=-]{0,127}")
_OWN_SBATCH_OPTIONS = (
    *("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--time", "-t", "--partition", "-p"),
    *(
        "--account",
        "-A",
        "--qos",
        "-q",
        "--output",
        "-o",
        "--error",
        "-e",
        "--open-mode",
        "--chdir",
    ),
    *(
        "-D",
        "--job-name",
        "-J",
        "--wrap",
        "--array",
        "-a",
        "--export",
        "--parsable",
        "--wait",
        "-W",
    ),
)
_SLURM_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSection:
    """[slurm]; the job that `run --site slurm` submits"""

    nodes: int = setting(1, low=1, high=4096)
    partition: str | None = None
    """none = the cluster's default; so too the three below."""
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    """Such as `"12:00:00"`, `"2-00"` (days-hours) or `"90"` (minutes). The run saves a checkpoint
    and stops before it is over."""
    cpus_per_node: int | None = setting(None, low=1, high=16_384)
    """none = whole nodes, which no other job shares."""
    extra: str = ""
    """More of sbatch's options, as on its command line: `"--constraint=amx --mail-type=END"`."""


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

    def malloc(self) -> Literal["tuned", "lean", "tcmalloc", "default"]:
        """Return how ranks allocate memory: lean where `tuned` would keep what shards free."""
        if self.launch.malloc == "tuned" and self.distributed.strategy != "replicate":
            return "lean"
        return self.launch.malloc

    def recomputation(self) -> float:
        """Return what a step's computing is multiplied by: with checkpointing, a second forward."""
        return 4 / 3 if self.memory.activation_checkpointing == "on" else 1.0

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        """Return the spec of what is trained: `spec`, as a classifier or with an adapter or both.

        The data alone knows the labels; a classifier is counted with two.

        Raises ConfigError for an adapter.target that the model does not have.
        """
        if self.task.kind == "classify":
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

    def longest_wait_s(self) -> float:
        """Longest time without progress in any phase; after it, ranks give each other up."""
        return 0.9 * self.distributed.timeout_s

    def decay_steps(self) -> int:
        """`schedule.decay_steps`, or what it stands for when it is none."""
        if self.schedule.decay_steps is not None:
            return self.schedule.decay_steps
        if self.schedule.kind == "wsd":
            return max(1, math.ceil(self.train.steps / 5))
        return self.train.steps

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
    problems = _contradictions(config)
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


def _contradictions(config: RunConfig) -> list[str]:
    """Settings that are each allowed but not together."""
    found = []
    optimizer, schedule, train = config.optimizer, config.schedule, config.train
    spec = config.model.spec(sequence_length=1, vocab_size=1)
    found += _adapter_contradictions(config)
    found += _preference_contradictions(config)
    found += _quantize_contradictions(config)
    found += _fp8_contradictions(config)
    found += strategy_contradictions(config)
    found += _slurm_problems(config.slurm)
    try:
        config.storage.address()
        config.data.folder()
    except ConfigError as error:
        found.append(str(error))
    if config.device.kind == "cpu" and config.distributed.backend == "nccl":
        found.append(
            'distributed.backend = "nccl" moves GPU tensors only, but device.kind = "cpu". Use '
            "gloo."
        )
    if spec.width() % spec.num_heads():
        found.append(
            f"model.n_embd = {spec.width()} is not a multiple of model.n_head = {spec.num_heads()}."
        )
    if optimizer.min_lr > optimizer.lr:
        found.append(
            f"optimizer.min_lr = {optimizer.min_lr} is above lr = {optimizer.lr}; lower it."
        )
    if schedule.warmup_steps >= train.steps and schedule.warmup_steps:
        found.append(
            f"schedule.warmup_steps = {schedule.warmup_steps} leaves nothing of train.steps = "
            f"{train.steps}; lower it."
        )
    if schedule.kind == "wsd" and schedule.warmup_steps + config.decay_steps() > train.steps:
        found.append(
            f"schedule.warmup_steps + decay_steps = {schedule.warmup_steps} + "
            f"{config.decay_steps()} is more than train.steps = {train.steps}; lower one."
        )
    if schedule.kind == "cosine" and config.decay_steps() <= schedule.warmup_steps:
        found.append(
            f"schedule.decay_steps = {config.decay_steps()} is not above warmup_steps = "
            f"{schedule.warmup_steps}."
        )
    size = config.batch.micro_batch_size
    if size != AUTO and config.batch.global_batch_size % size:
        found.append(
            f"batch.global_batch_size = {config.batch.global_batch_size} is not a multiple of "
            f"micro_batch_size = {size}. Set micro_batch_size to a number that divides it."
        )
    if config.limits.hang_timeout_s > config.longest_wait_s():
        found.append(
            f"limits.hang_timeout_s = {config.limits.hang_timeout_s:g} is above nine tenths of "
            f"distributed.timeout_s = {config.distributed.timeout_s:g}: the ranks would give each "
            "other up before a hang is found. Lower the one or raise the other."
        )
    unknown = [name for name in config.track.to if name not in ("auto", *TRACKERS)]
    if unknown:
        found.append(
            f"track.to = {shown(unknown[0])}: no tracker has this name. Known: auto, "
            f"{', '.join(TRACKERS)}."
        )
    if not config.run.name.strip() or "/" in config.run.name or not config.run.name.isprintable():
        found.append(
            f"run.name = {shown(config.run.name)}: use a name without slashes or control "
            "characters."
        )
    return found


def _slurm_problems(slurm: SlurmSection) -> list[str]:
    """Say what sbatch would not take, or would take for something else."""
    found = []
    for key in ("partition", "account", "qos"):
        value = getattr(slurm, key)
        if value is not None and not _SLURM_NAME.fullmatch(value):
            found.append(
                f"slurm.{key} = {shown(value)}: use a name of letters, digits and . _ - , = +."
            )
    if slurm.time is not None and not _SLURM_TIME.fullmatch(slurm.time):
        found.append(
            f"slurm.time = {shown(slurm.time)}: write minutes, HH:MM:SS, DAYS-HOURS or "
            "DAYS-HH:MM:SS, as in '12:00:00'."
        )
    try:
        words = shlex.split(slurm.extra)
    except ValueError as error:
        return [*found, f"slurm.extra = {shown(slurm.extra)}: {error}. Close every quote."]
    loose = [word for word in words if not word.startswith("-")]
    if loose:
        found.append(
            f"slurm.extra: {shown(loose[0])} is no option. Write each as --option=value, in one "
            "word."
        )
    ours = [word for word in words if word.partition("=")[0] in _OWN_SBATCH_OPTIONS]
    if ours:
        found.append(
            f"slurm.extra: {shown(ours[0])} is the run's own to say. Use the settings of [slurm] "
            "for it, or leave it out."
        )
    return found


def strategy_contradictions(config: RunConfig) -> list[str]:
    """Say what does not go with the run's strategy: a sentence for each."""
    distributed = config.distributed
    found = _split_contradictions(config) if distributed.splits_model() else []
    strategy = f'"{distributed.strategy}"'
    if distributed.strategy != "shard" and distributed.shard_size is not None:
        found.append(
            f"distributed.shard_size = {distributed.shard_size} needs distributed.strategy = "
            '"shard". Set it, or leave shard_size out.'
        )
    if distributed.strategy == "replicate":
        return found
    if config.optimizer.name == "muon":
        found.append(
            f'optimizer.name = "muon" needs whole matrices, and distributed.strategy = {strategy} '
            'splits them. Use adamw, or strategy = "replicate".'
        )
    if config.engine.kind != "native" or config.engine.compile:
        found.append(
            f'distributed.strategy = {strategy} runs on engine.kind = "native" without '
            "engine.compile alone. Leave them out."
        )
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


def _split_contradictions(config: RunConfig) -> list[str]:
    """Say what does not go with ranks that make a pass together."""
    distributed, found = config.distributed, []
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
    if config.optimizer.name == "muon":
        found.append(
            f'optimizer.name = "muon" needs whole matrices, and {setting} splits the model. Use '
            "adamw."
        )
    if config.engine.kind != "native" or config.engine.compile:
        found.append(
            f'{setting} runs on engine.kind = "native" without engine.compile alone. Leave them '
            "out."
        )
    if distributed.backend not in ("auto", "gloo"):
        found.append(
            f'distributed.backend = "{distributed.backend}": {setting} is for gloo alone. Use gloo.'
        )
    if config.adapter.is_on():
        found.append(
            f'adapter.kind = "{config.adapter.kind}" does not run with {setting}. Use '
            'distributed.strategy = "shard" without it, or train all weights.'
        )
    if config.task.kind in ("classify", "preference"):
        found.append(
            f'task.kind = "{config.task.kind}" does not run with {setting}. Use '
            'distributed.strategy = "shard" without it.'
        )
    return found


def _quantize_contradictions(config: RunConfig) -> list[str]:
    if config.model.quantize == "none":
        return []
    found, setting = [], f'model.quantize = "{config.model.quantize}"'
    if not config.adapter.is_on():
        found.append(
            f'{setting}: weights of 4 bits cannot be trained. Set adapter.kind = "lora", or '
            'model.quantize = "none" for full training.'
        )
    if config.engine.kind != "native":
        found.append(
            f'{setting} does not run on engine.kind = "{config.engine.kind}". Set it to "native".'
        )
    if config.precision.dtype == "fp32":
        found.append(
            f'{setting} computes in bf16, but precision.dtype = "fp32". Set it to "bf16" or "auto".'
        )
    if config.distributed.splits_model():
        found.append(
            f"{setting} does not run with distributed.tensor_parallel or pipeline_parallel: blocks "
            "of 4 bits cannot be split. Leave these out."
        )
    if config.distributed.strategy != "replicate":
        found.append(
            f"{setting} does not run with distributed.strategy = "
            f'"{config.distributed.strategy}". Set it to "replicate".'
        )
    return found


def _fp8_contradictions(config: RunConfig) -> list[str]:
    if config.precision.fp8 == "off":
        return []
    found, setting = [], f'precision.fp8 = "{config.precision.fp8}"'
    if config.precision.fp8 == "on" and config.device.kind == "cpu":
        found.append(
            f'{setting} needs a GPU, but device.kind = "cpu". Set it to "emulated" for the same '
            'rounding, or "off".'
        )
    if config.precision.dtype == "fp32":
        found.append(
            f'{setting} computes all else in bf16, but precision.dtype = "fp32". Set it to "bf16" '
            'or "auto".'
        )
    if config.adapter.is_on():
        found.append(
            f'{setting} is for full training, but adapter.kind = "{config.adapter.kind}". Set fp8 '
            'to "off", or adapter.kind to "none".'
        )
    if config.engine.kind != "native":
        found.append(
            f'{setting} does not run on engine.kind = "{config.engine.kind}". Set it to "native".'
        )
    if config.distributed.strategy == "zero3" or config.distributed.splits_model():
        found.append(
            f'{setting} runs with distributed.strategy = "replicate" or "shard", without '
            'tensor_parallel and pipeline_parallel. Set these, or fp8 to "off".'
        )
    return found


def _preference_contradictions(config: RunConfig) -> list[str]:
    if config.task.kind != "preference" or config.model.init != "scratch":
        return []
    return [
        'task.kind = "preference" trains away from a model that answers already, but model.init = '
        '"scratch" has none. Name a model.'
    ]


def _adapter_contradictions(config: RunConfig) -> list[str]:
    if not config.adapter.is_on():
        return []
    found, kind = [], config.adapter.kind
    if config.model.init == "scratch":
        found.append(
            f'adapter.kind = "{kind}" trains beside weights that exist, but model.init = "scratch" '
            "has none. Name a model."
        )
    if config.adapter.dora and config.model.quantize != "none":
        found.append(
            "adapter.dora = true does not run with model.quantize = "
            f'"{config.model.quantize}". Set adapter.dora to false, or model.quantize to "none".'
        )
    if config.adapter.dora and config.distributed.strategy != "replicate":
        found.append(
            "adapter.dora = true does not run with distributed.strategy = "
            f'"{config.distributed.strategy}". Set it to "replicate".'
        )
    if config.engine.kind != "native" or config.engine.compile:
        found.append(
            f'adapter.kind = "{kind}" runs on engine.kind = "native" without engine.compile alone. '
            "Leave them out."
        )
    return found
