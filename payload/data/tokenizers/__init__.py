"""Tokenizers: GPT-2's, and any tokenizer.json. `load_tokenizer` finds the one asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from payload.core.errors import CheckpointError, DataError
from payload.core.printable_text import one_line, shown
from payload.core.regular_files import home_path
from payload.data.tokenizers.gguf import gguf_tokenizer_folder
from payload.data.tokenizers.gpt2 import TOKENIZER_NAME, gpt2_encoding, gpt2_tokenizer
from payload.data.tokenizers.probe import same_tokens
from payload.formats.checkpoint_listing import require_own
from payload.formats.hub_names import HubName, hub_name, require_one_meaning
from payload.formats.tokenizer_identity import GPT2_PIPELINE_SHA256
from payload.models.gguf import gguf_file
from payload.run_record.run_files import RunPaths

if TYPE_CHECKING:
    from payload.data.tokenizers.base import TextTokenizer
    from payload.data.tokenizers.hf import HfTokenizer

_FIX = "Name a folder with tokenizer.json, a run, a hub name (owner/name[@revision]) or gpt2."


def load_tokenizer(name: str) -> TextTokenizer:
    """Return the tokenizer that `name` stands for.

    `gpt2` is the packaged one. Else it is a folder with tokenizer.json, so a model or a checkpoint
    too, a GGUF file, a run, or a name on the Hugging Face hub with an optional @revision. Files
    that are GPT-2's in everything that changes tokens give the packaged one. Raises DataError, or
    CheckpointError for a GGUF file.
    """
    if name == TOKENIZER_NAME:
        return gpt2_tokenizer()
    found, _ = load_hf_tokenizer(name)
    return gpt2_tokenizer() if _is_gpt2(found) else found


def load_hf_tokenizer(name: str) -> tuple[HfTokenizer, Path]:
    """Return the same tokenizer from its own files, and their folder; never the packaged one.

    Raises DataError.
    """
    from payload.data.tokenizers.hf import hf_tokenizer

    if name == TOKENIZER_NAME:
        raise DataError(
            f"--tokenizer {name}: GPT-2 has no chat template. Name the model's folder or hub name."
        )
    folder, label = _find(name)
    return hf_tokenizer(folder, name=label), folder


def _find(name: str) -> tuple[Path, str]:
    """Return the folder, and what meta.json calls it."""
    require_one_meaning(name, setting="--tokenizer", kind="model", error=DataError)
    if (known := hub_name(name)) is not None:
        return _download(known)
    path = home_path(name)
    try:
        require_own(path)
    except CheckpointError as error:
        raise DataError(f"--tokenizer {shown(name)}: {error}") from None
    if (file := gguf_file(path)) is not None:
        return gguf_tokenizer_folder(file), name
    if path.is_dir():
        return _newest_checkpoint(path), name
    if path.is_file():
        if path.name == "tokenizer.json":
            return path.parent, str(path.parent)
        raise DataError(f"--tokenizer {shown(name)}: it is a file. {_FIX}")
    raise DataError(f"--tokenizer {shown(name)}: there is no such folder. {_FIX}")


def _newest_checkpoint(folder: Path) -> Path:
    """Return a run's newest checkpoint, or the folder itself when it is no run."""
    paths = RunPaths(folder)
    if not paths.checkpoints.is_dir():
        return folder
    newest = paths.newest_checkpoint()
    if newest is None:
        raise DataError(f"--tokenizer {folder}: the run has no checkpoint that is whole. {_FIX}")
    return newest


def _download(wanted: HubName) -> tuple[Path, str]:
    """Fetch the tokenizer's files from the hub, or take them from its cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # imported there
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # loaded lazily

    from payload.formats.hf_folder import CONFIG_FILE, TOKENIZER_FILES

    disable_progress_bars()
    try:
        folder = snapshot_download(
            wanted.name,
            revision=wanted.revision,
            allow_patterns=[*TOKENIZER_FILES, CONFIG_FILE, "generation_config.json"],
        )
    except (OSError, HTTPError, ValueError) as error:
        raise DataError(_explain(error, wanted)) from None
    return Path(folder), f"{wanted.name}@{Path(folder).name}"


def _explain(error: Exception, wanted: HubName) -> str:
    kind = type(error).__name__
    what = f"--tokenizer {wanted.name}"
    if kind == "GatedRepoError":
        return (
            f"{what}: the model is gated. Accept its terms on its page at the hub, then log in: "
            "hf auth login."
        )
    if kind == "RepositoryNotFoundError":
        return (
            f"{what}: the Hugging Face hub has no such public model, and there is no such folder "
            f"here. {_FIX}"
        )
    if kind == "RevisionNotFoundError":
        revision = shown(wanted.revision)
        return f"{what}: the Hugging Face hub has no revision {revision} of it. Correct it."
    return (
        f"{what}: there is no such folder here, and the Hugging Face hub cannot be reached "
        f"({one_line(error).rstrip('.')}). Check the network, or name a folder with tokenizer.json."
    )


def _is_gpt2(found: HfTokenizer) -> bool:
    if found.pipeline_sha256 != GPT2_PIPELINE_SHA256:
        return False
    encoding, backend = gpt2_encoding(), found.backend
    return same_tokens(
        lambda texts: [encoding.encode_ordinary(text) for text in texts],
        lambda texts: [each.ids for each in backend.encode_batch_fast(list(texts))],
    )
