"""Runs the whole Pulumi program under mocks, and records every resource."""

from __future__ import annotations

import asyncio
import contextvars
import json
import runpy
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from pulumi.runtime import mocks, rpc
from pulumi.runtime.settings import set_root_resource
from pulumi.runtime.stack import run_in_stack

from infra.config import PROJECT
from tests.support.identities import write_cluster_identity

ROOT = Path(__file__).resolve().parents[2]
NOW_UNIX = 1_800_000_000
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDQC5oFuLD7OiNkh4CSiD2bpP7Kvt2AR4GIGfBKesYne operator"
HEAD_ADDRESS = "203.0.113.9"
NUMBER = "415104041262"
"""The project's number."""

FILESTORE = "gcp:filestore/instance:Instance"

Plain = dict[str, Any]

CASES: dict[str, Plain] = {
    "default": {},
    "spot": {"spot": "true"},
    "direct": {"accessMode": "direct", "operatorCidr": "198.51.100.7/32"},
    "oslogin": {"accessMode": "oslogin", "osLoginUser": "ada_example_com"},
    "no-nat": {"egress": "none", "wheelhouse": "/srv/wheels"},
    "c4": {"machineType": "c4-highmem-48", "tier1": True, "maxHourlyUsd": "none"},
    "h3": {"machineType": "h3-standard-88", "maxHourlyUsd": "none"},
    "one-node": {"nodeCount": 1},
    "sixteen-nodes": {"nodeCount": 16},
    "bucket": {
        "bucket": "create",
        "kmsKey": "projects/p/locations/us-central1/keyRings/r/cryptoKeys/k",
        "headDiskGb": 200,
        "labels": ["owner=ada"],
    },
    "nfs": {"sharedStorage": "nfs"},
    "filestore": {"sharedStorage": "filestore", "maxHourlyUsd": "none"},
    "confidential": {"machineType": "c3-standard-8", "confidential": True, "maxHourlyUsd": "none"},
}
"""Settings of the stacks whose complete graphs are in tests/golden."""


@dataclass
class Recorded:
    """The resources that the program created."""

    resources: list[Plain] = field(default_factory=list)
    """Type, name, parent, inputs and options of each resource, in a stable order."""
    outputs: Plain = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def of_type(self, suffix: str) -> list[Plain]:
        """Return the inputs of every resource whose type ends with this, such as `Firewall`."""
        return [
            resource["inputs"]
            for resource in self.resources
            if resource["type"].rpartition(":")[2] == suffix and resource["type"] != FILESTORE
        ]


class _Cloud(mocks.Mocks):
    """Returns Google's values that the program reads."""

    def new_resource(self, args: mocks.MockResourceArgs) -> tuple[str | None, Plain]:
        state = dict(args.inputs)
        if args.typ == "gcp:serviceaccount/account:Account":
            state["email"] = f"{state['accountId']}@{state.get('project', 'p')}.example"
        if args.typ == "gcp:storage/bucket:Bucket":
            state["name"] = f"{args.name}-1a2b3c4"
        if args.typ == FILESTORE:
            for network in state["networks"]:
                network["ipAddresses"] = ["10.60.1.2"]
        if args.typ == "gcp:compute/instance:Instance":
            for interface in state["networkInterfaces"]:
                for config in interface.get("accessConfigs") or []:
                    config["natIp"] = HEAD_ADDRESS
        state["selfLink"] = f"https://example/{args.name}"
        return f"{args.inputs.get('name', args.name)}-id", state

    def call(self, args: mocks.MockCallArgs) -> tuple[Plain, list[tuple[str, str]]]:
        # Only names of a key's service agents; see infra/gcp/kms_key_access.py.
        if args.token == "gcp:organizations/getProject:getProject":
            return {"number": NUMBER, "projectId": args.args["projectId"]}, []
        if args.token == "gcp:storage/getProjectServiceAccount:getProjectServiceAccount":
            address = f"service-{NUMBER}@gs-project-accounts.iam.gserviceaccount.com"
            return {"emailAddress": address, "project": args.args["project"]}, []
        raise AssertionError(f"the program asks Google: {args.token}")


