"""CONTRACT: checks of a run's data, initial model, GPUs and memory, before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from payload.config.launch_sections import DeviceSection
from payload.config.model_checks import require_fit, require_weights, with_new_tokens
from payload.config.run_config import RunConfig
from payload.config.training_sections import PrecisionSection
from payload.core.errors import CheckpointError, ConfigError, DataError
from payload.core.regular_files import home_path
from payload.core.tasks import TaskKind
from payload.estimates.run_estimate import RunEstimate
from payload.formats.checkpoint_listing import MANIFEST_FILE
from payload.formats.data_folder import (
    TRAIN_NAME,
    DataMeta,
    describe_new_rows,
    load_meta,
    require_prepared_length,
    require_task,
)
from payload.formats.hub_names import HubName
from payload.formats.quantized.weight_headers import stored_format
from payload.formats.tokenizer_identity import (
    TOKENIZER_FILE,
    require_same_tokenizer,
    vocabulary_file,
)
from payload.launch.ranks import Placement
from payload.machines.gpu_catalog import FP8_CAPABILITY
from payload.machines.inventory import Node
from payload.models.spec import ModelSpec
from payload.weights.adapter_files import has_adapter
from payload.weights.hub import fetch_config, require_weights_on_hub
from payload.weights.source import SCRATCH, Source, find_source, pinned_name_of, spec_on_hub

# 6e-4, nanoGPT's learning rate for GPT-2 from scratch, made the pretrained weights of GPT-2 worse.
_MOST_FINE_TUNING_RATE = 3e-4
_GIB = 2**30


def check_data(folder: Path, *, sequence_length: int, task: TaskKind = "text") -> DataMeta:
    """Return meta.json of a data folder, after checking the sizes of the files.

    Raises DataError with the command that prepares the folder, and ConfigError if the folder was
    prepared for a different task or sequence length.
    """
    meta = load_meta(folder)
    require_task(folder, meta, task=task)
    require_prepared_length(folder, meta, sequence_length=sequence_length)
    # A block of text has one token more than the sequence: the target of its last token.
    if meta.task == "text" and meta.train_tokens <= sequence_length:
        raise DataError(
            f"{folder / TRAIN_NAME} has {meta.train_tokens:,} tokens, too few for one sequence of "
            f"data.sequence_length = {sequence_length}. Lower sequence_length, or prepare more "
            "text."
        )
    return meta


def initial_spec(config: RunConfig, *, vocab_size: int | None) -> tuple[ModelSpec, str | None]:
    """Return the sizes of the model before it is loaded, and a note if they are incomplete.

    `vocab_size` is the vocabulary size of the data, for a model from scratch. With None, the size
    in the preset is used.
    """
    sequence_length, init = config.data.sequence_length, config.model.init
    configured = config.model.spec(sequence_length=sequence_length, vocab_size=vocab_size)
    if init == SCRATCH:
        return configured, None
    weights = None
    with suppress(CheckpointError):
        source = find_source(init, setting="model.init", verify=False)
        weights = source.spec()
        name = HubName.parse(init) if source.kind == "hub" else None
        if weights is None and name is not None and name.commit():
            # `settle_initial` has already fetched config.json into the cache.
            weights = spec_on_hub(name, setting="model.init")
    if weights is not None:
        # `settle_initial` has checked that `prepare` added the tokens without a row.
        if vocab_size is not None and weights.vocab_size < vocab_size:
            weights = weights.with_vocab_size(vocab_size)
        return weights.with_sequence_length(sequence_length), weights.note()
    return configured, (
        f"the sizes of model.init = {init!r} are not known on this machine; the estimates use "
        f"model.preset = {config.model.preset!r}"
    )


def settle_initial(
    config: RunConfig, *, meta: DataMeta | None, say: Callable[[str], None], download: bool
) -> RunConfig:
    """Return the config with `model.init` resolved, for example to a run's newest checkpoint.

    The weights must exist, be complete, and match the settings and the data. `meta` is the data's
    meta.json, or None if the data is missing or damaged. With `download`, config.json is fetched,
    and the name of a hub model is pinned to the model's current commit for the whole run. `say`
    receives messages about damaged checkpoints and about quantised weights. Raises ConfigError.
    """
    source = find_source(
        config.model.init,
        setting="model.init",
        passed_over=lambda folder, problem: say(f"note: checkpoint {folder} is skipped: {problem}"),
    )
    init, known = source.name, source.spec()
    if source.folder is not None:
        init = str(source.folder.resolve())
    elif source.file is not None:
        init = str(source.file.resolve())
    elif source.kind == "hub" and download:
        init = pinned_name_of(source.name, setting="model.init")
        known = _spec_on_hub(init)
    new_tokens = 0
    if meta is not None:
        config = with_new_tokens(config, meta)
        new_tokens = len(meta.added_ids())
        if source.folder is not None and _has_tokenizer(source.folder):
            require_same_tokenizer(
                meta,
                data=config.data.folder(),
                folder=source.folder,
                init=source.name,
                error=ConfigError,
            )
    if known is not None:
        vocab_size = None if meta is None else meta.vocab_size
        require_fit(known, config, vocab_size=vocab_size, new_tokens=new_tokens)
        if meta is not None and new_tokens and known.vocab_size < meta.vocab_size:
            say(f"vocabulary {describe_new_rows(meta, known.vocab_size)}")
        if source.folder is not None:
            _require_sound(source.folder, known)
    if stored := _stored_format(source, init):
        say(f"weights   {stored}")
    return replace(config, model=replace(config.model, init=init))


def require_known_sizes(config: RunConfig) -> None:
    """Raise CheckpointError for a local model with unknown sizes.

    Without this check, the plan would use the sizes of a different model.
    """
    if config.model.init != SCRATCH and home_path(config.model.init).exists():
        find_source(config.model.init, setting="model.init", verify=False).spec()


def _spec_on_hub(init: str) -> ModelSpec:
    """Return the sizes of a pinned hub model after checking that its weights can be loaded."""
    name = HubName.parse(init)
    assert name is not None, "pinned() returns a name on the hub"
    require_weights_on_hub(name, setting="model.init")
    return spec_on_hub(name, setting="model.init")


def _stored_format(source: Source, init: str) -> str | None:
    """Return the format of quantised weights if their config.json is on this machine."""
    name = HubName.parse(init) if source.kind == "hub" else None
    if name is not None and name.commit():
        return stored_format(fetch_config(name, setting="model.init"))
    is_model = source.folder is not None and not has_adapter(source.folder)
    return stored_format(source.folder) if source.folder is not None and is_model else None


def _has_tokenizer(folder: Path) -> bool:
    return (folder / TOKENIZER_FILE).exists() or vocabulary_file(folder) is not None


def _require_sound(folder: Path, spec: ModelSpec) -> None:
    """Check the weights in a folder without a manifest, as another program writes it."""
    if has_adapter(folder) or (folder / MANIFEST_FILE).exists():
        return
    require_weights(spec, folder)


def rate_warning(config: RunConfig) -> str | None:
    """Return a warning if the learning rate is too high for pretrained weights, or None.

    The weights of an adapter are always new, so a high rate suits them.
    """
    rate, init = config.optimizer.lr, config.model.init
    if init == SCRATCH or config.adapter.is_on() or rate <= _MOST_FINE_TUNING_RATE:
        return None
    return (
        f"optimizer.lr = {rate:g} is a rate for training from scratch, but model.init = {init!r} "
        "has trained weights; fine-tuning needs about 3e-5"
    )


def rank_memory(device: DeviceSection, nodes: Sequence[Node], *, ranks: int) -> int | None:
    """Return the GPU memory of a node's ranks in bytes, for the node with the least GPU memory.

    Each node has `ranks` ranks, and each rank has one GPU. Returns None if the ranks compute on
    CPUs, or if the GPU memory of a node is unknown.
    """
    sizes = [node.gpu_memory_gib for node in nodes if node.gpus and node.gpu_memory_gib]
    if device.kind == "cpu" or not nodes or len(sizes) < len(nodes):
        return None
    return int(min(sizes) * 2**30) * ranks


def require_fp8_on(precision: PrecisionSection, nodes: Sequence[Node]) -> None:
    """Raise ConfigError if `precision.fp8 = "on"` and the GPUs of a node lack 8-bit matmuls."""
    if precision.fp8 != "on":
        return
    for node in nodes:
        found = node.gpu_capability
        if found and tuple(map(int, found.split("."))) < FP8_CAPABILITY:
            raise ConfigError(
                f"precision.fp8 = 'on': the GPUs of {node.name} have compute capability {found}, "
                f"and 8-bit matmuls need {'.'.join(map(str, FP8_CAPABILITY))}. Set fp8 to "
                "'emulated' for the same rounding, or to 'off'."
            )


def memory_warning(
    arithmetic: RunEstimate, placement: Placement, *, free_bytes: int | None
) -> str | None:
    """Return a warning if the node's ranks probably need more memory than is free."""
    need = arithmetic.memory_bytes_per_rank * placement.ranks_per_node
    if free_bytes is None or need <= free_bytes:
        return None
    return (
        f"the ranks need about {need / _GIB:.1f} GiB ({placement.ranks_per_node} x "
        f"{arithmetic.memory_bytes_per_rank / _GIB:.1f}); {free_bytes / _GIB:.1f} GiB are free. "
        "Lower batch.micro_batch_size or launch.ranks_per_node if ranks get killed"
    )


def tokens_of_data(config: RunConfig, *, expected_mean: float | None = None) -> int | None:
    """Return the mean number of tokens in a step, for data with samples shorter than a sequence.

    Returns None if all sequences are full. If the data cannot be read, `expected_mean` replaces the
    mean number of tokens in a sample; None means that all sequences are full.
    """
    try:
        mean = load_meta(config.data.folder()).mean_sample_tokens()
    except DataError:
        mean = expected_mean
    if mean is None:
        return None
    # Tokens that training truncates are counted, too: only the token files have all lengths.
    return min(config.tokens_per_step(), round(mean * config.batch.global_batch_size))
