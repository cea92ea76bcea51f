"""The `pulumi` command, a stack's config, and the engine's events. Nothing else runs it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from typing import Any, BinaryIO, Literal, TypeVar

from payload.core.errors import ConfigError, ExitCode
from payload.core.one_line import joined_lines
from payload.core.suggested_commands import command
from payload.core.validation import (
    NODE_NAME,
    build,
    check_type,
    checked,
    parse_json,
    printable,
    shown,
)
from payload.orchestrate.cloud.proxy import past_the_proxy
from payload.stack.cloud_need import Need
from payload.storage.google_login import REFUSED_CREDENTIALS, GoogleLogin

_MOST_EVENT_BYTES = 2**25
"""Limit of an event, which has a resource's state before and after: user-data is under 256 KiB."""
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
    """The resource that it is about; empty or None for the whole operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    inputs: Mapping[str, Any] | None = None
    outputs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation on one resource."""

    op: str
    """create, update, replace, delete, same, refresh, ..."""
    urn: str = urn_field()
    diffs: tuple[str, ...] | None = None
    """Names of the inputs that differ."""
    detailed: Mapping[str, Any] | None = checked(None, key="detailedDiff")
    """Paths of what differs, such as shieldedInstanceConfig.enableSecureBoot."""
    new: _State | None = None
    old: _State | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEvent:
    """A rule of the policy pack is not kept."""

    message: str
    name: str = checked(key="policyName")
    level: str = checked("", key="enforcementLevel")
    """advisory or mandatory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The totals of the operation."""

    changes: Mapping[str, int] | None = checked(None, key="resourceChanges")
    """Resources by operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wrapped:
    metadata: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of the event log; empty where it is of a kind that is of no use here."""

    time_unix: float
    diagnostic: Diagnostic | None = None
    began: Step | None = None
    done: Step | None = None
    failed: Step | None = None
    policy: PolicyEvent | None = None
    summary: Summary | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """How an operation has ended."""

    words: Sequence[str]
    """The command's, after `pulumi`."""
    status: int
    events: Sequence[Event] = ()
    unreadable: str = ""
    """Why not every event could be read; empty when all could."""
    text: str = ""
    """The end of what was printed for people."""
    log: Path | None = None
    login: GoogleLogin = field(default_factory=GoogleLogin)
    """The one that Google's provider had."""

    @property
    def shown(self) -> str:
        """The command, as messages name it."""
        return f"pulumi {self.words[0]}"

    @property
    def diagnostics(self) -> Sequence[Diagnostic]:
        """Return the messages, without those for debugging."""
        found = [event.diagnostic for event in self.events if event.diagnostic is not None]
        return [each for each in found if each.severity in ("error", "warning", "info")]

    @property
    def is_cancelled(self) -> bool:
        """Tell whether an interrupt ended it; pulumi's status is then that of any failure."""
        return any(
            each.severity == "error" and re.fullmatch(r"\s*\w+ canceled\s*", each.message)
            for each in self.diagnostics
        )

    @property
    def steps(self) -> Sequence[Step]:
        """Every operation that was begun, or that a preview plans."""
        return [event.began for event in self.events if event.began is not None]

    @property
    def failures(self) -> Sequence[Step]:
        """Operations that failed."""
        return [event.failed for event in self.events if event.failed is not None]

    @property
    def outputs(self) -> Mapping[str, Any]:
        """The stack's outputs, of a preview those that it expects."""
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
    """Why the first event that could not be read could not be."""
    _rest: bytes = b""

    def read(self) -> Iterator[Event]:
        """Yield the events that have been written since the last call."""
        while block := self.stream.read(2**20):
            *lines, self._rest = (self._rest + block).split(b"\n")
            if len(self._rest) > _MOST_EVENT_BYTES:
                self._rest, self.unreadable = b"", "an event of Pulumi's engine has no end."
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
    """Return one line of the event log. Raises ConfigError."""
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


ASK_S = 120.0
_POLL_S = 0.05
_MOST_PRINTED_CHARS = 2**20
_STACK = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*){0,2}")

NEWER = "See that it is Pulumi 3.200 or newer: pulumi version"

Trouble = Literal[
    "not installed",
    "no project",
    "not logged in",
    "no stack",
    "credentials refused",
    "damaged state",
    "other",
]
_MOST_CHARS = 300

