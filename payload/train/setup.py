"""Builds what a run starts from: the model with its weights, the tokenizer and the saved state."""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from payload.config.model_checks import require_fit, unused_settings, with_new_tokens
from payload.config.run_config import (
    RunConfig,
    fixed_differences,
    load_run_config,
    parse_run_config,
)
from payload.core.errors import CheckpointError, ConfigError
from payload.core.suggested_commands import command
from payload.data.tokenizer_files import tokenizer_files
from payload.data.tokenizer_match import require_same_tokens
from payload.estimates.disk_room import require_room
from payload.formats.checkpoint_listing import (
    checkpoint_folders,
    manifest_problems,
)
from payload.formats.data_folder import TRAIN_NAME, DataMeta, describe_new_rows
from payload.formats.hf_folder import CONFIG_FILE, read_config, read_generation_file
from payload.formats.quantized.weight_headers import stored_format
from payload.formats.tokenizer_identity import folder_identity, is_tokenizer_of
from payload.models.multimodal_tensors import model_headers
from payload.models.registry import read_spec, spec_of
from payload.models.spec import ModelSpec
from payload.models.transformers.ignored_tensors import describe_ignored, ignored_tensors
from payload.run_record.run_files import RunPaths, require_own_folders
from payload.run_record.run_identity import checkpoint_identity, known_identity
from payload.train.checkpoints.checkpoint import (
    BaseModel,
    TrainerState,
    load_trainer_state,
    newest_checkpoint,
    remove_partial_checkpoints,
)
from payload.train.checkpoints.initial_weights_identity import identify
from payload.train.models.base import CausalLM
from payload.train.models.classifier import Classifier
from payload.train.models.hf_weights import config_folder, model_folder
from payload.train.models.loading import build, load, require_enough_weights
from payload.train.models.lora import (
    add_adapter,
    load_adapter,
    quantize_base,
    read_adapter_tensors,
)
from payload.train.ranks.world import World
from payload.train.tasks.base import Task
from payload.train.tensors.copied_parts import CopiedParts
from payload.train.tensors.lazy_tensors import LazyTensors, path_on_all_ranks
from payload.weights.adapter_files import has_adapter
from payload.weights.source import pinned_name_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The model and the state from which this rank begins to train."""

    model: CausalLM
    state: TrainerState | None
    """State of the checkpoint to resume from; None for a new run."""
    checkpoint: Path | None
    """The checkpoint to resume from, on rank 0 only; None for a new run."""
    tokenizer: Mapping[str, bytes] = field(default_factory=dict)
    """The tokenizer's files and generation_config.json for the checkpoints, by name; on rank 0
    only."""
    copied: CopiedParts | None = None
    """The untrained parts of a multimodal model for the checkpoints; on rank 0 only."""
    base: BaseModel | None = None
    """The base model of an adapter; on rank 0 only."""
    identity: str | None = None
    """The run's identity, once the run has a folder; on rank 0 only."""


def pin_initial(config: RunConfig, *, paths: RunPaths, world: World) -> RunConfig:
    """Return the config with a hub model pinned to one commit for all ranks and all resumes.

    Rank 0 queries the hub if no earlier start of the run has recorded the commit. Raises
    CheckpointError.
    """
    init = None
    if world.is_main:
        earlier = earlier_config(paths)
        before = earlier.model.init if earlier else None
        init = pinned_name_of(config.model.init, setting="model.init", earlier=before)
    agreed = world.broadcast(init, str)
    return replace(config, model=replace(config.model, init=agreed))


def earlier_config(paths: RunPaths) -> RunConfig | None:
    """Return the resolved settings of an earlier start of the run, or None for a new run.

    The settings in the newest checkpoint are preferred, because a Kubernetes operator may have
    replaced the run.toml in the run folder.
    """
    for checkpoint in reversed(checkpoint_folders(paths.checkpoints)):
        with suppress(ConfigError):
            state = load_trainer_state(checkpoint)
            return parse_run_config(state.config_toml, where="the checkpoint's config")
    with suppress(ConfigError):
        return load_run_config(paths.config) if paths.config.exists() else None
    return None


