"""Why `pulumi up` failed: no capacity, quota, permission. From its output; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from payload.errors import CapacityError, CloudAuthError, ConfigError, QuotaError, TileforgeError
from payload.hints import command
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
_BUSY = re.compile(r"stack is currently locked|Another update is currently in progress")
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
_NO_CREDENTIALS = re.compile(r"could not find default credentials|invalid_grant|reauth", re.I)
_DENIED = re.compile(
    r"googleapi: Error 40[13]|PERMISSION_DENIED|Permission denied|Required '[\w.]{1,99}' permission"
)
_SENTENCE_END = re.compile(r"\.(?!\w)")


class StackBusyError(ConfigError):
    """Another `pulumi` is at work on the stack; this one has not begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StockOut:
    """What the cloud said about machines that it has not."""

    machine_type: str | None
    full: Sequence[str]
    """Zones without one, in the order of the output."""
    free: Sequence[str]
    """Zones that the error says have some."""

    def describe(self) -> str:
        """What happened and the next command."""
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
    """The stock-out that Pulumi's output tells of, or None."""
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


def explain(output: str, *, what: str) -> TileforgeError:
    """The error that Pulumi's output amounts to, with its exit code.

    A stock-out goes before quota: Google reports some as QUOTA_EXCEEDED, with the zones that have
    capacity in the details (https://github.com/GoogleCloudPlatform/ai-on-gke/issues/849).
    """
    output = printable(output)
    flat = " ".join(output.split())
    if _BUSY.search(flat):
        return StackBusyError(
            f"{what}: another update of the stack is going on, so this one did nothing. Repeat the "
            "command when it has ended; if it was broken off, and nobody is at work: pulumi cancel"
        )
    stock_out = find_stock_out(output)
    if stock_out is not None:
        return CapacityError(f"{what}: {stock_out.describe()}")
    quotas = _once(_quota_words(flat))
    if quotas or _QUOTA_WORDS.search(flat):
        return QuotaError(
            f"{what}: {'; '.join(quotas) or 'a quota is too small, which Pulumi names above'}. Ask "
            "for more at https://console.cloud.google.com/iam-admin/quotas, or see what fits: "
            + command("orchestrate", "doctor")
        )
    if _API_OFF.search(flat):
        named = _API.search(flat)
        api = named.group(1) if named else "compute.googleapis.com"
        return CloudAuthError(f"{what}: {api} is off. Enable it: gcloud services enable {api}")
    if _NO_CREDENTIALS.search(flat):
        return CloudAuthError(
            f"{what}: there are no Google Cloud credentials, or they have expired. Log in: gcloud "
            "auth application-default login"
        )
    denied = _DENIED.search(flat)
    if denied:
        return CloudAuthError(
            f"{what}: {_sentence(flat, denied)[:300]}. Ask for the roles in docs/operating.md."
        )
    errors = [line.strip() for line in output.splitlines() if "error: " in line]
    last = errors[-1].partition("error: ")[2] if errors else "Pulumi's output above says why"
    return ConfigError(f"{what}: {last}")


def _quota_words(flat: str) -> Iterable[str]:
    for found in _QUOTA.finditer(flat):
        where = f"in {found['region']}" if found["region"] else "in all regions together"
        limit = f"{float(found['limit']):g} {where}"
        family = f" ({found['family']})" if found["family"] else ""
        yield f"quota {found['metric']}{family} is {limit}, the cluster needs more"


def _sentence(text: str, found: re.Match[str]) -> str:
    """Return the sentence around a match."""
    end = _SENTENCE_END.search(text, found.end())
    return text[text.rfind(".", 0, found.start()) + 1 : end.start() if end else None].strip()


def _found(patterns: Sequence[str], text: str) -> list[str]:
    hits = [(m.start(), m.group(1)) for each in patterns for m in re.finditer(each, text)]
    return [name for _, name in sorted(hits)]


def _once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