class _Monitor(mocks.MockMonitor):
    """Pulumi's mock monitor, which records all requests."""

    def __init__(self) -> None:
        super().__init__(_Cloud())
        self.recorded: list[Plain] = []

    def RegisterResource(self, request: Any) -> Any:  # noqa: N802  # Pulumi's name
        answer = super().RegisterResource(request)  # type: ignore[no-untyped-call]  # pulumi's mocks have no types
        if request.type != "pulumi:pulumi:Stack":
            self.recorded.append(
                {
                    "type": request.type,
                    "name": request.name,
                    "parent": request.parent.rpartition("::")[2],
                    "inputs": whole(rpc.deserialize_properties(request.object)),
                    "options": _options(request),
                }
            )
        return answer

    def RegisterResourceOutputs(self, request: Any) -> Any:  # noqa: N802  # Pulumi's name
        if "pulumi:pulumi:Stack" in request.urn:
            self.outputs = whole(rpc.deserialize_properties(request.outputs))
        return super().RegisterResourceOutputs(request)  # type: ignore[no-untyped-call]  # pulumi's mocks have no types

    outputs: Plain = {}  # noqa: RUF012  # replaced, never changed


def deploy(
    settings: Mapping[str, Any],
    *,
    folder: Path,
    stack: str = "dev",
    public_key: str = KEY,
    preview: bool = False,
) -> Recorded:
    """Run the program's __main__.py with these settings in an empty folder.

    Raises the program's exceptions.
    """
    key = folder / ".cluster" / stack / "id_ed25519.pub"
    key.parent.mkdir(parents=True, exist_ok=True)
    key.write_text(f"{public_key}\n", encoding="utf-8")
    write_cluster_identity(folder, stack, stack=stack)
    # The program stores a cluster's files in its own folder.
    shutil.copy(ROOT / "__main__.py", folder)
    with suppress(FileExistsError):
        (folder / "bootstrap").symlink_to(ROOT / "bootstrap")
    values = {"project": "my-project", "operatorPublicKeyFile": str(key)} | dict(settings)
    environment = {"PULUMI_CONFIG": json.dumps(as_pulumi_hands_over(values))}
    monitor, recorded = _Monitor(), Recorded()

    def program() -> None:
        runpy.run_path(str(folder / "__main__.py"), run_name="__main__")

    async def run() -> None:
        mocks.set_mocks(
            monitor.mocks, project=PROJECT, stack=stack, monitor=monitor, preview=preview
        )
        # Ends the stack that this created; run_in_stack then creates the real stack.
        set_root_resource(None)  # type: ignore[arg-type]  # its type omits None
        await run_in_stack(program)

    with (
        mock.patch.dict("os.environ", environment),
        mock.patch("time.time", lambda: float(NOW_UNIX)),
        mock.patch("pulumi.info", recorded.log.append),
    ):
        # Pulumi's state of a run is in its context.
        contextvars.Context().run(asyncio.run, run())
    recorded.resources = sorted(monitor.recorded, key=lambda found: (found["type"], found["name"]))
    recorded.outputs = monitor.outputs
    return recorded


def as_pulumi_hands_over(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings by full key; values other than text as JSON."""
    return {
        f"{PROJECT}:{key}": value if isinstance(value, str) else json.dumps(value)
        for key, value in settings.items()
    }


def _options(request: Any) -> Plain:
    """Return the options that affect a resource's later updates."""
    found = {
        "protect": request.protect,
        "retainOnDelete": request.retainOnDelete,
        "deleteBeforeReplace": request.deleteBeforeReplace,
        "ignoreChanges": list(request.ignoreChanges),
        "replaceOnChanges": list(request.replaceOnChanges),
        "replacementTrigger": request.replacement_trigger.string_value,
        "provider": request.provider.rpartition("::")[2],
        "dependsOn": sorted(urn.rpartition("::")[2] for urn in request.dependencies),
    }
    return {name: value for name, value in found.items() if value}


def whole(value: Any) -> Any:
    """Return the value with floats such as 3.0, as transmitted, converted to 3."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: whole(inner) for key, inner in sorted(value.items())}
    return [whole(inner) for inner in value] if isinstance(value, list) else value
