"""Endpoint URLs of Google's services, and the login to use."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from payload.core.errors import ConfigError
from payload.storage.google_environment_login import GoogleLogin

VARIABLE = "TILEFORGE_API_ENDPOINT"
REQUEST_LOG = "TILEFORGE_REQUEST_LOG"
"""Environment variable that names a log file. Each request appends a JSON line with its duration
and its error, if any, to the file."""
_SERVICE = "{service}"

Service = Literal[
    "cloudbilling",
    "cloudkms",
    "cloudquotas",
    "cloudresourcemanager",
    "compute",
    "dns",
    "file",
    "iam",
    "orgpolicy",
    "serviceusage",
    "storage",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """The URL of each service."""

    template: str | None = None
    """URL with the placeholder `{service}` for a service; None for Google's public endpoints."""
    request_log: Path | None = None
    login: GoogleLogin = field(default_factory=GoogleLogin)

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Endpoints:
        """Read TILEFORGE_API_ENDPOINT, TILEFORGE_REQUEST_LOG and the login. Raises ConfigError."""
        login = GoogleLogin.from_env(env)
        text, log = env.get(VARIABLE, "").rstrip("/"), env.get(REQUEST_LOG)
        request_log = Path(log) if log else None
        if not text:
            return cls(request_log=request_log, login=login)
        problem = _problem(text)
        if problem:
            raise ConfigError(f"{VARIABLE} = {text!r}: {problem}")
        return cls(template=text, request_log=request_log, login=login)

    def url(self, service: Service) -> str:
        """Return the scheme and host of a service's URL, without a trailing slash."""
        if self.template is None:
            return f"https://{service}.googleapis.com"
        return self.template.replace(_SERVICE, service)

    def is_loopback(self) -> bool:
        """Return whether the endpoint is on this machine, so that it receives no credentials."""
        return self.template is not None and _is_loopback(urlsplit(self.template).hostname or "")


def _problem(text: str) -> str | None:
    """Return why the text is not a valid endpoint, or None."""
    example = "such as https://{service}-mine.p.googleapis.com (Private Service Connect)"
    try:
        parts = urlsplit(text)
        host = parts.hostname or ""
        _ = parts.port  # raises ValueError if the port is not a number
    except ValueError:
        return f"not a URL. Set a URL {example}."
    if parts.scheme not in ("http", "https") or not host:
        return f"not an https URL. Set a URL {example}."
    if parts.username is not None or parts.path or parts.query or parts.fragment:
        return f"must have scheme, host and port only. Set a URL {example}."
    if _is_loopback(host):
        return None
    if parts.scheme != "https":
        return "http is only allowed for loopback addresses. Use https."
    if _SERVICE not in host:
        return f"the host must contain {_SERVICE}. Set a URL {example}."
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
