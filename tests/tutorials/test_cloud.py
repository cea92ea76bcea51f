"""The tutorial of Google Cloud, against the stand-in for Google and the fake `pulumi`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.engine import Engine
from tests.orchestrate.cloud.standin import PROJECT, CloudStandIn
from tests.tutorials.conftest import run_script
from tests.tutorials.pages import ROOT, TUTORIALS, Reduced, missing_lines, read_page, script
from tests.tutorials.substitutions import TABLE

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Return a project folder without a stack, on the fake engine."""
    with CloudStandIn() as cloud:
        cloud.sells_everything = True
        with Engine(tmp_path / "own", cloud, env=os.environ, is_fake=True) as engine:
            yield engine


def run(text: str, engine: Engine) -> str:
    """Run a script in the project folder, with `tileforge` on PATH."""
    programs = engine.folder.parent / "bin"
    command = programs / "tileforge"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m payload "$@"\n')
    command.chmod(0o755)
    return run_script(text, engine.folder, **engine.env)


def test_from_zero_to_destroyed_leaves_nothing(engine: Engine) -> None:
    page = read_page(TUTORIALS / "google_cloud.md")
    printed = run(script(page, TABLE["google_cloud.md"], project=PROJECT), engine)
    assert engine.cloud.count("POST .*/instances$") == 3, printed
    assert (
        missing_lines(page, TABLE["google_cloud.md"], printed.replace(PROJECT, "MY-PROJECT")) == []
    )
    assert engine.left() == {}


def test_the_readme_s_three_commands_build_and_destroy_a_cluster(engine: Engine) -> None:
    engine.stack("init", "dev")
    commands = [each for each in read_page(ROOT / "README.md").commands if each[:6] == "pulumi"]
    assert commands == ["pulumi up", "pulumi destroy"]
    yes = Reduced(
        replace={"pulumi up": "pulumi up --yes", "pulumi destroy": "pulumi destroy --yes"}
    )
    page = read_page(ROOT / "README.md")
    skip = {each: "no machines" for each in page.commands if each not in commands}
    run(script(page, Reduced(replace=yes.replace, skip=skip)), engine)
    assert engine.cloud.count("POST .*/instances$") == 2
    assert engine.left() == {}
