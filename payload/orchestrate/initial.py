"""The weights that a run starts from: which folder they are, and how large the model is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from payload.adapter_files import has_adapter
from payload.data_folder import load_meta
from payload.errors import CheckpointError, ConfigError
from payload.hf_folder import weight_files
from payload.models.fit import require_fit
from payload.models.hub import HubName, fetch_config
from payload.models.registry import read_spec
from payload.models.source import SCRATCH, find_source, pinned
from payload.models.spec import ModelSpec
from payload.run_config import RunConfig
from payload.tokenizer_identity import require_same_tokenizer


def initial_spec(config: RunConfig, *, vocab_size: int | None) -> tuple[ModelSpec, str | None]:
    """Return the model's numbers before it is loaded, and a note where they are a guess.

    `vocab_size` is the data's, for a model from scratch; None is the preset's own.
    """
    sequence_length, init = config.data.sequence_length, config.model.init
    configured = config.model.spec(sequence_length=sequence_length, vocab_size=vocab_size)
    if init == SCRATCH:
        return configured, None
    weights = None
    with suppress(CheckpointError):
        source = find_source(init, setting="model.init", verify=False)
        weights = source.spec()
        name = HubName.parse(init) if source.kind == "hub" else None
        if weights is None and name is not None and name.commit():
            # `settle_initial` has asked for it already, so the cache has it.
            weights = read_spec(fetch_config(name, setting="model.init"))
    if weights is not None:
        return weights.with_sequence_length(sequence_length), None
    return configured, (
        f"the sizes of model.init = {init!r} are not known here; the arithmetic is that of "
        f"model.preset = {config.model.preset!r}"
    )


def settle_initial(
    config: RunConfig, *, vocab_size: int | None, say: Callable[[str], None], download: bool
) -> RunConfig:
    """Return the config with model.init as one folder: a run's newest sound checkpoint, say.

    What can be known of the weights before the start is checked: that they are there and whole,
    and fit data and settings. With `download`, the hub is asked for the commit that a name stands
    for now, which the run then keeps, and for its config.json. `say` is told of damaged
    checkpoints. Raises ConfigError.
    """
    source = find_source(
        config.model.init,
        setting="model.init",
        passed_over=lambda folder, problem: say(
            f"note: checkpoint {folder} is passed over: {problem}"
        ),
    )
    known = source.spec()
    if source.folder is not None:
        folder = source.folder.resolve()
        _require_weights(folder, init=source.name)
        if vocab_size is not None:
            data = Path(config.data.dir)
            require_same_tokenizer(
                load_meta(data), data=data, folder=folder, init=source.name, error=ConfigError
            )
        config = _starting_from(config, str(folder))
    elif source.file is not None:
        config = _starting_from(config, str(source.file.resolve()))
    elif source.kind == "hub" and download:
        name = HubName.parse(pinned(source.name, setting="model.init"))
        assert name is not None
        config = _starting_from(config, str(name))
        known = read_spec(fetch_config(name, setting="model.init"))
    if known is not None:
        require_fit(known, config, vocab_size=vocab_size)
    return config


def _starting_from(config: RunConfig, init: str) -> RunConfig:
    return replace(config, model=replace(config.model, init=init))


def _require_weights(folder: Path, *, init: str) -> None:
    if has_adapter(folder):
        return
    for name in weight_files(folder):
        if not (folder / name).is_file():
            raise ConfigError(
                f"model.init = {init!r}: {folder} has no {name}. Name a folder in the Hugging Face "
                "layout, with safetensors, or a checkpoint."
            )
