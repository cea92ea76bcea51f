"""Errors of a `pulumi` that cannot be used, or refuses before its engine starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from payload.core.errors import ConfigError, ExitCode
from payload.core.one_line import joined_lines
from payload.core.printable_text import printable
from payload.core.suggested_commands import command
from payload.storage.google_environment_login import REFUSED_CREDENTIALS, GoogleLogin

NEWER = "See that it is Pulumi 3.200 or newer: pulumi version"

Trouble = Literal[
    "not installed",
    "no project",
    "not logged in",
    "no stack",
    "credentials refused",
    "damaged state",
    "other",
]
_MOST_CHARS = 300

# Pulumi's own words; what each means and what to do.
_COMPLAINTS: tuple[tuple[str, Trouble, str], ...] = (
    (r"no Pulumi\.yaml project file", "no project", "Go to the project's folder."),
    (
        r"no stack selected",
        "no stack",
        "Choose one: pulumi stack select NAME; or make one: pulumi stack init NAME",
    ),
    (r"no stack named", "no stack", "Look for its name: pulumi stack ls"),
    (
        r"PULUMI_ACCESS_TOKEN must be set|not logged in|pulumi login|invalid access token",
        "not logged in",
        "Log in: pulumi login (or pulumi login --local, for state in a folder)",
    ),
    (
        r"passphrase must be set|incorrect passphrase",
        "not logged in",
        "Set PULUMI_CONFIG_PASSPHRASE or PULUMI_CONFIG_PASSPHRASE_FILE.",
    ),
    (
        # Not with credentials that have expired, which Pulumi reports in the same way:
        # https://github.com/pulumi/pulumi/issues/2801
        r"unexpected end of JSON input|failed to load checkpoint: (invalid character|json:|.*EOF)"
        r"|could not deserialize deployment|snapshot integrity failure",
        "damaged state",
        "The stack's state is damaged, as after a full disk. Either put the engine's copy, "
        "STACK.json.bak, in the place of STACK.json beside it (after `pulumi login --local` in "
        "~/.pulumi/stacks/tileforge), and repeat the command; or remove what Google has without "
        f"the state: {command('orchestrate', 'sweep')} --cluster NAME --project P --delete",
    ),
)


class PulumiError(ConfigError):
    """`pulumi` cannot be used, or refuses."""

    def __init__(self, message: str, trouble: Trouble) -> None:
        """`trouble` says which of the known ones it is."""
        super().__init__(message)
        self.trouble = trouble
        if trouble in ("not logged in", "credentials refused"):
            self.exit_code = ExitCode.AUTH

    @property
    def is_fault(self) -> bool:
        """Tell whether there may be a stack all the same, which could not be read."""
        return self.trouble in ("credentials refused", "damaged state", "other")


def refusal(shown: str, said: str, login: GoogleLogin) -> PulumiError:
    """Return the error that a command amounts to whose engine never started, by what it printed.

    A state in a bucket is read with `login`.
    """
    said = printable(said)
    if REFUSED_CREDENTIALS.search(said) and re.search("google|oauth2", said):
        flat = joined_lines(said, longest=None).removeprefix("error: ").rstrip(".")
        flat = flat if len(flat) <= _MOST_CHARS else f"{flat[:_MOST_CHARS]}..."
        message = f"`{shown}`: {flat}. {login.refusal(said)}"
        return PulumiError(message, "credentials refused")
    for pattern, trouble, fix in _COMPLAINTS:
        found = re.search(rf"^.*({pattern}).*$", said, re.MULTILINE)
        if found:
            line = found.group(0).strip().removeprefix("error: ")
            return PulumiError(f"`{shown}`: {line.rstrip('.')}. {fix}", trouble)
    lines: Sequence[str] = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("error: ")] or lines or ["no word"]
    return PulumiError(f"`{shown}` failed: {telling[-1].removeprefix('error: ')}", "other")
