"""Reads a stack's state: the resources that Pulumi created, as proof of ownership."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from payload.core.errors import ConfigError
from payload.core.suggested_commands import command
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build
from payload.orchestrate.clouds.gcp.ownership import Ownership
from payload.orchestrate.clouds.gcp.removal_order import labels_in_description
from payload.orchestrate.clouds.pulumi.cli_errors import NEWER
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.events import name_of, type_of, urn_field
from payload.orchestrate.clouds.pulumi.resource_types import BUCKET, INSTANCE
from payload.stack.cluster_identity import identity_in

# Excludes key permissions: their ID has the key's project, which can differ from the cluster's.
_PROJECT = re.compile(
    r"projects/([^/]+)/(?:global|regions|zones|serviceAccounts|managedZones|locations/[^/]+/instances)/"
)


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
    """The stack's resources.

    Two states are equal if no resource was created or removed between them.
    """

    machines: tuple[str, ...]
    """Names of the machines."""
    parts: tuple[tuple[str, str | None], ...]
    """URN and ID (or None) of each resource; the ID changes if a resource is rebuilt."""
    identities: tuple[str, ...] = ()
    """The cluster's identities, from labels and descriptions; empty if an older version built the
    cluster. If identity.json is lost, `pulumi up` changes the identity in labels, but not in
    descriptions. So a stack can have two identities."""

    @property
    def projects(self) -> tuple[str, ...]:
        """Return the projects of the resources."""
        found = (_PROJECT.match(known or "") for _, known in self.parts)
        return tuple(dict.fromkeys(each[1] for each in found if each))

    @property
    def bucket(self) -> str | None:
        """Return the name of the bucket that `bucket: create` created, or None."""
        return next((known for urn, known in self.parts if type_of(urn) == BUCKET), None)


def stack_state(pulumi: Pulumi) -> StackState:
    """Return the current state in Pulumi's backend. Raises PulumiError, ConfigError."""
    resources = _resources(pulumi)
    return StackState(
        machines=tuple(machine_names(each.urn for each in resources)),
        parts=tuple((each.urn, each.id) for each in resources),
        identities=tuple(dict.fromkeys(filter(None, map(_identity_of, resources)))),
    )


def inputs_in_state(pulumi: Pulumi, kind: str) -> list[Mapping[str, Any]]:
    """Return the cluster program's last inputs of every resource of this type.

    Raises PulumiError, ConfigError.
    """
    return [each.inputs or {} for each in _resources(pulumi) if type_of(each.urn) == kind]


def _resources(pulumi: Pulumi) -> Sequence[_Resource]:
    where = _where("stack export")
    text = pulumi.ask("stack", "export")
    export = build(_Export, parse_json(text, where=where, fix=NEWER), where=where, fix=NEWER)
    return (export.deployment or _Deployment()).resources or ()


def _identity_of(resource: _Resource) -> str | None:
    inputs = resource.inputs or {}
    labels = inputs.get("labels")
    # A value that is secret or damaged is not text.
    labelled = labels.items() if isinstance(labels, dict) else ()
    described = labels_in_description(str(inputs.get("description") or ""))
    return identity_in({key: str(value) for key, value in labelled}) or identity_in(described)


def machine_names(urns: Iterable[str]) -> list[str]:
    """Return the distinct names of the machines among these URNs."""
    return list(dict.fromkeys(name_of(urn) for urn in urns if type_of(urn) == INSTANCE))


def _where(arguments: str) -> str:
    return f"output of `pulumi {arguments}` cannot be parsed"


def ownership_of(state: StackState, *identities: str | None, project: str) -> Ownership:
    """Return the proof of ownership from the stack's state and from further identities."""
    return Ownership(
        identities=frozenset(filter(None, (*state.identities, *identities))),
        known=tuple(found for _, found in state.parts if found),
        project=project,
    )


def refuse_another_project(state: StackState, project: str) -> None:
    """Raise ConfigError if the stack has resources outside the configured project.

    Pulumi would destroy and rebuild everything, and the IDs in the state prove nothing in this
    project.
    """
    if others := [each for each in state.projects if each != project]:
        raise ConfigError(
            f"project = {project!r}: the stack has resources in project {', '.join(others)}, so "
            "nothing was built. Use another stack for this project: pulumi stack init NAME; or "
            f"destroy its resources first: {command('orchestrate', 'down')}"
        )
