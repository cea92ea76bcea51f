"""Explains a failed operation of Pulumi: the resource, Google's message, and the fix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from payload.core.errors import ConfigError, QuotaError, TileforgeError
from payload.core.one_line import joined_lines
from payload.core.suggested_commands import command
from payload.orchestrate.clouds.gcp.error_catalog import access_refusal, other_refusal
from payload.orchestrate.clouds.gcp.stock_outs import StockOut, find_stock_out
from payload.orchestrate.clouds.pulumi.cli_errors import refusal
from payload.orchestrate.clouds.pulumi.events import STACK_TYPE, Update, name_of, type_of
from payload.orchestrate.clouds.pulumi.locks import is_busy, locks_in
from payload.orchestrate.clouds.pulumi.resource_types import INSTANCE, kind_name
from payload.storage.google_environment_login import GoogleLogin

# Google deletes a preempted spot machine, and the provider waits for it in vain. SkyPilot reports
# UNSUPPORTED_OPERATION instead (sky/provision/gcp/instance_utils.py).
_GONE = re.compile(
    r"couldn't find resource|/instances/[a-z0-9-]{1,63}' was not found|UNSUPPORTED_OPERATION"
    r"|was present, but now absent"
)
_CREATIONS = ("create", "create-replacement", "replace")

_QUOTA = re.compile(
    r"Quota '(?P<metric>\w{1,64})' exceeded\.? +Limit: (?P<limit>\d{1,19}(?:\.\d{1,9})?) *"
    r"(?:in region (?P<region>[a-z0-9-]+)|globally)?"
    # CPUS_PER_VM_FAMILY is the quota of C4 and newer families.
    r"(?: *dimensions = map\[[^\]]{0,200}?vm_family:(?P<family>\w{1,16}))?",
    re.ASCII,
)
# A rate limit: Google also calls it a quota, but the fix is not a higher quota.
_PER_MINUTE = re.compile(r"rateLimitExceeded|RATE_LIMIT_EXCEEDED|[Qq]ueries per minute")
_QUOTA_WORDS = re.compile(r"QUOTA_EXCEEDED|quotaExceeded|Quota exceeded|quota limit .* exceeded")
# Messages that repeat the provider's log or only announce a failure.
_PROVIDER_LOG = re.compile(r"\s*sdk-v[0-9]+/\w+\.go:[0-9]+: ")
_UNINFORMATIVE = re.compile(
    r"(update|preview|destroy|refresh) (failed|canceled)|an unhandled error occurred: program "
    r"exited with non-zero exit code: [0-9]+"
)
_WRAPPER = re.compile(
    r"(?:deleting|updating|creating|refreshing|reading) urn:pulumi:\S+: |[0-9]+ errors? occurred: "
    r"?\* |Preview failed: |error: "
)
# Long texts of the engine and the provider that list other possible causes.
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
_UP = command("orchestrate", "up")
_DOWN = command("orchestrate", "down")


class StackBusyError(ConfigError):
    """Another `pulumi` process holds the stack's lock, so this process has not started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error that the engine reported for a resource, without the prefixes that Pulumi adds."""

    urn: str
    """URN of the resource; empty for the whole operation."""
    message: str
    """The error as a single line."""

    def __str__(self) -> str:
        if not self.urn or type_of(self.urn) == STACK_TYPE:
            return self.message
        return f"{kind_name(self.urn)} {name_of(self.urn)}: {self.message}"


def problems_of(update: Update) -> list[Problem]:
    """Return the distinct errors of an operation: errors of the engine, then policy violations."""
    found = [
        Problem(urn=each.urn or "", message=message)
        for each in update.diagnostics
        if each.severity == "error"
        and not _PROVIDER_LOG.match(each.message)
        and (message := _plain(each.message))
        and not _UNINFORMATIVE.fullmatch(message)
    ]
    broken = [
        Problem(urn="", message=f"policy {each.name}: {_plain(each.message)}")
        for event in update.events
        if (each := event.policy) is not None and each.level == "mandatory"
    ]
    return list(dict.fromkeys([*found, *broken]))


