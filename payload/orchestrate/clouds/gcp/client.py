"""Client for one Google Cloud project: credentials, retries and error messages."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

from payload.core.errors import CloudAuthError, CloudError, ConfigError, TileforgeError
from payload.core.one_line import joined_lines
from payload.core.printable_text import shown
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build
from payload.orchestrate.clouds.gcp.endpoints import Endpoints, Service
from payload.orchestrate.clouds.gcp.error_catalog import access_refusal, other_refusal
from payload.stack.google_name_patterns import CLOUD_NAME
from payload.storage.credentials import load_credentials, quiet

REQUEST_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 16.0
_TRY_AGAIN = (429, 500, 502, 503, 504)
_RATE_REASONS = frozenset({"rateLimitExceeded", "userRateLimitExceeded"})
# The libraries prefix Google's message with "GET https://...: ".
_REQUEST = re.compile(r"^[A-Z]+ https?://\S+: ")
# A page has at most 500 entries, and no project has a million resources of one kind.
MOST_PAGES = 2000


class Page(Protocol):
    """One page of a list."""

    @property
    def next_page_token(self) -> str:
        """Token of the next page; empty on the last page."""


_T = TypeVar("_T")
_PageT = TypeVar("_PageT", bound=Page)


class CloudMissingError(CloudError):
    """The requested resource does not exist."""


class UnreadableError(CloudError):
    """Google's client library cannot parse a response of Google Cloud."""