def find_start(config: RunConfig, task: Task, *, paths: RunPaths, world: World) -> Start:
    """Build the model from the run's newest checkpoint, or from `model.init` for a new run.

    Rank 0 reads the files and broadcasts the config. The strategy distributes the weights later, or
    each rank reads its own part. Raises CheckpointError if checkpoints exist but none is valid.
    """
    adapter = with_new_tokens(config, task.meta).adapter
    checkpoint = _checkpoint_to_resume(paths) if world.is_main else None
    resumes = world.broadcast(checkpoint is not None, bool)
    if not resumes and config.model.init == "scratch":
        return _from_scratch(config, task, world=world)
    state = None
    if resumes:
        found = load_trainer_state(checkpoint) if checkpoint else None
        state = world.broadcast(found, TrainerState)
        _require_same_run(state, config)
    if checkpoint is not None:
        task.require_matching_checkpoint(checkpoint)
    folder = weights_folder(checkpoint, config) if world.is_main else None
    base = _base_model(folder, config, state, task=task) if folder else None
    if folder is not None and not resumes:
        require_same_tokens(
            task.meta,
            data=task.folder,
            folder=folder,
            init=config.model.init,
            error=CheckpointError,
        )
    model = _loaded_model(folder, config, task, world=world)
    model = task.adapt_model(model, seed=config.run.seed, init=config.model.init)
    tokenizer = _tokenizer(task, source=folder, model=model) if world.is_main else {}
    routers = model.freeze_router() if config.model.router == "freeze" else ()
    if config.adapter.is_on():
        add_adapter(model, adapter, seed=config.run.seed)
        _require_frozen(model, routers)
        if note := model.trained_spec().note():
            log.info(f"note: {note}")
        if checkpoint is not None:
            load_adapter(model, read_adapter_tensors(checkpoint), where=str(checkpoint))
    if state is not None:
        require_same_data(state, task.meta)
        _keep_router_loss(model, state)
    copied = None
    if folder is not None and not config.adapter.is_on():  # an adapter's checkpoints lack the base
        copied = CopiedParts.open(config_folder(folder))
        if not isinstance(model, Classifier):
            tokenizer = {**tokenizer, **read_generation_file(folder)}
    return Start(
        model=model,
        state=state,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        copied=copied,
        base=base,
    )


def _require_frozen(model: CausalLM, routers: Collection[str]) -> None:
    """Raise ConfigError if an adapter trains one of `routers`."""
    for name, parameter in model.named_parameters():
        for router in routers:
            if parameter.requires_grad and f".{router}." in f".{name}":
                raise ConfigError(
                    f'model.router = "freeze", but adapter.target names the router {router}. Set '
                    'model.router to "auto".'
                )


def _from_scratch(config: RunConfig, task: Task, *, world: World) -> Start:
    """Build a model of the configured size with random weights."""
    torch.manual_seed(config.run.seed)
    spec = config.model.spec(
        sequence_length=config.data.sequence_length, vocab_size=task.meta.vocab_size
    )
    model = build(spec, dropout=config.model.dropout)
    model = task.adapt_model(model, seed=config.run.seed, init=config.model.init)
    tokenizer = _tokenizer(task, source=None, model=model) if world.is_main else {}
    return Start(model=model, state=None, checkpoint=None, tokenizer=tokenizer)


def require_disk_space(config: RunConfig, spec: ModelSpec, *, paths: RunPaths) -> None:
    """Remove interrupted checkpoints; raise ConfigError if the run's checkpoints do not fit."""
    remove_partial_checkpoints(paths.checkpoints)
    require_room(
        paths.root,
        checkpoint_bytes=config.checkpoint_bytes(spec),
        keep=config.train.keep_checkpoints,
        uploads=config.storage.address() is not None,
    )


def _checkpoint_to_resume(paths: RunPaths) -> Path | None:
    """Return the newest valid checkpoint, or None for a new run.

    Raises CheckpointError if all checkpoints are damaged (a new run never replaces them) or if the
    newest checkpoint belongs to a different run. Raises ConfigError if a folder of the run is a
    link that leads outside the run.
    """
    require_own_folders(paths)
    checkpoints = paths.checkpoints
    newest = newest_checkpoint(checkpoints)
    damaged = checkpoint_folders(checkpoints)
    if newest is None and damaged:
        raise CheckpointError(
            f"{checkpoints}: none of {len(damaged)} checkpoints is valid. {damaged[-1].name}: "
            f"{manifest_problems(damaged[-1])[0]} Remove {checkpoints} to start from scratch."
        )
    recorded = checkpoint_identity(newest) if newest is not None else None
    own = known_identity(paths).identity
    if recorded not in (None, own):
        raise CheckpointError(
            f"{newest}: the checkpoint belongs to the run with identity {recorded}, but "
            f"{paths.identity} contains {own}: these are two runs with the same name. Move the "
            "checkpoint away, or start a new run with model.init set to this checkpoint."
        )
    return newest


