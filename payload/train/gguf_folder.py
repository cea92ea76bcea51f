"""GGUF files of the Llama family, as a folder in the Hugging Face layout.

transformers' reader makes fp32 weights, config and tokenizer of the file. They are kept in the
user's cache, so that everything that reads a model reads the same folder, and a file is converted
once.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from payload.checkpoint_files import sha256_of
from payload.errors import CheckpointError
from payload.hf_folder import CONFIG_FILE
from payload.untrusted import one_line, open_regular, shown

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_ARCHITECTURES = ("llama", "mistral")
_RECIPE = "1"
"""Part of the folder's name; raise it when the conversion changes."""
_FIX = "Name a folder in the Hugging Face layout, with safetensors."


def gguf_file(source: Path) -> Path | None:
    """Return the GGUF file that `source` is or has, or None for a folder of another kind.

    Raises CheckpointError for a folder with several.
    """
    if source.is_file():
        return source if source.suffix == SUFFIX else None
    found = sorted(source.glob(f"*{SUFFIX}"))
    if not found or (source / CONFIG_FILE).exists():
        return None
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:3])
        raise CheckpointError(f"{source}: it has {len(found)} GGUF files ({names}). Name one.")
    return found[0]


def folder_of_gguf(path: Path, *, cache: Path) -> Path:
    """Return a folder with the file's weights, config and tokenizer; made if it is not there.

    Raises CheckpointError for a file that is damaged or of another family.
    """
    try:
        with open_regular(path) as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise CheckpointError(f"{path}: it does not begin as a GGUF file. {_FIX}")
        digest = sha256_of(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}. {_FIX}") from None
    folder = cache / f"{digest[:32]}-{_RECIPE}"
    if folder.is_dir():
        return folder
    _require_family(path)
    cache.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=cache))
    try:
        _convert(path, partial)
        # Another process may have been faster; its folder has the same content.
        if not folder.is_dir():
            partial.rename(folder)
    except OSError as error:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: {error.strerror or error}. Free space.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def gguf_cache(env: Mapping[str, str]) -> Path:
    """Return the folder that keeps what GGUF files were converted to."""
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tileforge" / "gguf"


def _require_family(path: Path) -> None:
    """Raise CheckpointError unless the file is whole and of a family that is read."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        field = reader.get_field("general.architecture")
        architecture = field.contents() if field is not None else None
        size = path.stat().st_size
        ends = [int(each.data_offset) + int(each.n_bytes) for each in reader.tensors]
    except (OSError, ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise CheckpointError(
            f"{path}: it cannot be read as GGUF ({one_line(error).rstrip('.')}): it was cut off or "
            "is damaged. Download it again."
        ) from None
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture is {shown(architecture)}; of GGUF files only "
            f"{' and '.join(_ARCHITECTURES)} can be loaded. {_FIX}"
        )
    if not ends or max(ends) > size:
        raise CheckpointError(f"{path}: it was cut off after {size:,} bytes. Download it again.")


def _convert(path: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
        )
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        # The class as it is, without what the reader has hung on this one.
        plain = type(model)(model.config)
        plain.load_state_dict(model.state_dict(), assign=True)
        plain.save_pretrained(folder)
        AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        ).save_pretrained(folder)
    except (ValueError, KeyError, IndexError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: transformers cannot read it ({one_line(error).rstrip('.')}). {_FIX}"
        ) from None
