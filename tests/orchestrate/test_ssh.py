"""SSH against real sshd processes: successful operations, and the right error for each failure."""

from __future__ import annotations

import logging
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import (
    AnswerError,
    ConfigError,
    ConnectionLostError,
    ExitCode,
    HostKeyError,
    PreflightError,
    SshAuthError,
    SshUnreachableError,
    TileforgeError,
)
from payload.machines.inventory import Node
from payload.orchestrate.ssh import connection as ssh
from payload.orchestrate.ssh.authentication import dial
from payload.orchestrate.ssh.cluster import Cluster
from payload.orchestrate.ssh.connection import Connection
from payload.orchestrate.ssh.paramiko_transport import Transport
from payload.orchestrate.ssh.remote_calls import Deadlines, Login, ProxyProcess, open_tcp
from tests.orchestrate.conftest import PATIENT, SILENT_LATER, StartSshd
from tests.orchestrate.sshd import (
    Sshd,
    logs_since,
    make_cluster,
    make_key,
    relay_argv,
)
from tests.support.ports import free_port
from tests.support.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.sshd

HOSTILE = [
    "",
    "a b",
    "it's",
    'say "hi"',
    "a;touch x",
    "$HOME",
    "`id`",
    "*",
    "a\nb",
    "-n",
    "ä€",
    "\\",
]


@contextmanager
def connected(node: Node, login: Login, *, deadlines: Deadlines = PATIENT) -> Iterator[Connection]:
    connection = dial(
        node,
        login=login,
        open_stream=lambda: open_tcp(node, timeout_s=deadlines.connect_s),
        deadlines=deadlines,
    )
    try:
        yield connection
    finally:
        connection.close()


def error_of(node: Node, login: Login) -> TileforgeError:
    with pytest.raises(TileforgeError) as caught, connected(node, login):
        pass
    assert str(caught.value).startswith(f"{node.name}: ")
    return caught.value


def test_a_command_gives_its_status_and_both_outputs(node: Sshd, login: Login) -> None:
    with connected(node.node, login) as connection:
        done = connection.run(
            ["sh", "-c", "cat; echo no >&2; exit 3"], timeout_s=DEADLINE_S, stdin=b"yes"
        )
    assert (done.status, done.stdout, done.stderr) == (3, b"yes", b"no\n")


def test_arguments_arrive_as_they_are(node: Sshd, login: Login) -> None:
    with connected(node.node, login) as connection:
        said = connection.check_run(["printf", "%s\\0", *HOSTILE], timeout_s=DEADLINE_S)
    assert said.decode().split("\0")[:-1] == HOSTILE


def test_much_output_and_input_that_nobody_reads_do_not_block(node: Sshd, login: Login) -> None:
    program = "head -c 8000000 /dev/zero; head -c 8000000 /dev/zero >&2"
    with connected(node.node, login) as connection:
        done = connection.run(["sh", "-c", program], timeout_s=DEADLINE_S, stdin=bytes(8_000_000))
    assert (len(done.stdout), len(done.stderr)) == (8_000_000, 8_000_000)


def test_a_node_that_sends_without_end_is_not_listened_to(node: Sshd, login: Login) -> None:
    with connected(node.node, login) as connection:
        for stream in ("", " >&2"):
            argv = ["sh", "-c", f"cat /dev/zero{stream}"]
            with pytest.raises(AnswerError, match=r"^node-0: sent more data than requested"):
                connection.run(argv, timeout_s=DEADLINE_S)
        assert connection.check_run(["echo", "still here"], timeout_s=DEADLINE_S) == b"still here\n"


def test_a_failing_command_is_named_with_its_last_words(node: Sshd, login: Login) -> None:
    with (
        connected(node.node, login) as connection,
        pytest.raises(PreflightError, match=r"node-0: `ls` failed with status 2: .*/nowhere"),
    ):
        connection.check_run(["ls", "/nowhere"], timeout_s=DEADLINE_S)


def has_sleeping(sshd: Sshd) -> bool:
    """Return whether a command of the test sleeps on the node, or is starting."""
    return any("sleep 300" in command_line(pid) for pid in sshd.processes())


def command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").replace("\0", " ")
    return ""


