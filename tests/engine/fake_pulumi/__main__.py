"""The command line `python -m tests.engine.fake_pulumi ARGUMENTS`, which `pulumi` on PATH runs."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engine.fake_pulumi.backend import Backend, RefusedError, Stack
from tests.engine.fake_pulumi.deployment import STACK, Deployment, StoppedError
from tests.engine.fake_pulumi.events import Events
from tests.engine.fake_pulumi.program import ProgramError, run
from tests.engine.provider import Sender

_WITH_VALUE = frozenset({"--color", "--event-log", "--file", "--stack", "--replace"})
_FLAGS = frozenset(
    {
        *("--exclude-protected", "--expect-no-changes", "--force", "--json", "--non-interactive"),
        *("--no-select", "--path", "--show-name", "--skip-preview", "--yes"),
    }
)
_RETRIES = 5
_COMPUTE = "GOOGLE_COMPUTE_CUSTOM_ENDPOINT"
_NO_CREDENTIALS = (
    "Attempted to load application default credentials since neither `credentials` nor "
    "`access_token` was set in the provider block.  No credentials loaded. To use your gcloud "
    "credentials, run 'gcloud auth application-default login'.  Original error: google: could not "
    "find default credentials. See "
    "https://cloud.google.com/docs/authentication/external/set-up-adc for more information"
)
_INTERRUPTED = (
    "^C received; cancelling. If you would like to terminate immediately, press ^C again.\n"
    "Note that terminating immediately may lead to orphaned resources and other inconsistencies.\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A parsed command line."""

    words: Sequence[str]
    flags: frozenset[str]
    values: Mapping[str, str]
    replaced: Sequence[str] = field(default=())

    @classmethod
    def of(cls, argv: Sequence[str]) -> Line:
        """Raises RefusedError for an unsupported option."""
        words: list[str] = []
        flags: set[str] = set()
        values: dict[str, str] = {}
        urns: list[str] = []
        rest = iter(argv)
        for word in rest:
            if word == "--replace":
                urns.append(next(rest))
            elif word in _WITH_VALUE:
                values[word] = next(rest)
            elif word in _FLAGS:
                flags.add(word)
            elif word.startswith("--"):
                raise RefusedError(f"unknown flag: {word}")
            else:
                words.append(word)
        return cls(words=words, flags=frozenset(flags), values=values, replaced=tuple(urns))


def main(argv: Sequence[str], env: Mapping[str, str], folder: Path) -> int:
    """Run one command and return the exit status."""
    try:
        line = Line.of(argv)
        if line.words == ["version"]:
            sys.stdout.write("v3.260.0\n")
            return 0
        backend = Backend(env, folder)
        if line.words[0] in ("preview", "up", "destroy", "refresh"):
            if "--event-log" in line.values and env.get("PULUMI_DEBUG_COMMANDS") != "true":
                raise RefusedError("unknown flag: --event-log")
            return _operate(line, backend.stack(line.values.get("--stack")), env)
        sys.stdout.write(_answer(line, backend))
        return 0
    except RefusedError as error:
        # As recorded: an empty line on stdout, and the reason on stderr.
        sys.stdout.write("\n")
        sys.stderr.write(f"error: {error}\n")
        return 1


def _answer(line: Line, backend: Backend) -> str:
    """Return the output of a command that runs no engine."""
    match line.words:
        case ["whoami"]:
            return "operator\n"
        case ["stack", "init", *names]:
            names = [*names, *filter(None, [line.values.get("--stack")])]
            if len(names) > 1:
                raise RefusedError(
                    "only one of --stack or argument stack name may be specified, not both"
                )
            stack = backend.create(names[0])
            if "--no-select" not in line.flags:
                backend.select(stack)
            return f"Created stack '{stack.name}'\n"
        case ["stack", "ls"]:
            return f"{json.dumps([{'name': name} for name in backend.names()])}\n"
        case ["stack", "select", name]:
            backend.select(backend.stack(name))
            return ""
    removed = line.words[2] if line.words[:2] == ["stack", "rm"] and line.words[2:] else None
    stack = backend.stack(removed or line.values.get("--stack"))
    match line.words:
        case ["config"]:
            return f"{json.dumps(_shown_config(stack.config()), indent=2)}\n"
        case ["config", "set", key, value]:
            _set_config(stack, key, value, is_path="--path" in line.flags)
            return ""
        case ["config", "get", key]:
            return f"{stack.config()[_full(stack, key)]}\n"
        case ["stack"] if "--show-name" in line.flags:
            return f"{stack.name}\n"
        case ["stack", "output", *names]:
            return f"{json.dumps(_outputs(stack, names), indent=2)}\n"
        case ["stack", "export"]:
            text = f"{json.dumps(stack.export(), indent=4)}\n"
            if "--file" in line.values:
                Path(line.values["--file"]).write_text(text, encoding="utf-8")
            return "" if "--file" in line.values else text
        case ["stack", "import"]:
            path = line.values.get("--file")
            text = sys.stdin.read() if path is None else Path(path).read_text(encoding="utf-8")
            found = json.loads(text)["deployment"]
            stack.lock()
            stack.save(found.get("resources", []), found.get("pending_operations", []))
            stack.unlock()
            return "Import complete.\n"
        case ["stack", "rm", *_]:
            stack.remove(force="--force" in line.flags)
            return f"Stack '{stack.name}' has been removed!\n"
        case ["cancel"]:
            stack.cancel()
            return f"\nThe currently running update for '{stack.name}' has been canceled!\n"
    raise RefusedError(f'unknown command "{" ".join(line.words)}" for "pulumi"')


