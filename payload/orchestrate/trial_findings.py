"""Findings from a trial of the launcher and gloo: which node, why, and what to do. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from payload.errors import ConfigError
from payload.inventory import Node
from payload.launch.launchers.base import BOOTSTRAP_AGAIN, MISSING_LIBRARY, Launcher
from payload.orchestrate.findings import Finding
from payload.untrusted import NODE_NAME, build, checked, parse_json

MARK = "tileforge-trial "
"""Begins a line of payload/train/fabric.py that is meant for us."""

MAX_RANKS = 100_000
_OUTPUT_CHARS = 2**19
_LOG_LINES = 8
_ALARM = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpeed:
    """What one rank's matrix products reached."""

    node: str = checked(pattern=NODE_NAME, wanted="a node name")
    bf16: float = checked(low=1, high=1e18)
    fp32: float = checked(low=1, high=1e18)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What the ranks reached together."""

    all_reduce_bytes_per_s: float = checked(low=1, high=1e15)
    latency_s: float = checked(low=0, high=1e4)
    received_bytes_per_s: tuple[float, ...] = checked(low=1, high=1e15, max_items=MAX_RANKS)
    """By rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Rank 0's figures."""

    ranks: tuple[RankSpeed, ...] = checked(max_items=MAX_RANKS)
    exchange: Exchange | None
    """None with one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A line of payload/train/fabric.py."""

    node: str | None = checked(None, pattern=NODE_NAME, wanted="a node name")
    stage: str | None = checked(None, max_chars=32)
    error: str | None = checked(None, max_chars=10_000)
    result: Result | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What remote/trial.py answered."""

    unreached: Mapping[str, str]
    """What ssh said, by worker that the head could not reach."""
    status: int | None
    """The launcher's; None when it was not started or did not end in time."""
    late: bool
    stdout: str = checked(max_chars=_OUTPUT_CHARS)
    stderr: str = checked(max_chars=_OUTPUT_CHARS)

    def records(self) -> list[Said]:
        """Return what the ranks said, in the order in which it came; what is damaged is left out.

        A launcher mixes the ranks' lines, so that one may follow another without a line's end.
        """
        found = []
        for part in self.stdout.split(MARK)[1:]:
            with suppress(ConfigError, ValueError, RecursionError):
                _, end = json.JSONDecoder().raw_decode(part)
                raw = parse_json(part[:end], where="the trial")
                found.append(build(Said, raw, where="the trial"))
        return found

    def result(self) -> Result | None:
        """Return rank 0's figures, if it came so far."""
        return next((said.result for said in self.records() if said.result is not None), None)


def failures(
    nodes: Sequence[Node],
    outcome: Outcome,
    *,
    hostnames: Mapping[str, str],
    deadline_s: float,
    launcher: Launcher,
) -> list[Finding]:
    """Return the first of these that there is: ssh's words, the ranks', the launcher's, silence.

    `hostnames` are the nodes' names by their own hostnames, which mpirun's helpers sign with.
    """
    if outcome.status == 0 and outcome.result() is not None:
        return []
    found = [*_unreached(nodes, outcome, launcher)] or [*_said_by_ranks(nodes, outcome)]
    return (
        found
        or [*_said_by_launcher(nodes, outcome, hostnames, launcher)]
        or [*_silent(nodes, outcome, deadline_s=deadline_s, launcher=launcher)]
    )


def _unreached(nodes: Sequence[Node], outcome: Outcome, launcher: Launcher) -> Iterator[Finding]:
    head = nodes[0].name
    for node in nodes:
        said = outcome.unreached.get(node.name)
        if said is None:
            continue
        last = (said.splitlines() or ["no word"])[-1].rstrip(".")
        if "verification failed" in said:
            fix = f"Its sshd shows {head} another host key than the inventory's. Correct either."
        elif "Permission denied" in said:
            fix = "See that its sshd reads ~/.ssh/authorized_keys and lets the head in."
        else:
            fix = f"Open TCP port {node.ssh_port} there for the other nodes."
        cause = f"{head} cannot start a program on it over ssh: {last}"
        yield _error(node.name, launcher.name, cause, fix, log=tuple(said.splitlines()))