def test_a_command_that_takes_too_long_is_ended_on_the_node(node: Sshd, login: Login) -> None:
    with connected(node.node, login) as connection:
        with pytest.raises(PreflightError, match=r"node-0: `sh` did not finish within 3 s"):
            connection.run(["sh", "-c", "sleep 300; true"], timeout_s=3)
        wait_until(lambda: not has_sleeping(node), what="the command's end")
        assert connection.check_run(["echo", "still here"], timeout_s=DEADLINE_S) == b"still here\n"


def test_a_command_that_is_killed_is_said_to_be(node: Sshd, login: Login) -> None:
    with connected(node.node, login) as connection:
        with pytest.raises(PreflightError, match="node-0: `sh` was killed by a signal"):
            connection.run(["sh", "-c", "kill -9 $$"], timeout_s=DEADLINE_S)
        assert connection.run(["true"], timeout_s=DEADLINE_S).status == 0


def test_another_host_key_is_refused_before_anything_is_sent(
    start_sshd: StartSshd, login: Login, tmp_path: Path
) -> None:
    sshd = start_sshd("node-1", "127.0.0.3")
    error = error_of(sshd.with_host_key(make_key(tmp_path / "other")), login)
    assert isinstance(error, HostKeyError) and error.exit_code == ExitCode.HOST_KEY
    said = sshd.log.read_text(encoding="utf-8")
    assert "Connection" in said
    assert "Accepted" not in said and "publickey" not in said


def test_a_host_key_of_another_type_is_not_the_inventory_s(
    node: Sshd, login: Login, tmp_path: Path
) -> None:
    ecdsa = make_key(tmp_path / "key", kind="ecdsa")
    assert isinstance(error_of(node.with_host_key(ecdsa), login), HostKeyError)


@pytest.mark.parametrize(
    "keys", [(), ("ssh-ed25519 AAAA",), ("ssh-ed25519 A",), ("nonsense AAAA",)]
)
def test_without_a_usable_host_key_nobody_is_asked(keys: tuple[str, ...], login: Login) -> None:
    nobody = Node(name="n", address="127.0.0.2", host_keys=keys, physical_cores=1, memory_gib=1)
    assert error_of(nobody, login).exit_code == ExitCode.HOST_KEY


def test_a_refused_key_is_tried_twice(start_sshd: StartSshd, login: Login, tmp_path: Path) -> None:
    sshd = start_sshd("node-1", "127.0.0.3", public_key=make_key(tmp_path / "another"))
    error = error_of(sshd.node, login)
    assert isinstance(error, SshAuthError) and error.exit_code == ExitCode.SSH_AUTH
    assert str(login.key) in str(error)
    assert f"os-login ssh-keys add --key-file={login.key}.pub" in str(error)
    wait_until(
        lambda: sshd.log.read_text(encoding="utf-8").count("Connection from") == 2,
        what="two attempts",
    )


def test_nothing_listening_is_unreachable(login: Login) -> None:
    port = free_port("127.0.0.2")
    node = Node(
        name="node-2",
        address="127.0.0.2",
        ssh_port=port,
        host_keys=("ssh-ed25519 " + "A" * 8,),
        physical_cores=1,
        memory_gib=1,
    )
    with pytest.raises(SshUnreachableError, match=rf"node-2: 127\.0\.0\.2 port {port} refuses"):
        open_tcp(node, timeout_s=3)


def test_a_name_that_does_not_resolve_is_unreachable(node: Sshd) -> None:
    nowhere = replace(node.node, address="node.invalid")
    with pytest.raises(SshUnreachableError, match=r"'node\.invalid' does not resolve"):
        open_tcp(nowhere, timeout_s=3)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_server_that_does_not_speak_ssh_is_unreachable(
    node: Sshd, login: Login, said: bytes
) -> None:
    with socket.create_server(("127.0.0.2", 0)) as silent:
        deaf = replace(node.node, ssh_port=silent.getsockname()[1])
        open_streams = []

        def open_stream() -> socket.socket:
            stream = open_tcp(deaf, timeout_s=3)
            open_streams.append(silent.accept()[0])
            open_streams[-1].sendall(said)
            return stream

        with pytest.raises(SshUnreachableError, match="no SSH handshake within 3 s"):
            dial(deaf, login=login, open_stream=open_stream, deadlines=Deadlines(handshake_s=3.0))
        for stream in open_streams:
            stream.close()