class Google:
    """A thread-safe client for one project that uses Google's client libraries.

    The libraries take more than a second to import, so only functions of this module import them.
    """

    def __init__(
        self,
        project: str,
        *,
        endpoints: Endpoints,
        retry_s: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Retry each request for up to `retry_s` seconds while the cloud is busy.

        Raises ConfigError for an invalid project ID, because every request's path contains the ID.
        """
        if not CLOUD_NAME.fullmatch(project):
            raise ConfigError(
                f"project {shown(project)}: must be a Google Cloud project's id. List your "
                "projects: gcloud projects list."
            )
        self.project = project
        self._endpoints = endpoints
        self._retry_s = retry_s
        self._sleep = sleep
        self._lock = threading.RLock()
        self._failures, self._unreadable = _import()
        self._credentials: Any = None
        self._clients: dict[str, Any] = {}

    def compute(self, kind: str) -> Any:
        """Return Compute Engine's client for one kind of resource: "Instances", "Disks", ..."""
        from google.cloud import compute_v1

        with self._lock:
            if kind not in self._clients:
                self._clients[kind] = getattr(compute_v1, f"{kind}Client")(
                    credentials=self._credentials_or_raise(),
                    client_options={"api_endpoint": self._endpoints.url("compute")},
                )
            return self._clients[kind]

    def storage(self) -> Any:
        """Return Cloud Storage's client."""
        import google.cloud.storage as storage

        with self._lock:
            if "storage" not in self._clients:
                self._clients["storage"] = storage.Client(
                    project=self.project,
                    credentials=self._credentials_or_raise(),
                    client_options={"api_endpoint": self._endpoints.url("storage")},
                )
            return self._clients["storage"]

    def get(self, service: Service, path: str, *, what: str, shape: type[_T]) -> _T:
        """Return the JSON at `path` of a REST service, parsed into the dataclass `shape`.

        Use it for services without a client library. payload.core.validation.records.build
        validates the JSON.
        """
        return build(
            shape, self._request("GET", service, path, what=what), where=what, error=CloudError
        )

    def get_pages(
        self, service: Service, path: str, *, what: str, shape: type[_PageT]
    ) -> Iterator[_PageT]:
        """Yield every page of a REST service's list; `path` must contain a query string."""
        token = ""
        for _ in range(MOST_PAGES):
            more = f"&pageToken={quote(token)}" if token else ""
            page = self.get(service, path + more, what=what, shape=shape)
            yield page
            token = page.next_page_token
            if not token:
                return
        raise too_many_pages(what)

    def post(self, service: Service, path: str, body: Any, *, what: str, shape: type[_T]) -> _T:
        """Post `body` as JSON to a REST service and return the response as a `shape`."""
        answer = self._request("POST", service, path, what=what, body=body)
        return build(shape, answer, where=what, error=CloudError)

    def delete(self, service: Service, path: str, *, what: str) -> None:
        """Delete the resource at `path` of a REST service."""
        self._request("DELETE", service, path, what=what)

    def begin_to_delete(self, service: Service, path: str, *, what: str, shape: type[_T]) -> _T:
        """Request the deletion of the resource at `path` and return the long-running operation."""
        answer = self._request("DELETE", service, path, what=what)
        return build(shape, answer, where=what, error=CloudError)

    def _request(
        self, method: str, service: Service, path: str, *, what: str, body: Any = None
    ) -> Any:
        from google.api_core import exceptions
        from google.auth.transport.requests import AuthorizedSession

        with self._lock:
            credentials = self._credentials_or_raise()
            if "session" not in self._clients:
                self._clients["session"] = AuthorizedSession(credentials)
        session, url = self._clients["session"], self._endpoints.url(service) + path

        def request() -> Any:
            answer = session.request(method, url, timeout=REQUEST_S, json=body)
            if answer.status_code >= 400:
                raise exceptions.from_http_response(answer)
            return parse_json(answer.content or b"{}", where=what, error=CloudError)

        return self.call(what, request)

    def call(self, what: str, request: Callable[[], _T]) -> _T:
        """Return the result of `request`; retry while the cloud is busy or fails temporarily.

        `what` starts every error message. Raises CloudMissingError, CloudAuthError and CloudError.
        """
        ends, pause_s = time.monotonic() + self._retry_s, _FIRST_PAUSE_S
        while True:
            try:
                return self._timed(what, request)
            except self._failures as error:
                wait_s = _wait_s(error, pause_s)
                if wait_s is None or time.monotonic() + wait_s > ends:
                    raise self._explained(error, what) from None
            except self._unreadable as error:
                raise _unreadable(error, what) from None
            self._sleep(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _timed(self, what: str, request: Callable[[], _T]) -> _T:
        """Return the result of `request`; record its duration in the request log."""
        log = self._endpoints.request_log
        if log is None:
            return request()
        began_s, failed = time.monotonic(), True
        try:
            answer = request()
            failed = False
        finally:
            took_s = round(time.monotonic() - began_s, 4)
            line = json.dumps({"what": joined_lines(what), "seconds": took_s, "failed": failed})
            with self._lock, log.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        return answer

    def pages(self, what: str, method: Callable[..., Any], request: Any) -> Iterator[Any]:
        """Yield every page of a list. Each page has the full retry time."""
        for _ in range(MOST_PAGES):
            page = self.call(what, lambda: method(request=request, retry=None, timeout=REQUEST_S))
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token
        raise too_many_pages(what)

    def check_credentials(self) -> str:
        """Return a description of the credentials in use. Raises CloudAuthError."""
        with self._lock:
            credentials = self._credentials_or_raise()
        email = getattr(credentials, "service_account_email", None)
        where = self._endpoints.login.describe()
        return f"{email} ({where})" if email else where

    def lacks_quota_project(self) -> bool:
        """Return whether the credentials belong to a user and have no quota project."""
        with self._lock:
            credentials = self._credentials_or_raise()
        return bool(getattr(credentials, "refresh_token", None)) and not getattr(
            credentials, "quota_project_id", None
        )

    def check_access(self) -> None:
        """Check that the project is readable, before anything is built in it.

        Raises CloudAuthError, CloudError, or ConfigError if the project does not exist.
        """
        request = request_of("GetProjectRequest", project=self.project)
        client = self.compute("Projects")
        try:
            self.call("project", lambda: client.get(request=request, retry=None, timeout=REQUEST_S))
        except CloudMissingError:
            raise ConfigError(
                f"project = {self.project!r}: not found, or this login "
                f"({self.check_credentials()}) has no access. List your projects: gcloud projects "
                "list; then: pulumi config set project ID"
            ) from None

    def _credentials_or_raise(self) -> Any:
        if self._credentials is None:
            with quiet():
                loopback, login = self._endpoints.is_loopback(), self._endpoints.login
                self._credentials = _anonymous() if loopback else load_credentials(login)
        return self._credentials

    def _explained(self, error: Exception, what: str) -> TileforgeError:
        from google.api_core import exceptions
        from google.auth import exceptions as auth
        from requests.exceptions import InvalidJSONError

        if isinstance(error, InvalidJSONError):
            return _unreadable(error, what)
        message = str(_attribute(error, "message") or _attribute(error, "__str__"))
        reason = _REQUEST.sub("", joined_lines(message))
        is_refused = isinstance(error, auth.GoogleAuthError) and not isinstance(
            error, auth.TransportError
        )
        if is_refused or isinstance(error, exceptions.Unauthorized):
            fix = self._endpoints.login.refusal(joined_lines(message, longest=2000))
            return CloudAuthError(f"{what}: {reason}", fix=f"{fix}.")
        if isinstance(error, exceptions.NotFound):
            return CloudMissingError(f"{what}: {reason}")
        if isinstance(error, exceptions.Forbidden):
            more = f"{_attribute(error, 'errors')} {_attribute(error, 'details')}"
            text = joined_lines(f"{reason} {more}", longest=2000)
            known = access_refusal(text, project=self.project, login=self._endpoints.login)
            if known is not None and known.error is CloudError:
                return CloudError(f"{what}: {reason}. {known.advice}.")
            fix = known.advice if known else "Request the roles in docs/guides/roles.md"
            return CloudAuthError(f"{what}: {reason}", fix=f"{fix}.")
        if isinstance(error, exceptions.GoogleAPICallError):
            again = " Try again." if error.code in _TRY_AGAIN else ""
            return CloudError(f"{what}: Google Cloud returned {error.code}: {reason}{again}")
        known = other_refusal(joined_lines(message, longest=2000), project=self.project)
        fix = known.advice if known else "Check the network"
        return CloudError(f"{what}: Google Cloud cannot be reached ({reason}). {fix}.")


def request_of(name: str, **fields: Any) -> Any:
    """Return a request object of Compute Engine; `name` is its class name."""
    from google.cloud import compute_v1

    return getattr(compute_v1, name)(**fields)


def _unreadable(error: Exception, what: str) -> UnreadableError:
    return UnreadableError(
        f"{what}: Google Cloud's response cannot be parsed ({joined_lines(repr(error))}). Try "
        "again. If it fails again, check for a proxy that changes responses."
    )


def too_many_pages(what: str) -> CloudError:
    """Return the error for a list of more than MOST_PAGES pages."""
    return CloudError(f"{what}: the list has more than {MOST_PAGES} pages. Try again later.")


def _anonymous() -> Any:
    from google.auth.credentials import AnonymousCredentials

    return AnonymousCredentials()


_Errors = tuple[type[Exception], ...]


def _import() -> tuple[_Errors, _Errors]:
    """Import Google's libraries before any thread is started.

    Return two groups of exceptions: for failed requests and for malformed responses.
    """
    with quiet():
        import google.cloud.compute_v1
        import google.cloud.storage  # noqa: F401
        import requests
        from google.api_core import exceptions
        from google.auth.exceptions import GoogleAuthError
        from google.protobuf.json_format import ParseError

    return (
        (exceptions.GoogleAPIError, GoogleAuthError, requests.RequestException),
        (AttributeError, LookupError, ParseError, RecursionError, TypeError, ValueError),
    )


def _attribute(error: Exception, name: str) -> Any:
    """Return an attribute of an exception from Google's libraries; None for a damaged response.

    The libraries compute these attributes on access, from unchecked fields of the response.
    """
    try:
        value = getattr(error, name, None)
        return value() if callable(value) else value
    except (TypeError, ValueError):
        return None


def _wait_s(error: Exception, pause_s: float) -> float | None:
    """Return the seconds to wait before a retry, or None if a retry cannot succeed."""
    import requests
    from google.api_core import exceptions
    from google.auth.exceptions import TransportError

    if isinstance(error, (requests.ConnectionError, requests.Timeout, TransportError)):
        return None if _is_permanent(error) else pause_s
    if not isinstance(error, exceptions.GoogleAPICallError):
        return None
    entries = _attribute(error, "errors") or ()
    reasons = {str(entry.get("reason")) for entry in entries if isinstance(entry, dict)}
    if error.code not in _TRY_AGAIN and not reasons & _RATE_REASONS:
        return None
    retry_after = getattr(error.response, "headers", {}).get("Retry-After", "")
    return max(float(retry_after), pause_s) if re.fullmatch("[0-9]{1,9}", retry_after) else pause_s


def _is_permanent(error: Exception) -> bool:
    """Return whether a retry cannot succeed because of a certificate or the proxy's login."""
    return any(word in str(error) for word in ("CERTIFICATE_VERIFY_FAILED", "failed: 407"))
