"""CONTRACT: the files and the adapter_config.json of an adapter's folder in PEFT's layout.

Source: https://github.com/huggingface/peft/blob/main/src/peft/tuners/lora/config.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from payload.config.training_sections import AdapterSection, Quantize
from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.core.regular_files import read_bytes
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build
from payload.formats.checkpoint_listing import ADAPTER_FILES, TRAINER_FILE
from payload.formats.hf_folder import own_file
from payload.models.adapter import ALL_LINEAR, token_ids

ADAPTER_FILE, ADAPTER_CONFIG_FILE = ADAPTER_FILES

_UNUSED = frozenset(
    {"auto_mapping", "inference_mode", "peft_version", "runtime_config"}
    # Each of these only affects another key, which is rejected or describes the initialisation.
    | {"eva_config", "layers_pattern", "megatron_core", "qalora_group_size"}
    # The storage layout of the base's linears, which the model's family determines.
    | {"fan_in_fan_out"}
)
"""Keys of PEFT's config that do not affect the results of a saved adapter."""
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
"""PEFT's initialisations that do not change the base's weights, unlike pissa and olora."""

CLASSIFIER = "SEQ_CLS"
"""PEFT's task_type for a classifier's adapter."""
CLASSIFIER_MODULES = ("classifier", "score")
"""Names of a classifier's head. PEFT trains and saves the head in full for this task_type."""

_FIX = "Use a folder with a LoRA adapter in PEFT's layout."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    """The fields of adapter_config.json that affect results."""

    peft_type: str
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    r: int = checked(low=1, high=4096)
    lora_alpha: float = checked(low=0)
    lora_dropout: float = checked(0.0, low=0)
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    init_lora_weights: bool | str | None = True
    target_modules: Any = None
    target_parameters: Any = None
    modules_to_save: tuple[str, ...] | None = None
    trainable_token_indices: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Settings of a LoRA adapter, and the name of its base model."""

    settings: AdapterSection
    base: str
    """Folder or hub name of the base model."""
    revision: str | None
    modules_to_save: tuple[str, ...] = ()
    """Modules of the base that are trained and saved in full: a classifier's `score`."""
    token_modules: tuple[str, ...] = ()
    """Names of the modules with trained token rows: the embedding and, if its rows are trained too,
    the separate output head. Empty if adapter_config.json names no module; PEFT then trains the
    embedding."""

    def source(self) -> str:
        """Return the base in the form of model.init."""
        return f"{self.base}@{self.revision}" if self.revision else self.base


def has_adapter(folder: Path) -> bool:
    """Return True if `folder` holds an adapter instead of a model."""
    return (folder / ADAPTER_CONFIG_FILE).is_file()


def recorded_base(folder: Path) -> Mapping[str, object]:
    """Return a checkpoint's record of its adapter's base; empty for files of other programs.

    Raises CheckpointError for a damaged file.
    """
    path = folder / TRAINER_FILE
    if not path.is_file():
        return {}
    fix = "Use another checkpoint."
    raw = parse_json(read_bytes(path), where=str(path), fix=fix, error=CheckpointError)
    found = raw.get("base") if isinstance(raw, dict) else raw
    if not isinstance(found, dict | None):
        raise CheckpointError(f"{path}: base = {shown(found)} is not a JSON object. {fix}")
    return found or {}


