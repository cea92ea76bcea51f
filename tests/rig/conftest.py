"""Deselects, and says so, what boots machines where none can be booted; fixtures for the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rig.host import missing, run

_NOT_RUN = pytest.StashKey[str]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    problem = missing()
    rig = [item for item in items if item.get_closest_marker("rig")]
    if problem and rig:
        config.hook.pytest_deselected(items=rig)
        items[:] = [item for item in items if item not in rig]
        config.stash[_NOT_RUN] = f"NOT RUN: {len(rig)} tests that boot machines: {problem}."


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    note = config.stash.get(_NOT_RUN, None)
    if note:
        terminalreporter.section("tests/rig", yellow=True, bold=True)
        terminalreporter.write_line(note, yellow=True, bold=True)


@pytest.fixture(scope="session")
def operator_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private key; the public one is beside it."""
    path = tmp_path_factory.mktemp("keys") / "id_ed25519"
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "operator", "-f", path])
    return path
