"""Models by their name on the Hugging Face hub: NAME, OWNER/NAME or either with @REVISION.

The one module that asks the hub for models. A name is resolved to a commit once; whoever gets the
resolved name afterwards gets the same files, on every node and at every resume.
"""

from __future__ import annotations

import difflib
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies

from payload.errors import CheckpointError
from payload.hf_folder import CONFIG_FILE, TOKENIZER_FILES
from payload.models.tensor_headers import INDEX_FILE, PICKLE_FILES, WEIGHTS_FILE, weight_files
from payload.untrusted import one_line, shown

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

# https://github.com/huggingface/huggingface_hub/blob/main/src/huggingface_hub/utils/_validators.py
_NAME = r"[A-Za-z0-9_][\w.-]{0,95}(?:/[A-Za-z0-9_][\w.-]{0,95})?"
_SPEC = re.compile(rf"(?P<name>{_NAME})(?:@(?P<revision>[\w][\w./-]{{0,254}}))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONNECT_TIMEOUT_S = 3.0
_ANSWER_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the hub; without a revision it is the newest one."""

    name: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Return the name in `text`, or None where it can be none."""
        found = _SPEC.fullmatch(text)
        if found is None or ".." in text or "--" in found["name"]:
            return None
        return cls(found["name"], found["revision"])

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    def commit(self) -> str | None:
        """Return the revision where it is a commit, which is the same files for ever."""
        return self.revision if _COMMIT.fullmatch(self.revision or "") else None


def resolve(wanted: HubName, *, setting: str) -> HubName:
    """Return the name with the commit that its revision stands for now.

    Offline it is the commit of the newest download. `setting` names the setting in messages.
    Raises CheckpointError.
    """
    return wanted if wanted.commit() else _Hub(wanted, setting).resolved()


def fetch_config(wanted: HubName, *, setting: str) -> Path:
    """Return a folder with the model's config.json, without its weights.

    Raises CheckpointError.
    """
    return _Hub(wanted, setting).config_folder()


def fetch(
    wanted: HubName,
    *,
    setting: str,
    weights: bool = True,
    say: Callable[[str], None] = lambda _line: None,
) -> Path:
    """Download a model's config and tokenizer, and its weights in safetensors; return the folder.

    What the cache has is not asked for again. A terminal shows a progress bar; `say` gets one line
    before a download of weights begins. Raises CheckpointError.
    """
    return _Hub(wanted, setting).folder(weights=weights, say=say)


class _Hub:
    """One model on the hub, and what to say when it cannot be had."""

    def __init__(self, wanted: HubName, setting: str) -> None:
        self.wanted = wanted
        self.setting = setting
        try:
            # It takes half a second to import, and is not installed everywhere that plans are made.
            import huggingface_hub
        except ImportError as error:
            raise self._refusal(
                f"needs the package huggingface_hub ({error})", "Install it, or name a folder."
            ) from None
        self._hub = huggingface_hub

    def resolved(self) -> HubName:
        """Return the name with its commit."""
        cached = self._cached_commit()
        try:
            commit = self._info().sha
        except (OSError, ValueError) as error:
            if cached is None or not self._is_unreachable(error):
                raise self._explained(error) from None
            commit = cached
        if commit is None or not _COMMIT.fullmatch(commit):
            raise self._refusal(f"the hub names no commit ({shown(commit)})", "Try again later.")
        return replace(self.wanted, revision=commit)

    def config_folder(self) -> Path:
        """Return a folder with config.json."""
        name, revision = self.wanted.name, self.wanted.revision
        try:
            return Path(
                self._hub.hf_hub_download(
                    name, CONFIG_FILE, revision=revision, local_files_only=True
                )
            ).parent
        except (OSError, ValueError):
            pass
        try:
            self._require_network()
            return Path(self._hub.hf_hub_download(name, CONFIG_FILE, revision=revision)).parent
        except (OSError, ValueError) as error:
            raise self._explained(error) from None

    def folder(self, *, weights: bool, say: Callable[[str], None]) -> Path:
        """Return a folder with the model's files."""
        offline = self._hub.constants.HF_HUB_OFFLINE
        commit = self._cached_commit() if offline else self.wanted.commit()
        known = self._cached_folder(commit, weights=weights)
        if known is not None:
            return known
        try:
            info = self._info()
            names = [each.rfilename for each in info.siblings or ()]
            revision = self.wanted.revision or info.sha
            wanted = [name for name in names if "/" not in name and name.endswith(".json")]
            wanted += [name for name in TOKENIZER_FILES if name in names]
            if weights:
                self._refuse_without_weights(names)
                shards = self._weights(names, revision)
                say(f"downloading {self.wanted}: {', '.join(shards[:2])}{_more(len(shards) - 2)}")
                wanted += shards
            return Path(
                self._hub.snapshot_download(
                    self.wanted.name, revision=revision, allow_patterns=wanted
                )
            )
        except (OSError, ValueError) as error:
            known = self._cached_folder(self._cached_commit(), weights=weights)
            if known is None or not self._is_unreachable(error):
                raise self._explained(error) from None
            say(f"note: the hub cannot be reached; {self.wanted} is the download of {known.name}")
            return known

    def _cached_folder(self, commit: str | None, *, weights: bool) -> Path | None:
        """Return what an earlier download of a commit left, if it is all there."""
        if commit is None:
            return None
        folder = self._cache() / "snapshots" / commit
        try:
            needed = [CONFIG_FILE, *(weight_files(folder) if weights else ())]
        except CheckpointError:
            return None
        return folder if all((folder / name).is_file() for name in needed) else None

    def _cache(self) -> Path:
        from huggingface_hub.file_download import repo_folder_name

        folder = repo_folder_name(repo_id=self.wanted.name, repo_type="model")
        return Path(self._hub.constants.HF_HUB_CACHE).expanduser() / folder

    def _cached_commit(self) -> str | None:
        """Return the commit that the revision stood for when it was last downloaded."""
        if self.wanted.commit() is not None:
            return self.wanted.commit()
        path = self._cache() / "refs" / (self.wanted.revision or "main")
        try:
            found = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return found if _COMMIT.fullmatch(found) else None

    def _info(self) -> ModelInfo:
        self._require_network()
        return self._hub.HfApi().model_info(
            self.wanted.name, revision=self.wanted.revision, timeout=_ANSWER_TIMEOUT_S
        )

    def _require_network(self) -> None:
        """Raise OSError where the hub cannot be reached: its client would retry for 24 s."""
        if getproxies() or self._hub.constants.HF_HUB_OFFLINE:
            return
        url = urlsplit(self._hub.constants.ENDPOINT)
        port = url.port or (80 if url.scheme == "http" else 443)
        socket.create_connection((url.hostname or "", port), timeout=_CONNECT_TIMEOUT_S).close()

    def _weights(self, names: Iterable[str], revision: str | None) -> list[str]:
        if INDEX_FILE not in names:
            return [WEIGHTS_FILE]
        index = self._hub.hf_hub_download(self.wanted.name, INDEX_FILE, revision=revision)
        return list(weight_files(Path(index).parent))

    def _refuse_without_weights(self, names: list[str]) -> None:
        if WEIGHTS_FILE in names or INDEX_FILE in names:
            return
        if any(name in PICKLE_FILES or name.endswith(".bin") for name in names):
            raise self._refusal(
                "it has its weights as a pickle alone, which can run code when it is loaded",
                "Use a model with safetensors, or convert it where you trust it.",
            )
        if any(name.endswith(".gguf") for name in names):
            raise self._refusal(
                "it has GGUF files alone", "Download one of them into a folder, and name that."
            )
        raise self._refusal(f"it has no {WEIGHTS_FILE}", "Name a model with safetensors.")

    def _is_unreachable(self, error: Exception) -> bool:
        """Tell a hub that does not answer from one that refuses."""
        from huggingface_hub.errors import HfHubHTTPError

        if isinstance(error, HfHubHTTPError):
            return error.response.status_code >= 500
        return isinstance(error, OSError)

    def _explained(self, error: Exception) -> CheckpointError:
        """Return the error that says what is wrong, why, and what to do."""
        from huggingface_hub import errors

        name, host = self.wanted.name, self._hub.constants.ENDPOINT
        if isinstance(error, errors.GatedRepoError):
            return self._refusal(
                "it is gated: its owner gives it to accounts that accepted its terms",
                f"Accept them at {host}/{name}, then log in (hf auth login, or HF_TOKEN).",
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return self._refusal(
                f"it has no revision {shown(self.wanted.revision)}",
                "Name a branch, a tag or a commit of it.",
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return self._refusal(
                "no such folder, and the Hugging Face hub has no such model, or a private one",
                f"{self._meant(name)}Check the name, or log in (hf auth login).",
            )
        if isinstance(error, errors.RemoteEntryNotFoundError):
            return self._refusal(
                f"the hub has no {CONFIG_FILE} of it", "Name a model in the Hugging Face layout."
            )
        if self._hub.constants.HF_HUB_OFFLINE:
            return self._refusal(
                "HF_HUB_OFFLINE is set, and the cache does not have it "
                f"({self._hub.constants.HF_HUB_CACHE})",
                "Download it once with a network (hf download), or name a folder.",
            )
        return self._refusal(
            f"no such folder, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {one_line(error).rstrip('.')})",
            f"{self._meant(name)}Check the name or the network, or name a folder.",
        )

    def _meant(self, name: str) -> str:
        from payload.models.registry import presets

        close = difflib.get_close_matches(name, presets(), n=1)
        return f"Did you mean {close[0]!r}? " if close and close[0] != name else ""

    def _refusal(self, problem: str, fix: str) -> CheckpointError:
        return CheckpointError(f"{self.setting} = {shown(str(self.wanted))}: {problem}. {fix}")


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
