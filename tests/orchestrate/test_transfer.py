"""Files over SSH: atomic, verified and resumed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from payload.core.errors import PreflightError, SshUnreachableError
from payload.orchestrate.ssh.authentication import dial
from payload.orchestrate.ssh.connection import Connection
from payload.orchestrate.ssh.files import get, put
from payload.orchestrate.ssh.node_code import build_kernels, this_code
from payload.orchestrate.ssh.remote_calls import Login, ProxyProcess, open_tcp
from tests.orchestrate.conftest import PATIENT
from tests.orchestrate.sshd import Sshd, relay_argv
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.sshd

BIG = os.urandom(6 * 2**20)


@pytest.fixture
def connection(node: Sshd, login: Login) -> Iterator[Connection]:
    made = dial(
        node.node,
        login=login,
        open_stream=lambda: open_tcp(node.node, timeout_s=PATIENT.connect_s),
        deadlines=PATIENT,
    )
    yield made
    made.close()


def test_kernels_that_cannot_be_built_are_a_reason_and_no_error(
    tmp_path: Path, connection: Connection
) -> None:
    home, venv = PurePosixPath(tmp_path), PurePosixPath("/nowhere")
    reason = build_kernels(connection, this_code(), home=home, venv=venv)
    assert reason is not None and "/nowhere/bin/python" in reason


def short_lived(node: Sshd, login: Login, *, limit_bytes: float) -> Connection:
    """A connection that breaks after a number of bytes from the node."""
    argv = relay_argv(node.node, limit_bytes=limit_bytes)
    return dial(
        node.node,
        login=login,
        open_stream=lambda: ProxyProcess(argv, node="node-0", env=dict(os.environ)),
        deadlines=PATIENT,
    )


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o755])
def test_a_file_goes_and_comes_back_with_its_mode(
    connection: Connection, tmp_path: Path, mode: int
) -> None:
    source, there, back = tmp_path / "source", tmp_path / "there", tmp_path / "back"
    source.write_bytes(BIG)
    put(connection, source, str(there), mode=mode, timeout_s=DEADLINE_S)
    get(connection, str(there), back, mode=mode, timeout_s=DEADLINE_S)
    assert back.read_bytes() == there.read_bytes() == BIG
    assert stat.S_IMODE(there.stat().st_mode) == stat.S_IMODE(back.stat().st_mode) == mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "source", "there"]


@pytest.mark.parametrize("name", ["a b", "it's", "a;touch x", "$HOME", "-n", "a\nb", "ä€", "a\\b"])
def test_a_file_s_name_is_nothing_but_a_name(
    connection: Connection, tmp_path: Path, name: str
) -> None:
    source, there, back = tmp_path / "source", tmp_path / "far" / name, tmp_path / "near" / name
    there.parent.mkdir()
    back.parent.mkdir()
    source.write_bytes(b"content")
    put(connection, source, str(there), timeout_s=DEADLINE_S)
    get(connection, str(there), back, timeout_s=DEADLINE_S)
    assert back.read_bytes() == b"content"
    assert [path.name for path in there.parent.iterdir()] == [name]


def test_an_empty_file_is_a_file(connection: Connection, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    put(connection, tmp_path / "empty", str(tmp_path / "there"), timeout_s=DEADLINE_S)
    get(connection, str(tmp_path / "there"), tmp_path / "back", timeout_s=DEADLINE_S)
    assert (tmp_path / "back").read_bytes() == b""


def test_a_download_that_breaks_twice_goes_on_and_ends_equal(
    node: Sshd, login: Login, tmp_path: Path
) -> None:
    source, target, partial = tmp_path / "far", tmp_path / "near", tmp_path / "near.partial"
    source.write_bytes(BIG)
    sizes = []
    for _ in range(2):
        broken = short_lived(node, login, limit_bytes=2 * 2**20)
        with pytest.raises(SshUnreachableError, match="node-0: the connection broke"):
            get(broken, str(source), target, timeout_s=DEADLINE_S)
        broken.close()
        assert not target.exists()
        sizes.append(partial.stat().st_size)
    assert 0 < sizes[0] < sizes[1] < len(BIG)
    # Enough for the rest, but not for the whole file.
    enough = short_lived(node, login, limit_bytes=len(BIG) - sizes[1] + 2**20)
    get(enough, str(source), target, timeout_s=DEADLINE_S)
    enough.close()
    assert target.read_bytes() == BIG
    assert not partial.exists()


def test_an_upload_goes_on_from_what_is_there(connection: Connection, tmp_path: Path) -> None:
    source, target, partial = tmp_path / "near", tmp_path / "far", tmp_path / "far.partial"
    source.write_bytes(BIG)
    partial.write_bytes(BIG[: len(BIG) // 2])
    inode = partial.stat().st_ino
    put(connection, source, str(target), timeout_s=DEADLINE_S)
    assert target.read_bytes() == BIG
    assert target.stat().st_ino == inode


@pytest.mark.parametrize("rest", [b"of another file", BIG + b"and more"])
def test_the_rest_of_another_file_does_no_harm(
    connection: Connection, tmp_path: Path, rest: bytes
) -> None:
    source, far, near = tmp_path / "source", tmp_path / "far", tmp_path / "near"
    source.write_bytes(BIG)
    for target in (far, near):
        target.with_name(f"{target.name}.partial").write_bytes(rest)
    put(connection, source, str(far), timeout_s=DEADLINE_S)
    get(connection, str(source), near, timeout_s=DEADLINE_S)
    assert far.read_bytes() == near.read_bytes() == BIG


def test_a_file_takes_an_older_one_s_place(connection: Connection, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"new")
    (tmp_path / "target").write_bytes(b"older and longer")
    put(connection, tmp_path / "source", str(tmp_path / "target"), timeout_s=DEADLINE_S)
    assert (tmp_path / "target").read_bytes() == b"new"


def test_what_the_node_cannot_store_or_does_not_have_is_named(
    connection: Connection, tmp_path: Path
) -> None:
    (tmp_path / "source").write_bytes(b"x")
    with pytest.raises(PreflightError, match=r"node-0: writing /proc/nowhere/x: .*No such file"):
        put(connection, tmp_path / "source", "/proc/nowhere/x", timeout_s=DEADLINE_S)
    with pytest.raises(PreflightError, match=r"node-0: `sha256sum` failed .*/nowhere"):
        get(connection, "/nowhere", tmp_path / "target", timeout_s=DEADLINE_S)
    assert not (tmp_path / "target").exists()