def _said_by_ranks(nodes: Sequence[Node], outcome: Outcome) -> Iterator[Finding]:
    records = outcome.records()
    known = {node.name for node in nodes}
    errors = {said.node: said.error for said in records if said.node in known and said.error}
    broken = {name: text for name, text in errors.items() if _is_environment(text)}
    for name, text in broken.items():
        library = MISSING_LIBRARY.search(text)
        cause = f"torch cannot be loaded there: {_one_line(text)}"
        if library:
            cause = f"its environment lacks the library {library[1].rpartition('/')[2]}"
        yield _error(name, "payload", cause, BOOTSTRAP_AGAIN, log=(text,) if library else ())
    if broken:
        return  # the others only lost them
    joined = {said.node for said in records if said.stage == "joined"}
    for name, text in errors.items():
        doing = "while measuring" if name in joined else "while the ranks look for each other"
        cause = f"gloo failed {doing}: {_one_line(text)}"
        yield _error(name, "gloo", cause, "See that all TCP ports are open between the nodes.")


def _said_by_launcher(
    nodes: Sequence[Node],
    outcome: Outcome,
    hostnames: Mapping[str, str],
    launcher: Launcher,
) -> Iterator[Finding]:
    text = outcome.stderr + outcome.stdout
    failures = list(launcher.trial_failures(text, nodes=nodes, hostnames=hostnames))
    for failure in failures:
        log = _log(outcome, launcher) if failure.shows_log else ()
        yield _error(failure.node, launcher.name, failure.cause, failure.fix, log=log)
    killed = launcher.report(text).killed
    if not failures and killed and killed.signal != _ALARM:
        where = next((node for node in nodes if node.address == killed.address), nodes[0])
        cause = f"the trial's rank there was killed by signal {killed.signal}"
        yield _error(where.name, launcher.name, cause, "Is its memory used up? See dmesg there.")


def _silent(
    nodes: Sequence[Node], outcome: Outcome, *, deadline_s: float, launcher: Launcher
) -> Iterator[Finding]:
    """Nothing said why: the nodes that came least far."""
    records = outcome.records()
    reached = {
        stage: {said.node for said in records if said.stage == stage}
        for stage in ("started", "joined")
    }
    log = _log(outcome, launcher)
    killed = launcher.report(outcome.stdout).killed
    late = outcome.late or (killed is not None and killed.signal == _ALARM)
    within = f" within {deadline_s:g} s" if late else f" (status {outcome.status})"
    for stage, check, what in (
        ("started", launcher.name, f"{launcher.name} started no rank on it"),
        ("joined", "gloo", "its rank did not find the others"),
    ):
        behind = [node for node in nodes if node.name not in reached[stage]]
        for node in behind:
            fix = "Are all TCP ports open between the nodes, and does its Python start?"
            yield _error(node.name, check, what + within, fix, log=log)
        if behind:
            return
    cause = "the measurement did not end" + within
    yield _error(nodes[0].name, "gloo", cause, "Is the network between the nodes alive?", log=log)


def _log(outcome: Outcome, launcher: Launcher) -> tuple[str, ...]:
    lines = [line for line in outcome.stderr.splitlines() if line]
    if launcher.noise is not None:
        lines = [line for line in lines if not launcher.noise.search(line)]
    return tuple(lines[-_LOG_LINES:])


def _is_environment(text: str) -> bool:
    """Whether a rank's error is about what is installed there."""
    kinds = ("ImportError", "ModuleNotFoundError", "OSError: ")
    return text.startswith(kinds) or MISSING_LIBRARY.search(text) is not None


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200].rstrip(".")


def _error(node: str, check: str, cause: str, fix: str, *, log: tuple[str, ...] = ()) -> Finding:
    return Finding(node=node, check=check, severity="error", cause=cause, fix=fix, log=log)
