"""Reads the cluster's settings once, before anything is built."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pulumi
from pulumi.runtime.config import CONFIG, get_config_env

from infra.config import KEYS, PROJECT, ClusterConfig
from infra.config_checks import problems
from infra.operator_keys import Problems, make_missing_key, operator_keys
from payload.core.errors import ConfigError
from payload.core.printable_text import shown
from payload.core.validation.json_text import parse_json
from payload.core.validation.refusal import RefusedError
from payload.core.validation.suggestion import did_you_mean
from payload.stack.cluster_files import cluster_path

_LOGIN_KEYS = {
    "gcp:credentials": "GOOGLE_CREDENTIALS",
    "gcp:accessToken": "GOOGLE_OAUTH_ACCESS_TOKEN",
    "gcp:impersonateServiceAccount": "GOOGLE_IMPERSONATE_SERVICE_ACCOUNT",
}
"""Settings of the provider's login, with the variables that have the same effect."""


def load_config(root: Path) -> tuple[ClusterConfig, tuple[str, ...]]:
    """The stack's settings and the operator's public keys.

    `root` is the project's folder. Raises ConfigError with everything that is wrong.
    """
    prefix = f"{PROJECT}:"
    # Pulumi gives a program its settings in the environment; CONFIG is for those set within.
    there = {*get_config_env(), *CONFIG.get()}
    raw = {key.removeprefix(prefix) for key in there if key.startswith(prefix)}
    settings = pulumi.Config(PROJECT)
    values = {key: settings.get(key) or "" for key in sorted(raw)}
    _check_login_keys(there)
    values |= _from_provider(values)
    return read_config(values, stack=pulumi.get_stack(), root=root, missing_key=make_missing_key)


def _check_login_keys(keys: Iterable[str]) -> None:
    """Raise ConfigError for a login of the provider's that would stay unused.

    The program makes its own provider, which these settings do not reach; the environment does, and
    the orchestrator reads it too.
    """
    found = [key for key in sorted(keys) if key in _LOGIN_KEYS]
    if found:
        lines = "".join(
            f"\n  {key} has no effect. Remove it: pulumi config rm {key}; and set "
            f"{_LOGIN_KEYS[key]} in the environment"
            for key in found
        )
        raise ConfigError(f"the stack's settings have {len(found)} problem(s):{lines}")


def _from_provider(values: Mapping[str, str]) -> dict[str, str]:
    """Return project and region of the provider's settings, where this program's are not set.

    `doctor` reads them so, too: payload/orchestrate/clouds/pulumi/engine.py.
    """
    provider = pulumi.Config("gcp")
    return {
        key: given
        for key in ("project", "region")
        if values.get(key, "") in ("", KEYS[key].default) and (given := provider.get(key))
    }


def read_config(
    values: Mapping[str, str],
    *,
    stack: str,
    root: Path,
    missing_key: Callable[[Path], str] | None = None,
) -> tuple[ClusterConfig, tuple[str, ...]]:
    """Read the settings from plain values, as Pulumi hands them over: text, or JSON for an array.

    `missing_key` makes the public key of a file that is not there, where no file is named and all
    else is right. Raises ConfigError with every problem, one a line.
    """
    config, found = _parsed(values, stack=stack)
    found += problems(config, refused=frozenset(key for key, _ in found))
    keys: tuple[str, ...] = ()
    # Without a name that can be used, there is no place to look for the cluster's key.
    named = config.operator_public_key_file or "cluster" not in {key for key, _ in found}
    if config.access_mode != "oslogin" and named:
        path = root / config.public_key_file()
        if not config.operator_public_key_file:
            for name in (path.name, path.stem):
                cluster_path(root, config.cluster, name)
        may_make = missing_key is not None and not config.operator_public_key_file
        if may_make and not found and not path.exists():
            assert missing_key is not None
            return config, (missing_key(path),)
        keys, problem = operator_keys(config, root=root)
        found += problem
    if found:
        lines = "".join(f"\n  {PROJECT}:{key}{text}" for key, text in found)
        raise ConfigError(f"the stack's settings have {len(found)} problem(s):{lines}")
    return config, keys


def _parsed(values: Mapping[str, str], *, stack: str) -> tuple[ClusterConfig, Problems]:
    """Return the settings, with defaults for those that cannot be read, and the problems.

    A value beyond its limits stays, for the checks of the others.
    """
    known = ", ".join(sorted(KEYS))
    found = [
        (key, f" is no setting; remove it. Known: {known}.{did_you_mean(key, KEYS)}")
        for key in values
        if key not in KEYS
    ]
    fields: dict[str, object] = {}
    for key, each in KEYS.items():
        default = stack if key == "cluster" else each.default
        text = values.get(key)
        value = default if text is None else _typed(text, default)
        if key == "cluster":
            value = value or stack
        try:
            fields[each.name] = each.read_value(key, value)
        except RefusedError as refused:
            found.append((key, _message(refused, key=key, text=text or "")))
            fields[each.name] = default if refused.reason == "type" else value
    return ClusterConfig(**fields), found  # type: ignore[arg-type]  # a reader keeps to the types


def _typed(text: str, default: object) -> object:
    """Return what a text says for a setting of the default's type; the text where it has none."""
    match default:
        case bool():
            return {"true": True, "false": False}.get(text, text)
        case int():
            return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else text
        case tuple():
            try:
                return parse_json(text, where="a list")
            except ConfigError:
                return text
        case _:
            return text.strip()


def _message(refused: RefusedError, *, key: str, text: str) -> str:
    """Return what follows the key in the message of a refused setting, which was written `text`."""
    if refused.reason == "type":
        wanted = {bool: "true or false", int: "a whole number"}.get(refused.wanted)
        fix = f"pulumi config set {key} VALUE"
        return f" = {shown(text)} is not {wanted or 'a list of texts'}. {fix}"
    value = f" {'has' if '[' in refused.path else '='} {refused.value!r}"
    if refused.reason == "choices":
        return f"{value}. Use one of: {', '.join(map(str, refused.wanted))}."
    return f"{value}{refused.refusal or f': {refused.problem()}.'}"
