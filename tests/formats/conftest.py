"""Commands, a copy of the fixtures for each test, and runs that are resumed once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.formats.commands import Commands
from tests.formats.recorded import Recorded, expected, named


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """`tileforge`, with the recorded cache of the hub and without a network."""
    hub = Recorded.copied_to(tmp_path_factory.mktemp("hub") / "ada").root / "hub"
    return Commands(env={"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"})


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """The fixtures, for one test."""
    return Recorded.copied_to(tmp_path / "ada")


@pytest.fixture(scope="session")
def continued(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A copy in which the current code has resumed the runs with an adapter."""
    copy = Recorded.copied_to(tmp_path_factory.mktemp("continued") / "ada")
    for name in ("lora", "labels", "pairs"):
        settings = [f"train.steps={expected()[name]['last_step']}"]
        if name == "pairs":  # its base was a folder, which was moved
            settings.append("model.init=./models/base")
        sets = named(name) + [word for setting in settings for word in ("--set", setting)]
        commands.do("train", "--run-dir", f"runs/{name}", *sets, folder=copy.project)
    return copy


@pytest.fixture(scope="session")
def supervised(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A copy in which the current code has resumed run `full` on two ranks, with a store."""
    copy = Recorded.copied_to(tmp_path_factory.mktemp("supervised") / "ada")
    settings = (
        f"train.steps={expected()['full']['last_step']}",
        "train.profile_step=10",
        f"storage.results={copy.store}",
        "data.dir=data/text",  # the user must approve it: that release kept no record
    )
    sets = [word for setting in settings for word in ("--set", setting)]
    words = ("run", "--resume", "full", "--inventory", "local", *sets)
    commands.do(*words, folder=copy.project)
    return copy
