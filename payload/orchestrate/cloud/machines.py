"""The stack's machines: those in Pulumi's state, and those that a `pulumi up` would end."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from payload.orchestrate.cloud.pulumi_cli import NEWER, Pulumi
from payload.untrusted import build, checked, parse_json

_INSTANCE = "gcp:compute/instance:Instance"
# Operations of a preview that end what is there; a replacement is one of them.
_ENDS = ("delete", "replace", "delete-replaced")
_PREVIEW_S = 600.0
# urn:pulumi:STACK::PROJECT::PARENT'S TYPE$TYPE::NAME
_URN = re.compile(r"urn:pulumi:[^\s:]+::[^\s:]+::(?:[^\s:]|:(?!:))+::[ -~]+")


def _urn() -> str:
    urn: str = checked(pattern=_URN, wanted="a URN of Pulumi's")
    return urn


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resource:
    urn: str = _urn()
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Deployment:
    resources: tuple[_Resource, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Export:
    deployment: _Deployment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    op: str
    urn: str = _urn()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preview:
    steps: tuple[_Step, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StackState:
    """What Pulumi has made for the stack. Equal ones: nobody has built or removed anything."""

    machines: tuple[str, ...]
    """Their names."""
    parts: tuple[tuple[str, str | None], ...]
    """URN and, where the cloud gave one, id of everything; a thing made anew has another id."""


def stack_state(pulumi: Pulumi) -> StackState:
    """Return the state that Pulumi's backend has now. Raises PulumiError, ConfigError."""
    where = _where("stack export")
    text = pulumi.ask("stack", "export")
    export = build(_Export, parse_json(text, where=where, fix=NEWER), where=where, fix=NEWER)
    resources = (export.deployment or _Deployment()).resources or ()
    return StackState(
        machines=tuple(_names(each.urn for each in resources)),
        parts=tuple((each.urn, each.id) for each in resources),
    )


def machines_that_go(pulumi: Pulumi) -> list[str]:
    """Return those that `pulumi up` would remove or make anew. Raises PulumiError, ConfigError.

    A preview once more, for programs: the one for people is no format.
    """
    document = pulumi.ask_json("preview", timeout_s=_PREVIEW_S)
    preview = build(_Preview, document, where=_where("preview --json"), fix=NEWER)
    return _names(step.urn for step in preview.steps or () if step.op in _ENDS)


def _names(urns: Iterable[str]) -> list[str]:
    parts = [urn.split("::", 3) for urn in urns]
    found = [each[3] for each in parts if each[2].rpartition("$")[2] == _INSTANCE]
    return list(dict.fromkeys(found))


def _where(words: str) -> str:
    return f"`pulumi {words}` printed what cannot be read"