# Pulumi's own words; what each means and what to do.
_COMPLAINTS: tuple[tuple[str, Trouble, str], ...] = (
    (r"no Pulumi\.yaml project file", "no project", "Go to the project's folder."),
    (
        r"no stack selected",
        "no stack",
        "Choose one: pulumi stack select NAME; or make one: pulumi stack init NAME",
    ),
    (r"no stack named", "no stack", "Look for its name: pulumi stack ls"),
    (
        r"PULUMI_ACCESS_TOKEN must be set|not logged in|pulumi login|invalid access token",
        "not logged in",
        "Log in: pulumi login (or pulumi login --local, for state in a folder)",
    ),
    (
        r"passphrase must be set|incorrect passphrase",
        "not logged in",
        "Set PULUMI_CONFIG_PASSPHRASE or PULUMI_CONFIG_PASSPHRASE_FILE.",
    ),
    (
        # Not with credentials that have expired, which Pulumi reports in the same way:
        # https://github.com/pulumi/pulumi/issues/2801
        r"unexpected end of JSON input|failed to load checkpoint: (invalid character|json:|.*EOF)"
        r"|could not deserialize deployment|snapshot integrity failure",
        "damaged state",
        "The stack's state is damaged, as after a full disk. Either put the engine's copy, "
        "STACK.json.bak, in the place of STACK.json beside it (after `pulumi login --local` in "
        "~/.pulumi/stacks/tileforge), and repeat the command; or remove what Google has without "
        f"the state: {command('orchestrate', 'sweep')} --cluster NAME --project P --delete",
    ),
)


def _wait(
    process: subprocess.Popen[bytes],
    events: EventReader,
    *,
    see: Callable[[Event], None],
    say: Callable[[str], None],
) -> int:
    """Read events until the process has ended; returns how often the operator interrupted it."""
    interrupts, ended = 0, False
    while True:
        try:
            for event in events.read():
                see(event)
            if ended:
                return interrupts
            # Once more after its end: the last events.
            process.wait(timeout=_POLL_S)
            ended = True
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:
            interrupts += 1
            say(_INTERRUPTED[min(interrupts, len(_INTERRUPTED)) - 1])
            if interrupts > len(_INTERRUPTED):
                process.kill()


_INTERRUPTED = (
    "interrupted: waiting for pulumi to end, so that its state stays true",
    "interrupted again: pulumi ends at once; the next `up` or `down` looks for what it was making",
)


class PulumiError(ConfigError):
    """`pulumi` cannot be used, or refuses."""

    def __init__(self, message: str, trouble: Trouble) -> None:
        """`trouble` says which of the known ones it is."""
        super().__init__(message)
        self.trouble = trouble
        if trouble in ("not logged in", "credentials refused"):
            self.exit_code = ExitCode.AUTH

    @property
    def is_fault(self) -> bool:
        """Tell whether there may be a stack all the same, which could not be read."""
        return self.trouble in ("credentials refused", "damaged state", "other")


