"""The addresses of Google's services, and the login for them."""

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
"""A file that gets a line of JSON for each request to Google: what, seconds, whether it failed."""
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
    """A URL for each service."""

    template: str | None = None
    """With `{service}` where the service's name goes; None for Google's public addresses."""
    request_log: Path | None = None
    login: GoogleLogin = field(default_factory=GoogleLogin)

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Endpoints:
        """Return the endpoint in TILEFORGE_API_ENDPOINT, and the login. Raises ConfigError."""
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
        """Return scheme and host, without a slash at the end."""
        if self.template is None:
            return f"https://{service}.googleapis.com"
        return self.template.replace(_SERVICE, service)

    def is_loopback(self) -> bool:
        """Return whether it is a program on this machine, which is sent no credentials."""
        return self.template is not None and _is_loopback(urlsplit(self.template).hostname or "")


def _problem(text: str) -> str | None:
    """Return why the text cannot be used, or None."""
    example = "such as https://{service}-mine.p.googleapis.com (Private Service Connect)"
    try:
        parts = urlsplit(text)
        host = parts.hostname or ""
        _ = parts.port  # raises when it is no number
    except ValueError:
        return f"it is not a URL. Give one {example}."
    if parts.scheme not in ("http", "https") or not host:
        return f"it is not a URL of scheme https. Give one {example}."
    if parts.username is not None or parts.path or parts.query or parts.fragment:
        return f"only scheme, host and port may be in it. Give one {example}."
    if _is_loopback(host):
        return None
    if parts.scheme != "https":
        return "credentials go over https only; http is for loopback addresses. Use https."
    if _SERVICE not in host:
        return f"{_SERVICE} is missing in it, for compute, storage, ... Give one {example}."
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
