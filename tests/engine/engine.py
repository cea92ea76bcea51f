"""An operator's project folder with Pulumi's real or fake engine, and the stand-in for Google."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from payload.orchestrate.clouds.gcp.endpoints import VARIABLE
from tests.orchestrate.cloud.standin import PROJECT, CloudStandIn
from tests.support import forked
from tests.support.fork_server import server_name
from tests.support.launching import PYTHON
from tests.support.sessions import kill_session
from tests.support.waiting import wait_until
from tests.test_architecture import ROOT

_PROGRAM = ("__main__.py", "bootstrap", "infra", "payload", "pyproject.toml")
# The fake's forks have infra and payload in memory.
_PROGRAM_OF_FORKS = ("__main__.py", "bootstrap", "pyproject.toml")
_LIBRARIES = (
    *("paramiko", "google.cloud.compute_v1", "google.cloud.storage", "yaml"),
    *(
        "infra.config_reading",
        "infra.bootstrap_values",
        "infra.gcp.kms_key_access",
        "infra.error_display",
    ),
    *(
        "infra.gcp.identity",
        "infra.gcp.inventory_output",
        "infra.last_measured_speed",
        "infra.gcp.nodes",
    ),
    *("infra.gcp.shared_storage", "infra.gcp.storage", "tests.engine.fake_pulumi.warm"),
)
_SHIM = """#!{python} -IS
import os, runpy, sys
os.environ[{variable!r}] = {server!r}
sys.argv = [{forked!r}, "-m", "tests.engine.fake_pulumi", *sys.argv[1:]]
runpy.run_path({forked!r}, run_name="__main__")
"""
_MOST_S = 600.0
STARTED_LOG = "started.log"
"""Output of the commands that `start` started."""
Done = subprocess.CompletedProcess[str]


def missing(env: Mapping[str, str]) -> str:
    """Return what the group `engine` lacks on this machine; empty if nothing is missing."""
    if shutil.which("pulumi", path=env.get("PATH")) is None:
        return "there is no `pulumi` on PATH"
    home = Path(env.get("PULUMI_HOME") or Path(env.get("HOME", "/")) / ".pulumi")
    plugin = f"resource-gcp-v{version('pulumi-gcp')}"
    on_path = shutil.which("pulumi-resource-gcp", path=env.get("PATH"))
    if on_path is None and not (home / "plugins" / plugin).is_dir():
        return f"Google's provider is not installed ({plugin})"
    return ""


class Engine:
    """One operator's project folder; a context manager that ends the processes that it started."""

    def __init__(
        self,
        folder: Path,
        cloud: CloudStandIn,
        *,
        env: Mapping[str, str],
        is_fake: bool = False,
        door: str = "",
    ) -> None:
        """With `is_fake`, use tests.engine.fake_pulumi instead of the `pulumi` on PATH.

        `door` identifies this operator's requests to the cloud.
        """
        self.is_fake = is_fake
        self.folder = folder / "project"
        self.cloud = cloud
        self.state = folder / "state"
        self.folder.mkdir(parents=True)
        self.state.mkdir()
        # A copy, because the program writes keys into its folder.
        for name in _PROGRAM_OF_FORKS if is_fake else _PROGRAM:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, self.folder / name)
        document = yaml.safe_load((ROOT / "Pulumi.yaml").read_text(encoding="utf-8"))
        # This test's Python, independent of the environment's name.
        document["runtime"]["options"]["virtualenv"] = sys.prefix
        (self.folder / "Pulumi.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
        url = cloud.open_door(door) if door else cloud.url
        self.env = {
            name: env[name]
            for name in ("PATH", "HOME", "PULUMI_HOME", "XDG_STATE_HOME")
            if name in env
        } | {
            **cloud.variables(url),
            VARIABLE: url,
            "PULUMI_BACKEND_URL": f"file://{self.state}",
            "PULUMI_CONFIG_PASSPHRASE": "",
            "PULUMI_SKIP_UPDATE_CHECK": "true",
        }
        self._python = [sys.executable]
        self._started: list[subprocess.Popen[bytes]] = []
        if is_fake:
            self._use_fake(folder / "bin", env)

    def _use_fake(self, folder: Path, env: Mapping[str, str]) -> None:
        """Put the fake `pulumi` first on PATH, and run every command in a fork."""
        self.env |= forked.read_at_start(env) | {"PYTHONPATH": str(ROOT)}
        server = server_name(*_LIBRARIES, PYTHONPATH=str(ROOT))
        folder.mkdir()
        shim = folder / "pulumi"
        text = _SHIM.format(
            python=sys.executable,
            variable=forked.VARIABLE,
            server=server,
            forked=forked.__file__,
        )
        shim.write_text(text, encoding="utf-8")
        shim.chmod(0o755)
        self.env |= {"PATH": f"{folder}:{env['PATH']}", forked.VARIABLE: server}
        self._python = list(PYTHON)

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
        """Run `pulumi` and wait for it."""
        return self._run(["pulumi", *words, "--non-interactive"])

    def orchestrate(self, *words: str) -> Done:
        """Run `python -m payload.orchestrate` and wait for it."""
        return self._run(self._argv(words))

    def stack(self, verb: str, name: str) -> None:
        """Create, select or remove a stack, and configure a new one."""
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
        """Run only `pulumi up`, which must succeed."""
        done = self.pulumi("up", "--yes", "--skip-preview")
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def down(self) -> Done:
        """Run `down --yes`, which must exit with 0."""
        loses = ("--without-collect", "--delete-filestore", "dev-shared")
        done = self.orchestrate("down", "--yes", *loses, "--project", PROJECT)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start `pulumi` or, with `orchestrate`, our command, in a new session."""
        argv = self._argv(words[1:]) if words[0] == "orchestrate" else [*words, "--non-interactive"]
        process = subprocess.Popen(
            argv,
            cwd=self.folder,
            env={**self.env, forked.GROUP: "1"},
            stdin=subprocess.DEVNULL,
            stdout=(self.folder / STARTED_LOG).open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def interrupt(self, process: subprocess.Popen[bytes]) -> None:
        """Send SIGINT to the process group, as Ctrl-C does, unless the command has ended."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the command with every process that it started, as a crash of the machine does."""
        kill_session(process.pid)
        process.wait(timeout=60)
        wait_until(lambda: not self._holders(), what="the end of a killed engine")

    def locks(self) -> list[Path]:
        """Return the lock files of the stack."""
        return sorted(self.state.glob(".pulumi/locks/**/*.json"))

    def _holders(self) -> list[int]:
        """Return the running processes of this machine that hold a lock."""
        held = [json.loads(path.read_text())["pid"] for path in self.locks()]
        return [pid for pid in held if Path(f"/proc/{pid}").exists()]

    def wait_for_requests(self, count: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until the cloud has received this number of requests, or the process has ended."""
        ends = time.monotonic() + _MOST_S
        while len(self.cloud.requests) < count and process.poll() is None:
            assert time.monotonic() < ends
            time.sleep(0.005)

    def kill_while_it_builds(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the command at its first request after a resource exists."""
        is_building, is_killed = threading.Event(), threading.Event()

        def hold(method: str, target: str) -> None:
            if not is_killed.is_set() and self.left():
                is_building.set()
                # On a busy machine, the command could otherwise end before it is killed.
                is_killed.wait(_MOST_S)

        self.cloud.before_each = hold
        while not is_building.wait(0.05):
            if process.poll() is not None:
                log = (self.folder / STARTED_LOG).read_text(encoding="utf-8", errors="replace")
                raise AssertionError(f"the command ended before it built anything:\n{log}")
        kill_session(process.pid)
        is_killed.set()  # an engine in another session ends when its request is answered
        self.kill(process)

    def left(self) -> dict[str, list[str]]:
        """Return the cloud's resources, without those that existed before."""
        with self.cloud.quiet():
            found = {
                kind: [each["name"] for each in items]
                for (kind, _), items in self.cloud.items.items()
                if items
            }
            shared = [each["name"] for each in self.cloud.filestores.values()]
            buckets = [each["name"] for each in self.cloud.buckets if each["labels"]]
        found |= {"filestores": shared} if shared else {}
        return found | ({"buckets": buckets} if buckets else {})

    def machines(self) -> dict[str, str]:
        """Return each machine's ID by name, in the order of names."""
        with self.cloud.quiet():
            found = {
                each["name"]: each["id"]
                for (kind, _), items in self.cloud.items.items()
                if kind == "instances"
                for each in items
            }
        return dict(sorted(found.items()))

    def _argv(self, words: Sequence[str]) -> list[str]:
        return [*self._python, "-m", "payload.orchestrate", *words]

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
