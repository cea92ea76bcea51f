"""A new user's first `run`: no config, a mistyped config, and a run of more than a day."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from pathlib import Path
from typing import NoReturn

import pytest

from payload.core.errors import ConfigError, ExitCode
from payload.orchestrate.__main__ import main
from payload.orchestrate.commands.run_commands_options import toml_file
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from tests.orchestrate.test_commands import Workplace
from tests.support.launching import REPO


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


@pytest.mark.processes
@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_run_without_config_suggests_finetune_and_the_shipped_configs(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    status = main([command, "--inventory", "local"], os.environ)
    assert status == (ExitCode.CONFIG if command == "run" else ExitCode.OK)
    said = capsys.readouterr().err
    assert "no config and no data are named" in said and "make run" in said
    assert "finetune --model MODEL --data FILE" in said and "quickstart.toml" in said
    assert "openwebtext --out" not in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("payload/configs/quickstart", "Did you mean payload/configs/quickstart.toml?"),
        ("quickstart", "Did you mean payload/configs/quickstart.toml?"),
        ("quikstart.toml", "Did you mean payload/configs/quickstart.toml?"),
        ("my/smolm2_chat_lora", "Did you mean payload/configs/smollm2_chat_lora.toml?"),
        ("quickstart-20261128-135100-bd1c", "To continue a run: run --resume quickstart-2026"),
    ],
)
def test_a_mistyped_config_suggests_the_config_that_was_meant(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPO)
    with pytest.raises(ArgumentTypeError) as error:
        toml_file(text)
    assert message in str(error.value)


def test_a_config_in_the_user_s_folder_is_suggested_first_and_an_existing_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quickstart.toml").write_text("")
    with pytest.raises(ArgumentTypeError, match=r"Did you mean quickstart\.toml\?"):
        toml_file("quickstart")
    assert toml_file("quickstart.toml") == Path("quickstart.toml")
    assert toml_file("others.toml") == Path("others.toml"), "the file's reader reports it"


class StartedError(ConfigError):
    """The run would have begun."""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "is_started"),
    [
        ((), False),
        (("--yes",), True),
        (("--set", "limits.max_hours=3"), True),
        (("--set", "train.steps=10"), True),
    ],
)
def test_a_run_of_more_than_a_day_begins_only_with_yes(
    words: tuple[str, ...],
    is_started: bool,
    workplace: Workplace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(*_: object, **__: object) -> NoReturn:
        raise StartedError("it would begin")

    monkeypatch.setattr(LocalAccess, "start_supervisor", start)
    long = ("--set", "train.steps=1000000000", "--inventory", "local")
    arguments = workplace.arguments("run", *workplace.settings(), *long, *words)
    status = main(arguments, os.environ)
    said = " ".join(capsys.readouterr().err.split())
    assert ("it would begin" in said) is is_started, said
    assert status == (ExitCode.CONFIG if is_started else ExitCode.USAGE)
    if not is_started:
        assert " d" in said and "repeat with --yes" in said
        assert not (workplace.runs.exists() and any(workplace.runs.iterdir()))
