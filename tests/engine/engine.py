"""Pulumi's real engine and Google's real provider, on the stand-in for Google Cloud."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from payload.orchestrate.cloud.google import VARIABLE
from tests.orchestrate.cloud.standin import PROJECT, CloudStandIn
from tests.test_architecture import ROOT

_PROGRAM = ("__main__.py", "bootstrap", "infra", "payload", "pyproject.toml")
_MOST_S = 600.0
Done = subprocess.CompletedProcess[str]


def missing(env: Mapping[str, str]) -> str:
    """Return what the group `engine` lacks here; empty when nothing."""
    if shutil.which("pulumi", path=env.get("PATH")) is None:
        return "there is no `pulumi` on PATH"
    home = Path(env.get("PULUMI_HOME") or Path(env.get("HOME", "/")) / ".pulumi")
    plugin = f"resource-gcp-v{version('pulumi-gcp')}"
    on_path = shutil.which("pulumi-resource-gcp", path=env.get("PATH"))
    if on_path is None and not (home / "plugins" / plugin).is_dir():
        return f"Google's provider is not installed ({plugin})"
    return ""


class Engine:
    """One operator's project folder; a context manager that ends what it has started."""

    def __init__(self, folder: Path, cloud: CloudStandIn, *, env: Mapping[str, str]) -> None:
        self.folder = folder / "project"
        self.cloud = cloud
        self.folder.mkdir()
        (folder / "state").mkdir()
        for name in _PROGRAM:
            (self.folder / name).symlink_to(ROOT / name)
        document = yaml.safe_load((ROOT / "Pulumi.yaml").read_text(encoding="utf-8"))
        # This test's Python, whatever the environment around it is called.
        document["runtime"]["options"]["virtualenv"] = sys.prefix
        (self.folder / "Pulumi.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
        self.env = {name: env[name] for name in ("PATH", "HOME", "PULUMI_HOME") if name in env} | {
            **cloud.variables(),
            VARIABLE: cloud.url,
            "PYTHONPATH": str(ROOT),
            "PULUMI_BACKEND_URL": f"file://{folder}/state",
            "PULUMI_CONFIG_PASSPHRASE": "",
            "PULUMI_SKIP_UPDATE_CHECK": "true",
        }
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._started:
            self.kill(process)

    def pulumi(self, *words: str) -> Done:
        """Run `pulumi` to its end."""
        return self._run(["pulumi", *words, "--non-interactive"])

    def orchestrate(self, *words: str) -> Done:
        """Run `python -m payload.orchestrate` to its end."""
        return self._run(self._argv(words))

    def stack(self, verb: str, name: str) -> None:
        """Make, select or remove a stack, and configure a new one."""
        done = self.pulumi("stack", verb, name, *(["--yes"] if verb == "rm" else []))
        assert done.returncode == 0, done.stderr
        if verb == "init":
            self.configure(project=PROJECT, nodeCount=2)

    def configure(self, **settings: Any) -> None:
        """Set the stack's config."""
        for key, value in settings.items():
            words = value if isinstance(value, list) else [value]
            for place, word in enumerate(words):
                path = f"{key}[{place}]" if isinstance(value, list) else key
                text = str(word).lower() if isinstance(word, bool) else str(word)
                done = self.pulumi("config", "set", "--path", path, text)
                assert done.returncode == 0, done.stderr

    def up(self) -> Done:
        """`pulumi up` alone, which has to succeed."""
        done = self.pulumi("up", "--yes", "--skip-preview")
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def down(self) -> Done:
        """`down --yes`, which has to end with 0."""
        done = self.orchestrate("down", "--yes", "--without-collect", "--project", PROJECT)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start `pulumi` or, after `orchestrate`, a command of ours, in a group of its own."""
        argv = self._argv(words[1:]) if words[0] == "orchestrate" else [*words, "--non-interactive"]
        process = subprocess.Popen(
            argv,
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def interrupt(self, process: subprocess.Popen[bytes]) -> None:
        """Press Ctrl-C: every process of the group gets it."""
        os.killpg(process.pid, signal.SIGINT)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """End the whole group at once, as a crash of the machine does."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=60)

    def wait_for_requests(self, count: int, process: subprocess.Popen[bytes]) -> None:
        """Return when the cloud has been sent so many requests, or the process has ended."""
        ends = time.monotonic() + _MOST_S
        while len(self.cloud.requests) < count and process.poll() is None:
            assert time.monotonic() < ends
            time.sleep(0.005)

    def left(self) -> dict[str, list[str]]:
        """Return the cloud's resources, but for those of before."""
        with self.cloud.quiet():
            found = {
                kind: [each["name"] for each in items]
                for (kind, _), items in self.cloud.items.items()
                if items
            }
            buckets = [each["name"] for each in self.cloud.buckets if each["labels"]]
        return found | ({"buckets": buckets} if buckets else {})

    def machines(self) -> dict[str, str]:
        """The number of each machine, by its name."""
        with self.cloud.quiet():
            return {
                each["name"]: each["id"]
                for (kind, _), items in self.cloud.items.items()
                if kind == "instances"
                for each in items
            }

    def _argv(self, words: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "payload.orchestrate", *words]

    def _run(self, argv: Sequence[str]) -> Done:
        return subprocess.run(
            argv,
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_MOST_S,
            check=False,
        )
