"""Errors of the `pulumi` command before its engine starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from payload.core.errors import ConfigError, ExitCode
from payload.core.one_line import joined_lines
from payload.core.printable_text import printable
from payload.core.suggested_commands import command
from payload.storage.google_environment_login import REFUSED_CREDENTIALS, GoogleLogin

NEWER = "Pulumi 3.200 or newer is required; check: pulumi version"

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

# Patterns of Pulumi's messages, with the kind of trouble and the fix.
_COMPLAINTS: tuple[tuple[str, Trouble, str], ...] = (
    (r"no Pulumi\.yaml project file", "no project", "Change to the project's folder."),
    (
        r"no stack selected",
        "no stack",
        "Select one: pulumi stack select NAME; or create one: pulumi stack init NAME",
    ),
    (r"no stack named", "no stack", "List the stacks: pulumi stack ls"),
    (
        r"PULUMI_ACCESS_TOKEN must be set|not logged in|pulumi login|invalid access token",
        "not logged in",
        "Log in: pulumi login (or, for local state: pulumi login --local)",
    ),
    (
        r"passphrase must be set|incorrect passphrase",
        "not logged in",
        "Set PULUMI_CONFIG_PASSPHRASE or PULUMI_CONFIG_PASSPHRASE_FILE.",
    ),
    (
        # Expired credentials are handled earlier, because Pulumi reports them with the same
        # message: https://github.com/pulumi/pulumi/issues/2801
        r"unexpected end of JSON input|failed to load checkpoint: (invalid character|json:|.*EOF)"
        r"|could not deserialize deployment|snapshot integrity failure",
        "damaged state",
        "The stack's state is damaged, for example because a disk was full. Replace STACK.json "
        "with its backup STACK.json.bak (for `pulumi login --local`: in "
        "~/.pulumi/stacks/tileforge) and repeat the command; or remove the cluster without the "
        f"state: {command('orchestrate', 'sweep')} --cluster NAME --project P --delete",
    ),
)


class PulumiError(ConfigError):
    """The `pulumi` command is missing or failed."""

    def __init__(self, message: str, trouble: Trouble) -> None:
        """Set the exit code by the kind of problem."""
        super().__init__(message)
        self.trouble = trouble
        if trouble in ("not logged in", "credentials refused"):
            self.exit_code = ExitCode.AUTH

    @property
    def is_fault(self) -> bool:
        """Return whether a stack may exist although the command could not read it."""
        return self.trouble in ("credentials refused", "damaged state", "other")


def refusal(shown: str, output: str, login: GoogleLogin) -> PulumiError:
    """Return the error for a command that failed before its engine started.

    `login` is the login with which Pulumi reads state in a bucket.
    """
    output = printable(output)
    if REFUSED_CREDENTIALS.search(output) and re.search("google|oauth2", output):
        flat = joined_lines(output, longest=None).removeprefix("error: ").rstrip(".")
        flat = flat if len(flat) <= _MOST_CHARS else f"{flat[:_MOST_CHARS]}..."
        message = f"`{shown}`: {flat}. {login.refusal(output)}"
        return PulumiError(message, "credentials refused")
    for pattern, trouble, fix in _COMPLAINTS:
        found = re.search(rf"^.*({pattern}).*$", output, re.MULTILINE)
        if found:
            line = found.group(0).strip().removeprefix("error: ")
            return PulumiError(f"`{shown}`: {line.rstrip('.')}. {fix}", trouble)
    lines: Sequence[str] = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")] or lines or ["no output"]
    return PulumiError(f"`{shown}` failed: {errors[-1].removeprefix('error: ')}", "other")
