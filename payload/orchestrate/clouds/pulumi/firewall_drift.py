"""Compares the cluster program's firewall rules with the actual rules, and repairs drift."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from payload.core.errors import CloudError, ExitCode, TileforgeError
from payload.core.suggested_commands import command
from payload.core.validation.fields import checked
from payload.core.validation.records import build
from payload.orchestrate.clouds.gcp.check_result import Check, unknown
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.firewall_rules import Rule, compare, foreign_rule_lines, traffic
from payload.orchestrate.clouds.gcp.removal import remove
from payload.orchestrate.clouds.gcp.removal_order import Resource, last_segment
from payload.orchestrate.clouds.pulumi.cli_errors import NEWER, PulumiError
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.events import Step, Update, type_of
from payload.orchestrate.clouds.pulumi.resource_types import FIREWALL
from payload.orchestrate.clouds.pulumi.stack_state import inputs_in_state

_DEFAULT_PRIORITY = 1000
_ENDS = ("delete", "delete-replaced", "discard", "refresh", "replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traffic:
    protocol: str
    ports: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """The inputs of a cluster program's firewall rule, as the engine's events contain them."""

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


def expected_rules(update: Update) -> tuple[str, dict[str, Rule]]:
    """Return the network's name and the cluster program's rules by name.

    Raises ConfigError for a malformed event.
    """
    return _rules(
        _inputs(step)
        for step in update.steps
        if type_of(step.urn) == FIREWALL and step.op not in _ENDS
    )


def rules_in_state(pulumi: Pulumi) -> tuple[str, dict[str, Rule]]:
    """Return the network's name and the rules in the stack's state; both empty without a cluster.

    Raises PulumiError, ConfigError.
    """
    return _rules(inputs_in_state(pulumi, FIREWALL))


def _rules(each_inputs: Iterable[Any]) -> tuple[str, dict[str, Rule]]:
    network, rules = "", {}
    for raw in each_inputs:
        inputs = build(_Inputs, raw, where="a firewall rule of the stack", fix=NEWER)
        rules[inputs.name] = _rule(inputs)
        network = last_segment(inputs.network) or network
    return network, rules


def reconcile_firewall(
    google: Google, update: Update, *, again: Callable[[], Update], talk: Console
) -> None:
    """Compare the firewall rules, replace each rule that differs, and compare again.

    `again` repeats `pulumi up`, which creates the removed rules again. Raises CloudError with the
    names of rules that still differ.
    """
    network, expected = expected_rules(update)
    if not network:
        return
    found = compare(google, network, expected)
    if found.differing:
        for name, how in found.differing.items():
            talk.print(
                f"firewall rule {name} differs from the cluster program's rule: {how}; replacing it"
            )
        gone = [Resource(kind="firewall rule", name=n, location="global") for n in found.differing]
        failed = remove(google, gone)
        if failed:
            raise CloudError(f"firewall: {'; '.join(failed)} {_CLOSE}")
        network, expected = expected_rules(again())
        found = compare(google, network, expected)
    for line in foreign_rule_lines(found):
        talk.print(f"warning: {line}")
    if found.differing:
        still = "; ".join(f"{name}: {how}" for name, how in found.differing.items())
        raise CloudError(f"firewall of {network}: {still}. {_CLOSE}")


_CLOSE = f"If this is not intended, remove the cluster: {command('orchestrate', 'down')}"


def check_firewall(google: Google, pulumi: Pulumi) -> Iterator[Check]:
    """Check the firewall of a cluster that is up; yield nothing if there is no stack."""
    try:
        network, expected = rules_in_state(pulumi)
        if not expected:
            return
        found = compare(google, network, expected)
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
            found=f"differs from the cluster program's rule: {how}",
            fix=f"Replace it: {command('orchestrate', 'up')}",
            exit_code=ExitCode.PREFLIGHT,
        )
    for name in found.foreign:
        yield Check(
            name=f"firewall rule {name}",
            outcome="warning",
            found=f"in {network}, but not created by the cluster program",
            fix=f"Check what the rule allows: gcloud compute firewall-rules describe {name}",
        )
    if not found.differing:
        yield Check(
            name=f"firewall of {network}",
            outcome="ok",
            found=f"{len(expected)} rules equal to the cluster program's",
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
        allowed=traffic((each.protocol, each.ports or ()) for each in inputs.allows),
        denied=traffic((each.protocol, each.ports or ()) for each in inputs.denies),
        disabled=inputs.disabled,
    )
