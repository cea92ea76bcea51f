"""Builds the model of a spec, or loads the model in a folder, for any family."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from payload.config.training_sections import Quantize
from payload.core.errors import CheckpointError, ConfigError
from payload.formats.checkpoint_listing import TRAINER_FILE
from payload.formats.hf_folder import CONFIG_FILE, classifier_config, read_config
from payload.models.adapter import token_ids
from payload.models.registry import family_of_spec, read_spec
from payload.models.spec import ModelSpec
from payload.train.models.base import CausalLM
from payload.train.models.classifier import (
    Classifier,
    is_classifier,
    saved_labels,
    saved_pad_token,
)
from payload.train.models.hf_weights import base_folder
from payload.train.models.lora import (
    add_adapter,
    load_adapter,
    load_resized_rows,
    merge_adapter,
    quantize_base,
    read_adapter_tensors,
)
from payload.train.tensors.lazy_tensors import LazyTensors, PlannedTensors
from payload.weights.adapter_files import base_quantization, has_adapter, read_adapter_config


def build(spec: ModelSpec, *, dropout: float = 0.0, random: bool = True) -> CausalLM:
    """Build the model of this spec, with random weights or with weights for the caller to set.

    Raises CheckpointError for an unknown family.
    """
    module = importlib.import_module(family_of_spec(spec).tensors)
    model: CausalLM = module.build(spec, dropout=dropout, random=random)
    return model


def load(folder: Path, *, dropout: float = 0.0, quantize: Quantize = "none") -> CausalLM:
    """Load the model in a folder in the Hugging Face layout.

    `quantize` quantises each linear of the layers while reading it. For an adapter's folder, load
    its base, dequantised if necessary, and merge the adapter. Raises CheckpointError if the model
    is missing, damaged or of an unknown family, or if the adapter was trained on a different base.
    """
    if has_adapter(folder):
        model = load_unmerged(folder, dropout=dropout)
        merge_adapter(model)
        return model
    tensors = LazyTensors(folder)
    model = _built_for(tensors, folder, dropout=dropout)
    if quantize == "nf4":
        quantize_base(model)
    model.load_tensors(tensors, where=str(folder))
    return model


def load_unmerged(folder: Path, *, dropout: float = 0.0) -> CausalLM:
    """Load the model in a folder as training computes it, without merging an adapter into the base.

    In bf16, a merged weight would lose a part of the adapter's change. A quantised base stays
    quantised. Raises CheckpointError like `load`.
    """
    if not has_adapter(folder):
        return load(folder, dropout=dropout)
    model = load(base_folder(folder), dropout=dropout, quantize=base_quantization(folder))
    return _with_adapter(model, folder)


def plan(folder: Path) -> tuple[CausalLM, PlannedTensors]:
    """Build the model in a folder and check its weights without reading them.

    The caller reads the weights later, by the names in the tensors' `targets`; until then the
    weights use no memory. `targets` is empty if transformers converts the weights while it loads
    them. In this case, the weights are already loaded. Raises CheckpointError like `load`.
    """
    tensors = PlannedTensors(folder)
    model = _built_for(tensors, folder, dropout=0.0)
    model.load_tensors(tensors, where=str(folder))
    return model, tensors


def plan_adapter(adapter: Path, base: Path) -> tuple[CausalLM, PlannedTensors]:
    """Build an adapter's base without reading its weights, and load the adapter.

    Raises CheckpointError like `load`.
    """
    model, tensors = plan(base)
    before = {each.data_ptr() for each in model.parameters()}
    model = _with_adapter(model, adapter)
    # These are the head's weights, if the model became a classifier.
    gone = before - {each.data_ptr() for each in model.parameters()}
    for name, target in list(tensors.targets.items()):
        if target.data_ptr() in gone:
            del tensors.targets[name]
    return model, tensors


def _built_for(tensors: LazyTensors, folder: Path, *, dropout: float) -> CausalLM:
    """Build the model that the config.json in `folder` describes, with weights unset."""
    spec = read_spec(folder)
    require_enough_weights(tensors, spec, folder)
    model = build(spec, dropout=dropout, random=False)
    config = read_config(folder)
    if is_classifier(config):
        model = _classifier(model, config, folder / CONFIG_FILE)
    return model


def _with_adapter(model: CausalLM, folder: Path) -> CausalLM:
    """Add the adapter in `folder` to the linears of `model`, a language model or classifier."""
    config = read_adapter_config(folder)
    tensors = read_adapter_tensors(folder)
    if config.modules_to_save and not isinstance(model, Classifier):
        model = _classifier(model, *classifier_config(folder))
    settings, whole = config.settings, model.spec.whole
    if whole is not None:
        own = map(whole.text_path, settings.target.split(","))
        settings = replace(settings, target=",".join(own))
    if tokens := token_ids(settings.train_tokens):
        tensors, rows = load_resized_rows(model, tensors), max(tokens) + 1
        if rows > model.spec.vocab_size:
            model.add_tokens(model.spec.vocab_size, rows)
    # Without names, PEFT trains the embedding, and a head only if it is tied.
    has_head = len(config.token_modules) > 1
    try:
        add_adapter(model, settings, seed=0, token_heads=has_head)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: the adapter does not fit its base: {error}") from None
    load_adapter(model, tensors, where=str(folder))
    return model


def _classifier(body: CausalLM, config: Mapping[str, object], path: Path) -> Classifier:
    """Return `body` as the classifier that `config`, the content of the file `path`, describes.

    The caller sets the weights.
    """
    is_own = path.with_name(TRAINER_FILE).is_file()
    labels = saved_labels(config, where=str(path), is_own=is_own)
    pad_token = saved_pad_token(config, where=str(path))
    return Classifier(body, labels=labels, pad_token=pad_token, random=False)


def require_enough_weights(tensors: LazyTensors, spec: ModelSpec, folder: Path) -> None:
    """Raise CheckpointError if config.json describes far more parameters than the files have."""
    held = tensors.num_elements()
    if sum(each.elements for each in spec.gradient_sizes() if each.kind == "matrix") > 2 * held:
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: its sizes require {spec.num_params():,} parameters, but the "
            f"weight files have {held:,}. The folder is damaged; use another folder."
        )