def _full(stack: Stack, key: str) -> str:
    return key if ":" in key else f"{stack.backend.name}:{key}"


def _shown_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: {"value": json.dumps(value), "objectValue": value, "secret": False}
        if isinstance(value, (list, dict))
        else {"value": _text(value), "secret": False}
        for key, value in sorted(config.items())
    }


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _set_config(stack: Stack, key: str, value: str, *, is_path: bool) -> None:
    name, _, place = _full(stack, key).partition("[")
    document = stack.read_settings()
    config = document.setdefault("config", {})
    if is_path and place:
        items = config.setdefault(name, [])
        number = int(place.rstrip("]"))
        items[number : number + 1] = [value]
    else:
        config[name] = value
    stack.write_settings(document)


def _outputs(stack: Stack, names: Sequence[str]) -> Any:
    resources, _ = stack.read()
    outputs: dict[str, Any] = next((r["outputs"] for r in resources if r["type"] == STACK), {})
    if names and names[0] not in outputs:
        raise RefusedError(f"current stack does not have output property '{names[0]}'")
    return outputs[names[0]] if names else outputs


def _operate(line: Line, stack: Stack, env: Mapping[str, str]) -> int:
    """Run preview, up, destroy or refresh; return the exit status."""
    verb = line.words[0]
    stack.check_passphrase()
    if verb != "preview":
        stack.lock()
    log = line.values.get("--event-log")
    events = Events(None if log is None else Path(log), is_preview=verb == "preview")
    try:
        return _Operation(line, stack, events, env).carry_out()
    finally:
        stack.unlock()


class _Operation:
    """One operation of the engine."""

    def __init__(self, line: Line, stack: Stack, events: Events, env: Mapping[str, str]) -> None:
        self._line = line
        self._stack = stack
        self._events = events
        self._verb = line.words[0]
        url = env.get(_COMPUTE, "").partition("/compute/")[0]
        self._sender = Sender(
            url=url, token=env.get("GOOGLE_OAUTH_ACCESS_TOKEN", ""), retries=_RETRIES
        )
        is_preview = self._verb == "preview"
        self._deployment = Deployment(stack, events, self._sender, is_preview=is_preview)
        signal.signal(signal.SIGINT, self._interrupted)

    def carry_out(self) -> int:
        """Run the operation and return the exit status."""
        config = {key: value for key, value in self._stack.config().items()}
        shown = {key: _text(value) for key, value in config.items()}
        self._events.write("preludeEvent", {"config": shown})
        self._events.say(f"{self._verb} ({self._stack.name}):\n")
        try:
            self._steps(config)
            succeeded = not self._deployment.stopped
        except ProgramError as error:
            succeeded = False
            self._events.diagnostic(f"{error}\n", "error")
            words = "an unhandled error occurred: program exited with non-zero exit code: 1\n"
            self._events.diagnostic(words, "error")
        except StoppedError:
            succeeded = False
        except OSError as error:
            succeeded = False
            self._events.diagnostic(f"saving the state: {error}\n", "error")
        except Exception:
            succeeded = False
            text = f"Program failed with an unhandled exception:\n{traceback.format_exc()}"
            self._events.diagnostic(text, "error")
        if not succeeded and self._deployment.stopped:
            noun = "preview" if self._verb == "preview" else "update"
            how = "canceled" if self._deployment.interrupted else "failed"
            self._events.diagnostic(f"{noun} {how}\n", "error")
        self._events.conclude(succeeded=succeeded)
        changes = {op for op, count in self._events.changes.items() if count and op != "same"}
        if succeeded and changes and "--expect-no-changes" in self._line.flags:
            sys.stderr.write("error: no changes were expected but changes were proposed\n")
            return 1
        return 0 if succeeded else 1

    def _steps(self, config: Mapping[str, Any]) -> None:
        deployment = self._deployment
        options = self._stack.backend.project.get("options", {})
        if deployment.old and not self._sender.url:
            self._no_credentials()
        if options.get("refresh") == "always" or self._verb == "refresh":
            deployment.refresh()
        if self._verb == "refresh":
            return
        if self._verb == "destroy":
            self._destroy()
            return
        for urn in self._line.replaced:
            deployment.replaced_by_hand.add(urn)
        if not self._sender.url:
            self._no_credentials()
        run(
            deployment,
            folder=self._stack.backend.folder,
            config=config,
            project=self._stack.backend.name,
            stack=self._stack.name,
        )
        deployment.delete_rest()

    def _destroy(self) -> None:
        protected = self._deployment.protected()
        if protected and "--exclude-protected" not in self._line.flags:
            urn = protected[0]
            self._events.diagnostic(
                f'resource "{urn}" cannot be deleted\nbecause it is protected. To unprotect the '
                f"resource, either remove the `protect` flag\n",
                "error",
                urn,
            )
            self._deployment.failed = True
            raise StoppedError
        self._deployment.delete_rest(keep=self._deployment.with_their_needs(protected))

    def _no_credentials(self) -> None:
        self._deployment.failed = True
        message = f"Preview failed: 1 error occurred:\n\t* {_NO_CREDENTIALS}\n\n\n"
        self._events.diagnostic(message, "error")
        raise StoppedError

    def _interrupted(self, _: int, __: object) -> None:
        """Finish the running steps, then stop; at the second interrupt, stop immediately."""
        if self._deployment.interrupted:
            self._stack.unlock()
            os._exit(1)
        self._deployment.interrupted = True
        self._events.say(_INTERRUPTED)
        self._events.write("stdoutEvent", {"message": _INTERRUPTED, "color": "never"})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dict(os.environ), Path.cwd()))
