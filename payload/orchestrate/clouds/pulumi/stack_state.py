"""A stack's state: the resources that Pulumi has made, and what that proves."""

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
from payload.orchestrate.clouds.gcp.removal_order import marks
from payload.orchestrate.clouds.pulumi.cli_errors import NEWER
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.events import name_of, type_of, urn_field
from payload.orchestrate.clouds.pulumi.resource_types import BUCKET, INSTANCE
from payload.stack.cluster_identity import identity_in

# A right to a key has an id that begins with the key's project, which may be another one.
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
        return next((known for urn, known in self.parts if type_of(urn) == BUCKET), None)


def stack_state(pulumi: Pulumi) -> StackState:
    """Return the state that Pulumi's backend has now. Raises PulumiError, ConfigError."""
    resources = _resources(pulumi)
    return StackState(
        machines=tuple(machine_names(each.urn for each in resources)),
        parts=tuple((each.urn, each.id) for each in resources),
        identities=tuple(dict.fromkeys(filter(None, map(_identity_of, resources)))),
    )


def inputs_in_state(pulumi: Pulumi, kind: str) -> list[Mapping[str, Any]]:
    """Return what the cluster program last asked for of every resource of this type.

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
    # What is secret or damaged in a state is no text.
    told = labels.items() if isinstance(labels, dict) else ()
    described = marks(str(inputs.get("description") or ""))
    return identity_in({key: str(value) for key, value in told}) or identity_in(described)


def machine_names(urns: Iterable[str]) -> list[str]:
    """Return the names of the machines among these URNs, each once."""
    return list(dict.fromkeys(name_of(urn) for urn in urns if type_of(urn) == INSTANCE))


def _where(words: str) -> str:
    return f"`pulumi {words}` printed what cannot be read"


def ownership_of(state: StackState, *identities: str | None, project: str) -> Ownership:
    """Return what the stack's state and these identities prove of a project's resources."""
    return Ownership(
        identities=frozenset(filter(None, (*state.identities, *identities))),
        known=tuple(found for _, found in state.parts if found),
        project=project,
    )


def refuse_another_project(state: StackState, project: str) -> None:
    """Raise ConfigError where the stack has resources in another project than the config's.

    Pulumi would destroy and build all of it; and no name that the stack knows is proof here.
    """
    if others := [each for each in state.projects if each != project]:
        raise ConfigError(
            f"project = {project!r}: the stack has resources in project {', '.join(others)}, so "
            "nothing was built. Use another stack for this project: pulumi stack init NAME; or "
            f"destroy those first: {command('orchestrate', 'down')}"
        )
