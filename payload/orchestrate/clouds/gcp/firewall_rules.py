"""Reads a network's firewall rules from Google and compares them with the expected rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from payload.core.printable_text import printable
from payload.orchestrate.clouds.gcp.client import Google, request_of
from payload.orchestrate.clouds.gcp.removal_order import last_segment

Traffic = frozenset[tuple[str, tuple[str, ...]]]
"""Protocols with their ports; an empty tuple means all ports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The traffic that a firewall rule allows or denies."""

    direction: str
    priority: int
    sources: frozenset[str]
    """Address ranges from which the traffic comes."""
    destinations: frozenset[str]
    source_tags: frozenset[str]
    target_tags: frozenset[str]
    source_accounts: frozenset[str]
    target_accounts: frozenset[str]
    allowed: Traffic
    denied: Traffic
    disabled: bool

    def differences(self, actual: Rule) -> str:
        """Return a description of how the actual rule differs; empty if the rules are equal."""
        return "; ".join(
            f"{each.name.replace('_', ' ')} {_text(getattr(actual, each.name))} instead of "
            f"{_text(getattr(self, each.name))}"
            for each in fields(self)
            if getattr(self, each.name) != getattr(actual, each.name)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Differences between the actual rules and the rules of the cluster program."""

    network: str
    differing: Mapping[str, str]
    """By rule name, a description of the difference, for each rule of the cluster program that was
    changed or is missing."""
    foreign: tuple[str, ...]
    """Names of the network's enabled rules that the cluster program did not create."""


def compare(google: Google, network: str, expected: Mapping[str, Rule]) -> Findings:
    """Compare the rules of `network` with `expected`. Raises CloudError, CloudAuthError."""
    actual = actual_rules(google, network)
    differing = {}
    for name, rule in expected.items():
        found = actual.get(name)
        difference = "it is missing" if found is None else rule.differences(found)
        if difference:
            differing[name] = difference
    foreign = [name for name, rule in actual.items() if name not in expected and not rule.disabled]
    return Findings(network=network, differing=differing, foreign=tuple(sorted(foreign)))


def actual_rules(google: Google, network: str) -> dict[str, Rule]:
    """Return the firewall rules that exist in the network of this name."""
    client = google.compute("Firewalls")
    request = request_of("ListFirewallsRequest", project=google.project, max_results=500)
    return {
        printable(item.name): _rule(item)
        for page in google.pages("listing firewall rules", client.list, request)
        for item in page.items
        if last_segment(item.network) == network
    }


def foreign_rule_lines(found: Findings) -> list[str]:
    """Return a line for each rule that the cluster program did not create."""
    return [
        f"firewall rule {name} in {found.network} was not created by the cluster program. Check "
        f"what the rule allows: gcloud compute firewall-rules describe {name}"
        for name in found.foreign
    ]


def _rule(item: Any) -> Rule:
    return Rule(
        direction=item.direction or "INGRESS",
        priority=item.priority,
        sources=frozenset(item.source_ranges),
        destinations=frozenset(item.destination_ranges),
        source_tags=frozenset(item.source_tags),
        target_tags=frozenset(item.target_tags),
        source_accounts=frozenset(item.source_service_accounts),
        target_accounts=frozenset(item.target_service_accounts),
        allowed=traffic((each.I_p_protocol, each.ports) for each in item.allowed),
        denied=traffic((each.I_p_protocol, each.ports) for each in item.denied),
        disabled=item.disabled,
    )


def traffic(each: Iterable[tuple[str, Iterable[str]]]) -> Traffic:
    """Return protocols with sorted ports, so that equivalent rules compare equal."""
    return frozenset((protocol.lower(), tuple(sorted(ports))) for protocol, ports in each)


def _text(value: Any) -> str:
    if not isinstance(value, frozenset):
        return str(value)
    texts = [
        each if isinstance(each, str) else ":".join((each[0], ",".join(each[1]))).rstrip(":")
        for each in value
    ]
    return printable(", ".join(sorted(texts)) or "none")
