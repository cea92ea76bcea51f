"""Firewall rules of a network, as Google has them, and how two differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from payload.core.printable_text import printable
from payload.orchestrate.clouds.gcp.client import Google, request_of
from payload.orchestrate.clouds.gcp.removal_order import last_word

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
class Findings:
    """Differences from the cluster program."""

    network: str
    differing: Mapping[str, str]
    """How, by name, the program's own rules differ; one that is missing is among them."""
    foreign: tuple[str, ...]
    """Names of enabled rules in the network that the program did not make."""


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


def foreign_words(found: Findings) -> list[str]:
    """Return a line for each rule that the program did not make."""
    return [
        f"firewall rule {name} in {found.network} is not the cluster program's; see what it opens: "
        f"gcloud compute firewall-rules describe {name}"
        for name in found.foreign
    ]


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
        allowed=traffic((each.I_p_protocol, each.ports) for each in item.allowed),
        denied=traffic((each.I_p_protocol, each.ports) for each in item.denied),
        disabled=item.disabled,
    )


def traffic(each: Iterable[tuple[str, Iterable[str]]]) -> Traffic:
    """Return protocols with their ports in one order, so that equal rules are equal."""
    return frozenset((protocol.lower(), tuple(sorted(ports))) for protocol, ports in each)


def _words(value: Any) -> str:
    if not isinstance(value, frozenset):
        return str(value)
    texts = [
        each if isinstance(each, str) else ":".join((each[0], ",".join(each[1]))).rstrip(":")
        for each in value
    ]
    return printable(", ".join(sorted(texts)) or "none")
