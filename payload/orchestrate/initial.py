"""The weights that a run starts from: which folder they are, and how large the model is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from payload.adapter_files import has_adapter
from payload.checkpoint_files import MANIFEST_FILE
from payload.data_folder import load_meta
from payload.errors import CheckpointError, ConfigError
from payload.models.fit import require_fit, require_weights
from payload.models.hub import HubName, require_weights_on_hub
from payload.models.source import SCRATCH, find_source, pinned, spec_on_hub
from payload.models.spec import ModelSpec
from payload.run_config import RunConfig
from payload.tokenizer_identity import TOKENIZER_FILE, require_same_tokenizer


def initial_spec(config: RunConfig, *, vocab_size: int | None) -> tuple[ModelSpec, str | None]:
    """Return the model's numbers before it is loaded, and a note where they are a guess or not all.

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
            weights = spec_on_hub(name, setting="model.init")
    if weights is not None:
        return weights.with_sequence_length(sequence_length), weights.note()
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
    init, known = source.name, source.spec()
    if source.folder is not None:
        init = str(source.folder.resolve())
    elif source.file is not None:
        init = str(source.file.resolve())
    elif source.kind == "hub" and download:
        init = pinned(source.name, setting="model.init")
        known = _spec_on_hub(init)
    if source.folder is not None and vocab_size is not None and _has_tokenizer(source.folder):
        data = Path(config.data.dir)
        require_same_tokenizer(
            load_meta(data), data=data, folder=source.folder, init=source.name, error=ConfigError
        )
    if known is not None:
        require_fit(known, config, vocab_size=vocab_size)
        if source.folder is not None:
            _require_sound(source.folder, known)
    return replace(config, model=replace(config.model, init=init))


def require_known_sizes(config: RunConfig) -> None:
    """Raise CheckpointError where a model is here and its sizes are not known.

    A plan would count another model's.
    """
    if config.model.init != SCRATCH and Path(config.model.init).expanduser().exists():
        find_source(config.model.init, setting="model.init", verify=False).spec()


def _spec_on_hub(init: str) -> ModelSpec:
    """Return the numbers of a model whose name has its commit; its weights can be loaded."""
    name = HubName.parse(init)
    assert name is not None, "pinned() returns a name on the hub"
    require_weights_on_hub(name, setting="model.init")
    return spec_on_hub(name, setting="model.init")


def _has_tokenizer(folder: Path) -> bool:
    return (folder / TOKENIZER_FILE).exists()


def _require_sound(folder: Path, spec: ModelSpec) -> None:
    """Compare the weights of a folder that others made; a checkpoint's manifest was compared."""
    if has_adapter(folder) or (folder / MANIFEST_FILE).exists():
        return
    require_weights(spec, folder)
