"""The command that trains a model on a data folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from payload.core.errors import DataError
from payload.core.regular_files import home_path
from payload.core.suggested_commands import command
from payload.core.tasks import TaskKind
from payload.formats.data_folder import DataMeta
from payload.formats.tokenizer_identity import TOKENIZER_FILE
from payload.weights.run_names import path_of_run

_CONFIGS: Mapping[TaskKind, str] = {
    "text": "gpt2_finetune.toml",
    "chat": "smollm2_chat_lora.toml",
    "classify": "classify.toml",
    "preference": "smollm2_dpo_lora.toml",
}
_FOLDER = Path(__file__).parents[1] / "configs"


def trained_model(tokenizer: str) -> str:
    """Return the model to train on data that was prepared with this tokenizer.

    Returns `MODEL` for a folder with only a tokenizer. Raises DataError.
    """
    model = path_of_run(tokenizer, setting="--tokenizer", error=DataError)
    folder = home_path(model)
    has_no_model = (folder / TOKENIZER_FILE).is_file() and not (folder / "config.json").is_file()
    return "MODEL" if has_no_model else model


def training_command(folder: Path, meta: DataMeta, *, model: str) -> str:
    """Return the command that trains `model` on the folder, with a config for the data's task."""
    config = _FOLDER / _CONFIGS[meta.task]
    if config.is_relative_to(Path.cwd()):
        config = config.relative_to(Path.cwd())
    blocks = meta.chat or meta.preference
    settings = [f"model.init={model}", f"data.dir={folder}"]
    settings += [] if blocks is None else [f"data.sequence_length={blocks.sequence_length}"]
    sets = [word for each in settings for word in ("--set", each)]
    return command("orchestrate", "run", "--config", str(config), *sets)
