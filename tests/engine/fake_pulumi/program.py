"""Runs the cluster program under Pulumi's mocks, with the deployment as engine."""

from __future__ import annotations

import asyncio
import json
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pulumi
from google.protobuf import json_format, struct_pb2
from pulumi.runtime import mocks
from pulumi.runtime.proto import resource_pb2
from pulumi.runtime.settings import set_root_resource
from pulumi.runtime.stack import run_in_stack

from tests.engine.fake_pulumi.deployment import STACK, UNKNOWN, Deployment, Options, StoppedError
from tests.engine.provider import Sender
from tests.infra.stacks import whole

_SIGNATURE = "4dabf18193072939515e22adb298388d"
"""The key by which Pulumi marks a secret and other special values."""
Document = dict[str, Any]


def run(
    deployment: Deployment, *, folder: Path, config: Mapping[str, Any], project: str, stack: str
) -> None:
    """Run `__main__.py` in `folder`. Raises StoppedError, and the program's exceptions."""
    monitor = _Monitor(deployment)
    # Values other than text are passed as JSON.
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in config.items()}
    environment = {"PULUMI_CONFIG": json.dumps(values)}

    def program() -> None:
        runpy.run_path(str(folder / "__main__.py"), run_name="__main__")

    def said(severity: str) -> Any:
        return lambda message, *_, **__: deployment.events.diagnostic(f"{message}\n", severity)

    async def main() -> None:
        mocks.set_mocks(
            monitor.mocks,
            project=project,
            stack=stack,
            monitor=monitor,
            preview=deployment.is_preview,
        )
        # Ends the stack that this created; run_in_stack then creates the real stack.
        set_root_resource(None)  # type: ignore[arg-type]  # its type omits None
        monitor.begun = True
        await run_in_stack(program)

    with (
        mock.patch.dict("os.environ", environment),
        mock.patch("pulumi.info", said("info")),
        mock.patch("pulumi.warn", said("warning")),
    ):
        try:
            asyncio.run(main())
        except pulumi.RunError as error:
            raise ProgramError(str(error)) from None
        except Exception:
            if deployment.stopped:
                raise StoppedError from None
            raise


class ProgramError(Exception):
    """An error of the program."""


class _Cloud(mocks.Mocks):
    """Returns results of the program's calls to Google."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def new_resource(self, args: mocks.MockResourceArgs) -> tuple[str | None, Document]:
        raise AssertionError(f"{args.name} reaches the deployment")

    def call(self, args: mocks.MockCallArgs) -> tuple[Document, list[tuple[str, str]]]:
        if args.token == "gcp:organizations/getProject:getProject":
            project = args.args["projectId"]
            found = self._sender.request("GET", f"/v1/projects/{project}", None)
            return {"number": found["projectNumber"], "projectId": project}, []
        if args.token == "gcp:storage/getProjectServiceAccount:getProjectServiceAccount":
            path = f"/storage/v1/projects/{args.args['project']}/serviceAccount"
            found = self._sender.request("GET", path, None)
            return {"emailAddress": found["email_address"], "project": args.args["project"]}, []
        raise AssertionError(f"the program asks Google: {args.token}")


class _Monitor(mocks.MockMonitor):
    """The engine's side of a registration."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(_Cloud(deployment.sender))
        self._deployment = deployment
        self.begun = False

    def RegisterResource(self, request: Any) -> Any:  # noqa: N802  # Pulumi's name
        if not self.begun:
            return super().RegisterResource(request)  # type: ignore[no-untyped-call]  # pulumi's mocks have no types
        urn = self.make_urn(request.parent, request.type, request.name)
        if request.type == STACK or request.parent.rpartition("::")[0].endswith(f"::{STACK}"):
            # The stack is not part of its children's types.
            begins = "::".join(urn.split("::")[:2])
            urn = f"{begins}::{request.type}::{request.name}"
        trigger = request.replacement_trigger.string_value
        options = Options(
            ignore=tuple(request.ignoreChanges),
            replace_on=tuple(request.replaceOnChanges),
            trigger=trigger or None,
            delete_first=request.deleteBeforeReplace,
        )
        done = self._deployment.register(_resource(request, urn), options)
        is_known = bool(done.get("id")) or not done["custom"]
        values = done["inputs"] if not is_known else {**done["inputs"], **done["outputs"]}
        return resource_pb2.RegisterResourceResponse(
            urn=urn,
            id=done.get("id", ""),
            object=json_format.ParseDict(values, struct_pb2.Struct()),
        )

    def RegisterResourceOutputs(self, request: Any) -> Any:  # noqa: N802  # Pulumi's name
        if self.begun and f"::{STACK}::" in request.urn:
            self._deployment.export(request.urn, _plain(request.outputs))
        return super().RegisterResourceOutputs(request)  # type: ignore[no-untyped-call]


def _resource(request: Any, urn: str) -> Document:
    """Return the resource in the state's format."""
    found: Document = {
        "urn": urn,
        "custom": request.custom,
        "id": "",
        "type": request.type,
        "inputs": _plain(request.object),
        "outputs": {},
        "parent": request.parent,
        "dependencies": sorted(request.dependencies),
        "propertyDependencies": {
            key: sorted(each.urns) for key, each in sorted(request.propertyDependencies.items())
        },
        "provider": request.provider,
        "protect": request.protect,
        "retainOnDelete": request.retainOnDelete,
        "ignoreChanges": list(request.ignoreChanges),
    }
    kept = ("urn", "custom", "id", "inputs", "outputs", "type")
    return {key: value for key, value in found.items() if value or key in kept}


def _plain(struct: Any) -> Any:
    """Return a message's values, with integers restored and secrets unwrapped."""
    return _unmarked(whole(json_format.MessageToDict(struct)))


def _unmarked(value: Any) -> Any:
    if isinstance(value, dict):
        if _SIGNATURE in value:
            return _unmarked(value.get("value", UNKNOWN))
        return {key: _unmarked(each) for key, each in value.items()}
    return [_unmarked(each) for each in value] if isinstance(value, list) else value
