"""Weights in the Hugging Face layout: loading by name or folder, and saving to a folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from payload.core.errors import CheckpointError
from payload.core.suggested_commands import command
from payload.formats.checkpoint_listing import config_sha256, weights_sha256
from payload.formats.hf_folder import CONFIG_FILE, WEIGHTS_FILE
from payload.formats.hub_names import HubName, is_ambiguous
from payload.formats.tokenizer_identity import TOKENIZER_FILE
from payload.train.models.hf_layout import saved_whole_config
from payload.train.tensors.gguf_to_hf_folder import folder_of_gguf
from payload.train.tensors.tensor_file import write_tensors
from payload.weights.adapter_files import (
    ADAPTER_CONFIG_FILE,
    has_adapter,
    recorded_base,
)
from payload.weights.hub import fetch
from payload.weights.source import base_name, find_source

if TYPE_CHECKING:
    from payload.train.models.base import CausalLM
    from payload.train.tensors.copied_parts import CopiedParts

log = logging.getLogger(__name__)


def save_hf(
    model: CausalLM,
    folder: Path,
    *,
    progressed: Callable[[], None] = lambda: None,
    copied: CopiedParts | None = None,
) -> str:
    """Write `model.safetensors` and `config.json` to a folder that transformers can load.

    `copied` are the other parts of a multimodal model. Return the sha256 of the weights' file.
    Raises OSError.
    """
    save_hf_config(model, folder)
    return write_tensors(
        folder / WEIGHTS_FILE,
        model.hf_tensors(),
        metadata={"format": "pt"},
        progressed=progressed,
        copied=copied,
    )


def save_hf_config(model: CausalLM, folder: Path) -> None:
    """Write a `config.json` from which transformers builds the same model. Raises OSError."""
    whole = model.spec.whole
    found = model.hf_config() if whole is None else saved_whole_config(whole.config)
    content = json.dumps(found, indent=2) + "\n"
    (folder / CONFIG_FILE).write_text(content, encoding="utf-8")


def checkpoint_folder(name: str) -> Path:
    """Return the folder with the weights that `--model` names, as `model_folder` does.

    The option accepts runs and checkpoints, so a local folder `exp/first` takes precedence over a
    hub model of that name. This is logged, because a cloned project could contain such a folder on
    purpose.
    """
    folder = model_folder(name, setting="--model", takes_runs=True)
    if is_ambiguous(name):
        log.warning(
            f"--model = {name!r}: using the local folder {folder}, not the hub model of this name"
        )
    return folder


def model_folder(
    name: str,
    *,
    setting: str = "model.init",
    verify: bool = True,
    takes_runs: bool = False,
    takes_ids: bool = True,
) -> Path:
    """Return the folder with the weights of `name`, downloaded if it is on the hub.

    `setting` is the name in messages; the other arguments have the same meaning as in
    `find_source`. Raises CheckpointError if no weights are found.
    """
    source = find_source(
        name,
        setting=setting,
        verify=verify,
        takes_runs=takes_runs,
        takes_ids=takes_ids,
        passed_over=warn_skipped,
    )
    if source.folder is not None:
        return source.folder
    if source.file is not None:
        log.info(f"reading {source.file}")
        return folder_of_gguf(source.file)
    hub_name = HubName.parse(name)
    if hub_name is None:
        raise CheckpointError(f"{setting} = {name!r}: the folder has no weights. Use a checkpoint.")
    return fetch(hub_name, setting=setting, say=log.info)


def config_folder(folder: Path) -> Path:
    """Return the folder of a checkpoint's model config: for an adapter, the base's folder.

    Only a classifier's labels are used from an adapter's own config. Raises CheckpointError.
    """
    return base_folder(folder, verify=False) if has_adapter(folder) else folder


def tokenizer_folder(folder: Path) -> Path:
    """Return the folder with a checkpoint's tokenizer; an adapter without a tokenizer uses the
    tokenizer of its base.

    Raises CheckpointError.
    """
    is_whole = (folder / TOKENIZER_FILE).is_file() or not has_adapter(folder)
    return folder if is_whole else base_folder(folder, verify=False)


def base_folder(adapter: Path, *, verify: bool = True) -> Path:
    """Return the folder with the weights of an adapter's base, downloaded if it is on the hub.

    With `verify`, the base's weights and config.json are compared with the hashes that the
    adapter's run recorded. Adapters of other programs have no hashes. Without `verify`, no weights
    are read. Raises CheckpointError.
    """
    source = base_name(adapter)
    if Path(source).is_absolute() and not Path(source).exists():
        raise CheckpointError(
            f"{adapter}: its base is missing, and an adapter contains no copy of its base. Restore "
            f"the base in {source}."
        )
    recorded = recorded_base(adapter) if verify else {}
    expected = recorded.get("sha256")
    # The recorded hash covers all weights; verifying the manifest would read them a second time.
    setting = f"{adapter / ADAPTER_CONFIG_FILE}: base_model_name_or_path"
    base = model_folder(source, setting=setting, verify=verify and not expected, takes_ids=False)
    if has_adapter(base):
        raise CheckpointError(
            f"{adapter}: its base {base} is an adapter, too. Merge that base first with "
            f"{command('export', '--model', str(base), '--merge')}."
        )
    if expected and expected != (found := weights_sha256(base)):
        raise CheckpointError(
            f"{base}: the adapter {adapter} was trained with other weights (sha256 "
            f"{str(expected)[:12]}, now {found[:12]}). Restore the original "
            f"weights in {base}."
        )
    config = recorded.get("config_sha256")
    if config and config != (found := config_sha256(base)):
        raise CheckpointError(
            f"{base / CONFIG_FILE}: the adapter {adapter} was trained with another {CONFIG_FILE} "
            f"(sha256 {str(config)[:12]}, now {found[:12]}). Restore the original {CONFIG_FILE}."
        )
    return base


def warn_skipped(folder: Path, problem: str) -> None:
    """Log that a damaged checkpoint is skipped, and why."""
    log.warning(f"checkpoint {folder} is skipped: {problem}")
