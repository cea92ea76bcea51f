"""The identity of a run's initial weights, independent of where the files are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from payload.config.training_sections import Quantize
from payload.core.errors import CheckpointError
from payload.core.file_hash import sha256_of
from payload.core.regular_files import read_bytes
from payload.core.validation.json_text import parse_json
from payload.formats.checkpoint_listing import config_sha256, weights_sha256
from payload.formats.hf_folder import own_file
from payload.formats.hub_names import hub_name
from payload.train.checkpoints.checkpoint import BaseModel
from payload.train.models.hf_weights import config_folder, model_folder
from payload.weights.adapter_files import ADAPTER_CONFIG_FILE, ADAPTER_FILE, has_adapter
from payload.weights.source import base_name


def identify(source: str, folder: Path, *, quantize: Quantize) -> BaseModel:
    """Return the identity of the weights in `folder`. `source` is the name that the user gave.

    Raises OSError, and CheckpointError for a damaged folder.
    """
    on_hub = hub_name(source)
    return BaseModel(
        source=on_hub.name if on_hub else str(folder.resolve()),
        revision=on_hub.revision if on_hub else None,
        sha256=_sha256(folder),
        config_sha256=config_sha256(config_folder(folder)),
        quantize=quantize,
    )


def _sha256(folder: Path) -> str:
    """Return the hash of the folder's weights.

    For an adapter, hash also the base and the adapter's config. Raises OSError, CheckpointError.
    """
    if not has_adapter(folder):
        return weights_sha256(folder)
    base = weights_sha256(model_folder(base_name(folder)))
    own = sha256_of(own_file(folder, ADAPTER_FILE))
    path = folder / ADAPTER_CONFIG_FILE
    config = parse_json(read_bytes(path), where=str(path), error=CheckpointError)
    # The base's location does not matter: its weights are in the hash.
    kept = {key: config[key] for key in config.keys() - {"base_model_name_or_path", "revision"}}
    settings = json.dumps(kept, sort_keys=True)
    return hashlib.sha256(f"{own} {base} {settings}".encode()).hexdigest()