def weights_folder(checkpoint: Path | None, config: RunConfig) -> Path:
    """Return the folder of the weights to load: `checkpoint`, or `model.init` without a checkpoint.

    `checkpoint` belongs to the run and is already verified. A run that trains an adapter always
    reads `model.init`, because its checkpoints do not contain the base's weights. Raises
    CheckpointError for an adapter in a run that trains all weights: the adapter's author could
    choose any folder of this machine as the base.
    """
    if config.adapter.is_on():
        checkpoint = None
    elif checkpoint is not None and has_adapter(checkpoint):
        raise CheckpointError(
            f"{checkpoint}: this is an adapter, but the run trains all weights (adapter.kind = "
            "'none'), so the checkpoint belongs to another run. Move the checkpoint away."
        )
    return checkpoint or model_folder(config.model.init)


def _base_model(
    folder: Path, config: RunConfig, state: TrainerState | None, *, task: Task
) -> BaseModel | None:
    """Return the identity of the run's initial weights, or None if the task does not need it."""
    if config.adapter.is_on():
        base: BaseModel | None = _adapters_base(folder, config, state)
    elif not task.keeps_base:
        return None
    elif state is not None:
        base = state.base
    else:
        base = identify(config.model.init, folder, quantize=config.model.quantize)
    if base is not None and task.keeps_base:
        task.set_base(base, resumes=state is not None)
    return base


def _adapters_base(folder: Path, config: RunConfig, state: TrainerState | None) -> BaseModel:
    """Return the identity of the adapter's base in `folder`; on a resume the base must be
    unchanged."""
    if has_adapter(folder):
        raise CheckpointError(
            f"model.init = {config.model.init!r}: this is an adapter, but adapter.kind = "
            f"{config.adapter.kind!r} needs a complete model as its base. Merge the adapter first "
            f"with {command('export', '--model', config.model.init, '--merge')}."
        )
    source = config.model.init
    found = identify(source, folder, quantize=config.model.quantize)
    before = state.base if state else None
    if before is not None and before.sha256 != found.sha256:
        raise CheckpointError(
            f"model.init = {source!r}: the adapter was trained with other weights (sha256 "
            f"{before.sha256[:12]}, now {found.sha256[:12]}). Restore the original weights, "
            "or start a new run."
        )
    if before is not None and not before.has_same_config(found):
        raise CheckpointError(
            f"model.init = {source!r}: the adapter was trained with another {CONFIG_FILE} (sha256 "
            f"{str(before.config_sha256)[:12]}, now {str(found.config_sha256)[:12]}). Restore the "
            f"original {CONFIG_FILE}, or start a new run."
        )
    return found


def _tokenizer(task: Task, *, source: Path | None, model: CausalLM) -> Mapping[str, bytes]:
    context = model.spec.context()
    files = tokenizer_files(task.meta, data=task.folder, source=source, context=context)
    if not files:
        log.warning(
            "checkpoints will have no tokenizer: the files of the data's tokenizer "
            f"({task.meta.tokenizer}, {task.meta.vocab_size:,} tokens) were not found. Copy these "
            "files into a checkpoint before you load it with transformers."
        )
    return task.tokenizer(files)


def _loaded_model(folder: Path | None, config: RunConfig, task: Task, *, world: World) -> CausalLM:
    """Load the weights on rank 0; the other ranks build the same model with unset weights.

    They do so at the same time: otherwise the other ranks would import the model's packages only
    after rank 0 has read the weights.
    """
    described = config_folder(folder) if folder else None
    new = task.meta.added_ids() if _lacks_new_tokens(folder, task.meta, world=world) else ()
    in_parts = _read_in_parts(config, folder, world=world)
    if folder is not None and described is not None:
        _require_loadable(described, config, task, new_tokens=len(new))
    raw = world.broadcast(json.dumps(_described(described)) if described else None, str)
    if folder is not None and not in_parts:
        model = load(folder, dropout=config.model.dropout, quantize=config.model.quantize)
        model.spec = model.spec.with_sequence_length(config.data.sequence_length)
    else:
        spec = spec_of(json.loads(raw), where=f"rank 0's {CONFIG_FILE}")
        spec = spec.with_sequence_length(config.data.sequence_length)
        model = build(spec, dropout=config.model.dropout, random=False)
        if config.model.quantize == "nf4":
            quantize_base(model)
        if in_parts and model.reads_parts:
            log.info("weights   each rank reads its own part")
            model.deferred_weights = in_parts
        elif in_parts and world.is_main:
            model.load_tensors(LazyTensors(in_parts), where=str(in_parts))
    if new:
        model.add_tokens(new[0], new[-1] + 1)
        model.new_rows = new[0], new[-1] + 1
    return model