def stock_out_of(update: Update, *, spot: bool = False) -> StockOut | None:
    """Return the stock-out that made the operation fail, or None.

    `spot` is True for spot machines. A spot machine that disappears during its creation was
    preempted.
    """
    problems = problems_of(update)
    found = find_stock_out("\n".join(each.message for each in problems))
    if found is not None or not spot:
        return found
    created = {step.urn for step in update.failures if step.op in _CREATIONS}
    if any(
        type_of(each.urn) == INSTANCE and each.urn in created and _GONE.search(each.message)
        for each in problems
    ):
        return StockOut(machine_type=None, full=[], free=[], reason="preempted")
    return None


def explain(update: Update, *, spot: bool = False) -> TileforgeError:
    """Return the error, with its exit code, for a failed operation.

    `spot` has the same meaning as in stock_out_of. Stock-outs are checked before quotas: Google
    reports some stock-outs as QUOTA_EXCEEDED, and names zones with capacity in the details
    (https://github.com/GoogleCloudPlatform/ai-on-gke/issues/849).
    """
    what, problems = update.shown, problems_of(update)
    if update.status < 0:
        return ConfigError(
            f"{what}: killed by signal {-update.status}; resources whose creation had begun can "
            f"exist outside the stack. Repeat: {_UP}; or remove everything: {_DOWN}"
        )
    if not problems and not update.diagnostics:
        return _not_started(update)
    if not problems:
        unreadable = f" {update.unreadable}" if update.unreadable else ""
        return ConfigError(
            f"{what}: failed with status {update.status} and without a message.{unreadable} "
            f"Output: {update.log or 'none'}"
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
        f"{update.shown}: nothing was done, because another update of the stack is running: "
        f"{held or 'the backend does not show whose'}. Repeat the command when that update has "
        "ended. If that update was killed and no other user runs pulumi, release its lock: pulumi "
        "cancel --yes"
    )


def _quota_error(what: str, problems: Sequence[Problem]) -> TileforgeError | None:
    flat = " ".join(each.message for each in problems)
    if _PER_MINUTE.search(flat):
        return None
    quotas = "; ".join(dict.fromkeys(_quota_texts(flat)))
    if not quotas and not _QUOTA_WORDS.search(flat):
        return None
    if not quotas:
        first = next(each for each in problems if _QUOTA_WORDS.search(each.message))
        quotas = f"{_cut(str(first))}. A quota is too low, but Google's message does not name it"
    return QuotaError(
        f"{what}: {quotas}. Request an increase: https://console.cloud.google.com/iam-admin/quotas;"
        f" or check all quotas: {command('orchestrate', 'doctor')}"
    )


def _access_error(
    what: str, problems: Sequence[Problem], login: GoogleLogin
) -> TileforgeError | None:
    """Return an error for the first problem with credentials or permissions, or None."""
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
            f"{what}: the cluster program failed: {_cut(first.message[-300:])}. This is a bug; "
            "report it with the log file"
        )
    return ConfigError(f"{what}: {_cut(str(first))}{more}")


def _plain(message: str) -> str:
    """Return a message as one line, without the prefixes of the engine and the provider."""
    text = joined_lines(message, longest=None)
    while (wrapper := _WRAPPER.match(text)) is not None:
        text = text[wrapper.end() :]
    for pattern, short in _SHORTENED:
        text = pattern.sub(short, text)
    return text.strip()


def _cut(text: str) -> str:
    return (text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}...").rstrip(".")


def _quota_texts(flat: str) -> Iterable[str]:
    for found in _QUOTA.finditer(flat):
        where = f"in {found['region']}" if found["region"] else "in all regions together"
        limit = f"{float(found['limit']):g} {where}"
        family = f" ({found['family']})" if found["family"] else ""
        yield f"quota {found['metric']}{family} is {limit}, but the cluster needs more"
