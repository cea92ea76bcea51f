"""Builds the model of a spec, and loads the one in a folder, whatever its family."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

from payload.config.training_sections import Quantize
from payload.core.errors import CheckpointError, ConfigError
from payload.formats.checkpoint_listing import TRAINER_FILE
from payload.formats.hf_folder import CONFIG_FILE, read_config
from payload.models.registry import family_of, read_spec
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
    merge_adapter,
    quantize_base,
    read_adapter_tensors,
)
from payload.train.tensors.lazy_tensors import LazyTensors, PlannedTensors
from payload.weights.adapter_files import base_quantization, has_adapter, read_adapter_config


def build(spec: ModelSpec, *, dropout: float = 0.0, random: bool = True) -> CausalLM:
    """Build the model of this spec, with random weights or with weights for the caller to set.

    Raises CheckpointError for a family that is not known.
    """
    family = family_of({"model_type": spec.model_type}, where=CONFIG_FILE)
    module = importlib.import_module(family.tensors)
    model: CausalLM = module.build(spec, dropout=dropout, random=random)
    return model


def load(folder: Path, *, dropout: float = 0.0, quantize: Quantize = "none") -> CausalLM:
    """Load the model in a folder in the Hugging Face layout.

    With `quantize` each linear of the layers is quantised as it is read. An adapter's folder gives
    its base, dequantised if it was quantised, with the adapter merged. Raises CheckpointError when
    it is absent, damaged, of no family that is known, or the base is not the adapter's own.
    """
    if has_adapter(folder):
        return _load_merged(folder, dropout=dropout)
    tensors = LazyTensors(folder)
    model = _built_for(tensors, folder, dropout=dropout)
    if quantize == "nf4":
        quantize_base(model)
    model.load_tensors(tensors, where=str(folder))
    return model


def plan(folder: Path) -> tuple[CausalLM, PlannedTensors]:
    """Build the model in a folder and check its weights, of which none is read.

    They are for the caller to read, by the names of the tensors' targets. Until then they take no
    memory. Without targets the model was loaded: transformers converts its weights on the way.
    Raises CheckpointError as `load` does.
    """
    tensors = PlannedTensors(folder)
    model = _built_for(tensors, folder, dropout=0.0)
    model.load_tensors(tensors, where=str(folder))
    return model, tensors


def plan_adapter(adapter: Path, base: Path) -> tuple[CausalLM, PlannedTensors]:
    """Do the same for an adapter's base, and load the adapter beside it.

    Raises CheckpointError as `load` does.
    """
    model, tensors = plan(base)
    before = {each.data_ptr() for each in model.parameters()}
    model = _with_adapter(model, adapter)
    # The head, where the model became a classifier.
    gone = before - {each.data_ptr() for each in model.parameters()}
    for name, target in list(tensors.targets.items()):
        if target.data_ptr() in gone:
            del tensors.targets[name]
    return model, tensors


def _load_merged(folder: Path, *, dropout: float) -> CausalLM:
    model = load(base_folder(folder), dropout=dropout, quantize=base_quantization(folder))
    model = _with_adapter(model, folder)
    merge_adapter(model)
    return model


def _built_for(tensors: LazyTensors, folder: Path, *, dropout: float) -> CausalLM:
    """Build the model that the config.json of `folder` describes, with weights still to be set."""
    spec = read_spec(folder)
    require_enough(tensors, spec, folder)
    model = build(spec, dropout=dropout, random=False)
    config = read_config(folder)
    if is_classifier(config):
        model = _classifier(model, config, folder)
    return model


def _with_adapter(model: CausalLM, folder: Path) -> CausalLM:
    """Put the adapter in `folder` beside the linears of `model`, a language model or classifier."""
    config = read_adapter_config(folder)
    tensors = read_adapter_tensors(folder)
    if config.modules_to_save and not isinstance(model, Classifier):
        model = _classifier(model, read_config(folder), folder)
    try:
        add_adapter(model, config.settings, seed=0)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: does not fit its base: {error}") from None
    load_adapter(model, tensors, where=str(folder))
    return model


def _classifier(body: CausalLM, config: Mapping[str, object], folder: Path) -> Classifier:
    """Return `body` as the classifier of a config.json, with weights for the caller to set."""
    where, is_own = str(folder / CONFIG_FILE), (folder / TRAINER_FILE).is_file()
    labels = saved_labels(config, where=where, is_own=is_own)
    pad_token = saved_pad_token(config, where=where)
    return Classifier(body, labels=labels, pad_token=pad_token, random=False)


def require_enough(tensors: LazyTensors, spec: ModelSpec, folder: Path) -> None:
    """Refuse sizes that the weights do not have, before memory is taken for them."""
    held = tensors.num_elements()
    if sum(each.elements for each in spec.gradient_sizes() if each.kind == "matrix") > 2 * held:
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: its sizes make {spec.num_params():,} parameters, but the "
            f"files with the weights have {held:,}. The folder is damaged; name another one."
        )