def base_quantization(folder: Path) -> Quantize:
    """Return how the base was quantised while the adapter in `folder` was trained.

    Raises CheckpointError for an unknown quantisation.
    """
    found = recorded_base(folder).get("quantize")
    for known in get_args(Quantize):
        if found == known:
            return cast(Quantize, known)
    if found is None:
        return "none"
    raise CheckpointError(
        f"{folder / TRAINER_FILE}: quantize = {shown(found)}: unknown quantisation of a base. Use "
        "the release that trained the adapter."
    )


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read adapter_config.json of `folder`.

    Raises CheckpointError if the file is missing, damaged or describes a different kind of adapter.
    Keys that are not supported must have the value that disables them.
    """
    path = own_file(folder, ADAPTER_CONFIG_FILE)
    try:
        raw = parse_json(read_bytes(path), where=str(path), fix=_FIX, error=CheckpointError)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}. {_FIX}") from None
    found = build(_Config, raw, where=str(path), fix=_FIX, error=CheckpointError)
    assert isinstance(raw, Mapping)
    for key, value, expected in (
        ("peft_type", found.peft_type, "LORA"),
        ("bias", found.bias, "none"),
    ):
        if value != expected:
            raise CheckpointError(
                f"{path}: {key} = {shown(value)}, only {expected} can be loaded. {_FIX}"
            )
    if found.init_lora_weights not in _PLAIN_INITS:
        raise CheckpointError(
            f"{path}: init_lora_weights = {shown(found.init_lora_weights)} may have changed the "
            "base's weights, which are not in the adapter. Save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion."
        )
    read = {*_Config.__dataclass_fields__, *_UNUSED}
    for key in sorted(raw.keys() - read):
        # PEFT writes all of its keys; the values below disable a feature.
        if not (raw[key] is None or raw[key] is False or raw[key] in ([], {}, "")):
            raise CheckpointError(
                f"{path}: {shown(key)[1:-1]} = {shown(raw[key])}: adapters with this key cannot be "
                f"loaded. {_FIX}"
            )
    modules = found.modules_to_save or ()
    wanted_modules = CLASSIFIER_MODULES if found.task_type == CLASSIFIER else ()
    if not set(modules) <= set(wanted_modules):
        only = f"some of {', '.join(CLASSIFIER_MODULES)}" if wanted_modules else "null"
        raise CheckpointError(
            f"{path}: modules_to_save = {shown(modules)}, only {only} can be loaded for task_type "
            f"{shown(found.task_type)}. {_FIX}"
        )
    if not found.base_model_name_or_path:
        raise CheckpointError(f"{path}: base_model_name_or_path is missing. {_FIX}")
    tokens, token_modules = _tokens(found.trainable_token_indices, path)
    return AdapterConfig(
        settings=AdapterSection(
            kind="lora",
            rank=found.r,
            alpha=found.lora_alpha,
            dropout=found.lora_dropout,
            target=_target(found.target_modules, found.target_parameters, path),
            train_tokens=tokens,
            rslora=found.use_rslora,
            dora=found.use_dora,
        ),
        base=found.base_model_name_or_path,
        revision=found.revision,
        modules_to_save=("score",) if found.task_type == CLASSIFIER else (),
        token_modules=token_modules,
    )


def render_adapter_config(
    config: AdapterConfig,
    *,
    modules: list[str],
    parameters: list[str],
    transposed: bool,
    token_modules: list[str],
) -> dict[str, object]:
    """Return the content of adapter_config.json.

    `modules` are the names of the target linears, and `parameters` the names of other targets.
    `transposed` is True if transformers stores the weights of these linears as (in, out).
    `token_modules` are the names of the modules with trained token rows: the embedding, and perhaps
    a separate output head.
    """
    settings = config.settings
    tokens = list(token_ids(settings.train_tokens))
    # PEFT finds the embedding for a list, and ties a tied head to it.
    rows = tokens if len(token_modules) == 1 else dict.fromkeys(token_modules, tokens)
    return {
        "peft_type": "LORA",
        "task_type": CLASSIFIER if config.modules_to_save else "CAUSAL_LM",
        "base_model_name_or_path": config.base,
        "revision": config.revision,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": modules,
        **({"target_parameters": parameters} if parameters else {}),
        **({"trainable_token_indices": rows} if tokens else {}),
        "use_rslora": settings.rslora,
        "use_dora": settings.dora,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "modules_to_save": list(config.modules_to_save) or None,
        "inference_mode": True,
    }


def _tokens(raw: Any, path: Path) -> tuple[str, tuple[str, ...]]:
    """Return `adapter.train_tokens` and the modules for PEFT's trainable_token_indices."""
    if not raw:
        return "none", ()
    lists = list(raw.values()) if isinstance(raw, dict) else [raw]
    tokens = lists[0]
    is_ids = isinstance(tokens, list) and all(type(each) is int and each >= 0 for each in tokens)
    if not is_ids or not tokens or len(set(tokens)) < len(tokens) or len(lists) > 2:
        raise CheckpointError(
            f"{path}: trainable_token_indices = {shown(raw)} is not a list of different token ids, "
            f"or such a list for the embedding and the output head. {_FIX}"
        )
    if any(each != tokens for each in lists):
        raise CheckpointError(
            f"{path}: trainable_token_indices = {shown(raw)}: the embedding and the output head "
            f"must have the same tokens. {_FIX}"
        )
    return ",".join(map(str, tokens)), tuple(raw) if isinstance(raw, dict) else ()


def _is_target_name(name: object) -> bool:
    return isinstance(name, str) and name != ALL_LINEAR and bool(re.fullmatch(r"[\w.-]+", name))


def _target(modules: object, parameters: object, path: Path) -> str:
    """Return the value of `adapter.target` for PEFT's target_modules (a list or `all-linear`) and
    PEFT's target_parameters (a list)."""
    names = parameters or []
    if not isinstance(names, list) or not all(map(_is_target_name, names)):
        raise CheckpointError(
            f"{path}: target_parameters = {shown(parameters)} is not a list of names. {_FIX}"
        )
    if modules == ALL_LINEAR:
        return ",".join([ALL_LINEAR, *names])
    # PEFT compares names as they are, but `adapter.target` separates them by commas and blanks.
    if isinstance(modules, list) and modules + names and all(map(_is_target_name, modules)):
        return ",".join([*modules, *names])
    raise CheckpointError(
        f"{path}: target_modules = {shown(modules)} is not a list of names. Patterns are not "
        f"supported. {_FIX}"
    )
