"""The stack's machines: those in Pulumi's state, and those that a `pulumi up` would end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from payload.orchestrate.cloud.pulumi_cli import NEWER, Pulumi, PulumiError
from payload.orchestrate.cloud.pulumi_events import Update, name_of, type_of, urn_field
from payload.untrusted import build, parse_json

INSTANCE = "gcp:compute/instance:Instance"
# Operations of a preview that end what is there; a replacement is one of them.
_ENDS = ("delete", "replace", "delete-replaced")


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
    """What Pulumi has made for the stack. Equal ones: nobody has built or removed anything."""

    machines: tuple[str, ...]
    """Their names."""
    parts: tuple[tuple[str, str | None], ...]
    """URN and, where the cloud gave one, id of everything; a thing made anew has another id."""


def stack_state(pulumi: Pulumi) -> StackState:
    """Return the state that Pulumi's backend has now. Raises PulumiError, ConfigError."""
    resources = _resources(pulumi)
    return StackState(
        machines=tuple(_names(each.urn for each in resources)),
        parts=tuple((each.urn, each.id) for each in resources),
    )


def inputs_in_state(pulumi: Pulumi, kind: str) -> list[Mapping[str, Any]]:
    """Return what the cluster program last asked for of every resource of this type.

    Raises PulumiError, ConfigError.
    """
    return [each.inputs or {} for each in _resources(pulumi) if type_of(each.urn) == kind]


def machines_that_go(preview: Update) -> list[str]:
    """Return those that `pulumi up` would remove or make anew. Raises PulumiError.

    An event that cannot be read may be the one that ends a machine.
    """
    if preview.unreadable:
        raise PulumiError(f"`pulumi preview`: {preview.unreadable} {NEWER}", "other")
    return _names(step.urn for step in preview.steps if step.op in _ENDS)


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


def _names(urns: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name_of(urn) for urn in urns if type_of(urn) == INSTANCE))


def _where(words: str) -> str:
    return f"`pulumi {words}` printed what cannot be read"