def _require_loadable(described: Path, config: RunConfig, task: Task, *, new_tokens: int) -> None:
    """Raise CheckpointError or ConfigError if the model does not fit the run; log its notes.

    No other rank builds the model before this check of its sizes.
    """
    spec, meta = read_spec(described), task.meta
    require_fit(
        spec,
        config,
        vocab_size=meta.vocab_size,
        tokenizer=meta.tokenizer,
        new_tokens=new_tokens,
    )
    if new_tokens:
        log.info(f"vocabulary {describe_new_rows(meta, spec.vocab_size)}")
    require_enough_weights(LazyTensors(described), spec, described)
    if stored := stored_format(described):
        log.info(f"weights   {stored}")
    if spec.whole is not None:
        log.info(f"weights   {spec.whole.note()}")
    if ignored := _ignored_note(spec, described):
        log.info(f"weights   {ignored}")
    if note := unused_settings(spec, config):
        log.info(note)


def _ignored_note(spec: ModelSpec, folder: Path) -> str | None:
    """Return a line on tensors of the text model that transformers does not read, or None."""
    names = model_headers(folder)
    return describe_ignored(
        ignored_tensors(names, model_type=spec.model_type, layers=spec.num_layers())
    )


def _described(folder: Path) -> Mapping[str, object]:
    """Return config.json of `folder`, completed by values that a multimodal model's tensors
    determine."""
    whole = read_spec(folder).whole
    return read_config(folder) if whole is None else whole.config


def _lacks_new_tokens(folder: Path | None, meta: DataMeta, *, world: World) -> bool:
    """Return True if rank 0's `folder` has a model without the data's new special tokens."""
    if meta.added_tokens is None:
        return False
    identity = folder_identity(folder, error=CheckpointError) if folder else None
    has_tokens = identity is not None and is_tokenizer_of(meta, identity)
    return world.broadcast(not has_tokens, bool)


def _read_in_parts(config: RunConfig, folder: Path | None, *, world: World) -> Path | None:
    """Return rank 0's folder of weights if each rank can read its own part, or None.

    Rank 0 always reads the full weights for an adapter's base and for a classifier.
    """
    whole = config.adapter.is_on() or config.task.data() == "classify"
    in_parts = config.distributed.strategy == "shard" or config.distributed.splits_model()
    if whole or not in_parts or world.world_size == 1:
        return None
    is_plain = folder is not None and not has_adapter(folder)
    return path_on_all_ranks(folder if is_plain else None, world)


def _require_same_run(state: TrainerState, config: RunConfig) -> None:
    """Raise CheckpointError if a setting that must not change on a resume is different."""
    before = parse_run_config(state.config_toml, where="the checkpoint's config")
    for name, old, new in fixed_differences(before, config):
        raise CheckpointError(
            f"{name} = {new!r}, but the run's checkpoint was trained with {old!r}. Restore the "
            "old value, or start a new run with model.init set to the checkpoint."
        )


def _keep_router_loss(model: CausalLM, state: TrainerState) -> None:
    """Leave out the routers' balancing loss if the run has been trained without this loss."""
    was_on = state.router_loss
    if was_on is None:
        # The release that added the loss also added `model.router` to the recorded settings.
        was_on = "router" in tomllib.loads(state.config_toml).get("model", {})
    if model.has_router_loss() and not was_on:
        model.without_router_loss = True
        log.info(
            "note: the run continues without the routers' balancing loss, because an older release "
            "began the run without this loss"
        )


def require_same_data(state: TrainerState, meta: DataMeta) -> None:
    """Raise CheckpointError if the data differs: tokens, masks, labels or validation texts."""
    hashes = meta.hashes()
    before = state.data_sha256 or {TRAIN_NAME: state.train_sha256}
    if not state.data_sha256 and len(hashes) > 1:
        others = ", ".join(name for name in hashes if name != TRAIN_NAME)
        log.warning(
            "warning: the run's checkpoint is from an older version, which stored only the hash of "
            f"{TRAIN_NAME}. Changes in these files are not detected: {others}"
        )
    for name in sorted(before.keys() | (hashes.keys() if state.data_sha256 else set())):
        old, new = (each.get(name, "none")[:12] for each in (before, hashes))
        if old != new:
            raise CheckpointError(
                f"the run's checkpoint was trained on {name} {old}, but data.dir has {new}. Resume "
                "with the same data, or start a new run with model.init set to the checkpoint."
            )
