"""Converts the rules of infra.gcp.security_rules to Pulumi policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pulumi_policy import (
    EnforcementLevel,
    Policy,
    PolicyConfigSchema,
    PolicyPack,
    PolicyResource,
    ReportViolation,
    ResourceValidationArgs,
    ResourceValidationPolicy,
    StackValidationArgs,
    StackValidationPolicy,
)
from pulumi_policy.proxy import UnknownValueError

from infra.gcp.node_and_cost_limits import cost_problems, number_of_nodes
from infra.gcp.security_checks import NOT_KNOWN, Resource
from infra.gcp.security_rules import RULES, Rule, applies

_LEVELS = {"mandatory": EnforcementLevel.MANDATORY, "advisory": EnforcementLevel.ADVISORY}


def policies() -> list[Policy]:
    """Return one policy for each security rule and each limit."""
    rules: list[Policy] = [_of_rule(rule) for rule in RULES]
    return [*rules, _limit_of_nodes(), _limit_of_price()]


def serve() -> None:
    """Serve Pulumi's requests until Pulumi ends this process."""
    PolicyPack("tileforge", policies(), enforcement_level=EnforcementLevel.MANDATORY)


def plain(resources: Sequence[PolicyResource]) -> list[Resource]:
    """Return the resources as plain dictionaries for the rules."""
    return [
        {"type": found.resource_type, "name": found.name, "inputs": known(found.props)}
        for found in resources
    ]


def known(value: Any) -> Any:
    """Return plain lists and dictionaries, with NOT_KNOWN for values that only `up` determines."""
    if isinstance(value, Mapping):
        return {key: _known_item(value, key) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_known_item(value, index) for index in range(len(value))]
    return value


def _known_item(container: Any, key: Any) -> Any:
    try:
        return known(container[key])
    except UnknownValueError:
        return NOT_KNOWN


def _of_rule(rule: Rule) -> Policy:
    numbers = ", ".join(
        part for part in (f"CIS {rule.cis}" if rule.cis else "", rule.tools) if part
    )
    description = f"{rule.holds}{f' ({numbers})' if numbers else ''}"

    def check_one(args: ResourceValidationArgs, report: ReportViolation) -> None:
        if rule.problems and applies(rule, args.resource_type):
            found: Resource = {
                "type": args.resource_type,
                "name": args.name,
                "inputs": known(args.props),
            }
            for problem in rule.problems(found):
                report(f"{args.name}: {problem}", None)

    def check_all(args: StackValidationArgs, report: ReportViolation) -> None:
        seen = [found for found in plain(args.resources) if applies(rule, str(found["type"]))]
        for problem in rule.stack_problems(seen) if rule.stack_problems else ():
            report(problem, None)

    level = _LEVELS[rule.level]
    if rule.stack_problems:
        return StackValidationPolicy(rule.name, description, check_all, level)
    return ResourceValidationPolicy(rule.name, description, check_one, level)


def _limit_of_nodes() -> Policy:
    def check(args: StackValidationArgs, report: ReportViolation) -> None:
        most = int(args.get_config().get("most", 16))
        nodes = number_of_nodes(plain(args.resources))
        if nodes > most:
            report(f"{nodes} nodes, more than the limit of {most}", None)

    return StackValidationPolicy(
        "maximum-nodes",
        "a stack's number of machines is within the limit",
        check,
        EnforcementLevel.MANDATORY,
        PolicyConfigSchema({"most": {"type": "integer", "default": 16}}),
    )


def _limit_of_price() -> Policy:
    def check(args: StackValidationArgs, report: ReportViolation) -> None:
        most = float(args.get_config().get("usd", 25))
        for problem in cost_problems(plain(args.resources), most_usd=most):
            report(problem, None)

    return StackValidationPolicy(
        "maximum-price",
        "the cost per hour of a stack's machines and disks is within the limit",
        check,
        EnforcementLevel.MANDATORY,
        PolicyConfigSchema({"usd": {"type": "number", "default": 25}}),
    )
