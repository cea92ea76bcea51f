"""Find and download models on the Hugging Face hub.

Only this module downloads models from the hub. A name is resolved to a commit once, so that all
nodes and all resumes use the same files.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from payload.core.errors import CheckpointError
from payload.core.printable_text import one_line, shown
from payload.formats.hf_folder import (
    CONFIG_FILE,
    INDEX_FILE,
    TOKENIZER_FILES,
    WEIGHTS_FILE,
    read_config,
    weight_files,
)
from payload.formats.hub_names import HubName
from payload.formats.quantized.weight_headers import dequantized_headers
from payload.formats.tensor_headers import PICKLE_FILES, TensorHeader
from payload.weights.run_names import cached_copy, near_names, places_without

_CONNECT_TIMEOUT_S = 3.0
_ANSWER_TIMEOUT_S = 30.0


def resolve(wanted: HubName, *, setting: str) -> HubName:
    """Return the name with its revision resolved to a commit.

    Offline, the commit of the newest download is used. `setting` names the setting in messages.
    Raises CheckpointError.
    """
    if wanted.commit() is not None:
        return wanted
    commit = _Hub(wanted, setting).config_folder().name
    return replace(wanted, revision=commit)


def fetch_config(wanted: HubName, *, setting: str) -> Path:
    """Return a folder with the model's config.json, without its weights.

    Raises CheckpointError.
    """
    return _Hub(wanted, setting).config_folder()


def require_weights_on_hub(wanted: HubName, *, setting: str) -> None:
    """Raise CheckpointError if a model's weights cannot be loaded, without a download."""
    _Hub(wanted, setting).require_weights()


def hub_headers(wanted: HubName, *, setting: str) -> dict[str, TensorHeader]:
    """Return the shapes of a model's weights by name, from the headers of its safetensors files.

    Raises CheckpointError.
    """
    return _Hub(wanted, setting).headers()


def fetch(
    wanted: HubName,
    *,
    setting: str,
    weights: bool = True,
    say: Callable[[str], None] = lambda _line: None,
) -> Path:
    """Download a model's config and tokenizer, and its weights if `weights`; return the folder.

    Weights are downloaded only in safetensors. Cached files are not downloaded again. On a
    terminal, a progress bar is shown; `say` receives one line before a download of weights. Raises
    CheckpointError.
    """
    return _Hub(wanted, setting).folder(weights=weights, say=say)


