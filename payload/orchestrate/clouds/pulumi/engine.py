"""Runs the `pulumi` command for one stack; no other module runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from shutil import which
from typing import Any

from payload.core.errors import ConfigError
from payload.core.interrupts import Interrupts
from payload.core.printable_text import printable
from payload.core.validation.json_text import parse_json
from payload.orchestrate.clouds.proxy import with_loopback_exception
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
    interrupts: Interrupts,
    *,
    on_event: Callable[[Event], None],
    say: Callable[[str], None],
) -> None:
    """Read events until the process ends; pass each interrupt on to the process."""
    handled, ended = 0, False
    while True:
        for event in events.read():
            on_event(event)
        if ended:
            return
        # Read again after the process has ended: it can have written events since the last read.
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_POLL_S)
            ended = True
        if interrupts.exceed(handled) and not ended:
            say(_INTERRUPTED[min(handled, len(_INTERRUPTED) - 1)])
            number = signal.SIGINT if handled < len(_INTERRUPTED) else signal.SIGKILL
            handled += 1
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)


_INTERRUPTED = (
    "interrupted: waiting for pulumi to end, so that the stack's state stays correct",
    "interrupted again: killing pulumi; the next `up` or `down` finds the resources that pulumi "
    "was creating",
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
        """Use `stack`, or the selected stack if None. Raises ConfigError for an invalid name."""
        if stack is not None and not _STACK.fullmatch(stack):
            raise ConfigError(
                f"stack {stack!r}: must have letters, digits, dots, hyphens and underscores only, "
                "such as dev or my-org/tileforge/dev."
            )
        self.stack = stack
        self._env = {**with_loopback_exception(env), "PULUMI_SKIP_UPDATE_CHECK": "true"}
        self._folder = folder
        self._timeout_s = timeout_s

    def tell_program(self, **variables: str) -> None:
        """Pass environment variables to the cluster program in all later commands."""
        self._env = {**self._env, **variables}

    def argv(self, *arguments: str) -> list[str]:
        """Return the full command line, with the stack. Raises PulumiError."""
        program = which("pulumi", path=self._env.get("PATH", ""))
        if program is None:
            raise PulumiError(
                "`pulumi` not found on PATH. Install it: https://www.pulumi.com/docs/install/",
                "not installed",
            )
        stack = ["--stack", self.stack] if self.stack else []
        return [program, *arguments, *stack, "--non-interactive", "--color", "never"]

    def ask(self, *arguments: str, timeout_s: float | None = None) -> str:
        """Return the command's output. Raises PulumiError."""
        argv = self.argv(*arguments)
        timeout_s = timeout_s or self._timeout_s
        shown = f"pulumi {' '.join(arguments)}"
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
                f"`{shown}` did not finish within {timeout_s:g} s. Check that Pulumi's backend "
                "responds: pulumi whoami",
                "other",
            ) from None
        if done.returncode != 0:
            output = done.stderr or done.stdout
            raise refusal(shown, output, GoogleLogin.from_env(self._env))
        return done.stdout

    def ask_json(self, *arguments: str, timeout_s: float | None = None) -> Any:
        """Return the command's JSON output. Raises PulumiError."""
        text = self.ask(*arguments, "--json", timeout_s=timeout_s)
        where = f"output of `pulumi {' '.join(arguments)} --json`"
        try:
            return parse_json(text, where=where, fix=NEWER)
        except ConfigError as error:
            raise PulumiError(str(error), "other") from None

    def follow(
        self,
        *arguments: str,
        log: Path,
        on_event: Callable[[Event], None] = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Update:
        """Run an operation, pass each of its events to `on_event`, and return the result.

        Pulumi's output is written to `log`. An interrupt is passed on to pulumi. The method then
        waits until pulumi has shut down, and raises KeyboardInterrupt. Raises PulumiError.
        """
        with tempfile.TemporaryDirectory(prefix="tileforge-") as folder, Interrupts() as interrupts:
            path = Path(folder) / "events.jsonl"
            path.touch(mode=0o600)
            with log.open("wb") as printed, path.open("rb") as stream:
                process = subprocess.Popen(
                    [*self.argv(*arguments), "--event-log", str(path)],
                    cwd=self._folder,
                    # pulumi supports --event-log only if this variable is set.
                    env={**self._env, "PULUMI_DEBUG_COMMANDS": "true"},
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    # `timeout` and CI jobs interrupt some processes of a command twice. At the
                    # second interrupt, pulumi leaves resources outside its state.
                    process_group=0,
                )
                events = EventReader(stream)
                _wait(process, events, interrupts, on_event=on_event, say=say)
        if interrupts.count:
            raise KeyboardInterrupt
        text = log.read_bytes()[-_MOST_PRINTED_CHARS:].decode("utf-8", errors="replace")
        return Update(
            arguments=arguments,
            status=process.returncode,
            events=tuple(events.seen),
            unreadable=events.unreadable,
            text=printable(text),
            log=log,
            login=GoogleLogin.from_env(self._env),
        )
