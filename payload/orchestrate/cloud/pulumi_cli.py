"""The `pulumi` command: asked with a deadline, or followed; its complaints in our words."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import which
from typing import Any, Literal

from payload.errors import ConfigError, ExitCode
from payload.untrusted import parse_json, printable

ASK_S = 120.0
_STACK = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*){0,2}")

NEWER = "See that it is Pulumi 3.200 or newer: pulumi version"

Trouble = Literal["not installed", "no project", "not logged in", "no stack", "other"]

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
)


class PulumiError(ConfigError):
    """`pulumi` cannot be used, or refuses."""

    def __init__(self, message: str, trouble: Trouble) -> None:
        """`trouble` says which of the known ones it is."""
        super().__init__(message)
        self.trouble = trouble
        if trouble == "not logged in":
            self.exit_code = ExitCode.AUTH


class Pulumi:
    """`pulumi` for one stack of the project in `folder`."""

    def __init__(
        self,
        env: Mapping[str, str],
        *,
        folder: Path,
        stack: str | None = None,
        timeout_s: float = ASK_S,
    ) -> None:
        """`stack` None is the selected one. Raises ConfigError for a name that cannot be one."""
        if stack is not None and not _STACK.fullmatch(stack):
            raise ConfigError(
                f"stack {stack!r}: a stack's name has letters, digits, dots, hyphens and "
                "underscores, such as dev or my-org/tileforge/dev."
            )
        self.stack = stack
        self._env = {**env, "PULUMI_SKIP_UPDATE_CHECK": "true"}
        self._folder = folder
        self._timeout_s = timeout_s

    def argv(self, *words: str) -> list[str]:
        """The command line, the stack's name in it. Raises PulumiError."""
        program = which("pulumi", path=self._env.get("PATH", ""))
        if program is None:
            raise PulumiError(
                "there is no `pulumi` on PATH. Install it: https://www.pulumi.com/docs/install/",
                "not installed",
            )
        stack = ["--stack", self.stack] if self.stack else []
        return [program, *words, *stack, "--non-interactive", "--color", "never"]

    def ask(self, *words: str, timeout_s: float | None = None) -> str:
        """What the command printed. Raises PulumiError."""
        argv = self.argv(*words)
        timeout_s = timeout_s or self._timeout_s
        shown = f"pulumi {' '.join(words)}"
        try:
            done = subprocess.run(
                argv,
                cwd=self._folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise PulumiError(
                f"`{shown}` has not answered within {timeout_s:g} s. See that its backend "
                "can be reached: pulumi whoami",
                "other",
            ) from None
        if done.returncode != 0:
            raise self._refusal(shown, done.stderr or done.stdout)
        return done.stdout

    def ask_json(self, *words: str, timeout_s: float | None = None) -> Any:
        """The JSON that the command printed. Raises PulumiError."""
        text = self.ask(*words, "--json", timeout_s=timeout_s)
        where = f"what `pulumi {' '.join(words)} --json` printed"
        try:
            return parse_json(text, where=where, fix=NEWER)
        except ConfigError as error:
            raise PulumiError(str(error), "other") from None

    def follow(self, *words: str, say: Callable[[str], None]) -> tuple[int, str]:
        """Run it to its end and pass each line on; returns its status and all that it printed.

        An interrupt reaches pulumi too, which then ends in its own way; that is waited for.
        """
        process = subprocess.Popen(
            self.argv(*words),
            cwd=self._folder,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        lines: list[str] = []
        try:
            # As bytes: an interrupt within the decoding of text would lose what was read.
            for raw in process.stdout:
                lines.append(printable(raw.decode("utf-8", errors="replace")))
                say(lines[-1].rstrip("\n"))
        except KeyboardInterrupt:
            say("interrupted: waiting for pulumi to end, so that its state stays true")
            rest = process.stdout.read().decode("utf-8", errors="replace")
            say(printable(rest).rstrip("\n"))
            process.wait()
            raise
        return process.wait(), "".join(lines)

    def _refusal(self, shown: str, said: str) -> PulumiError:
        said = printable(said)
        for pattern, trouble, fix in _COMPLAINTS:
            found = re.search(rf"^.*({pattern}).*$", said, re.MULTILINE)
            if found:
                line = found.group(0).strip().removeprefix("error: ")
                return PulumiError(f"`{shown}`: {line.rstrip('.')}. {fix}", trouble)
        lines: Sequence[str] = [line.strip() for line in said.splitlines() if line.strip()]
        telling = [line for line in lines if line.startswith("error: ")] or lines or ["no word"]
        return PulumiError(f"`{shown}` failed: {telling[-1].removeprefix('error: ')}", "other")
