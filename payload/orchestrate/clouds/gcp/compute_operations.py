"""Waits for long-running operations of Compute Engine."""

from __future__ import annotations

import time
from typing import Any

from payload.core.errors import CloudError
from payload.core.one_line import joined_lines
from payload.orchestrate.clouds.gcp.client import Google, request_of

_OPERATION_S = 300.0
# Google delays the response until the operation is done, for up to two minutes.
_WAIT_S = 150.0


def operation_deadline() -> float:
    """Return the deadline of an operation that starts now, in monotonic seconds."""
    return time.monotonic() + _OPERATION_S


def wait_for_operation(
    google: Google,
    operation: Any,
    what: str,
    *,
    operations: str,
    place: dict[str, str],
    ends: float,
) -> None:
    """Wait until a Compute Engine operation is done, or until `ends` (monotonic, seconds).

    Raises CloudError if the operation fails or exceeds the deadline, and the errors of Google.call.
    """
    # Not client.delete(): the operation it returns polls the public address and ignores
    # api_endpoint (google-cloud-compute 1.48, _zone_operations_client).
    client = google.compute(f"{operations}Operations")
    request = request_of(f"Wait{operations}OperationRequest", operation=operation.name, **place)
    is_late = False
    # A status that the library does not know is a plain integer without `name`.
    while getattr(operation.status, "name", "") != "DONE":
        if is_late:
            raise CloudError(
                f"{what}: not finished after {_OPERATION_S:g} s. Repeat the command later."
            )
        # Poll at least once, because waits for earlier operations can have used up the time.
        is_late = time.monotonic() > ends
        operation = google.call(
            what, lambda: client.wait(request=request, retry=None, timeout=_WAIT_S)
        )
    errors = [joined_lines(error.message) for error in operation.error.errors]
    if errors or operation.http_error_status_code:
        raise CloudError(f"{what}: {' '.join(errors) or operation.http_error_message}")