class _Hub:
    """A model on the hub, with the conversion of download errors."""

    def __init__(self, wanted: HubName, setting: str) -> None:
        self.wanted = wanted
        self.setting = setting
        try:
            # The import takes half a second, and planning must also work if the package is missing.
            import huggingface_hub
            import huggingface_hub.constants
        except ImportError as error:
            raise self._refusal(
                f"needs the package huggingface_hub ({error})", "Install it, or use a folder."
            ) from None
        self._hub = huggingface_hub

    def config_folder(self) -> Path:
        """Return a folder with config.json; the folder's name is the commit."""
        if self.wanted.commit() is not None and (known := self._cached_config()) is not None:
            return known
        try:
            self._require_network()
            return Path(
                self._hub.hf_hub_download(
                    self.wanted.name, CONFIG_FILE, revision=self.wanted.revision
                )
            ).parent
        except (OSError, ValueError) as error:
            known = self._cached_config() if self._is_unreachable(error) else None
            if known is None:
                raise self._explained(error) from None
            return known

    def folder(self, *, weights: bool, say: Callable[[str], None]) -> Path:
        """Return a folder with the model's files."""
        folder = self.config_folder()
        if self._is_whole(folder, weights=weights):
            return folder
        commit = folder.name
        try:
            names = self._names(commit)
            wanted = [name for name in names if "/" not in name and name.endswith(".json")]
            wanted += [name for name in TOKENIZER_FILES if name in names]
            if weights:
                self._require_safetensors(names)
                shards = self._weights(names, commit)
                say(f"downloading {self.wanted}: {', '.join(shards[:2])}{_more(len(shards) - 2)}")
                wanted += shards
            with self._progress():
                self._hub.snapshot_download(
                    self.wanted.name, revision=commit, allow_patterns=wanted
                )
        except (OSError, ValueError) as error:
            raise self._explained(error) from None
        return folder

    def require_weights(self) -> None:
        """Raise CheckpointError for a model without safetensors."""
        folder = self.config_folder()
        if self._is_whole(folder, weights=True):
            return
        try:
            self._require_safetensors(self._names(folder.name))
        except (OSError, ValueError) as error:
            raise self._explained(error) from None

    def headers(self) -> dict[str, TensorHeader]:
        """Download only the headers of the files, and return the dequantised tensors."""
        from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

        try:
            self._require_network()
            with self._progress():
                found = self._hub.HfApi().get_safetensors_metadata(
                    self.wanted.name, revision=self.wanted.revision, timeout=_ANSWER_TIMEOUT_S
                )
        except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
            raise self._refusal(one_line(error).rstrip("."), "Use another model.") from None
        except (OSError, ValueError) as error:
            raise self._explained(error) from None
        headers: dict[str, TensorHeader] = {}
        for path, file in found.files_metadata.items():
            for name, tensor in file.tensors.items():
                if not all(type(size) is int and 0 <= size < 2**48 for size in tensor.shape):
                    raise self._refusal(
                        f"{shown(name)} has the shape {shown(tensor.shape)}", "Use another model."
                    )
                headers[name] = TensorHeader(
                    path=Path(path), dtype=tensor.dtype, shape=tuple(tensor.shape), start=0
                )
        folder = self.config_folder()
        return dequantized_headers(
            headers, read_config(folder), where=str(folder / CONFIG_FILE), has_data=False
        )

    def _names(self, commit: str) -> list[str]:
        """Return the names of the commit's files."""
        self._require_network()
        info = self._hub.HfApi().model_info(
            self.wanted.name, revision=commit, timeout=_ANSWER_TIMEOUT_S
        )
        return [each.rfilename for each in info.siblings or ()]

    @contextmanager
    def _progress(self) -> Iterator[None]:
        """Show the client's progress bar only on a terminal, as a log would keep every update."""
        if sys.stderr.isatty():
            yield
            return
        bars: Any = self._hub.utils
        bars.disable_progress_bars()
        try:
            yield
        finally:
            bars.enable_progress_bars()

    def _cached_config(self) -> Path | None:
        try:
            return Path(
                self._hub.hf_hub_download(
                    self.wanted.name,
                    CONFIG_FILE,
                    revision=self.wanted.revision,
                    local_files_only=True,
                )
            ).parent
        except (OSError, ValueError):
            return None

    def _is_whole(self, folder: Path, *, weights: bool) -> bool:
        """Return True if an earlier download is complete, that is, if the folder has all files."""
        try:
            needed = weight_files(folder) if weights else ()
            self._hub.snapshot_download(
                self.wanted.name,
                revision=folder.name,
                local_files_only=True,
                allow_patterns=["*.json", *TOKENIZER_FILES, *needed],
                ignore_patterns=["*/*"],
            )
        except (CheckpointError, OSError, ValueError):
            return False
        # If the client has no list of the commit's files, it accepts an incomplete download.
        if weights:
            return all((folder / name).is_file() for name in needed)
        return any((folder / name).is_file() for name in TOKENIZER_FILES)

    def _require_network(self) -> None:
        """Raise OSError if the hub cannot be reached.

        Without this check, the hub's client would retry for 24 s.
        """
        from urllib.request import (
            getproxies,
        )  # also imports http and ssl: a tenth of a command's start-up time

        if getproxies() or self._hub.constants.HF_HUB_OFFLINE:
            return
        url = urlsplit(self._hub.constants.ENDPOINT)
        port = url.port or (80 if url.scheme == "http" else 443)
        socket.create_connection((url.hostname or "", port), timeout=_CONNECT_TIMEOUT_S).close()

    def _weights(self, names: Iterable[str], commit: str) -> list[str]:
        if WEIGHTS_FILE in names:
            return [WEIGHTS_FILE]
        index = self._hub.hf_hub_download(self.wanted.name, INDEX_FILE, revision=commit)
        return list(weight_files(Path(index).parent))

    def _require_safetensors(self, names: list[str]) -> None:
        if WEIGHTS_FILE in names or INDEX_FILE in names:
            return
        if any(name in PICKLE_FILES or name.endswith(".bin") for name in names):
            raise self._refusal(
                "its weights are only available as a pickle, which can run code when it is loaded",
                "Use a model with safetensors, or convert the pickle if you trust its source.",
            )
        if any(name.endswith(".gguf") for name in names):
            raise self._refusal(
                "the model has only GGUF files", "Download one of the files, and use its path."
            )
        raise self._refusal(
            f"the model has no {WEIGHTS_FILE}", "Use a model with safetensors files."
        )

    def _is_unreachable(self, error: Exception) -> bool:
        """Return True if the hub does not respond; False if the hub responds but refuses access."""
        from huggingface_hub.errors import HfHubHTTPError

        if isinstance(error, HfHubHTTPError):
            return error.response.status_code >= 500
        return isinstance(error, OSError)

    def _explained(self, error: Exception) -> CheckpointError:
        """Return a CheckpointError with the problem, the cause and the fix."""
        from huggingface_hub import errors

        name, host = self.wanted.name, self._hub.constants.ENDPOINT
        if isinstance(error, errors.GatedRepoError):
            return self._refusal(
                "the model is gated: only accounts that accepted its terms can download it",
                f"Accept the terms at {host}/{name}, then log in (hf auth login, or HF_TOKEN).",
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return self._refusal(
                f"the model has no revision {shown(self.wanted.revision)}",
                "Use a branch, a tag or a commit of the model.",
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return self._refusal(
                f"{places_without(name)}, and not on the Hugging Face hub, or private",
                f"{self._meant(name)}Check the name, or log in (hf auth login).",
            )
        if isinstance(error, errors.RemoteEntryNotFoundError):
            return self._refusal(
                f"the model has no {CONFIG_FILE} on the hub",
                "Use a model in the Hugging Face layout.",
            )
        if self._hub.constants.HF_HUB_OFFLINE:
            return self._refusal(
                "HF_HUB_OFFLINE is set, and the model is not in the cache "
                f"({self._hub.constants.HF_HUB_CACHE})",
                f"{self._meant(name)}Download it while online (hf download), or use a folder.",
            )
        return self._refusal(
            f"{places_without(name)}, and could not be downloaded from the Hugging Face hub "
            f"({type(error).__name__}: {one_line(error).rstrip('.')})",
            f"{self._meant(name)}Check the name or the network, or use a folder.",
        )

    def _meant(self, name: str) -> str:
        return f"{near_names(name)}{cached_copy(name)} ".lstrip()

    def _refusal(self, problem: str, fix: str) -> CheckpointError:
        return CheckpointError(f"{self.setting} = {shown(str(self.wanted))}: {problem}. {fix}")


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
