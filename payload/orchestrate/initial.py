"""The weights that a run starts from: which folder they are, and how large the model is."""

from __future__ import annotations

import difflib
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from payload.checkpoint_files import MANIFEST_FILE, manifest_problems, newest_sound
from payload.data_folder import load_meta
from payload.errors import CheckpointError, ConfigError
from payload.hf_folder import weight_files
from payload.models.registry import preset_of_hub_name, presets, read_spec
from payload.models.spec import ModelSpec
from payload.results import RunPaths
from payload.run_config import RunConfig
from payload.tokenizer_identity import require_same_tokenizer

_HUB_TIMEOUT_S = 3.0
# https://github.com/huggingface/huggingface_hub/blob/main/src/huggingface_hub/utils/_validators.py
_HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)


def initial_spec(config: RunConfig, *, vocab_size: int | None) -> tuple[ModelSpec, str | None]:
    """The model's sizes before it is loaded, and a note where they are a guess."""
    configured = config.model.spec(
        sequence_length=config.data.sequence_length, vocab_size=vocab_size
    )
    init = config.model.init
    if init == "scratch":
        return configured, None
    weights = preset_of_hub_name(init)
    if Path(init).is_dir() or weights is None:
        try:
            weights = read_spec(_folder(Path(init)))
        except CheckpointError:
            return configured, (
                f"the sizes of model.init = {init!r} are not known here; the arithmetic is that of "
                f"model.preset = {config.model.preset!r}"
            )
    return weights.with_sequence_length(config.data.sequence_length), None


def settle_initial(
    config: RunConfig, *, vocab_size: int | None, say: Callable[[str], None], download: bool
) -> RunConfig:
    """Return the config with model.init as one folder: a run's newest sound checkpoint, say.

    What can be known of the weights before the start is checked: that they are there and whole,
    and fit data and settings. With `download`, a name on a hub is asked for its config.json.
    `say` is told of damaged checkpoints. Raises ConfigError.
    """
    init = config.model.init
    if init == "scratch":
        return config
    path = Path(init).expanduser()
    if path.is_dir():
        folder = _sound_folder(path.resolve(), init=init, say=say)
        _require_weights(folder, init=init)
        if vocab_size is not None:
            data = Path(config.data.dir)
            require_same_tokenizer(
                load_meta(data), data=data, folder=folder, init=init, error=ConfigError
            )
        _require_fit(read_spec(folder), config, vocab_size=vocab_size)
        return replace(config, model=replace(config.model, init=str(folder)))
    _require_hub_name(path, init=init)
    known = preset_of_hub_name(init)
    if download:
        known = read_spec(_hub_folder(init))
    if known is not None:
        _require_fit(known, config, vocab_size=vocab_size)
    return config


def _sound_folder(path: Path, *, init: str, say: Callable[[str], None]) -> Path:
    """A run stands for its newest sound checkpoint; a checkpoint must be what was written."""
    if (path / "checkpoints").is_dir():
        newest = newest_sound(
            path / "checkpoints",
            passed_over=lambda folder, problem: say(
                f"note: checkpoint {folder} is passed over: {problem}"
            ),
        )
        if newest is None:
            raise ConfigError(
                f"model.init = {init!r}: the run has no sound checkpoint. Name another one."
            )
        return newest
    if RunPaths(path).plan.exists():
        raise ConfigError(f"model.init = {init!r}: the run has no checkpoint. Name another one.")
    if (path / MANIFEST_FILE).exists() and (problems := manifest_problems(path)):
        raise ConfigError(
            f"model.init = {init!r}: the checkpoint is damaged: {problems[0]} Name another one."
        )
    return path


def _require_weights(folder: Path, *, init: str) -> None:
    for name in weight_files(folder):
        if not (folder / name).is_file():
            raise ConfigError(
                f"model.init = {init!r}: {folder} has no {name}. Name a folder in the Hugging Face "
                "layout, with safetensors, or a checkpoint."
            )


def _require_fit(weights: ModelSpec, config: RunConfig, *, vocab_size: int | None) -> None:
    wanted = config.data.sequence_length
    if wanted > weights.context():
        raise ConfigError(
            f"data.sequence_length = {wanted} is above the {weights.context()} positions of "
            f"model.init = {config.model.init!r}. Use at most {weights.context()}."
        )
    if vocab_size is not None and weights.vocab_size < vocab_size:
        raise ConfigError(
            f"model.init = {config.model.init!r} has {weights.vocab_size} tokens, the data has "
            f"{vocab_size}. Prepare the data with the model's tokenizer."
        )
    sizes = weights.settings()
    for name in ("n_layer", "n_head", "n_embd"):
        asked, found = getattr(config.model, name), sizes[name]
        if asked is not None and asked != found:
            raise ConfigError(
                f"model.{name} = {asked}, but the weights of model.init have {found}. Leave "
                f'model.{name} out, or use model.init = "scratch".'
            )


def _require_hub_name(path: Path, *, init: str) -> None:
    """Refuse what was meant as a path: a hub's names are NAME or OWNER/NAME."""
    is_path = init.startswith(("/", "./", "../", "~")) or not _HUB_NAME.fullmatch(init)
    if path.exists():
        raise ConfigError(f"model.init = {init!r}: that is a file. Name the folder it is in.")
    if is_path or (len(path.parts) > 1 and Path(path.parts[0]).is_dir()):
        raise ConfigError(f"model.init = {init!r}: there is no such folder. Correct the path.")


def _hub_folder(name: str) -> Path:
    """Return a folder with the model's config.json, from the hub or the cache of an earlier run."""
    try:
        # Not everywhere that plans are made; it takes half a second to import.
        from huggingface_hub import constants, hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise ConfigError(
            f"model.init = {name!r} needs huggingface_hub ({error}). Install it, or name a folder."
        ) from None
    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=True)).parent
    except (HFValidationError, OSError, ValueError):
        pass
    try:
        _require_hub(constants.ENDPOINT)
        return Path(hf_hub_download(name, "config.json")).parent
    except (HFValidationError, HfHubHTTPError, OSError, ValueError) as error:
        close = difflib.get_close_matches(name, presets(), n=1)
        meant = f" Did you mean {close[0]!r}?" if close and close[0] != name else ""
        raise ConfigError(
            f"model.init = {name!r}: no such folder, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {str(error).splitlines()[0]}).{meant} Check the name or the "
            "network."
        ) from None


def _require_hub(endpoint: str) -> None:
    """Raise OSError where the hub cannot be reached: its client would try again for 24 s."""
    if getproxies():
        return
    url = urlsplit(endpoint)
    port = url.port or (80 if url.scheme == "http" else 443)
    socket.create_connection((url.hostname or "", port), timeout=_HUB_TIMEOUT_S).close()


def _folder(init: Path) -> Path:
    """A run stands for its newest checkpoint."""
    return RunPaths(init).newest_checkpoint() or init
