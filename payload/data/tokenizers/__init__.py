"""Tokenizers: GPT-2's, which is packaged, and any tokenizer.json. `load_tokenizer` loads both."""

from __future__ import annotations

from collections.abc import Sequence
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
from payload.weights.run_names import near_names, path_of_run, places_without

if TYPE_CHECKING:
    from payload.data.tokenizers.base import TextTokenizer
    from payload.data.tokenizers.hf import HfTokenizer

_FIX = "Use a folder with tokenizer.json, a run, a hub name (owner/name[@revision]) or gpt2."


def load_tokenizer(name: str, added: Sequence[str] = ()) -> TextTokenizer:
    """Return the tokenizer called `name`, with the special tokens `added`.

    `gpt2` is the packaged tokenizer. Any other name is one of these: a folder with tokenizer.json
    (such as a model or a checkpoint), a GGUF file, a run, or a name on the Hugging Face hub with an
    optional @revision. If the files produce the same tokens as GPT-2's, the packaged tokenizer is
    returned. Raises DataError, or CheckpointError for a GGUF file.
    """
    if name == TOKENIZER_NAME and not added:
        return gpt2_tokenizer()
    found, _ = load_hf_tokenizer(name, added)
    return gpt2_tokenizer() if _is_gpt2(found) else found


def load_hf_tokenizer(name: str, added: Sequence[str] = ()) -> tuple[HfTokenizer, Path]:
    """Load a tokenizer from files, even for GPT-2. Return the tokenizer and the files' folder.

    The special tokens `added` are added to the returned tokenizer, but not to the files. Raises
    DataError.
    """
    from payload.data.tokenizers.hf import hf_tokenizer

    if name == TOKENIZER_NAME:
        if added:
            raise DataError(
                f"--add-special-tokens: not with the packaged tokenizer {name}. Use --model with a "
                "folder or hub name that has a tokenizer.json."
            )
        raise DataError(
            f"--tokenizer {name}: GPT-2 has no chat template. Use a model's folder or hub name."
        )
    folder, label = _find(name)
    return hf_tokenizer(folder, name=label, added=added), folder


def _find(name: str) -> tuple[Path, str]:
    """Return the folder of the tokenizer, and the name that meta.json records for it."""
    name = path_of_run(name, setting="--tokenizer", error=DataError)
    require_one_meaning(name, setting="--tokenizer", kind="model", error=DataError)
    if (hub_model := hub_name(name)) is not None:
        return _download(hub_model)
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
        raise DataError(f"--tokenizer {shown(name)} is a file. {_FIX}")
    raise DataError(
        f"--tokenizer {shown(name)}: the folder does not exist.{near_names(name)} {_FIX}"
    )


def _newest_checkpoint(folder: Path) -> Path:
    """Return the newest checkpoint of a run, or the folder itself if it is not a run."""
    paths = RunPaths(folder)
    if not paths.checkpoints.is_dir():
        return folder
    newest = paths.newest_checkpoint()
    if newest is None:
        raise DataError(f"--tokenizer {folder}: the run has no complete checkpoint. {_FIX}")
    return newest


def _download(hub: HubName) -> tuple[Path, str]:
    """Return the folder of the tokenizer's files in the hub's cache, and download missing files."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # imported there
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # loaded lazily

    from payload.formats.hf_folder import CONFIG_FILE, GENERATION_FILE, TOKENIZER_FILES

    disable_progress_bars()
    try:
        folder = snapshot_download(
            hub.name,
            revision=hub.revision,
            allow_patterns=[*TOKENIZER_FILES, CONFIG_FILE, GENERATION_FILE],
        )
    except (OSError, HTTPError, ValueError) as error:
        raise DataError(_explain(error, hub)) from None
    return Path(folder), f"{hub.name}@{Path(folder).name}"


def _explain(error: Exception, hub: HubName) -> str:
    kind = type(error).__name__
    what = f"--tokenizer {hub.name}"
    if kind == "GatedRepoError":
        return (
            f"{what}: the model is gated. Accept its terms on its hub page, then log in: hf auth "
            "login."
        )
    if kind == "RepositoryNotFoundError":
        return (
            f"{what}: {places_without(hub.name)}, and not a public model of the Hugging Face hub."
            f"{near_names(hub.name)} {_FIX}"
        )
    if kind == "RevisionNotFoundError":
        revision = shown(hub.revision)
        return (
            f"{what}: the model has no revision {revision} on the Hugging Face hub. Correct the "
            "revision."
        )
    return (
        f"{what}: {places_without(hub.name)}, and the Hugging Face hub cannot be reached "
        f"({one_line(error).rstrip('.')}).{near_names(hub.name)} Check the network, or use a "
        "folder with tokenizer.json."
    )


def _is_gpt2(found: HfTokenizer) -> bool:
    if found.pipeline_sha256 != GPT2_PIPELINE_SHA256:
        return False
    encoding, backend = gpt2_encoding(), found.backend
    return same_tokens(
        lambda texts: [encoding.encode_ordinary(text) for text in texts],
        lambda texts: [each.ids for each in backend.encode_batch_fast(list(texts))],
    )