def test_a_frozen_sshd_is_unreachable_within_the_deadline(
    start_sshd: StartSshd, login: Login
) -> None:
    sshd = start_sshd("node-1", "127.0.0.3")
    with connected(sshd.node, login, deadlines=SILENT_LATER) as connection:
        sshd.signal(signal.SIGSTOP)
        try:
            with (
                pytest.raises(
                    SshUnreachableError, match="node-1: no response for 1 s while waiting"
                ),
                connection.guard("waiting", timeout_s=1),
                connection.open_sftp() as sftp,
            ):
                sftp.listdir("/")
        finally:
            sshd.signal(signal.SIGCONT)


def test_a_node_that_falls_silent_is_unreachable_and_not_waited_for_twice(
    start_sshd: StartSshd, login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "_MARGIN_S", 0.5)
    sshd = start_sshd("node-1", "127.0.0.3")
    with connected(sshd.node, login, deadlines=SILENT_LATER) as connection:
        sshd.signal(signal.SIGSTOP)
        try:
            with pytest.raises(
                SshUnreachableError, match="node-1: no response while running `true`"
            ):
                connection.run(["true"], timeout_s=DEADLINE_S)
            with pytest.raises(SshUnreachableError, match="node-1: the connection broke"):
                connection.run(["true"], timeout_s=DEADLINE_S)
        finally:
            sshd.signal(signal.SIGCONT)


def test_a_connection_that_breaks_is_said_to(start_sshd: StartSshd, login: Login) -> None:
    sshd = start_sshd("node-1", "127.0.0.3")
    with connected(sshd.node, login) as connection:
        sshd.stop()
        with pytest.raises(SshUnreachableError, match="node-1: the connection broke"):
            connection.run(["true"], timeout_s=DEADLINE_S)


