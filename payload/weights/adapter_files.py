"""CONTRACT: an adapter's folder in PEFT's layout: its files, and its adapter_config.json.

Source: https://github.com/huggingface/peft/blob/main/src/peft/tuners/lora/config.py.
"""

from __future__ import annotations

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
from payload.models.adapter import ALL_LINEAR

ADAPTER_FILE, ADAPTER_CONFIG_FILE = ADAPTER_FILES

_UNUSED = frozenset(
    {"auto_mapping", "inference_mode", "peft_version", "runtime_config"}
    # Each matters only beside another key, which is refused or says how training began.
    | {"eva_config", "layers_pattern", "megatron_core", "qalora_group_size"}
    # How transformers stores the base's linears; the model's family says it.
    | {"fan_in_fan_out"}
)
"""PEFT's keys that change nothing in what a saved adapter computes."""
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
"""PEFT's initialisations that leave the base's weights as they are; pissa and olora do not."""

CLASSIFIER = "SEQ_CLS"
"""PEFT's task_type for a classifier's adapter."""
CLASSIFIER_MODULES = ("classifier", "score")
"""Modules that PEFT trains and saves whole for this task_type: the head, under either name."""

_FIX = "Name a folder with a LoRA adapter in PEFT's layout."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    """The fields of adapter_config.json that decide the arithmetic."""

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
    modules_to_save: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """A LoRA adapter, and the base that it belongs to."""

    settings: AdapterSection
    base: str
    """Folder or hub name of the base."""
    revision: str | None
    modules_to_save: tuple[str, ...] = ()
    """Modules of the base that are trained and saved whole: a classifier's `score`."""

    def source(self) -> str:
        """Return the base as model.init has it."""
        return f"{self.base}@{self.revision}" if self.revision else self.base


def has_adapter(folder: Path) -> bool:
    """Say whether `folder` holds an adapter instead of a model."""
    return (folder / ADAPTER_CONFIG_FILE).is_file()


def recorded_base(folder: Path) -> Mapping[str, object]:
    """Return what a run's checkpoint says of its adapter's base; nothing for other programs' files.

    Raises CheckpointError for a damaged file.
    """
    path = folder / TRAINER_FILE
    if not path.is_file():
        return {}
    fix = "Use another checkpoint."
    raw = parse_json(read_bytes(path), where=str(path), fix=fix, error=CheckpointError)
    found = raw.get("base") if isinstance(raw, dict) else raw
    if not isinstance(found, dict | None):
        raise CheckpointError(f"{path}: base = {shown(found)} is no JSON object. {fix}")
    return found or {}


def base_quantization(folder: Path) -> Quantize:
    """Return how the base's linears were quantised when the adapter in `folder` was trained.

    Raises CheckpointError for a way that is not known.
    """
    found = recorded_base(folder).get("quantize")
    for known in get_args(Quantize):
        if found == known:
            return cast(Quantize, known)
    if found is None:
        return "none"
    raise CheckpointError(
        f"{folder / TRAINER_FILE}: quantize = {shown(found)}: this way of quantising a base is not "
        "known here. Use the version that trained the adapter."
    )


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read adapter_config.json of `folder`.

    Raises CheckpointError when it is absent, damaged or another kind of adapter. Keys that are not
    read must have the value that leaves them out.
    """
    path = own_file(folder, ADAPTER_CONFIG_FILE)
    try:
        raw = parse_json(read_bytes(path), where=str(path), fix=_FIX, error=CheckpointError)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}. {_FIX}") from None
    found = build(_Config, raw, where=str(path), fix=_FIX, error=CheckpointError)
    assert isinstance(raw, Mapping)
    for key, value, wanted in (
        ("peft_type", found.peft_type, "LORA"),
        ("bias", found.bias, "none"),
    ):
        if value != wanted:
            raise CheckpointError(
                f"{path}: {key} = {shown(value)}, only {wanted} can be loaded. {_FIX}"
            )
    if found.init_lora_weights not in _PLAIN_INITS:
        raise CheckpointError(
            f"{path}: init_lora_weights = {shown(found.init_lora_weights)} may have changed the "
            "base's weights, which are not in the adapter. Save it with PEFT's "
            "path_initial_model_for_weight_conversion."
        )
    read = {*_Config.__dataclass_fields__, *_UNUSED}
    for key in sorted(raw.keys() - read):
        # PEFT writes every key that it knows; these values switch a feature off.
        if not (raw[key] is None or raw[key] is False or raw[key] in ([], {}, "")):
            raise CheckpointError(
                f"{path}: {shown(key)[1:-1]} = {shown(raw[key])}: adapters with it cannot be "
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
    return AdapterConfig(
        settings=AdapterSection(
            kind="lora",
            rank=found.r,
            alpha=found.lora_alpha,
            dropout=found.lora_dropout,
            target=_target(found.target_modules, path),
            rslora=found.use_rslora,
            dora=found.use_dora,
        ),
        base=found.base_model_name_or_path,
        revision=found.revision,
        modules_to_save=("score",) if found.task_type == CLASSIFIER else (),
    )


def render_adapter_config(
    config: AdapterConfig, *, modules: list[str], transposed: bool
) -> dict[str, object]:
    """Return the content of adapter_config.json.

    `modules` are the names of the target linears. `transposed`: transformers keeps the weights of
    these linears as (in, out).
    """
    settings = config.settings
    return {
        "peft_type": "LORA",
        "task_type": CLASSIFIER if config.modules_to_save else "CAUSAL_LM",
        "base_model_name_or_path": config.base,
        "revision": config.revision,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": modules,
        "use_rslora": settings.rslora,
        "use_dora": settings.dora,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "modules_to_save": list(config.modules_to_save) or None,
        "inference_mode": True,
    }


def _target(raw: object, path: Path) -> str:
    """Return `adapter.target` for PEFT's target_modules: a list of names, or `all-linear`."""
    if raw == ALL_LINEAR:
        return ALL_LINEAR
    if isinstance(raw, list) and raw and all(isinstance(name, str) and name for name in raw):
        return ",".join(raw)
    raise CheckpointError(
        f"{path}: target_modules = {shown(raw)} is no list of names. Patterns are not supported. "
        f"{_FIX}"
    )
