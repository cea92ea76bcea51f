"""Receives a node's heartbeats through ssh or srun, and reconnects when the connection breaks.

The supervisor has one stream for every node except the node that it runs on.

`wait_for_nodes` is where a replacement of a permanently lost node could be added. The function
would request a new machine instead of failing, and the next attempt would read a new inventory,
hosts file, ranks and plan from the run folder.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from signal import SIGKILL
from typing import Any

from payload.core.errors import ConfigError
from payload.core.python_processes import module_command
from payload.core.regular_files import MAX_FILE_BYTES
from payload.core.validation.fields import MAX_SECONDS, checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build
from payload.launch.liveness import SILENT_S, NodeHeartbeat
from payload.launch.plan_record import LaunchPlan
from payload.machines.inventory import Node
from payload.supervise.heartbeat import EVERY_S
from payload.supervise.processes import die_with_parent
from payload.supervise.shared_folders import short

_PROBE_S = 3.0
# Time until the first line: for the login, and the start of the program on a busy node.
_FIRST_S = 25.0
_RETRY_S = 1.0
_CLOSE_S = 5.0
_POLL_S = 0.5
_RETURN_S = 60.0
"""A machine that restarts is back within this time; otherwise it counts as lost."""
# sshd on a node may answer late; a connection that is silent for longer is closed and retried.
_SSH_OPTIONS = ("-o", "ConnectTimeout=6", "-o", "ServerAliveInterval=5")


class NodeStream:
    """Receives the heartbeats of one node in a separate thread, from `start` until it is closed."""

    def __init__(
        self,
        node: Node,
        *,
        plan: LaunchPlan,
        run_dir: Path,
        lifeline_s: float,
        env: Mapping[str, str],
        folders: Sequence[str] = (),
    ) -> None:
        """The node ends the run's processes if it receives no message for `lifeline_s`.

        The node monitors the `folders` that are on a network file system.
        """
        self.node = node
        self._argv = heartbeat_argv(
            node, plan=plan, run_dir=run_dir, lifeline_s=lifeline_s, folders=folders
        )
        self._troubles: Mapping[str, str] = {}
        self._env = dict(env)
        self._messages: deque[dict[str, Any]] = deque(maxlen=100)
        self._closing = threading.Event()
        self._end_requests = 0
        self._stop_pid: int | None = None
        self._ended = threading.Event()
        self._left: list[int] = []
        self._heard_s = time.monotonic()
        self._unreachable_since_s: float | None = None
        self._thread = threading.Thread(target=self._listen, name=node.name, daemon=True)

    def start(self) -> None:
        """Start receiving."""
        self._thread.start()

    def beat(self) -> NodeHeartbeat:
        """Return how long the node has been silent or unreachable."""
        now, since_s = time.monotonic(), self._unreachable_since_s
        return NodeHeartbeat(
            node=self.node.name,
            quiet_s=now - self._heard_s,
            unreachable_s=None if since_s is None else now - since_s,
        )

    def troubles(self) -> Mapping[str, str]:
        """Return the problem of each shared folder that does not answer on the node.

        The node's last heartbeat reported these problems.
        """
        return self._troubles

    def messages(self) -> list[dict[str, Any]]:
        """Return the node's messages since the last call, in the form of `parse_message`."""
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._messages.popleft())
        return taken

    def request_stop(self, pid: int) -> None:
        """Make the node send SIGTERM to a process of the run, even after a reconnect."""
        self._stop_pid = pid

    def request_end(self) -> None:
        """Make the node end all of its processes of the run."""
        self._ended.clear()
        self._end_requests += 1

    def wait_ended(self, timeout_s: float) -> list[int] | None:
        """Return the ids of the processes that did not end, or None without an answer."""
        return self._left if self._ended.wait(timeout_s) else None

    def request_close(self) -> None:
        """Request the end of the thread and of the program on the node, without waiting."""
        self._closing.set()

    def wait_closed(self, timeout_s: float) -> None:
        """Wait until the thread has ended, at most `timeout_s`."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _listen(self) -> None:
        while not self._closing.is_set():
            if self._accepts_connections():
                self._exchange()
            self._closing.wait(_RETRY_S)

    def _accepts_connections(self) -> bool:
        began_s = time.monotonic()
        try:
            address = (self.node.address, self.node.ssh_port)
            socket.create_connection(address, timeout=_PROBE_S).close()
        except OSError:
            if self._unreachable_since_s is None:
                self._unreachable_since_s = began_s
            return False
        self._unreachable_since_s = None
        return True

    def _exchange(self) -> None:
        """Exchange messages until the node is silent or lost, or a close is requested."""
        try:
            ssh = subprocess.Popen(
                self._argv,
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=die_with_parent(SIGKILL),
            )
        except OSError:
            return
        assert ssh.stdin is not None and ssh.stdout is not None
        splitter, patient_until_s = LineSplitter(), time.monotonic() + _FIRST_S
        ping_s, sent = 0.0, 0
        with ssh.stdin, ssh.stdout:
            while not self._closing.is_set() and time.monotonic() < patient_until_s:
                now = time.monotonic()
                if now >= ping_s or self._end_requests != sent:
                    ping_s, sent = now + EVERY_S / 2, self._end_requests
                    if not self._ping(ssh.stdin.fileno()):
                        break
                if not select.select([ssh.stdout], [], [], EVERY_S / 2)[0]:
                    continue
                content = os.read(ssh.stdout.fileno(), 65536)
                if not content:
                    break
                patient_until_s = time.monotonic() + SILENT_S
                for line in splitter.split(content):
                    self._receive(line)
                if splitter.is_over_limit():
                    break
            if self._closing.is_set():
                # Closing stdin ends the program on the node, and then ssh.
                ssh.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    ssh.wait(_CLOSE_S)
            ssh.kill()
            ssh.wait()

    def _ping(self, descriptor: int) -> bool:
        """Send a ping, and the pending requests until the node has answered them."""
        commands = ["ping"]
        if self._stop_pid is not None:
            commands.append(f"stop:{self._stop_pid}")
        if self._end_requests and not self._ended.is_set():
            commands.append(f"end:{self._end_requests}")
        try:
            os.write(descriptor, "".join(f"{each}\n" for each in commands).encode())
        except OSError:
            return False
        return True

    def _receive(self, line: bytes) -> None:
        message = parse_message(line, now_unix=time.time(), now_s=time.monotonic())
        if message is None:
            return
        self._heard_s = time.monotonic()
        self._unreachable_since_s = None
        self._troubles = {
            short(name): short(problem) for name, problem in message["folders"].items()
        }
        self._messages.append(message)
        if message["asked"] == self._end_requests and message["ended"] is not None:
            self._left = list(message["ended"])
            self._ended.set()


class LineSplitter:
    """Splits a byte stream into lines in linear time."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def split(self, content: bytes) -> list[bytes]:
        """Return the lines that `content` completes."""
        *lines, rest = content.split(b"\n")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += rest
        return lines

    def is_over_limit(self) -> bool:
        """Return True if the unfinished line is longer than any valid heartbeat."""
        return len(self._rest) > MAX_FILE_BYTES


