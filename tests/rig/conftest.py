"""Deselects, and says so, what boots machines where none can be booted; fixtures for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from payload.orchestrate.keys import make_operator_key, operator_key_path
from tests.rig import prepared
from tests.rig.host import missing
from tests.rig.prepared import node_user_data
from tests.rig.rig import Rig

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
def operator_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the operator has on disk: the key of cluster `rig`, inventory, runs."""
    return tmp_path_factory.mktemp("operator")


@pytest.fixture(scope="session")
def operator_key(operator_folder: Path) -> Path:
    """A private key, made as the program makes one; the public one is beside it."""
    path = operator_key_path(operator_folder, cluster="rig")
    public = make_operator_key(path)
    path.with_suffix(".pub").write_text(public + "\n", encoding="ascii")
    return path


@pytest.fixture(scope="session")
def from_nothing(operator_key: Path) -> Iterator[Rig]:
    """Four machines that boot for the first time from the image, with nothing prepared.

    The first three become ready; node-3 is asked for a package that does not exist. The tests
    leave them as they find them.
    """
    public = operator_key.with_suffix(".pub").read_text(encoding="ascii")
    good, broken = (
        node_user_data(public, extra_packages=more) for more in ((), ("no-such-package",))
    )
    with Rig([good, good, good, broken]) as rig:
        states = rig.wait_for_bootstrap(timeout_s=900)
        if states["node-1"]["ok"]:
            prepared.keep(rig.machines[1])
        yield rig
