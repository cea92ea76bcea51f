"""Nodes for tests that talk SSH; says so where none can be started."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from shutil import which

import pytest

from payload.orchestrate.ssh_settings import Deadlines, Login
from tests.orchestrate.sshd import SSHD, USER, Sshd, make_key

StartSshd = Callable[..., Sshd]
_NOT_RUN = pytest.StashKey[str]()
SHORT = Deadlines(connect_s=3.0, handshake_s=3.0, auth_s=3.0)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what starts an sshd where there is none."""
    marked = [item for item in items if item.get_closest_marker("sshd")]
    # On other systems the loopback interface has one address only.
    if marked and not (sys.platform == "linux" and SSHD.exists() and which("ssh-keygen")):
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]
        config.stash[_NOT_RUN] = (
            f"NOT RUN: {len(marked)} tests that start an SSH server: they need Linux with {SSHD} "
            "and ssh-keygen (apt-get install openssh-server openssh-client)."
        )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """What was left out, at the end, where it is seen."""
    note = config.stash.get(_NOT_RUN, None)
    if note:
        terminalreporter.section("tests/orchestrate", yellow=True, bold=True)
        terminalreporter.write_line(note, yellow=True, bold=True)


@pytest.fixture(scope="session")
def login(tmp_path_factory: pytest.TempPathFactory) -> Login:
    """The operator's key, made for the session."""
    key = tmp_path_factory.mktemp("operator") / "id_ed25519"
    make_key(key)
    return Login(user=USER, key=key)


@pytest.fixture
def start_sshd(tmp_path: Path, login: Login) -> Iterator[StartSshd]:
    """Starts a node: start_sshd("node-0", "127.0.0.2"); all are stopped at the end."""
    public_key = login.key.with_suffix(".pub").read_text(encoding="ascii").strip()
    with ExitStack() as stack:

        def start(name: str, address: str, *, public_key: str = public_key, more: str = "") -> Sshd:
            node = Sshd(tmp_path, name=name, address=address, public_key=public_key, more=more)
            return stack.enter_context(node)

        yield start


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, login: Login) -> Iterator[Sshd]:
    """One node that the tests of a module share and leave as it is."""
    public_key = login.key.with_suffix(".pub").read_text(encoding="ascii").strip()
    folder = tmp_path_factory.mktemp("nodes")
    with Sshd(folder, name="node-0", address="127.0.0.2", public_key=public_key) as sshd:
        yield sshd
