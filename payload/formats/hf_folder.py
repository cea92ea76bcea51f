"""CONTRACT: the files and the config.json of a model's folder in the Hugging Face layout.

The folder is from the hub, another trainer or a checkpoint, so it is untrusted. payload.models
interprets the config.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from payload.core.errors import CheckpointError, TileforgeError
from payload.core.printable_text import shown
from payload.core.regular_files import read_bytes
from payload.core.symlink_safety import inside_folder
from payload.core.validation.json_text import parse_json

CONFIG_FILE = "config.json"
CLASSIFIER_CONFIG_FILE = "classifier_config.json"
"""Name of the config.json of a classifier's adapter. If the file were called config.json,
transformers would read the adapter's folder as a complete model. Adapters of older versions have
config.json."""
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""All files that a tokenizer can consist of. A folder has only some of these files."""
GENERATION_FILE = "generation_config.json"
"""A model's stop tokens and sampling settings."""
PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
    GENERATION_FILE,
)
"""Files of a multimodal model's processor, in addition to the tokenizer's files."""
FLOAT_TAG = "__float__"
"""Key of the objects in config.json that represent NaN and infinity.

Source: transformers, configuration_utils.py, `_encode_special_floats`.
"""

FIX = "Use a folder in the Hugging Face layout."
_REPAIR = "Repair the folder, or use another folder."
_WEIGHTS_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")


def own_file(folder: Path, name: str, *, error: type[TileforgeError] = CheckpointError) -> Path:
    """Return the path of a file of a model's folder; the file need not exist.

    Raises `error` for a link that leads out of the folder, because the link's target could be
    copied to an output or sent to a node.
    """
    path = folder / name
    try:
        return inside_folder(path, home=folder)
    except OSError as problem:
        raise error(f"{path}: {problem.strerror}.") from None


def read_config(folder: Path) -> dict[str, object]:
    """Read config.json of `folder`. Raises CheckpointError if it is missing or damaged.

    NaN and infinity become objects such as `{"__float__": "Infinity"}`, so that the result is plain
    JSON. Newer releases of transformers write such objects. Older releases write bare NaN and
    Infinity.
    """
    return _read_config(own_file(folder, CONFIG_FILE))


def classifier_config(folder: Path) -> tuple[dict[str, object], Path]:
    """Return the config with a classifier's labels, and the path of the config file.

    `folder` contains a whole classifier or only its adapter. Raises CheckpointError.
    """
    is_adapter = (folder / CLASSIFIER_CONFIG_FILE).exists()
    path = own_file(folder, CLASSIFIER_CONFIG_FILE if is_adapter else CONFIG_FILE)
    return _read_config(path), path


def _read_config(path: Path) -> dict[str, object]:
    raw = _read_json(path, constants=lambda name: {FLOAT_TAG: name})
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: {shown(raw)} is not a JSON object. {FIX}")
    return raw


def label_names(checkpoint: Path | None, *, num_labels: int) -> tuple[str, ...]:
    """Return the names of a classifier's labels; without a valid config, their indices as text."""
    with suppress(CheckpointError):
        named = classifier_config(checkpoint)[0].get("id2label") if checkpoint else None
        if isinstance(named, dict) and len(named) == num_labels:
            return tuple(str(named.get(str(number), number)) for number in range(num_labels))
    return tuple(map(str, range(num_labels)))


def weight_files(folder: Path) -> tuple[str, ...]:
    """Return the names of the files with the weights, each inside `folder`.

    If a folder has both a single file and an index, the single file is used, as in transformers.
    Raises CheckpointError for a damaged index.
    """
    if not has_shards(folder):
        return (WEIGHTS_FILE,)
    return tuple(sorted(set(weight_map(folder).values())))


def has_shards(folder: Path) -> bool:
    """Return True if the weights in `folder` are shards, listed in an index."""
    return (folder / INDEX_FILE).exists() and not (folder / WEIGHTS_FILE).exists()


def weight_map(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, from the folder's index.

    Raises CheckpointError for a damaged index, or an index with paths out of the folder.
    """
    index = own_file(folder, INDEX_FILE)
    raw = _read_json(index)
    names = raw.get("weight_map") if isinstance(raw, dict) else None
    if names is None:
        raise CheckpointError(f"{index}: weight_map is missing. {FIX}")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(
            f"{index}: weight_map = {shown(names)}: must list the file of each tensor. {FIX}"
        )
    for name in names.values():
        if not isinstance(name, str) or not _WEIGHTS_NAME.fullmatch(name):
            raise CheckpointError(
                f"{index}: {shown(name)} does not name a safetensors file of its folder. {FIX}"
            )
    return names


def read_tokenizer_files(folder: Path, *, error: type[TileforgeError]) -> dict[str, bytes]:
    """Return the contents of the tokenizer files in `folder`, by name."""
    files = {}
    for name in TOKENIZER_FILES:
        path = folder / name
        try:
            files[name] = read_bytes(inside_folder(path))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as problem:
            raise error(f"{path}: {problem.strerror or problem}. {_REPAIR}") from None
        if path.suffix == ".json":
            parse_json(files[name], where=str(path), fix=_REPAIR, error=error, huge_integers=True)
    return files


def read_generation_file(folder: Path) -> dict[str, bytes]:
    """Return the content of generation_config.json by file name; empty without the file.

    Raises CheckpointError.
    """
    try:
        return {GENERATION_FILE: read_bytes(own_file(folder, GENERATION_FILE))}
    except FileNotFoundError:
        return {}
    except OSError as problem:
        path = folder / GENERATION_FILE
        raise CheckpointError(f"{path}: {problem.strerror}. {_REPAIR}") from None


def _read_json(path: Path, *, constants: Callable[[str], object] | None = None) -> object:
    try:
        content = read_bytes(inside_folder(path))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}. {FIX}") from None
    return parse_json(content, where=str(path), fix=FIX, error=CheckpointError, constants=constants)
