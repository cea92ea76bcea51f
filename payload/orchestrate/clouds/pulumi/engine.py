"""The `pulumi` command for one stack. Nothing else runs it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import which
from typing import Any

from payload.core.errors import ConfigError
from payload.core.printable_text import printable
from payload.core.validation.json_text import parse_json
from payload.orchestrate.clouds.proxy import past_the_proxy
from payload.orchestrate.clouds.pulumi.cli_errors import NEWER, PulumiError, refusal
from payload.orchestrate.clouds.pulumi.events import Event, EventReader, Update
from payload.storage.google_environment_login import GoogleLogin

ASK_S = 120.0
_POLL_S = 0.05
_MOST_PRINTED_CHARS = 2**20
_STACK = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*){0,2}")


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
        self._env = {**past_the_proxy(env), "PULUMI_SKIP_UPDATE_CHECK": "true"}
        self._folder = folder
        self._timeout_s = timeout_s

    def tell_program(self, **variables: str) -> None:
        """Set environment variables of the cluster program for every later command."""
        self._env = {**self._env, **variables}

    def argv(self, *words: str) -> list[str]:
        """Return the command line, the stack's name in it. Raises PulumiError."""
        program = which("pulumi", path=self._env.get("PATH", ""))
        if program is None:
            raise PulumiError(
                "there is no `pulumi` on PATH. Install it: https://www.pulumi.com/docs/install/",
                "not installed",
            )
        stack = ["--stack", self.stack] if self.stack else []
        return [program, *words, *stack, "--non-interactive", "--color", "never"]

    def ask(self, *words: str, timeout_s: float | None = None) -> str:
        """Return the command's output. Raises PulumiError."""
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
            said = done.stderr or done.stdout
            raise refusal(shown, said, GoogleLogin.from_env(self._env))
        return done.stdout

    def ask_json(self, *words: str, timeout_s: float | None = None) -> Any:
        """Return the JSON that the command printed. Raises PulumiError."""
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
            login=GoogleLogin.from_env(self._env),
        )
