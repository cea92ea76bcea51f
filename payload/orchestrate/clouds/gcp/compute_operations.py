"""Operations of Compute Engine, which end some time after their request."""

from __future__ import annotations

import time
from typing import Any

from payload.core.errors import CloudError
from payload.core.one_line import joined_lines
from payload.orchestrate.clouds.gcp.client import Google, request_of

_OPERATION_S = 300.0
# Google holds the answer back for up to two minutes, until the operation is done.
_WAIT_S = 150.0


def operation_deadline() -> float:
    """Return when an operation that begins now has to be done, in monotonic seconds."""
    return time.monotonic() + _OPERATION_S


def see_to_its_end(
    google: Google,
    operation: Any,
    what: str,
    *,
    operations: str,
    place: dict[str, str],
    ends: float,
) -> None:
    """Wait until one of Compute Engine's operations is done, or until `ends` (monotonic, seconds).

    Raises CloudError when it fails or takes longer, and as Google.ask does.
    """
    # Not client.delete(): what it returns asks the public address, whatever api_endpoint says
    # (google-cloud-compute 1.48, _zone_operations_client).
    client = google.compute(f"{operations}Operations")
    request = request_of(f"Wait{operations}OperationRequest", operation=operation.name, **place)
    is_late = False
    # A status that the library does not know is a bare number.
    while getattr(operation.status, "name", "") != "DONE":
        if is_late:
            raise CloudError(f"{what}: it is not done after {_OPERATION_S:g} s. Look again later.")
        # Asked once even when the time is over, which others of its kind may have taken.
        is_late = time.monotonic() > ends
        operation = google.ask(
            what, lambda: client.wait(request=request, retry=None, timeout=_WAIT_S)
        )
    said = [joined_lines(error.message) for error in operation.error.errors]
    if said or operation.http_error_status_code:
        raise CloudError(f"{what}: {' '.join(said) or operation.http_error_message}")
