"""The stack's machines, and the cluster's firewall rules as Google has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rich.console import Console

from payload.core.errors import CloudError, ExitCode, TileforgeError
from payload.core.printable_text import printable
from payload.core.suggested_commands import command
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build
from payload.orchestrate.cloud.google import Google, request_of
from payload.orchestrate.cloud.listing import remove
from payload.orchestrate.cloud.project_checks import Check, unknown
from payload.orchestrate.cloud.pulumi import (
    NEWER,
    Pulumi,
    PulumiError,
    Step,
    Update,
    name_of,
    type_of,
    urn_field,
)
from payload.orchestrate.cloud.resources import Resource, last_word, marks
from payload.stack.cluster_identity import identity_in

INSTANCE = "gcp:compute/instance:Instance"
_BUCKET = "gcp:storage/bucket:Bucket"
# A right to a key has an id that begins with the key's project, which may be another one.
_PROJECT = re.compile(
    r"projects/([^/]+)/(?:global|regions|zones|serviceAccounts|managedZones|locations/[^/]+/instances)/"
)
# Operations of a preview that end what is there; a replacement is one of them.
_DELETING = ("delete", "replace", "delete-replaced")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resource:
    urn: str = urn_field()
    id: str | None = None
    inputs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Deployment:
    resources: tuple[_Resource, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Export:
    deployment: _Deployment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StackState:
    """The resources that Pulumi has made for the stack; equal where none was built or removed."""

    machines: tuple[str, ...]
    """Their names."""
    parts: tuple[tuple[str, str | None], ...]
    """URN and, where the cloud gave one, id of everything; a rebuilt one has another id."""
    identities: tuple[str, ...] = ()
    """The cluster's, by the labels that the program last asked for; none of an older version.

    Descriptions keep their first one, so there may be two after a folder was lost."""

    @property
    def projects(self) -> tuple[str, ...]:
        """Return the projects that the resources are in."""
        found = (_PROJECT.match(known or "") for _, known in self.parts)
        return tuple(dict.fromkeys(each[1] for each in found if each))

    @property
    def bucket(self) -> str | None:
        """Return the name of the bucket that `bucket: create` has made."""
        return next((known for urn, known in self.parts if type_of(urn) == _BUCKET), None)


def stack_state(pulumi: Pulumi) -> StackState:
    """Return the state that Pulumi's backend has now. Raises PulumiError, ConfigError."""
    resources = _resources(pulumi)
    return StackState(
        machines=tuple(_names(each.urn for each in resources)),
        parts=tuple((each.urn, each.id) for each in resources),
        identities=tuple(dict.fromkeys(filter(None, map(_identity_of, resources)))),
    )


def inputs_in_state(pulumi: Pulumi, kind: str) -> list[Mapping[str, Any]]:
    """Return what the cluster program last asked for of every resource of this type.

    Raises PulumiError, ConfigError.
    """
    return [each.inputs or {} for each in _resources(pulumi) if type_of(each.urn) == kind]


def machines_that_go(preview: Update) -> list[str]:
    """Return those that `pulumi up` would remove or rebuild. Raises PulumiError.

    An event that cannot be read may be the one that ends a machine.
    """
    if preview.unreadable:
        raise PulumiError(f"`pulumi preview`: {preview.unreadable} {NEWER}", "other")
    return _names(step.urn for step in preview.steps if step.op in _DELETING)


def changes_metadata(preview: Update) -> bool:
    """Tell whether machines that stay get other metadata, which they read only as they boot."""
    return any(
        step.op == "update" and type_of(step.urn) == INSTANCE and "metadata" in (step.diffs or ())
        for step in preview.steps
    )


def _resources(pulumi: Pulumi) -> Sequence[_Resource]:
    where = _where("stack export")
    text = pulumi.ask("stack", "export")
    export = build(_Export, parse_json(text, where=where, fix=NEWER), where=where, fix=NEWER)
    return (export.deployment or _Deployment()).resources or ()


def _identity_of(resource: _Resource) -> str | None:
    inputs = resource.inputs or {}
    labels = inputs.get("labels")
    # What is secret or damaged in a state is no text.
    told = labels.items() if isinstance(labels, dict) else ()
    described = marks(str(inputs.get("description") or ""))
    return identity_in({key: str(value) for key, value in told}) or identity_in(described)


