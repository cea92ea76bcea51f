"""The claim of one attempt to start a run: no other starts on the cluster meanwhile."""

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

# Somebody else's supervisor may be starting, for which the head has 30 s.
_CLAIM_S = 60.0
_RETRY_S = 2.0

KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
_ORIGIN = re.compile(r"[0-9A-Fa-f.:]{2,45}")


class HeadBusyError(PreflightError):
    """Somebody else has the claim on the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Result of a claim on the head."""

    name: str
    """The attempt's, which its key gets: nobody else's has it."""
    running: str | None
    """The run that is under way, so that the claim is not had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claimed:
    """The head's answer to a claim, see node/control.py."""

    claim: bool
    running: str | None = checked(pattern=RUN_ID, wanted="a run's name")
    held: str | None = None
    """The text that the holder has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    name: str = checked("?", pattern=KEY_NAME, wanted="a key's name")
    run_id: str = checked("?", pattern=RUN_ID, wanted="a run's name")
    origin: str = checked("?", pattern=_ORIGIN, wanted="an address")


def attempt_name(run_id: str) -> str:
    """Return a name for an attempt to start a run, which nobody else's has. Raises ConfigError."""
    if not RUN_ID.fullmatch(run_id):
        raise ConfigError(
            f"run id {run_id!r}: letters, digits, dots, hyphens and underscores only."
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
    """Keep others from starting a run or a trial on this cluster.

    The claim ends with the connection, so also with this process; the head may notice that late.
    Waits for somebody else's, as long as `timeout_s`. An attempt that claims again gives its `name`
    and the error with which it has `lost` its connection: this is raised where the claim from
    before has not ended. Raises ConfigError for a run's name that is none, and PreflightError.
    """
    name = name or attempt_name(run_dir.name)
    ends = time.monotonic() + timeout_s
    head, has_told = cluster.inventory.head, False
    while True:
        with _asked(cluster.connect(head), run_dir, name) as answer:
            if answer.claim or answer.running is not None:
                yield Claim(name=name, running=answer.running)
                return
        holder = _holder(answer.held, head=head.name)
        is_own = lost is not None and holder.name == name
        held = f"{head.name}: somebody (from {holder.origin}) is starting {holder.run_id}"
        if is_own:
            held = f"{head.name}: the connection that broke still has the claim on it"
        if time.monotonic() > ends:
            if lost is not None and is_own:
                raise lost
            raise HeadBusyError(
                f"{held}, so nothing was started. Wait until it runs, and follow it with: "
                + command("orchestrate", "attach")
            )
        if not has_told:
            say(f"{held}: waiting for that")
            has_told = True
        time.sleep(_RETRY_S)


@contextmanager
def _asked(connection: Connection, run_dir: PurePosixPath, name: str) -> Iterator[_Claimed]:
    arguments = {"action": "claim", "run_dir": str(run_dir), "name": name}
    with connection.listening(
        remote_argv("control.py"),
        stdin=remote_stdin("control.py", arguments),
        timeout_s=_CLAIM_S,
    ) as line:
        yield parse_answer(_Claimed, line, node=connection.node.name)


def _holder(held: str | None, *, head: str) -> _Holder:
    """Return who has the claim; what the holder has left may be half written, or anything."""
    try:
        return build(_Holder, parse_json(held or "{}", where=head), where=head)
    except ConfigError:
        return _Holder()