def test_a_message_that_is_late_for_its_channel_does_not_end_the_connection(
    node: Sshd, login: Login, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    send = Transport._send_user_message
    may_end = tmp_path / "may_end"
    was_late: list[Any] = []

    def send_late(transport: Any, message: Any) -> None:
        """Send the end of a command's input after the command's channel is closed."""
        if message.asbytes()[:1] == b"\x60" and threading.current_thread() is not transport:
            may_end.touch()
            wait_until(lambda: not transport._channels.values(), what="the channel's close")
            was_late.append(message)
        send(transport, message)

    monkeypatch.setattr(Transport, "_send_user_message", send_late)
    with connected(node.node, login) as connection:
        # It ends when the end of its input is about to be sent.
        waits = f"until [ -e {may_end} ]; do sleep 0.01; done"
        assert connection.run(["sh", "-c", waits], timeout_s=DEADLINE_S).status == 0
        assert len(was_late) == 1
        # The node responds to earlier messages before it closes.
        assert connection.check_run(["echo", "still here"], timeout_s=DEADLINE_S) == b"still here\n"
    assert "nonexistent channel" not in node.log.read_text(encoding="utf-8")


def test_the_reason_of_a_connection_s_end_is_in_its_error(
    start_sshd: StartSshd, login: Login
) -> None:
    sshd = start_sshd("node-1", "127.0.0.3")
    with connected(sshd.node, login) as connection:
        message: Any = vars(ssh)["paramiko"].Message()
        message.add_byte(b"\x60").add_int(99)
        transport: Any = connection._transport
        transport._send_message(message)
        said = r"code 2: ieof packet referred to nonexistent channel 99\)\. Check that the machine"
        for _ in range(2):
            with pytest.raises(ConnectionLostError, match=said):
                connection.run(["true"], timeout_s=DEADLINE_S)
    with connected(sshd.node, login) as connection:
        sshd.stop()
        said = r"\((the node closed the connection|Connection reset by peer|Broken pipe)\)\. Check"
        with pytest.raises(ConnectionLostError, match=said):
            connection.run(["true"], timeout_s=DEADLINE_S)


def test_a_channel_takes_nothing_after_its_close_here(node: Sshd, login: Login) -> None:
    with connected(node.node, login) as connection:
        transport: Any = connection._transport
        channel: Any = transport.open_session(timeout=DEADLINE_S)
        channel.exec_command("cat")
        sent: list[bytes] = []
        transport._send_message = lambda message: sent.append(message.asbytes()[:1])

        def send_data_and_eof() -> None:
            for kind in (b"\x5e", b"\x60"):
                message: Any = vars(ssh)["paramiko"].Message()
                transport._send_user_message(message.add_byte(kind).add_int(channel.remote_chanid))

        send_data_and_eof()
        channel.close()
        send_data_and_eof()
        assert sent == [b"\x5e", b"\x60", b"\x61"]
        del transport._send_message
        assert connection.check_run(["echo", "still here"], timeout_s=DEADLINE_S) == b"still here\n"


def test_a_worker_s_error_says_whether_it_or_the_head_has_ended_the_connection(
    start_sshd: StartSshd, login: Login
) -> None:
    head, worker = start_sshd("node-0", "127.0.0.2"), start_sshd("node-1", "127.0.0.3")
    inventory = make_cluster(head.node, worker.node)
    for broken, said in (
        (worker, r"\((the node closed the connection|Socket is closed)\)\. Check"),
        (
            head,
            r"\(the connection to node-0, through which this node is reached, has ended\)\. Check",
        ),
    ):
        with Cluster(inventory, login=login, env={}, deadlines=PATIENT) as cluster:
            connection = cluster.connect(worker.node)
            broken.stop()
            with pytest.raises(ConnectionLostError, match=f"^node-1: the connection .*{said}"):
                connection.run(["true"], timeout_s=DEADLINE_S)
        broken.start()


# It ends when its output has no reader.
_NO_ANSWER = "while :; do echo; sleep 0.1; done"


def test_a_connection_that_breaks_while_an_answer_is_awaited_is_said_to(
    start_sshd: StartSshd, login: Login, tmp_path: Path
) -> None:
    sshd = start_sshd("node-1", "127.0.0.3")
    runs = tmp_path / "runs"

    def stop_it() -> None:
        wait_until(runs.exists, what="the command to run")
        sshd.stop()

    stopper = threading.Thread(target=stop_it)
    stopper.start()
    with connected(sshd.node, login) as connection:
        words = ["sh", "-c", f"touch {runs}; {_NO_ANSWER}"]
        with (
            pytest.raises(ConnectionLostError, match="the connection broke while running `sh`"),
            connection.listening(words, timeout_s=DEADLINE_S),
        ):
            pass
    stopper.join()


def test_a_command_that_does_not_answer_in_time_is_unreachable(node: Sshd, login: Login) -> None:
    with connected(node.node, login) as connection:
        with connection.listening(["echo", "hi"], timeout_s=DEADLINE_S) as answer:
            assert answer == b""
        with (
            pytest.raises(SshUnreachableError, match="node-0: no response for 1 s while running"),
            connection.listening(["sh", "-c", _NO_ANSWER], timeout_s=1),
        ):
            pass


def test_the_log_of_a_node_can_be_shown_where_a_test_fails(node: Sshd, login: Login) -> None:
    began = time.time() - 1.0
    with connected(node.node, login) as connection:
        connection.check_run(["true"], timeout_s=DEADLINE_S)
    assert "Accepted publickey" in dict(logs_since(began))["node-0"]
    assert not dict(logs_since(time.time() + 60.0))


def test_workers_are_reached_through_the_head(start_sshd: StartSshd, login: Login) -> None:
    head, worker = start_sshd("node-0", "127.0.0.2"), start_sshd("node-1", "127.0.0.3")
    inventory = make_cluster(head.node, worker.node)
    with Cluster(inventory, login=login, env={}, deadlines=PATIENT) as cluster:
        said = cluster.connect(worker.node).check_run(
            ["sh", "-c", "echo $HOME"], timeout_s=DEADLINE_S
        )
    assert said.decode().strip() == str(worker.home)


def test_a_worker_behind_a_head_that_cannot_be_used_is_not_tried(
    start_sshd: StartSshd, login: Login, tmp_path: Path
) -> None:
    head, worker = start_sshd("node-0", "127.0.0.2"), start_sshd("node-1", "127.0.0.3")
    inventory = make_cluster(head.with_host_key(make_key(tmp_path / "x")), worker.node)
    with Cluster(inventory, login=login, env={}, deadlines=PATIENT) as cluster:
        with pytest.raises(SshUnreachableError, match=r"node-1: not tried, .* through node-0"):
            cluster.connect(worker.node)
        with pytest.raises(HostKeyError):
            cluster.connect(inventory.head)
    assert "Connection" not in worker.log.read_text(encoding="utf-8")


def test_a_worker_that_does_not_listen_is_named_and_not_the_head(
    start_sshd: StartSshd, login: Login
) -> None:
    head = start_sshd("node-0", "127.0.0.2")
    worker = replace(head.node, name="node-1", address="127.0.0.3", ssh_port=free_port("127.0.0.3"))
    with (
        Cluster(make_cluster(head.node, worker), login=login, env={}, deadlines=PATIENT) as cluster,
        pytest.raises(SshUnreachableError, match=r"node-1: .* cannot be reached from node-0"),
    ):
        cluster.connect(worker)


def test_a_head_that_forbids_forwarding_is_named(start_sshd: StartSshd, login: Login) -> None:
    head = start_sshd("node-0", "127.0.0.2", more="AllowTcpForwarding no")
    worker = replace(head.node, name="node-1", address="127.0.0.3")
    with (
        Cluster(make_cluster(head.node, worker), login=login, env={}, deadlines=PATIENT) as cluster,
        pytest.raises(SshUnreachableError, match=r"node-0, .*refuses TCP forwarding"),
    ):
        cluster.connect(worker)


def test_a_proxy_command_carries_a_connection_and_ends_with_it(node: Sshd, login: Login) -> None:
    proxies = []

    def open_stream() -> ProxyProcess:
        proxies.append(ProxyProcess(relay_argv(node.node), node="node-0", env=dict(os.environ)))
        return proxies[-1]

    connection = dial(node.node, login=login, open_stream=open_stream, deadlines=PATIENT)
    assert connection.check_run(["echo", "hi"], timeout_s=DEADLINE_S) == b"hi\n"
    connection.close()
    assert proxies[0].ended()


def test_a_proxy_command_ends_with_ctrl_c_while_it_is_logging_in(node: Sshd, login: Login) -> None:
    proxies = []

    def open_stream() -> ProxyProcess:
        # It interrupts this process after our part of the handshake.
        argv = ["sh", "-c", "head -c 4 >&2; kill -INT $PPID; exec sleep 60"]
        proxies.append(ProxyProcess(argv, node="node-0", env=dict(os.environ)))
        return proxies[-1]

    with pytest.raises(KeyboardInterrupt):
        dial(node.node, login=login, open_stream=open_stream, deadlines=PATIENT)
    assert proxies[0].ended()


def test_what_a_failing_proxy_command_says_is_shown(node: Sshd, login: Login) -> None:
    argv = ["sh", "-c", "echo 'ERROR: (gcloud) not authorized' >&2"]
    with pytest.raises(
        SshUnreachableError, match=r"`sh` printed: ERROR: \(gcloud\) not authorized"
    ):
        dial(
            node.node,
            login=login,
            open_stream=lambda: ProxyProcess(argv, node="node-0", env=dict(os.environ)),
            deadlines=PATIENT,
        )


def test_a_proxy_command_that_is_not_installed_is_named() -> None:
    with pytest.raises(
        SshUnreachableError, match="node-0: cannot start the proxy command `no-such-program`"
    ):
        ProxyProcess(["no-such-program"], node="node-0", env=dict(os.environ))


@pytest.mark.parametrize("text", [None, "", "nonsense\n"])
def test_a_key_that_cannot_be_used_is_the_operator_s_mistake(
    node: Sshd, tmp_path: Path, text: str | None
) -> None:
    key = tmp_path / "key"
    if text is not None:
        key.write_text(text, encoding="ascii")
    with pytest.raises(ConfigError, match="key"), connected(node.node, Login(user="x", key=key)):
        pass


def test_neither_logs_nor_errors_hold_key_material(
    start_sshd: StartSshd, login: Login, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    good = start_sshd("node-0", "127.0.0.2")
    bad = start_sshd("node-1", "127.0.0.3", public_key=make_key(tmp_path / "another"))
    with connected(good.node, login) as connection:
        connection.check_run(["true"], timeout_s=DEADLINE_S)
    error = error_of(bad.node, login)
    private = login.key.read_text(encoding="ascii").splitlines()[1:-1]
    said = caplog.text + str(error) + good.log.read_text(encoding="utf-8")
    assert not [line for line in private if line in said]
    assert stat.S_IMODE(login.key.stat().st_mode) == 0o600
