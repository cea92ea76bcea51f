"""Events of Pulumi's engine, and the result of an operation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from payload.core.errors import ConfigError
from payload.core.printable_text import shown
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build, check_type
from payload.storage.google_environment_login import GoogleLogin

_MOST_EVENT_BYTES = 2**25
"""Size limit of an event, which holds a resource's old and new state with 256 KiB of user-data."""
_T = TypeVar("_T")

URN = re.compile(r"urn:pulumi:[^\s:]+::[^\s:]+::(?:[^\s:]|:(?!:))+::[ -~]+")
"""urn:pulumi:STACK::PROJECT::PARENT'S TYPE$TYPE::NAME"""
_URN_OR_NONE = re.compile(rf"(?:{URN.pattern})?")
STACK_TYPE = "pulumi:pulumi:Stack"


def urn_field() -> str:
    """Declare a dataclass field that holds a URN."""
    urn: str = checked(pattern=URN, wanted="a URN of Pulumi's")
    return urn


def type_of(urn: str) -> str:
    """Return the type in a URN: gcp:compute/instance:Instance."""
    parts = urn.split("::", 3)
    return parts[2].rpartition("$")[2] if len(parts) == 4 else ""


def name_of(urn: str) -> str:
    """Return the resource's name in a URN: dev-node-0."""
    return urn.split("::", 3)[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostic:
    """A message of the engine, a provider or the cluster program."""

    message: str = checked(max_chars=2**22)
    severity: str
    urn: str | None = checked(None, pattern=_URN_OR_NONE, wanted="a URN of Pulumi's")
    """The resource that the message is about; empty or None for the whole operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    inputs: Mapping[str, Any] | None = None
    outputs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation on one resource."""

    op: str
    """The operation: create, update, replace, delete, same, refresh, ..."""
    urn: str = urn_field()
    diffs: tuple[str, ...] | None = None
    """Names of the inputs that differ."""
    detailed: Mapping[str, Any] | None = checked(None, key="detailedDiff")
    """Paths of the differing inputs, such as shieldedInstanceConfig.enableSecureBoot."""
    new: _State | None = None
    old: _State | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEvent:
    """A violation of a rule of the policy pack."""

    message: str
    name: str = checked(key="policyName")
    level: str = checked("", key="enforcementLevel")
    """Enforcement level of the policy: advisory or mandatory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The summary event: how many resources an operation created, updated, deleted and so on."""

    changes: Mapping[str, int] | None = checked(None, key="resourceChanges")
    """Number of resources by operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wrapped:
    metadata: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A line of the event log. No field is set for a kind of event that is not used here."""

    time_unix: float
    diagnostic: Diagnostic | None = None
    began: Step | None = None
    done: Step | None = None
    failed: Step | None = None
    policy: PolicyEvent | None = None
    summary: Summary | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Result of an operation."""

    arguments: Sequence[str]
    """Arguments after `pulumi`."""
    status: int
    events: Sequence[Event] = ()
    unreadable: str = ""
    """Error of the first unreadable event; empty if all were read."""
    text: str = ""
    """The end of the output that pulumi printed."""
    log: Path | None = None
    login: GoogleLogin = field(default_factory=GoogleLogin)
    """The login that Google's Pulumi provider used."""

    @property
    def shown(self) -> str:
        """The command's name in messages, such as `pulumi up`."""
        return f"pulumi {self.arguments[0]}"

    @property
    def diagnostics(self) -> Sequence[Diagnostic]:
        """Return the messages, except debug messages."""
        found = [event.diagnostic for event in self.events if event.diagnostic is not None]
        return [each for each in found if each.severity in ("error", "warning", "info")]

    @property
    def is_cancelled(self) -> bool:
        """Return whether the operation was interrupted; pulumi's exit status does not show this."""
        return any(
            each.severity == "error" and re.fullmatch(r"\s*\w+ canceled\s*", each.message)
            for each in self.diagnostics
        )

    @property
    def steps(self) -> Sequence[Step]:
        """Every operation that was started, or planned by a preview."""
        return [event.began for event in self.events if event.began is not None]

    @property
    def failures(self) -> Sequence[Step]:
        """Operations that failed."""
        return [event.failed for event in self.events if event.failed is not None]

    @property
    def outputs(self) -> Mapping[str, Any]:
        """The stack's outputs; for a preview, the outputs that it predicts."""
        for event in reversed(self.events):
            step = event.done
            if step is not None and type_of(step.urn) == STACK_TYPE and step.op != "refresh":
                return (step.new and step.new.outputs) or {}
        return {}


@dataclass(slots=True)
class EventReader:
    """Reads the event log while it is written."""

    stream: BinaryIO
    seen: list[Event] = field(default_factory=list)
    unreadable: str = ""
    """Error of the first unreadable event."""
    _rest: bytes = b""

    def read(self) -> Iterator[Event]:
        """Yield the events that have been written since the last call."""
        while block := self.stream.read(2**20):
            *lines, self._rest = (self._rest + block).split(b"\n")
            if len(self._rest) > _MOST_EVENT_BYTES:
                self._rest, self.unreadable = b"", "an event of Pulumi's engine is too long."
            for line in lines:
                if line.strip() and (event := self._event(line)) is not None:
                    self.seen.append(event)
                    yield event

    def _event(self, line: bytes) -> Event | None:
        try:
            return parse_event(line)
        except ConfigError as error:
            self.unreadable = self.unreadable or str(error)
            return None


def parse_event(line: bytes) -> Event:
    """Parse one line of the event log. Raises ConfigError."""
    where = "an event of Pulumi's engine"
    raw = parse_json(line, where=where)
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: expected an object, got {shown(raw)}.")
    time_unix = check_type(float, raw.get("timestamp", 0), where=f"{where}: timestamp")

    def body(key: str, kind: type[_T]) -> _T | None:
        return build(kind, raw[key], where=f"{where}: {key}") if key in raw else None

    def step(key: str) -> Step | None:
        wrapped = body(key, _Wrapped)
        return None if wrapped is None else wrapped.metadata

    return Event(
        time_unix=time_unix,
        diagnostic=body("diagnosticEvent", Diagnostic),
        began=step("resourcePreEvent"),
        done=step("resOutputsEvent"),
        failed=step("resOpFailedEvent"),
        policy=body("policyEvent", PolicyEvent),
        summary=body("summaryEvent", Summary),
    )
