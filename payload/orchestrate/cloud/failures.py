"""Why an operation of Pulumi's failed: the resource, Google's message, the lock, and what to do."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from payload.core.errors import CapacityError, ConfigError, QuotaError, TileforgeError
from payload.core.one_line import joined_lines
from payload.core.suggested_commands import command
from payload.core.validation import printable
from payload.orchestrate.cloud.error_catalog import access_refusal, other_refusal
from payload.orchestrate.cloud.pulumi import STACK_TYPE, Update, name_of, refusal, type_of
from payload.storage.google_login import GoogleLogin

_ZONE = r"[a-z]+(?:-[a-z]+)+\d+-[a-z]"
_NO_CAPACITY = re.compile(
    r"(ZONE|REGION)_RESOURCE_POOL_EXHAUSTED|does not have enough resources available|STOCKOUT"
    r"|insufficientCapacity|VM instance[^.]* is currently unavailable in the|zonesAvailable"
)
_FULL_ZONES = (
    rf"zones/({_ZONE})'? does not have enough resources",
    rf"currently unavailable in the ({_ZONE}) zone",
    rf"not supported in the ({_ZONE}) zone",
    rf"""["']?\bzone["']?\s*[:=]>?\s*["']?({_ZONE})\b""",
)
_FREE_ZONES = (
    rf"[Cc]onsider trying your request in the ((?:{_ZONE}(?:, )?)+) zone\(s\)",
    rf"""zonesAvailable["']?\s*[:=]>?\s*["']?((?:{_ZONE},? ?)+)""",
)
_MACHINE = re.compile(r"\bAn? ([a-z0-9]+-[a-z0-9-]+) VM instance")
_NOT_OFFERED = re.compile(
    r"Machine type with name '(?P<name>[a-z0-9-]{1,63})' does not exist in zone "
    rf"'(?P<zone>{_ZONE})'"
    rf"|zones/(?P<in>{_ZONE})/(?:machineTypes|diskTypes)/(?P<type>[a-z0-9-]{{1,63}})' was not found"
)
_PREEMPTED = re.compile(r"failed to start due to preemption|\bPREEMPTED\b")
# Google deletes a spot machine that it takes back, and the provider waits for it in vain. SkyPilot
# has met UNSUPPORTED_OPERATION instead (sky/provision/gcp/instance_utils.py).
_GONE = re.compile(
    r"couldn't find resource|/instances/[a-z0-9-]{1,63}' was not found|UNSUPPORTED_OPERATION"
    r"|was present, but now absent"
)
_INSTANCE = "gcp:compute/instance:Instance"
_CREATIONS = ("create", "create-replacement", "replace")