class Pulumi:
    """`pulumi` for one stack of the project in `folder`."""

    def __init__(
        self,
        env: Mapping[str, str],
        *,
        folder: Path,
        stack: str | None = None,
        timeout_s: float = ASK_S,
    ) -> None:
        """`stack` None is the selected one. Raises ConfigError for a name that cannot be one."""
        if stack is not None and not _STACK.fullmatch(stack):
            raise ConfigError(
                f"stack {stack!r}: a stack's name has letters, digits, dots, hyphens and "
                "underscores, such as dev or my-org/tileforge/dev."
            )
        self.stack = stack
        self._env = {**past_the_proxy(env), "PULUMI_SKIP_UPDATE_CHECK": "true"}
        self._folder = folder
        self._timeout_s = timeout_s

    def tell_program(self, **variables: str) -> None:
        """Set environment variables of the cluster program for every later command."""
        self._env = {**self._env, **variables}

    def argv(self, *words: str) -> list[str]:
        """Return the command line, the stack's name in it. Raises PulumiError."""
        program = which("pulumi", path=self._env.get("PATH", ""))
        if program is None:
            raise PulumiError(
                "there is no `pulumi` on PATH. Install it: https://www.pulumi.com/docs/install/",
                "not installed",
            )
        stack = ["--stack", self.stack] if self.stack else []
        return [program, *words, *stack, "--non-interactive", "--color", "never"]

    def ask(self, *words: str, timeout_s: float | None = None) -> str:
        """Return the command's output. Raises PulumiError."""
        argv = self.argv(*words)
        timeout_s = timeout_s or self._timeout_s
        shown = f"pulumi {' '.join(words)}"
        try:
            done = subprocess.run(
                argv,
                cwd=self._folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise PulumiError(
                f"`{shown}` has not answered within {timeout_s:g} s. See that its backend "
                "can be reached: pulumi whoami",
                "other",
            ) from None
        if done.returncode != 0:
            said = done.stderr or done.stdout
            raise refusal(shown, said, GoogleLogin.from_env(self._env))
        return done.stdout

    def ask_json(self, *words: str, timeout_s: float | None = None) -> Any:
        """Return the JSON that the command printed. Raises PulumiError."""
        text = self.ask(*words, "--json", timeout_s=timeout_s)
        where = f"what `pulumi {' '.join(words)} --json` printed"
        try:
            return parse_json(text, where=where, fix=NEWER)
        except ConfigError as error:
            raise PulumiError(str(error), "other") from None

    def follow(
        self,
        *words: str,
        log: Path,
        see: Callable[[Event], None] = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Update:
        """Run an operation to its end, pass each of its events to `see`, and return the result.

        `log` gets what pulumi prints. An interrupt reaches pulumi too, which then ends in its own
        way; that is waited for, and KeyboardInterrupt is raised after it. Raises PulumiError.
        """
        with tempfile.TemporaryDirectory(prefix="tileforge-") as folder:
            path = Path(folder) / "events.jsonl"
            path.touch(mode=0o600)
            with log.open("wb") as printed, path.open("rb") as stream:
                process = subprocess.Popen(
                    [*self.argv(*words), "--event-log", str(path)],
                    cwd=self._folder,
                    # The option exists only with the variable.
                    env={**self._env, "PULUMI_DEBUG_COMMANDS": "true"},
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                )
                events = EventReader(stream)
                interrupts = _wait(process, events, see=see, say=say)
        if interrupts:
            raise KeyboardInterrupt
        text = log.read_bytes()[-_MOST_PRINTED_CHARS:].decode("utf-8", errors="replace")
        return Update(
            words=words,
            status=process.returncode,
            events=tuple(events.seen),
            unreadable=events.unreadable,
            text=printable(text),
            log=log,
            login=GoogleLogin.from_env(self._env),
        )


def refusal(shown: str, said: str, login: GoogleLogin) -> PulumiError:
    """Return the error that a command amounts to whose engine never started, by what it printed.

    A state in a bucket is read with `login`.
    """
    said = printable(said)
    if REFUSED_CREDENTIALS.search(said) and re.search("google|oauth2", said):
        flat = joined_lines(said, longest=None).removeprefix("error: ").rstrip(".")
        flat = flat if len(flat) <= _MOST_CHARS else f"{flat[:_MOST_CHARS]}..."
        message = f"`{shown}`: {flat}. {login.refusal(said)}"
        return PulumiError(message, "credentials refused")
    for pattern, trouble, fix in _COMPLAINTS:
        found = re.search(rf"^.*({pattern}).*$", said, re.MULTILINE)
        if found:
            line = found.group(0).strip().removeprefix("error: ")
            return PulumiError(f"`{shown}`: {line.rstrip('.')}. {fix}", trouble)
    lines: Sequence[str] = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("error: ")] or lines or ["no word"]
    return PulumiError(f"`{shown}` failed: {telling[-1].removeprefix('error: ')}", "other")


_PROVIDERS_TOO = {"project": "", "region": Need().region}
"""Settings that the provider's take the place of, with their defaults."""


def settings(pulumi: Pulumi) -> dict[str, Any]:
    """Return the stack's config by the keys' last part; the project's own keys before a provider's.

    A key of the project's that has its default gives way to the provider's project and region.
    Raises PulumiError and ConfigError.
    """
    raw = pulumi.ask_json("config")
    if not isinstance(raw, dict):
        raise ConfigError(f"`pulumi config --json` printed {shown(raw)}, not an object. {NEWER}")
    known: dict[str, Any] = {}
    for key in sorted(raw, key=lambda key: not key.startswith("gcp:")):
        entry = raw[key] if isinstance(raw[key], dict) else {}
        value, name = entry.get("objectValue", entry.get("value")), key.rpartition(":")[2]
        # As the cluster program does: infra/config_reading.py.
        if known.get(name) and value in ("", _PROVIDERS_TOO.get(name)):
            continue
        known[name] = value
    return known


def cluster_name(pulumi: Pulumi, known: dict[str, Any]) -> str:
    """Return the cluster of the config: its key, or the stack's name. Raises PulumiError."""
    name = known.get("cluster") or pulumi.ask("stack", "--show-name").strip().rpartition("/")[2]
    # It names a folder here, with the key that opens the cluster.
    if not isinstance(name, str) or not NODE_NAME.fullmatch(name):
        raise ConfigError(
            f"cluster = {shown(name)}: must be a name of letters, digits and hyphens. "
            "pulumi config set cluster NAME"
        )
    return name
