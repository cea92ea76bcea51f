"""Reads and validates the cluster's settings before anything is built."""

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
"""Login settings of Google's Pulumi provider, each with the equivalent environment variable."""


def load_config(root: Path) -> tuple[ClusterConfig, tuple[str, ...]]:
    """Return the stack's settings and the operator's public keys.

    `root` is the project's folder. Raises ConfigError with all problems.
    """
    prefix = f"{PROJECT}:"
    # Pulumi passes the settings in the environment; CONFIG has settings that a program set itself.
    all_keys = {*get_config_env(), *CONFIG.get()}
    raw = {key.removeprefix(prefix) for key in all_keys if key.startswith(prefix)}
    settings = pulumi.Config(PROJECT)
    values = {key: settings.get(key) or "" for key in sorted(raw)}
    _check_login_keys(all_keys)
    values |= _from_provider(values)
    return read_config(values, stack=pulumi.get_stack(), root=root, missing_key=make_missing_key)


def _check_login_keys(keys: Iterable[str]) -> None:
    """Raise ConfigError for the provider's login settings. Such settings would have no effect.

    The program creates its own provider. Like the orchestrator, this provider reads the environment
    instead of the settings.
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
    """Return the provider's project and region, for settings that this program's config lacks.

    `doctor` does the same: payload/orchestrate/clouds/pulumi/stack_config.py.
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
    """Parse settings from Pulumi's text values; arrays are JSON text.

    `missing_key` creates the public key if the default file is missing and there is no problem.
    Raises ConfigError with every problem, one per line.
    """
    config, found = _parsed(values, stack=stack)
    found += problems(config, refused=frozenset(key for key, _ in found))
    keys: tuple[str, ...] = ()
    # Without a valid cluster name, the default path of the key is unknown.
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
    """Return the settings and the problems; the default replaces a value of the wrong type.

    A value outside its limits is kept, so that the checks of other settings still work.
    """
    known = ", ".join(sorted(KEYS))
    found = [
        (key, f": unknown setting; remove it. Known: {known}.{did_you_mean(key, KEYS)}")
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
    """Convert a text to the default's type; return it unchanged if that is not possible."""
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
    """Return the error text that follows the key of a setting with the invalid value `text`."""
    if refused.reason == "type":
        kind = {bool: "true or false", int: "an integer"}.get(refused.wanted)
        fix = f"Set it: pulumi config set {key} VALUE"
        return f" = {shown(text)}: must be {kind or 'a list of strings'}. {fix}"
    value = f" {'has' if '[' in refused.path else '='} {refused.value!r}"
    if refused.reason == "choices":
        return f"{value}. Use one of: {', '.join(map(str, refused.wanted))}."
    return f"{value}{refused.refusal or f': {refused.problem()}.'}"
