"""The lock that one attempt to start a run holds, so that no other run starts on the cluster."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath

from payload.core.errors import ConfigError, PreflightError, TileforgeError
from payload.core.suggested_commands import command
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import RUN_ID
from payload.core.validation.records import build
from payload.orchestrate.ssh.cluster import Cluster
from payload.orchestrate.ssh.connection import Connection
from payload.orchestrate.ssh.remote_calls import parse_answer, remote_argv, remote_stdin

# Another operator can be starting a supervisor, for which the head allows 30 s.
_CLAIM_S = 60.0
_RETRY_S = 2.0

KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
_ORIGIN = re.compile(r"[0-9A-Fa-f.:]{2,45}")


class HeadBusyError(PreflightError):
    """Another operator holds the claim on the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Result of an attempt to get the lock on the head."""

    name: str
    """The unique name of the attempt. The attempt's SSH key has the same name."""
    running: str | None
    """The run in progress that prevents the claim; None if this command holds the claim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claimed:
    """The head's response to a claim, as node/control.py sends it."""

    claim: bool
    running: str | None = checked(pattern=RUN_ID, wanted="a run's name")
    held: str | None = None
    """The text in which the current holder of the claim describes itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    name: str = checked("?", pattern=KEY_NAME, wanted="a key's name")
    run_id: str = checked("?", pattern=RUN_ID, wanted="a run's name")
    origin: str = checked("?", pattern=_ORIGIN, wanted="an address")


def attempt_name(run_id: str) -> str:
    """Return a unique name for an attempt to start a run. Raises ConfigError."""
    if not RUN_ID.fullmatch(run_id):
        raise ConfigError(
            f"run id {run_id!r}: must have letters, digits, dots, hyphens and underscores only."
        )
    return f"{run_id}.{secrets.token_hex(4)}"


@contextmanager
def claimed(
    cluster: Cluster,
    *,
    run_dir: PurePosixPath,
    say: Callable[[str], None],
    timeout_s: float = _CLAIM_S,
    name: str | None = None,
    lost: TileforgeError | None = None,
) -> Iterator[Claim]:
    """Hold the claim, so that no other operator starts a run or a trial on this cluster.

    The head releases the claim when the connection or this process ends, possibly with a delay.
    Wait up to `timeout_s` for another operator's claim. To claim again after a broken connection,
    pass the attempt's `name` and the error of the connection as `lost`. That error is raised if the
    earlier claim is still held. Raises ConfigError for an invalid run ID, and PreflightError.
    """
    name = name or attempt_name(run_dir.name)
    ends = time.monotonic() + timeout_s
    head, has_reported = cluster.inventory.head, False
    while True:
        with _request_claim(cluster.connect(head), run_dir, name) as answer:
            if answer.claim or answer.running is not None:
                yield Claim(name=name, running=answer.running)
                return
        holder = _holder(answer.held, head=head.name)
        is_own = lost is not None and holder.name == name
        held = f"{head.name}: another operator (from {holder.origin}) is starting {holder.run_id}"
        if is_own:
            held = f"{head.name}: the broken connection still holds the claim"
        if time.monotonic() > ends:
            if lost is not None and is_own:
                raise lost
            raise HeadBusyError(
                f"{held}, so nothing was started. Wait until that run has started, then follow it: "
                + command("orchestrate", "attach")
            )
        if not has_reported:
            say(f"{held}; waiting")
            has_reported = True
        time.sleep(_RETRY_S)


@contextmanager
def _request_claim(connection: Connection, run_dir: PurePosixPath, name: str) -> Iterator[_Claimed]:
    arguments = {"action": "claim", "run_dir": str(run_dir), "name": name}
    with connection.listening(
        remote_argv("control.py"),
        stdin=remote_stdin("control.py", arguments),
        timeout_s=_CLAIM_S,
    ) as line:
        yield parse_answer(_Claimed, line, node=connection.node.name)


def _holder(held: str | None, *, head: str) -> _Holder:
    """Return the holder of the claim, with placeholders if its description is invalid."""
    try:
        return build(_Holder, parse_json(held or "{}", where=head), where=head)
    except ConfigError:
        return _Holder()
