"""The stack's machines: those in Pulumi's state, and those that a `pulumi up` would end."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from payload.errors import ConfigError
from payload.orchestrate.cloud.pulumi_cli import Pulumi

_INSTANCE = "gcp:compute/instance:Instance"
# Operations of a preview that end what is there; a replacement is one of them.
_ENDS = ("delete", "replace", "delete-replaced")
_PREVIEW_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StackState:
    """What Pulumi has made for the stack. Equal ones: nobody has built or removed anything."""

    machines: tuple[str, ...]
    """Their names."""
    parts: tuple[tuple[str, str | None], ...]
    """URN and, where the cloud gave one, id of everything; a thing made anew has another id."""


def stack_state(pulumi: Pulumi) -> StackState:
    """The state that Pulumi's backend has now. Raises PulumiError, ConfigError."""
    words = ("stack", "export")
    try:
        deployment = json.loads(pulumi.ask(*words)).get("deployment") or {}
        resources = deployment.get("resources") or []
        return StackState(
            machines=tuple(_names(resources)),
            parts=tuple((each["urn"], each.get("id")) for each in resources),
        )
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise _unreadable(" ".join(words), error) from None


def machines_that_go(pulumi: Pulumi) -> list[str]:
    """Names of those that `pulumi up` would remove or make anew. Raises PulumiError, ConfigError.

    A preview once more, for programs: the one for people is no format.
    """
    document = pulumi.ask_json("preview", timeout_s=_PREVIEW_S)
    try:
        steps = document.get("steps") or []
        return _names(step for step in steps if step["op"] in _ENDS)
    except (AttributeError, TypeError, KeyError) as error:
        raise _unreadable("preview --json", error) from None


def _names(resources: Iterable[dict[str, Any]]) -> list[str]:
    # urn:pulumi:STACK::PROJECT::PARENT'S TYPE$TYPE::NAME
    parts = [resource["urn"].split("::") for resource in resources]
    found = [each[3] for each in parts if each[2].rpartition("$")[2] == _INSTANCE]
    return list(dict.fromkeys(found))


def _unreadable(words: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"`pulumi {words}` printed what cannot be read ({error!r}). See that it is Pulumi 3.200 or "
        "newer: pulumi version"
    )
