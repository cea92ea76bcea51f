"""Why an operation of Pulumi's failed: the resource, Google's message, the lock, and what to do."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from payload.errors import (
    CapacityError,
    CloudAuthError,
    CloudError,
    ConfigError,
    QuotaError,
    TileforgeError,
)
from payload.hints import command
from payload.orchestrate.cloud.pulumi import STACK_TYPE, Update, name_of, refusal, type_of
from payload.untrusted import printable

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StockOut:
    """The cloud's words about machines that are out of stock."""

    machine_type: str | None
    full: Sequence[str]
    """Zones without one, in the order of the output."""
    free: Sequence[str]
    """Zones that the error says have some."""

    def describe(self) -> str:
        """Return the cause and the next command."""
        machine = self.machine_type or "such machine"
        build = command("orchestrate", "up")
        tried = ", ".join(self.full) or "the zone that was tried"
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
    flat = " ".join(output.split())
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
    return _BUSY.search(" ".join(text.split())) is not None


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
_QUOTA_WORDS = re.compile(r"QUOTA_EXCEEDED|quotaExceeded|Quota exceeded|quota limit .* exceeded")
_API = re.compile(r"apis/api/([a-z.]+)/")
_API_OFF = re.compile(r"has not been used in project|accessNotConfigured|SERVICE_DISABLED")
_NO_CREDENTIALS = re.compile(
    r"could not find default credentials|No credentials loaded|invalid_grant|reauth", re.I
)
_DENIED = re.compile(
    r"googleapi: Error 40[13]|PERMISSION_DENIED|Permission denied|Required '[\w.]{1,99}' permission"
)
_PERMISSION = re.compile(r"Required '([\w.]{1,99})' permission|[Pp]ermission '([\w.]{1,99})'")
_ROLES = {
    "compute": "roles/compute.admin",
    "iam": "roles/iam.serviceAccountAdmin",
    "storage": "roles/storage.admin",
    "dns": "roles/dns.admin",
    "file": "roles/file.editor",
    "cloudkms": "roles/cloudkms.admin",
    "iap": "roles/iap.tunnelResourceAccessor",
}
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
# What Google answers, what kind of failure that is, and what to do. The first that fits.
_FIXES: tuple[tuple[re.Pattern[str], type[TileforgeError], str], ...] = (
    (
        re.compile(r"Error 409\b|alreadyExists|already exists"),
        ConfigError,
        "It is in Google Cloud, but not in the stack, as after an answer that was lost. Repeat: "
        f"{_UP}, which first removes what carries this cluster's label",
    ),
    (
        re.compile(r"the change requires stopping it"),
        ConfigError,
        "It was changed outside Pulumi, and only a stopped machine can be changed back. Build it "
        f"again: {_UP}",
    ),
    (
        re.compile(r"resourceInUseByAnotherResource|already being used by"),
        ConfigError,
        f"What uses it is not in the stack. Remove both: {_DOWN}",
    ),
    (
        re.compile(r"because it is protected"),
        ConfigError,
        f"A results bucket of an older release. Remove all but the bucket: {_DOWN}",
    ),
    (
        re.compile(r"dial tcp|connection re(fused|set)|no such host|i/o timeout|TLS handshake|EOF"),
        CloudError,
        "Google Cloud cannot be reached from here. See to the network, then repeat the command",
    ),
    (
        re.compile(r"Error 5[0-9][0-9]\b|Internal error|backendError"),
        CloudError,
        "The failure is on Google's side. Repeat the command",
    ),
    (
        re.compile(r"Error 404\b.*images/|images/.*(not found|notFound)"),
        ConfigError,
        "There is no such image, or it may not be used. Look: gcloud compute images list; then: "
        "pulumi config set image NAME",
    ),
    (
        re.compile(r"Error 40[04]\b.*(serviceAccount|service account|iam\.gserviceaccount)", re.I),
        CloudError,
        "Google has not yet spread the account that was just made. Repeat the command",
    ),
    (
        re.compile(r"Error 404\b|notFound"),
        ConfigError,
        f"It went while it was being used. Repeat: {_UP}",
    ),
    (
        re.compile(r"Error 400\b"),
        ConfigError,
        "Google does not allow these settings together. Change the one that it names: "
        "pulumi config set KEY VALUE",
    ),
)


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


def stock_out_of(update: Update) -> StockOut | None:
    """Return the stock-out that made the operation fail, or None."""
    return find_stock_out("\n".join(each.message for each in problems_of(update)))


def explain(update: Update) -> TileforgeError:
    """Return the error that a failed operation amounts to, with its exit code.

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
    flat = " ".join(each.message for each in problems)
    stock_out = find_stock_out(flat)
    if stock_out is not None:
        return CapacityError(f"{what}: {stock_out.describe()}")
    for known in (_quota_error, _access_error):
        error = known(what, problems, flat)
        if error is not None:
            return error
    return _other_error(what, problems)


def _not_started(update: Update) -> TileforgeError:
    if not is_busy(update.text):
        return refusal(update.shown, update.text)
    held = ", ".join(map(str, locks_in(update.text)))
    return StackBusyError(
        f"{update.shown}: another update of the stack is going on, so this one did nothing: "
        f"{held or 'the backend does not say whose'}. Repeat the command when it has ended; if it "
        "was broken off, and nobody is at work: pulumi cancel --yes"
    )


def _quota_error(what: str, problems: Sequence[Problem], flat: str) -> TileforgeError | None:
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


def _access_error(what: str, problems: Sequence[Problem], flat: str) -> TileforgeError | None:
    if _API_OFF.search(flat):
        named = _API.search(flat)
        api = named.group(1) if named else "compute.googleapis.com"
        return CloudAuthError(f"{what}: {api} is off. Enable it: gcloud services enable {api}")
    if _NO_CREDENTIALS.search(flat):
        return CloudAuthError(
            f"{what}: there are no Google Cloud credentials, or they have expired. Log in: gcloud "
            "auth application-default login"
        )
    denied = [each for each in problems if _DENIED.search(each.message)]
    if not denied:
        return None
    return CloudAuthError(f"{what}: {_cut(str(denied[0]))}. {_role_advice(flat)}")


def _role_advice(flat: str) -> str:
    permission = _PERMISSION.search(flat)
    service = permission.group(1).partition(".")[0] if permission else ""
    role = _ROLES.get(service)
    if permission is None or role is None:
        return "Ask for the roles in docs/operating.md."
    return (
        f"{permission.group(1)} is in {role}. The project's owner gives it: gcloud projects "
        f"add-iam-policy-binding PROJECT --member=user:YOU --role={role}"
    )


def _other_error(what: str, problems: Sequence[Problem]) -> TileforgeError:
    first = problems[0]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    for pattern, kind, fix in _FIXES:
        if pattern.search(first.message):
            return kind(f"{what}: {_cut(str(first))}{more}. {fix}")
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
    text = " ".join(printable(message).split())
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
