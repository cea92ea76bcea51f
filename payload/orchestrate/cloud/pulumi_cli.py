"""The `pulumi` command: nothing else starts it or reads what it prints.

`ask` runs a short command with a deadline. `follow` runs an operation (preview, up, refresh,
destroy) and reads the events that the engine writes with `--event-log`, as Pulumi's Automation API
does; what the command prints for people goes to a log file and is parsed only when the engine never
started (wrong passphrase, locked stack).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import which
from typing import Any, Literal

from payload.errors import ConfigError, ExitCode
from payload.orchestrate.cloud.pulumi_events import Event, EventReader, Update
from payload.untrusted import parse_json, printable

ASK_S = 120.0
_POLL_S = 0.05
_MOST_PRINTED_CHARS = 2**20
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


def _wait(
    process: subprocess.Popen[bytes],
    events: EventReader,
    *,
    see: Callable[[Event], None],
    say: Callable[[str], None],
) -> int:
    """Read events until the process has ended; returns how often the operator interrupted it."""
    interrupts, ended = 0, False
    while True:
        try:
            for event in events.read():
                see(event)
            if ended:
                return interrupts
            # Once more after its end: the last events.
            process.wait(timeout=_POLL_S)
            ended = True
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:
            interrupts += 1
            say(_INTERRUPTED[min(interrupts, len(_INTERRUPTED)) - 1])
            if interrupts > len(_INTERRUPTED):
                process.kill()


_INTERRUPTED = (
    "interrupted: waiting for pulumi to end, so that its state stays true",
    "interrupted again: pulumi ends at once; the next `up` or `down` looks for what it was making",
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
            raise refusal(shown, done.stderr or done.stdout)
        return done.stdout

    def ask_json(self, *words: str, timeout_s: float | None = None) -> Any:
        """The JSON that the command printed. Raises PulumiError."""
        text = self.ask(*words, "--json", timeout_s=timeout_s)
        where = f"what `pulumi {' '.join(words)} --json` printed"
        try:
            return parse_json(text, where=where, fix=NEWER)
        except ConfigError as error:
            raise PulumiError(str(error), "other") from None

    def follow(
        self,
        *words: str,
        log: Path,
        see: Callable[[Event], None] = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Update:
        """Run an operation to its end, pass each of its events to `see`, and return the result.

        `log` gets what pulumi prints. An interrupt reaches pulumi too, which then ends in its own
        way; that is waited for, and KeyboardInterrupt is raised after it. Raises PulumiError.
        """
        with tempfile.TemporaryDirectory(prefix="tileforge-") as folder:
            path = Path(folder) / "events.jsonl"
            path.touch(mode=0o600)
            with log.open("wb") as printed, path.open("rb") as stream:
                process = subprocess.Popen(
                    [*self.argv(*words), "--event-log", str(path)],
                    cwd=self._folder,
                    # The option exists only with the variable.
                    env={**self._env, "PULUMI_DEBUG_COMMANDS": "true"},
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                )
                events = EventReader(stream)
                interrupts = _wait(process, events, see=see, say=say)
        if interrupts:
            raise KeyboardInterrupt
        text = log.read_bytes()[-_MOST_PRINTED_CHARS:].decode("utf-8", errors="replace")
        return Update(
            words=words,
            status=process.returncode,
            events=tuple(events.seen),
            unreadable=events.unreadable,
            text=printable(text),
            log=log,
        )


def refusal(shown: str, said: str) -> PulumiError:
    """Return the error that a command amounts to whose engine never started, by what it printed."""
    said = printable(said)
    for pattern, trouble, fix in _COMPLAINTS:
        found = re.search(rf"^.*({pattern}).*$", said, re.MULTILINE)
        if found:
            line = found.group(0).strip().removeprefix("error: ")
            return PulumiError(f"`{shown}`: {line.rstrip('.')}. {fix}", trouble)
    lines: Sequence[str] = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("error: ")] or lines or ["no word"]
    return PulumiError(f"`{shown}` failed: {telling[-1].removeprefix('error: ')}", "other")