def _names(urns: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name_of(urn) for urn in urns if type_of(urn) == INSTANCE))


def _where(words: str) -> str:
    return f"`pulumi {words}` printed what cannot be read"


_FIREWALL = "gcp:compute/firewall:Firewall"
_DEFAULT_PRIORITY = 1000
_ENDS = ("delete", "delete-replaced", "discard", "refresh", "replace")
Traffic = frozenset[tuple[str, tuple[str, ...]]]
"""Protocols, each with its ports; no ports are all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The traffic that a firewall rule allows or denies."""

    direction: str
    priority: int
    sources: frozenset[str]
    """Address ranges."""
    destinations: frozenset[str]
    source_tags: frozenset[str]
    target_tags: frozenset[str]
    source_accounts: frozenset[str]
    target_accounts: frozenset[str]
    allowed: Traffic
    denied: Traffic
    disabled: bool

    def differences(self, there: Rule) -> str:
        """Return in words how the rule that is there differs; empty when it does not."""
        return "; ".join(
            f"{each.name.replace('_', ' ')} {_words(getattr(there, each.name))} instead of "
            f"{_words(getattr(self, each.name))}"
            for each in fields(self)
            if getattr(self, each.name) != getattr(there, each.name)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traffic:
    protocol: str
    ports: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """Inputs of a rule of the cluster program, as the engine's events have them."""

    name: str
    network: str
    direction: str = "INGRESS"
    priority: int = _DEFAULT_PRIORITY
    sources: tuple[str, ...] = checked((), key="sourceRanges")
    destinations: tuple[str, ...] = checked((), key="destinationRanges")
    source_tags: tuple[str, ...] = checked((), key="sourceTags")
    target_tags: tuple[str, ...] = checked((), key="targetTags")
    source_accounts: tuple[str, ...] = checked((), key="sourceServiceAccounts")
    target_accounts: tuple[str, ...] = checked((), key="targetServiceAccounts")
    allows: tuple[_Traffic, ...] = ()
    denies: tuple[_Traffic, ...] = ()
    disabled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Differences from the cluster program."""

    network: str
    differing: Mapping[str, str]
    """How, by name, the program's own rules differ; one that is missing is among them."""
    foreign: tuple[str, ...]
    """Names of enabled rules in the network that the program did not make."""


def wanted_rules(update: Update) -> tuple[str, dict[str, Rule]]:
    """Return the network's name and the rules that the cluster program asked for, by name.

    Raises ConfigError for an event that is not in the engine's format.
    """
    return _rules(
        _inputs(step)
        for step in update.steps
        if type_of(step.urn) == _FIREWALL and step.op not in _ENDS
    )


def rules_in_state(pulumi: Pulumi) -> tuple[str, dict[str, Rule]]:
    """Return the same from the stack's state; an empty name and no rules when nothing is up.

    Raises PulumiError, ConfigError.
    """
    return _rules(inputs_in_state(pulumi, _FIREWALL))


def _rules(each_inputs: Iterable[Any]) -> tuple[str, dict[str, Rule]]:
    network, rules = "", {}
    for raw in each_inputs:
        inputs = build(_Inputs, raw, where="a firewall rule of the stack", fix=NEWER)
        rules[inputs.name] = _rule(inputs)
        network = last_word(inputs.network) or network
    return network, rules


def compare(google: Google, network: str, wanted: Mapping[str, Rule]) -> Findings:
    """Return how the rules of `network` differ from these. Raises CloudError, CloudAuthError."""
    there = rules_there(google, network)
    differing = {}
    for name, rule in wanted.items():
        found = there.get(name)
        words = "it is missing" if found is None else rule.differences(found)
        if words:
            differing[name] = words
    foreign = [name for name, rule in there.items() if name not in wanted and not rule.disabled]
    return Findings(network=network, differing=differing, foreign=tuple(sorted(foreign)))


def rules_there(google: Google, network: str) -> dict[str, Rule]:
    """Return the rules that Google has in the network of this name."""
    client = google.compute("Firewalls")
    request = request_of("ListFirewallsRequest", project=google.project, max_results=500)
    return {
        printable(item.name): _rule_there(item)
        for page in google.pages("listing firewall rules", client.list, request)
        for item in page.items
        if last_word(item.network) == network
    }


def settle(google: Google, update: Update, *, again: Callable[[], Update], talk: Console) -> None:
    """Compare, replace each rule that differs, and compare again.

    `again` runs `pulumi up` once more, which makes the rules that were removed. Raises CloudError
    with the names of rules that still differ.
    """
    network, wanted = wanted_rules(update)
    if not network:
        return
    found = compare(google, network, wanted)
    if found.differing:
        for name, how in found.differing.items():
            talk.print(f"firewall rule {name} is not as the program has it: {how}; replacing it")
        gone = [Resource(kind="firewall rule", name=n, location="global") for n in found.differing]
        failed = remove(google, gone)
        if failed:
            raise CloudError(f"firewall: {'; '.join(failed)} {_CLOSE}")
        network, wanted = wanted_rules(again())
        found = compare(google, network, wanted)
    for line in foreign_words(found):
        talk.print(f"warning: {line}")
    if found.differing:
        still = "; ".join(f"{name}: {how}" for name, how in found.differing.items())
        raise CloudError(f"firewall of {network}: {still}. {_CLOSE}")


_CLOSE = f"Remove the cluster if this is not meant: {command('orchestrate', 'down')}"


def foreign_words(found: Findings) -> list[str]:
    """Return a line for each rule that the program did not make."""
    return [
        f"firewall rule {name} in {found.network} is not the cluster program's; see what it opens: "
        f"gcloud compute firewall-rules describe {name}"
        for name in found.foreign
    ]


def check_firewall(google: Google, pulumi: Pulumi) -> Iterator[Check]:
    """Check the firewall of a cluster that is up; yields nothing where there is no stack."""
    try:
        network, wanted = rules_in_state(pulumi)
        if not wanted:
            return
        found = compare(google, network, wanted)
    except PulumiError as error:
        if error.is_fault:
            yield unknown("firewall", error)
        return
    except TileforgeError as error:
        yield unknown("firewall", error)
        return
    for name, how in found.differing.items():
        yield Check(
            name=f"firewall rule {name}",
            outcome="error",
            found=f"not as the program has it: {how}",
            fix=f"Replace it: {command('orchestrate', 'up')}",
            exit_code=ExitCode.PREFLIGHT,
        )
    for name in found.foreign:
        yield Check(
            name=f"firewall rule {name}",
            outcome="warning",
            found=f"in {network}, and not the cluster program's",
            fix=f"See what it opens: gcloud compute firewall-rules describe {name}",
        )
    if not found.differing:
        yield Check(
            name=f"firewall of {network}",
            outcome="ok",
            found=f"{len(wanted)} rules as the program has them",
        )


def _inputs(step: Step) -> Any:
    return step.new.inputs if step.new is not None else None


def _rule(inputs: _Inputs) -> Rule:
    return Rule(
        direction=inputs.direction,
        priority=inputs.priority,
        sources=frozenset(inputs.sources),
        destinations=frozenset(inputs.destinations),
        source_tags=frozenset(inputs.source_tags),
        target_tags=frozenset(inputs.target_tags),
        source_accounts=frozenset(inputs.source_accounts),
        target_accounts=frozenset(inputs.target_accounts),
        allowed=_traffic((each.protocol, each.ports or ()) for each in inputs.allows),
        denied=_traffic((each.protocol, each.ports or ()) for each in inputs.denies),
        disabled=inputs.disabled,
    )


def _rule_there(item: Any) -> Rule:
    return Rule(
        direction=item.direction or "INGRESS",
        priority=item.priority,
        sources=frozenset(item.source_ranges),
        destinations=frozenset(item.destination_ranges),
        source_tags=frozenset(item.source_tags),
        target_tags=frozenset(item.target_tags),
        source_accounts=frozenset(item.source_service_accounts),
        target_accounts=frozenset(item.target_service_accounts),
        allowed=_traffic((each.I_p_protocol, each.ports) for each in item.allowed),
        denied=_traffic((each.I_p_protocol, each.ports) for each in item.denied),
        disabled=item.disabled,
    )


def _traffic(each: Iterable[tuple[str, Iterable[str]]]) -> Traffic:
    return frozenset((protocol.lower(), tuple(sorted(ports))) for protocol, ports in each)


def _words(value: Any) -> str:
    if not isinstance(value, frozenset):
        return str(value)
    texts = [
        each if isinstance(each, str) else ":".join((each[0], ",".join(each[1]))).rstrip(":")
        for each in value
    ]
    return printable(", ".join(sorted(texts)) or "none")
