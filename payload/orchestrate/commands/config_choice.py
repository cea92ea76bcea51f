"""Loads the settings that a command line selects: a config file, a resumed run, or the defaults."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from payload.config.run_config import RunConfig, load_run_config, parse_run_config
from payload.core.errors import ConfigError, DataError
from payload.core.suggested_commands import command
from payload.estimates.batch_size import with_recorded_size
from payload.launch.plan_record import auto_batch_size
from payload.orchestrate.commands.run_commands_options import ConfigOptions, shipped_configs
from payload.run_record.run_files import RunPaths
from payload.run_record.run_repair import config_to_resume


def load_config(
    options: ConfigOptions,
    *,
    resumed: RunPaths | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> RunConfig:
    """Return the settings of the config file, the resumed run or the defaults, with --set on top.

    If the plan of a resumed run chose the micro-batch size, `auto` resolves to this size. If the
    run's settings had a number instead, `auto` is resolved again. Raises ConfigError.
    """
    if options.config_path is not None:
        config = load_run_config(options.config_path, overrides=options.overrides)
        _require_settings(options.config_path)
    elif resumed is not None:
        config, warning = config_to_resume(resumed, overrides=options.overrides)
        if warning:
            say(f"warning: {warning}")
    else:
        return parse_run_config("", overrides=options.overrides, where="defaults")
    if resumed is not None and _left_size_open(resumed):
        with suppress(ConfigError):
            config = with_recorded_size(config, config_to_resume(resumed, overrides=())[0])
    return config


def require_choice(options: ConfigOptions, config: RunConfig, *, resumed: bool = False) -> None:
    """Raise DataError if the command line names neither a config nor data.

    The default data, OpenWebText, takes 40 GB, so a new user must not start this download by
    accident.
    """
    is_named = any(each.strip().startswith("data.dir") for each in options.overrides)
    if resumed or is_named or options.config_path is not None or config.data.folder().exists():
        return
    folder = shipped_configs()
    names = ", ".join(sorted(path.name for path in folder.glob("*.toml")))
    fine_tune = command("finetune", "--model", "MODEL", "--data", "FILE")
    raise DataError(
        f"no config and no data are named. To fine-tune on your own file: {fine_tune}; for an "
        f"example: make run.\nConfigs in {folder}: {names}. Use one as: "
        f"{command('orchestrate', 'run', str(folder / 'quickstart.toml'))}"
    )


def _require_settings(path: Path) -> None:
    """Raise ConfigError for a valid config that sets nothing, such as an empty file.

    The defaults would train GPT-2 on OpenWebText, which is not the purpose of an empty file.
    """
    if any(tomllib.loads(path.read_text(encoding="utf-8-sig")).values()):
        return
    write = command("finetune", "--model", "MODEL", "--data", "FILE", "--prepare-only")
    raise ConfigError(
        f"config {path}: no setting in the file. Set at least data.dir and model.init, or write a "
        f"run.toml with: {write}"
    )


def _left_size_open(resumed: RunPaths) -> bool:
    """Return True if the plan chose the micro-batch size, or if there is no plan file."""
    return not resumed.plan.exists() or auto_batch_size(resumed.plan) is not None
