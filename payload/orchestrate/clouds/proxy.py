"""The HTTP proxy that the environment sets."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

# Pulumi's processes (engine, providers, cluster program) communicate over gRPC on 127.0.0.1. gRPC
# sends these connections through a proxy unless no_proxy lists the address. `localhost` is not
# enough, and a space after a comma hides a name (https://github.com/pulumi/pulumi/issues/2651).
_VARIABLES = ("https_proxy", "http_proxy", "all_proxy", "grpc_proxy")
_EXCEPTIONS = ("no_proxy", "NO_PROXY")
_LOOPBACK = ("127.0.0.1", "localhost")


def proxy_of(env: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the name and value of the variable that sets a proxy; None if no variable does."""
    names = [name for lower in _VARIABLES for name in (lower, lower.upper())]
    return next(((name, env[name]) for name in names if env.get(name)), None)


def address_of(proxy: str) -> tuple[str, int] | None:
    """Return host and port of a proxy's URL, or None if it is not a valid URL."""
    try:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        port = parts.port or {"https": 443, "socks5": 1080}.get(parts.scheme, 80)
    except ValueError:
        return None
    return (parts.hostname, port) if parts.hostname else None


def bypasses_loopback(env: Mapping[str, str]) -> bool:
    """Return whether connections to 127.0.0.1, including gRPC connections, bypass the proxy."""
    return "127.0.0.1" in env.get("no_proxy", env.get("NO_PROXY", "")).split(",")


def with_loopback_exception(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` with 127.0.0.1 added to no_proxy; unchanged if no proxy is set."""
    if proxy_of(env) is None:
        return dict(env)
    named = next((env[name] for name in _EXCEPTIONS if env.get(name)), "")
    kept = [each for each in map(str.strip, named.split(",")) if each]
    value = ",".join(dict.fromkeys([*kept, *_LOOPBACK]))
    return {**env, **dict.fromkeys(_EXCEPTIONS, value)}