def close_all(streams: Sequence[NodeStream]) -> None:
    """Close all streams at the same time, because a frozen node takes seconds to close."""
    for stream in streams:
        stream.request_close()
    ends_s = time.monotonic() + 2 * _CLOSE_S
    for stream in streams:
        stream.wait_closed(max(0.0, ends_s - time.monotonic()))


def wait_for_nodes(
    streams: Sequence[NodeStream],
    *,
    pause: Callable[[float], bool],
    timeout_s: float = _RETURN_S,
) -> str | None:
    """Wait until all nodes have ended the run's processes; return an error message, or None.

    With an error, the run cannot be restarted. `pause` sleeps and returns False if a stop of the
    run is requested.
    """
    for stream in streams:
        stream.request_end()
    ends = time.monotonic() + timeout_s
    while True:
        found = {stream.node.name: stream.wait_ended(0.0) for stream in streams}
        if all(left == [] for left in found.values()):
            return None
        stuck = [name for name, left in found.items() if left]
        if stuck:
            return f"processes on {', '.join(stuck)} could not be ended"
        if time.monotonic() > ends or not pause(_POLL_S):
            away = [name for name, left in found.items() if left is None]
            return f"{', '.join(away)} did not reconnect within {timeout_s:.0f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """One line of a worker's heartbeat."""

    now: float = checked(low=0, high=MAX_SECONDS)
    monotonic_s: float = checked(low=0, high=MAX_SECONDS)
    progress: tuple[Any, ...] = ()
    exits: tuple[Any, ...] = ()
    states: Mapping[str, str | None] = field(default_factory=dict)
    ended: tuple[int, ...] | None = None
    asked: int | None = None
    folders: Mapping[str, str] = field(default_factory=dict)


def parse_message(line: bytes, *, now_unix: float, now_s: float) -> dict[str, Any] | None:
    """Return the content of a heartbeat line, or None for other output, as from a login shell.

    The content includes `skew_s`, the node's wall clock minus the clock of this machine, and
    `lag_s`, this machine's monotonic clock minus the monotonic clock of the node.
    """
    try:
        message = build(_Message, parse_json(line, where="heartbeat"), where="heartbeat")
    except ConfigError:
        return None
    times = {"skew_s": message.now - now_unix, "lag_s": now_s - message.monotonic_s}
    return asdict(message) | times


def heartbeat_argv(
    node: Node, *, plan: LaunchPlan, run_dir: Path, lifeline_s: float, folders: Sequence[str] = ()
) -> list[str]:
    """Return the command line that runs the heartbeat program on a node through ssh or srun."""
    arguments = ["--run-dir", str(run_dir), "--lifeline", f"{lifeline_s:g}"]
    arguments += [f"--folder={folder}" for folder in folders]
    python_path = plan.environment.get("PYTHONPATH")
    return remote_argv(
        node.name,
        ssh=(*plan.ssh, *_SSH_OPTIONS),
        node_command=plan.node_command,
        argv=module_command("payload.supervise.heartbeat", *arguments, python=plan.program[0]),
        environment={"PYTHONPATH": python_path} if python_path else {},
    )


def remote_argv(
    host: str,
    *,
    ssh: Sequence[str],
    argv: Sequence[str],
    environment: Mapping[str, str],
    node_command: Sequence[str] = (),
) -> list[str]:
    """Return the command line that runs `argv` on `host` with extra environment variables."""
    settings = [f"{name}={value}" for name, value in environment.items()]
    prefix = ["env", *settings] if settings else []
    if node_command:
        return [*(each.replace("{node}", host) for each in node_command), *prefix, *argv]
    return ["ssh", *ssh, host, shlex.join([*prefix, *argv])]
