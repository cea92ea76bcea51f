"""Builds transformers' own module for a config.json; never runs code from the model's folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.formats.hf_folder import FLOAT_TAG
from payload.models.spec import ModelSpec
from payload.train.families.transformers.probes import first_line, require_causal
from payload.train.models.hf_layout import without_code
from payload.train.tensors.transformers_import import import_shared_modules

_Module = Any
"""transformers.PreTrainedModel. Most of its methods have no type hints."""
_Config = Any
"""transformers.PreTrainedConfig."""

_TAGGED = ("NaN", "Infinity", "-Infinity")


def build_module(spec: ModelSpec, dropout: float, *, random: bool) -> _Module:
    """Return transformers' module for the spec's config.json, in fp32.

    Raises CheckpointError if transformers has no code for the model, or if the model does not
    predict the next token.
    """
    config = module_config(raw_config(spec), where="config.json", dropout=dropout)
    kind = module_class(config)
    try:
        with nullcontext() if random else _without_initialisation():
            module = kind._from_config(config, dtype=torch.float32)
    except Exception as error:  # Invalid sizes fail in many places of transformers' code.
        raise CheckpointError(
            f"config.json: transformers cannot build the model ({first_line(error)}). Use a "
            "folder with the model's config.json and all its weight files."
        ) from None
    module.tie_weights()  # The skipped initialisation would have done this.
    if random:
        require_causal(module)
    return module


def module_config(raw: Mapping[str, Any], *, where: str, dropout: float) -> _Config:
    """Return transformers' configuration of a config.json, with every dropout set to `dropout`.

    Raises CheckpointError for a model that needs code from its folder.
    """
    import_shared_modules()
    from transformers import CONFIG_MAPPING

    name = raw.get("model_type")
    if not isinstance(name, str) or name not in CONFIG_MAPPING:
        remote = ", and the model's own code (auto_map) is never run" if "auto_map" in raw else ""
        raise CheckpointError(
            f"{where}: model_type = {shown(name)}: unknown to the installed transformers{remote}. "
            "Use a model that transformers builds from its own code."
        )
    try:
        config = CONFIG_MAPPING[name].from_dict(_with_floats(without_code(raw)))
    except Exception as error:  # Each family raises its own errors for invalid fields.
        raise CheckpointError(
            f"{where}: transformers rejects this config ({first_line(error)}). Correct config.json."
        ) from None
    for key, value in config.to_dict().items():
        if ("dropout" in key or key.endswith("_pdrop")) and isinstance(value, int | float):
            setattr(config, key, type(value)(dropout) if value in (True, False) else dropout)
    return config


def _with_floats(value: Any) -> Any:
    """Return a value of config.json in which floats replace the tags for NaN and infinity."""
    if isinstance(value, Mapping):
        if set(value) == {FLOAT_TAG} and value[FLOAT_TAG] in _TAGGED:
            return float(value[FLOAT_TAG])
        return {key: _with_floats(each) for key, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


def module_class(config: _Config) -> Any:
    """Return transformers' class for next-token prediction. Raises CheckpointError."""
    import_shared_modules()
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    is_text_alone = kind is not None and not kind.__name__.endswith("ForConditionalGeneration")
    if not is_text_alone or getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(
            f"config.json: model_type = {shown(config.model_type)}: transformers has no text-only "
            "causal language model of this type. Use the model's text-only version."
        )
    return kind


def raw_config(spec: ModelSpec) -> Mapping[str, Any]:
    """Return the config.json that was read."""
    return cast("Mapping[str, Any]", spec.config)  # type: ignore[attr-defined]  # GPT-2's lacks it


@contextmanager
def without_load_report() -> Iterator[None]:
    """Suppress transformers' progress bar and table of missing weights."""
    from transformers.utils import logging as theirs

    level = theirs.get_verbosity()
    has_bar = theirs.is_progress_bar_enabled()
    theirs.set_verbosity(logging.ERROR)
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if has_bar:
            theirs.enable_progress_bar()


def _without_initialisation() -> AbstractContextManager[None]:
    from transformers.initialization import no_init_weights

    return cast("AbstractContextManager[None]", no_init_weights())
