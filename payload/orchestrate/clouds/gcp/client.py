"""One project in Google Cloud: credentials, retries, refusals in plain words."""

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
# The libraries put "GET https://...: " in front of what Google says.
_REQUEST = re.compile(r"^[A-Z]+ https?://\S+: ")
# A list has at most 500 entries a page, and no project a million of anything.
MOST_PAGES = 2000


class Page(Protocol):
    """One page of a list."""

    @property
    def next_page_token(self) -> str:
        """Where the next one begins; empty on the last."""


_T = TypeVar("_T")
_PageT = TypeVar("_PageT", bound=Page)


class CloudMissingError(CloudError):
    """The requested resource does not exist."""


class UnreadableError(CloudError):
    """Google Cloud has answered in a form that its own client library cannot parse."""


class Google:
    """One project, seen through Google's client libraries; threads may share it.

    The one module that imports them: they take more than a second, so only within functions.
    """

    def __init__(
        self,
        project: str,
        *,
        endpoints: Endpoints,
        retry_s: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`retry_s` is how long one request is retried while the cloud is busy.

        Raises ConfigError for a project that cannot be one: it is a part of every request's path.
        """
        if not CLOUD_NAME.fullmatch(project):
            raise ConfigError(
                f"project {shown(project)}: must be a Google Cloud project's id. `gcloud projects "
                "list` shows yours."
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
        """Compute Engine's client for one kind of resource: "Instances", "Disks", ..."""
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
        """Return the JSON at `path` of a service that has no client library here.

        `shape` is the dataclass that it is held to, as payload.core.validation.records.build does.
        """
        return build(
            shape, self._request("GET", service, path, what=what), where=what, error=CloudError
        )

    def get_pages(
        self, service: Service, path: str, *, what: str, shape: type[_PageT]
    ) -> Iterator[_PageT]:
        """Yield every page of such a list; `path` has a query already."""
        token = ""
        for _ in range(MOST_PAGES):
            more = f"&pageToken={quote(token)}" if token else ""
            page = self.get(service, path + more, what=what, shape=shape)
            yield page
            token = page.next_page_token
            if not token:
                return
        raise endless(what)

    def post(self, service: Service, path: str, body: Any, *, what: str, shape: type[_T]) -> _T:
        """Return the answer of such a service to `body`."""
        answer = self._request("POST", service, path, what=what, body=body)
        return build(shape, answer, where=what, error=CloudError)

    def delete(self, service: Service, path: str, *, what: str) -> None:
        """Delete what is at `path` of such a service."""
        self._request("DELETE", service, path, what=what)

    def begin_to_delete(self, service: Service, path: str, *, what: str, shape: type[_T]) -> _T:
        """Ask for the deletion of what is at `path`; return the operation."""
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

        return self.ask(what, request)

    def ask(self, what: str, request: Callable[[], _T]) -> _T:
        """Return what `request` returns; retry while the cloud is busy or fails by itself.

        `what` begins the messages. Raises CloudMissingError, CloudAuthError and CloudError.
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
        """Return what `request` returns; the log of requests gets how long that took."""
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
        """Yield every page of a list; each request is retried for as long."""
        for _ in range(MOST_PAGES):
            page = self.ask(what, lambda: method(request=request, retry=None, timeout=REQUEST_S))
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token
        raise endless(what)

    def check_credentials(self) -> str:
        """Return whose credentials these are, in words. Raises CloudAuthError."""
        with self._lock:
            credentials = self._credentials_or_raise()
        email = getattr(credentials, "service_account_email", None)
        where = self._endpoints.login.describe()
        return f"{email} ({where})" if email else where

    def lacks_quota_project(self) -> bool:
        """Tell whether it is a person's login that says no project for APIs that want one."""
        with self._lock:
            credentials = self._credentials_or_raise()
        return bool(getattr(credentials, "refresh_token", None)) and not getattr(
            credentials, "quota_project_id", None
        )

    def check_access(self) -> None:
        """Request the project. Raises CloudAuthError, CloudError, or ConfigError for no such one.

        What is built with credentials that work nowhere else would have to be removed by hand.
        """
        request = request_of("GetProjectRequest", project=self.project)
        client = self.compute("Projects")
        try:
            self.ask("project", lambda: client.get(request=request, retry=None, timeout=REQUEST_S))
        except CloudMissingError:
            raise ConfigError(
                f"project = {self.project!r}: there is no such project, or this login "
                f"({self.check_credentials()}) may not see it. `gcloud projects list` shows yours; "
                "then: pulumi config set project ID"
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
        said = _REQUEST.sub("", joined_lines(message))
        is_refused = isinstance(error, auth.GoogleAuthError) and not isinstance(
            error, auth.TransportError
        )
        if is_refused or isinstance(error, exceptions.Unauthorized):
            fix = self._endpoints.login.refusal(joined_lines(message, longest=2000))
            return CloudAuthError(f"{what}: {said}", fix=f"{fix}.")
        if isinstance(error, exceptions.NotFound):
            return CloudMissingError(f"{what}: {said}")
        if isinstance(error, exceptions.Forbidden):
            more = f"{_attribute(error, 'errors')} {_attribute(error, 'details')}"
            text = joined_lines(f"{said} {more}", longest=2000)
            known = access_refusal(text, project=self.project, login=self._endpoints.login)
            if known is not None and known.error is CloudError:
                return CloudError(f"{what}: {said}. {known.advice}.")
            fix = known.advice if known else "Ask for a role that allows it, see docs/operating.md"
            return CloudAuthError(f"{what}: {said}", fix=f"{fix}.")
        if isinstance(error, exceptions.GoogleAPICallError):
            again = " Try again." if error.code in _TRY_AGAIN else ""
            return CloudError(f"{what}: Google Cloud answers {error.code}: {said}{again}")
        known = other_refusal(joined_lines(message, longest=2000), project=self.project)
        fix = known.advice if known else "See to the network"
        return CloudError(f"{what}: Google Cloud cannot be reached ({said}). {fix}.")


def request_of(name: str, **fields: Any) -> Any:
    """Return one of Compute Engine's request objects, by the name of its class."""
    from google.cloud import compute_v1

    return getattr(compute_v1, name)(**fields)


def _unreadable(error: Exception, what: str) -> UnreadableError:
    return UnreadableError(
        f"{what}: Google Cloud's answer cannot be read ({joined_lines(repr(error))}). Try again; "
        "if it stays so, something between here and Google changes answers."
    )


def endless(what: str) -> CloudError:
    """Return the error of a list that has a next page for ever."""
    return CloudError(f"{what}: the list does not end after {MOST_PAGES} pages. Try again later.")


def _anonymous() -> Any:
    from google.auth.credentials import AnonymousCredentials

    return AnonymousCredentials()


_Errors = tuple[type[Exception], ...]


def _import() -> tuple[_Errors, _Errors]:
    """Import the libraries, before there are threads.

    Return what their requests raise, and what they raise on an answer that is not in Google's
    format.
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
    """Return what an error of Google's libraries holds; None where its answer was damaged.

    The libraries make these of the answer's fields unchecked, and only when they are asked for.
    """
    try:
        value = getattr(error, name, None)
        return value() if callable(value) else value
    except (TypeError, ValueError):
        return None


def _wait_s(error: Exception, pause_s: float) -> float | None:
    """Return how long to wait before the next attempt, or None when another one is of no use."""
    import requests
    from google.api_core import exceptions
    from google.auth.exceptions import TransportError

    if isinstance(error, (requests.ConnectionError, requests.Timeout, TransportError)):
        return None if _is_for_good(error) else pause_s
    if not isinstance(error, exceptions.GoogleAPICallError):
        return None
    entries = _attribute(error, "errors") or ()
    reasons = {str(entry.get("reason")) for entry in entries if isinstance(entry, dict)}
    if error.code not in _TRY_AGAIN and not reasons & _RATE_REASONS:
        return None
    asked = getattr(error.response, "headers", {}).get("Retry-After", "")
    return max(float(asked), pause_s) if re.fullmatch("[0-9]{1,9}", asked) else pause_s


def _is_for_good(error: Exception) -> bool:
    """Tell whether it is a certificate or a proxy's login, which no repetition mends."""
    return any(word in str(error) for word in ("CERTIFICATE_VERIFY_FAILED", "failed: 407"))