Reason = Literal["full", "not offered", "preempted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StockOut:
    """A zone that has no machine for the cluster, by the cloud's message."""

    machine_type: str | None
    full: Sequence[str]
    """Zones without one, in the order of the output."""
    free: Sequence[str]
    """Zones that the error says have some."""
    reason: Reason = "full"

    @property
    def shown_reason(self) -> str:
        """Return why the zone is passed over, for the list of such zones."""
        if self.reason == "preempted":
            return "took spot machines back"
        word = "free" if self.reason == "full" else "offered"
        return f"no {self.machine_type or 'such machine'} {word}"

    def error(self, what: str) -> TileforgeError:
        """Return the error of the operation `what`."""
        kind = ConfigError if self.reason == "not offered" else CapacityError
        return kind(f"{what}: {self.describe()}")

    def describe(self) -> str:
        """Return the cause and the next command."""
        machine = self.machine_type or "such machine"
        build = command("orchestrate", "up")
        tried = ", ".join(self.full) or "the zone that was tried"
        if self.reason == "not offered":
            return (
                f"{machine} is not offered in {tried}. Try the next zone of the config: {build} "
                f"--next-zone; or see what each has: {command('orchestrate', 'doctor')}"
            )
        if self.reason == "preempted":
            return (
                f"Google took a spot machine back while it was created, in {tried}. Try the next "
                f"zone of the config: {build} --next-zone; or later"
            )
        if self.free:
            zone = self.free[0]
            return (
                f"no {machine} is free in {tried}. Google Cloud says that {', '.join(self.free)} "
                f"has: pulumi config set --path 'zones[0]' {zone} && {build}"
            )
        return (
            f"no {machine} is free in {tried}, and Google Cloud names no zone that has one. Try "
            f"the next zone of the config: {build} --next-zone; or later, or another machineType"
        )


def find_stock_out(output: str) -> StockOut | None:
    """Return the stock-out that Pulumi's output tells of, or None."""
    flat = joined_lines(output, longest=None)
    missing = _NOT_OFFERED.search(flat)
    if missing is not None:
        name, zone = missing["name"] or missing["type"], missing["zone"] or missing["in"]
        return StockOut(machine_type=name, full=[zone], free=[], reason="not offered")
    if _PREEMPTED.search(flat):
        return StockOut(machine_type=None, full=[], free=[], reason="preempted")
    if not _NO_CAPACITY.search(flat):
        return None
    machine = _MACHINE.search(flat)
    free = [zone for each in _found(_FREE_ZONES, flat) for zone in re.findall(_ZONE, each)]
    full = _once(_found(_FULL_ZONES, flat))
    return StockOut(
        machine_type=machine.group(1) if machine else None,
        full=full,
        free=[zone for zone in _once(free) if zone not in full],
    )


def _found(patterns: Sequence[str], text: str) -> list[str]:
    hits = [(m.start(), m.group(1)) for each in patterns for m in re.finditer(each, text)]
    return [name for _, name in sorted(hits)]


def _once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


_BUSY = re.compile(r"stack is currently locked|Another update is currently in progress")
# Of a backend that the project keeps itself: pkg/backend/diy/lock.go.
_HOLDER = re.compile(
    r"created by (?P<user>[^\s@]{1,64})@(?P<host>[^\s()]{1,253}) \(pid (?P<pid>[0-9]{1,10})\) at "
    r"(?P<time>[0-9TZ:.+-]{1,40})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """One lock of a stack."""

    user: str
    host: str
    pid: int
    since_unix: float | None
    since: str

    def __str__(self) -> str:
        return f"{self.user}@{self.host} (process {self.pid}) since {self.since}"

    def is_dead(self, *, host: str, boot_unix: float | None) -> bool:
        """Tell whether its process is gone for certain: on `host`, which booted at `boot_unix`."""
        if self.host != host:
            return False
        if boot_unix is not None and self.since_unix is not None and self.since_unix < boot_unix:
            return True
        return not _exists(self.pid)


def is_busy(text: str) -> bool:
    """Tell whether Pulumi printed that the stack is locked."""
    return _BUSY.search(joined_lines(text, longest=None)) is not None


def locks_in(text: str) -> list[Lock]:
    """Return the locks that Pulumi's message names; none where the backend does not say."""
    return [
        Lock(
            user=found["user"],
            host=found["host"],
            pid=int(found["pid"]),
            since_unix=_unix(found["time"]),
            since=found["time"],
        )
        for found in _HOLDER.finditer(printable(text))
    ]


def are_dead(locks: list[Lock]) -> bool:
    """Tell whether there are locks, and all of them of dead processes on this machine."""
    host, boot_unix = socket.gethostname(), _boot_unix()
    return bool(locks) and all(each.is_dead(host=host, boot_unix=boot_unix) for each in locks)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _boot_unix() -> float | None:
    """Return when this machine started; None where the system does not count sleep in."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return None if clock is None else time.time() - time.clock_gettime(clock)


def _unix(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).astimezone(UTC).timestamp()
    except (OverflowError, ValueError):
        return None


_QUOTA = re.compile(
    r"Quota '(?P<metric>\w{1,64})' exceeded\.? +Limit: (?P<limit>\d{1,19}(?:\.\d{1,9})?) *"
    r"(?:in region (?P<region>[a-z0-9-]+)|globally)?"
    # CPUS_PER_VM_FAMILY, of C4 and newer families.
    r"(?: *dimensions = map\[[^\]]{0,200}?vm_family:(?P<family>\w{1,16}))?",
    re.ASCII,
)
# A limit of requests, which Google calls a quota too; nobody has to ask for more.
_PER_MINUTE = re.compile(r"rateLimitExceeded|RATE_LIMIT_EXCEEDED|[Qq]ueries per minute")
_QUOTA_WORDS = re.compile(r"QUOTA_EXCEEDED|quotaExceeded|Quota exceeded|quota limit .* exceeded")
# What the provider's own log has twice, and what only says that there is more to read.
_PROVIDER_LOG = re.compile(r"\s*sdk-v[0-9]+/\w+\.go:[0-9]+: ")
_SAYS_NOTHING = re.compile(
    r"(update|preview|destroy|refresh) (failed|canceled)|an unhandled error occurred: program "
    r"exited with non-zero exit code: [0-9]+"
)
_WRAPPER = re.compile(
    r"(?:deleting|updating|creating|refreshing|reading) urn:pulumi:\S+: |[0-9]+ errors? occurred: "
    r"?\* |Preview failed: |error: "
)
# Long texts of the engine's and the provider's own that name every case but this one.
_SHORTENED = (
    (
        re.compile(r"Changing the machine_type, .* requires stopping it\b.*"),
        "the change requires stopping it",
    ),
    (
        re.compile(r'resource "urn:pulumi:\S+" cannot be deleted because it is protected\b.*'),
        "it cannot be deleted because it is protected",
    ),
)
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_MOST_CHARS = 300
_WORDS = {
    "gcp:compute/instance:Instance": "machine",
    "gcp:compute/network:Network": "network",
    "gcp:compute/subnetwork:Subnetwork": "subnetwork",
    "gcp:compute/router:Router": "router",
    "gcp:compute/routerNat:RouterNat": "NAT",
    "gcp:compute/firewall:Firewall": "firewall rule",
    "gcp:compute/resourcePolicy:ResourcePolicy": "placement policy",
    "gcp:serviceaccount/account:Account": "service account",
    "gcp:storage/bucket:Bucket": "bucket",
    "gcp:filestore/instance:Instance": "Filestore instance",
    "gcp:storage/bucketIAMMember:BucketIAMMember": "bucket permission",
    "gcp:dns/managedZone:ManagedZone": "DNS zone",
    "gcp:dns/recordSet:RecordSet": "DNS record",
    "gcp:kms/cryptoKeyIAMMember:CryptoKeyIAMMember": "key permission",
    "pulumi:providers:gcp": "provider",
}
_UP = command("orchestrate", "up")
_DOWN = command("orchestrate", "down")


class StackBusyError(ConfigError):
    """Another `pulumi` is at work on the stack; this one has not begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The engine's report about one resource, without its wrappers."""

    urn: str
    """Empty for the whole operation."""
    message: str
    """On one line."""

    def __str__(self) -> str:
        if not self.urn or type_of(self.urn) == STACK_TYPE:
            return self.message
        return f"{kind_in_words(self.urn)} {name_of(self.urn)}: {self.message}"


def problems_of(update: Update) -> list[Problem]:
    """Return what went wrong, the most telling first, each once."""
    found = [
        Problem(urn=each.urn or "", message=message)
        for each in update.diagnostics
        if each.severity == "error"
        and not _PROVIDER_LOG.match(each.message)
        and (message := _plain(each.message))
        and not _SAYS_NOTHING.fullmatch(message)
    ]
    broken = [
        Problem(urn="", message=f"policy {each.name}: {_plain(each.message)}")
        for event in update.events
        if (each := event.policy) is not None and each.level == "mandatory"
    ]
    return list(dict.fromkeys([*found, *broken]))


def stock_out_of(update: Update, *, spot: bool = False) -> StockOut | None:
    """Return the stock-out that made the operation fail, or None.

    `spot` says that the machines are spot ones: one that is gone while it is created was preempted.
    """
    problems = problems_of(update)
    found = find_stock_out("\n".join(each.message for each in problems))
    if found is not None or not spot:
        return found
    created = {step.urn for step in update.failures if step.op in _CREATIONS}
    if any(
        type_of(each.urn) == _INSTANCE and each.urn in created and _GONE.search(each.message)
        for each in problems
    ):
        return StockOut(machine_type=None, full=[], free=[], reason="preempted")
    return None


def explain(update: Update, *, spot: bool = False) -> TileforgeError:
    """Return the error that a failed operation amounts to, with its exit code.

    `spot` is as for stock_out_of.
    A stock-out goes before quota: Google reports some as QUOTA_EXCEEDED, with the zones that have
    capacity in the details (https://github.com/GoogleCloudPlatform/ai-on-gke/issues/849).
    """
    what, problems = update.shown, problems_of(update)
    if update.status < 0:
        return ConfigError(
            f"{what}: it was killed by signal {-update.status}; what it was creating may be in "
            f"Google Cloud and not in the stack. Repeat: {_UP}; or remove everything: {_DOWN}"
        )
    if not problems and not update.diagnostics:
        return _not_started(update)
    if not problems:
        seen = f" {update.unreadable}" if update.unreadable else ""
        return ConfigError(
            f"{what}: failed with status {update.status}, and its engine does not say why.{seen} "
            f"Its output: {update.log or 'none'}"
        )
    stock_out = stock_out_of(update, spot=spot)
    if stock_out is not None:
        return stock_out.error(what)
    return (
        _quota_error(what, problems)
        or _access_error(what, problems, update.login)
        or _other_error(what, problems)
    )


def _not_started(update: Update) -> TileforgeError:
    if not is_busy(update.text):
        return refusal(update.shown, update.text, update.login)
    held = ", ".join(map(str, locks_in(update.text)))
    return StackBusyError(
        f"{update.shown}: another update of the stack is going on, so this one did nothing: "
        f"{held or 'the backend does not say whose'}. Repeat the command when it has ended; if it "
        "was broken off, and nobody is at work: pulumi cancel --yes"
    )


def _quota_error(what: str, problems: Sequence[Problem]) -> TileforgeError | None:
    flat = " ".join(each.message for each in problems)
    if _PER_MINUTE.search(flat):
        return None
    quotas = "; ".join(_once(_quota_words(flat)))
    if not quotas and not _QUOTA_WORDS.search(flat):
        return None
    if not quotas:
        first = next(each for each in problems if _QUOTA_WORDS.search(each.message))
        quotas = f"{_cut(str(first))}. A quota is too small, and Google does not say which"
    return QuotaError(
        f"{what}: {quotas}. Ask for more at https://console.cloud.google.com/iam-admin/quotas, or "
        f"see what fits: {command('orchestrate', 'doctor')}"
    )


def _access_error(
    what: str, problems: Sequence[Problem], login: GoogleLogin
) -> TileforgeError | None:
    """Return the error of the first problem with credentials or permissions, or None."""
    for each in problems:
        refusal = access_refusal(each.message, login=login)
        if refusal is not None:
            return refusal.error(f"{what}: {_cut(str(each))}. {refusal.advice}")
    return None


def _other_error(what: str, problems: Sequence[Problem]) -> TileforgeError:
    first = problems[0]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    known = other_refusal(first.message)
    if known is not None:
        return known.error(f"{what}: {_cut(str(first))}{more}. {known.advice}")
    if _TRACEBACK.search(first.message):
        return ConfigError(
            f"{what}: the cluster program failed: {_cut(first.message[-300:])}. This is a bug: "
            "report it with the log file"
        )
    return ConfigError(f"{what}: {_cut(str(first))}{more}")


def kind_in_words(urn: str) -> str:
    """Return a resource's type as people say it: firewall rule."""
    kind = type_of(urn)
    return _WORDS.get(kind, kind.rpartition(":")[2].lower() or "resource")


def _plain(message: str) -> str:
    """Return a message on one line, without what the engine and the provider put around it."""
    text = joined_lines(message, longest=None)
    while (wrapper := _WRAPPER.match(text)) is not None:
        text = text[wrapper.end() :]
    for pattern, short in _SHORTENED:
        text = pattern.sub(short, text)
    return text.strip()


def _cut(text: str) -> str:
    return (text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}...").rstrip(".")


def _quota_words(flat: str) -> Iterable[str]:
    for found in _QUOTA.finditer(flat):
        where = f"in {found['region']}" if found["region"] else "in all regions together"
        limit = f"{float(found['limit']):g} {where}"
        family = f" ({found['family']})" if found["family"] else ""
        yield f"quota {found['metric']}{family} is {limit}, the cluster needs more"
