"""CONTRACT IN: the sections of run.toml for model, data, optimizer and training."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from payload.config.settings import AUTO
from payload.config.store_address import is_bucket_address, parse_store_address
from payload.core.errors import ConfigError
from payload.core.printable_text import shown
from payload.core.tasks import TASKS, TaskKind, training_tasks
from payload.core.validation.fields import checked
from payload.models.registry import from_scratch
from payload.models.spec import ModelSpec
from payload.optimizers.registry import DEFAULT, names

Preset = Literal["tiny", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
DtypeChoice = Literal["auto", "bf16", "fp32"]
Quantize = Literal["none", "nf4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """[run]; docs/guides/runs.md"""

    name: str = "run"
    """First part of the run id."""
    seed: int = checked(1337, low=0, high=2**32 - 1)
    """Seed of initial weights, dropout and data order."""

    def problems(self) -> list[str]:
        """Return a sentence if `name` cannot begin a run id."""
        if self.name.strip() and "/" not in self.name and self.name.isprintable():
            return []
        return [f"run.name = {shown(self.name)}: use a name without slashes or control characters."]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """[data]; docs/guides/recipes.md"""

    dir: str = "data/openwebtext"
    """Folder with train.bin, val.bin and meta.json, written by `tileforge prepare`. The folder can
    also be in a bucket, at `gs://BUCKET/PREFIX`. Then the folder is downloaded once, to a cache."""
    sequence_length: int = checked(1024, low=1, high=2**20, unit="tokens")
    """Tokens per sequence."""

    def folder(self) -> Path:
        """Return the data folder; for a bucket, its copy in this user's cache."""
        if not is_bucket_address(self.dir):
            return Path(self.dir)
        address = parse_store_address(self.dir, setting="data.dir")
        # The copies are siblings, because the copy of one address must not contain the copy of
        # another.
        mark = hashlib.sha256(str(address).encode()).hexdigest()[:16]
        name = f"{address.last() or address.bucket}-{mark}"
        return Path.home() / ".cache" / "tileforge" / "data" / name


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """[model]; docs/guides/models.md"""

    preset: Preset = "gpt2"
    """Sizes of a model that is trained from scratch: layers, heads and width. A model from
    `model.init` has its own sizes and ignores the preset."""
    init: str = "scratch"
    """Model that the training starts from: `scratch` for random weights, the name or folder of a
    Hugging Face model, a GGUF file, a run, or a checkpoint of a run."""
    quantize: Quantize = "none"
    """With `nf4`, the weights of the layers' linears are stored in 4 bits. This needs an adapter
    and the extra `quant`."""
    router: Literal["auto", "train", "freeze"] = "auto"
    """Treatment of the routers of a mixture of experts. `auto` trains them in full fine-tuning
    and freezes them with an adapter. An adapter trains a router only if `adapter.target` names the
    router."""
    dropout: float = checked(0.0, low=0.0, high=0.99)
    """Dropout in the model's layers."""
    bias: bool = True
    """If true, a model that is trained from scratch has biases."""
    n_layer: int | None = checked(None, low=1, high=1000, unit="layers")
    """Number of layers of a model that is trained from scratch; none = the preset's number."""
    n_head: int | None = checked(None, low=1, high=1000, unit="heads")
    """Number of attention heads of a model that is trained from scratch; none = the preset's
    number."""
    n_embd: int | None = checked(None, low=1, high=2**16, unit="elements")
    """Width of a model that is trained from scratch; it must be a multiple of n_head. none = the
    preset's width."""

    def spec(self, *, sequence_length: int, vocab_size: int | None) -> ModelSpec:
        """Return the spec of a model from scratch: the preset with the sizes of this section.

        A `vocab_size` of None means the vocabulary size of the preset.
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

    def problems(self) -> list[str]:
        """Return a sentence if the heads do not divide the model's width."""
        spec = self.spec(sequence_length=1, vocab_size=1)
        if not spec.width() % spec.num_heads():
            return []
        return [
            f"model.n_embd = {spec.width()} is not a multiple of model.n_head = {spec.num_heads()}."
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSection:
    """[task]; the task for which data.dir was prepared (`prepare --task`);
    docs/guides/recipes.md"""

    kind: str = checked("text", choices=training_tasks)
    """Prediction that the model learns. `text`: the next token of plain text. `chat`: the
    assistant's tokens in conversations. `classify`: the label of a text. `preference`: which of two
    answers is better (DPO)."""
    beta: float = checked(0.1, above=0.0, high=1e3)
    """Only for the task `preference`: DPO's beta. A higher value keeps the model closer to the
    reference model. TRL's default is also 0.1."""
    class_weights: str = "none"
    """Only for the task `classify`: weights of the labels in the loss. With `none`, all texts have
    equal weight. With `balanced`, the texts of each label have the same total weight. Otherwise,
    write one weight for each label, in the order of the labels: `1,2.5`."""

    def sequences_per_sample(self) -> int:
        """Return the sequences of a sample: two for a preference pair, otherwise one."""
        return 2 if self.data() == "preference" else 1

    def data(self) -> TaskKind:
        """Return the task for which the data is prepared."""
        return TASKS[self.kind].data

    def splits_model(self) -> bool:
        """Return whether the task supports tensor and pipeline parallelism."""
        return TASKS[self.kind].splits_model


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSection:
    """[adapter]; train a small adapter, with the weights of model.init frozen;
    docs/guides/recipes.md"""

    kind: Literal["none", "lora"] = "none"
    """With `lora`, training adds two low-rank matrices to each target linear. Checkpoints have
    PEFT's format."""
    rank: int = checked(16, low=1, high=4096)
    """Rank of the adapter's two matrices. A higher rank trains more parameters."""
    alpha: float = checked(32.0, above=0.0)
    """The adapter's output is multiplied by alpha / rank."""
    dropout: float = checked(0.0, low=0.0, high=0.99)
    """Dropout on the adapter's input."""
    target: str = "all-linear"
    """Linears that get an adapter: `all-linear`, or the names of linears, separated by commas, such
    as `q_proj,v_proj`."""
    train_tokens: str = "new"
    """Tokens whose rows in the embedding and the output head are trained in full, in addition to
    the adapter. `new` means the tokens that `prepare --add-special-tokens` added. `none` means no
    tokens. Token ids, separated by commas, mean these tokens: `32000,32001`."""
    rslora: bool = False
    """If true, the adapter's output is multiplied by alpha / sqrt(rank) instead of alpha / rank.
    The output then keeps its scale at high ranks."""
    dora: bool = False
    """If true, use DoRA: also train the norm of the weights of each output. DoRA does not use the
    project's kernels."""

    def is_on(self) -> bool:
        """Return True if an adapter is trained instead of the model."""
        return self.kind != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSection:
    """[batch], in sequences; docs/explanations/scaling.md"""

    global_batch_size: int = checked(32, low=1, high=10**9, unit="sequences")
    """Number of sequences per step, summed over all ranks."""
    micro_batch_size: int | Literal["auto"] = checked(4, low=1, high=10**6, unit="sequences")
    """Sequences per rank per micro-batch; lower it if memory runs out. `auto` means the largest
    number whose estimated memory fits. The run chooses this number when it places the ranks, and
    writes it to run.toml."""

    def micro_batch(self) -> int:
        """Return `micro_batch_size` as a number; planning or rank 0 must have resolved `auto`."""
        assert self.micro_batch_size != AUTO, "settle_batch() comes first"
        return self.micro_batch_size

    def per_pass(self, world_size: int) -> int:
        """Return the sequences in one micro-batch of every rank; with `auto`, in a step."""
        if self.micro_batch_size == AUTO:
            return max(1, self.global_batch_size // world_size) * world_size
        return self.micro_batch_size * world_size

    def require_even(self, world_size: int) -> None:
        """Raise ConfigError if the ranks cannot share the batch in whole micro-batches."""
        if self.micro_batch_size == AUTO:
            self._require_multiple(world_size, f"world_size = {world_size}")
        else:
            self.grad_accum_steps(world_size)

    def grad_accum_steps(self, world_size: int) -> int:
        """Return each rank's number of micro-batches per step. Raises ConfigError if it is not
        whole."""
        size = self.micro_batch()
        per_pass = size * world_size
        self._require_multiple(
            per_pass, f"micro_batch_size x world_size = {size} x {world_size} = {per_pass}"
        )
        return self.global_batch_size // per_pass

    def _require_multiple(self, number: int, description: str) -> None:
        if self.global_batch_size % number:
            below = self.global_batch_size // number * number
            fitting = [size for size in (below, below + number) if size]
            raise ConfigError(
                f"batch.global_batch_size = {self.global_batch_size} is not a multiple of "
                f"{description}. Use {' or '.join(map(str, fitting))}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    """[optimizer]; docs/guides/recipes.md"""

    name: str = checked(DEFAULT, choices=names)
    """`adamw` trains all parameters with AdamW. `adamw8bit` keeps AdamW's state in 8 bits, a
    quarter of the memory; it needs bitsandbytes. `muon` trains hidden matrices with Muon and the
    other parameters with AdamW. Muon's updates are scaled to AdamW's step size."""
    lr: float = checked(3e-5, above=0.0)
    """Highest learning rate. nanoGPT fine-tunes GPT-2 with 3e-5."""
    min_lr: float = checked(3e-6, low=0.0)
    """Learning rate at the end of the decay."""
    weight_decay: float = checked(0.1, low=0.0)
    """Weight decay of matrices and embeddings. The other parameters have no weight decay."""
    beta1: float = checked(0.9, low=0.0, high=0.9999)
    """Decay rate of AdamW's running mean of the gradient."""
    beta2: float = checked(0.95, low=0.0, high=0.99999)
    """Decay rate of AdamW's running mean of the squared gradient."""
    grad_clip: float = checked(1.0, low=0.0)
    """Highest norm of the gradient. A larger gradient is scaled down to this norm; 0 = no
    clipping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSection:
    """[schedule]; docs/guides/recipes.md"""

    kind: Literal["cosine", "constant", "wsd"] = "cosine"
    """Learning-rate schedule after the warm-up. `cosine`: the rate falls from lr to min_lr along a
    cosine. `constant`: it stays at lr. `wsd`: it stays at lr, then falls linearly to min_lr over
    the last `decay_steps`."""
    warmup_steps: int = checked(0, low=0, unit="steps")
    """Number of steps over which the learning rate rises from zero to lr."""
    decay_steps: int | None = checked(None, low=1, unit="steps")
    """For `cosine`: the step at which the learning rate reaches min_lr; none = the last step. For
    `wsd`: the number of steps of the final decay; none = a fifth of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSection:
    """[train]; a step is one optimizer update; docs/guides/runs.md"""

    steps: int = checked(100, low=1, unit="steps")
    """Number of steps of the run."""
    log_every: int = checked(10, low=1, unit="steps")
    """Steps between two printed lines. The file metrics.jsonl has a row for every step."""
    eval_every: int = checked(100, low=0, unit="steps")
    """Steps between two evaluations on the validation data; 0 = evaluate only at the start and at
    the end."""
    eval_tokens: int | None = checked(None, low=1, unit="tokens")
    """Number of validation tokens per evaluation; none = all tokens."""
    checkpoint_every: int = checked(100, low=0, unit="steps")
    """Steps between two checkpoints; 0 = save only at the end."""
    keep_checkpoints: int = checked(2, low=1)
    """Number of newest checkpoints to keep. The checkpoint with the lowest val_loss is also
    kept."""
    sync_check_every: int = checked(100, low=0, unit="steps")
    """Steps between two checks that all ranks have the same weights and optimizer state; 0 = check
    only at checkpoints and at the end."""
    profile_step: int | None = checked(None, low=1)
    """Step that the torch profiler records, on one rank; none = no profile. `run --profile STEP`
    sets this key."""
    profile_rank: int = checked(0, low=0)
    """Rank on which the profiler records `profile_step`."""

    def require_profiled(self, world_size: int) -> None:
        """Raise ConfigError if no rank would record the step to profile.

        A checkpoint's settings are not checked, because the resumed run can change them.
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
                "so nothing would be recorded. Choose one of these ranks."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSection:
    """[precision]; docs/explanations/speed.md"""

    dtype: DtypeChoice = "auto"
    """Data type of the computation. `auto` means bf16 if a measurement finds bf16 faster, otherwise
    fp32. The run logs the chosen type."""
    fp8: Literal["off", "on", "emulated"] = "off"
    """`on`: the layers' linears compute in 8-bit floats, and the rest of the model computes in
    bf16. This needs the extra `fp8` and a GPU of compute capability 8.9 or higher. `emulated`: the
    same rounding on any device, but slower than bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSection:
    """[engine]; docs/explanations/speed.md"""

    kind: Literal["native", "ipex"] = "native"
    """`native` is stock torch. `ipex` is Intel's archived extension for torch, and needs the extra
    `intel`."""
    compile: bool = False
    """If true, torch.compile compiles the model. This needs a C++ compiler on every node."""
    kernels: Literal["auto", "off"] = "auto"
    """With `auto`, the model uses the project's own kernels if they can be built, but not with
    `compile` or `ipex`. With `off`, the model never uses these kernels."""
    deterministic: bool = False
    """Only for CUDA: whether to use only deterministic algorithms. These are slower, but a resumed
    run is then bitwise identical. On CPUs, a resumed run is always bitwise identical."""

    def wants_kernels(self) -> bool:
        """Return whether this engine uses the project's kernels."""
        return self.kernels == "auto" and self.kind == "native" and not self.compile


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySection:
    """[memory]; docs/explanations/strategies.md"""

    activation_checkpointing: Literal["off", "auto", "on"] = "auto"
    """With `on`, a rank keeps only the input of each layer, and recomputes the layer in the
    backward pass. This takes a third more time. `auto` means `on` if a rank's estimated memory
    exceeds the free memory, otherwise `off`."""
