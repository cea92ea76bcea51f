"""A stack's state, lock and config on disk, in the format of Pulumi's file backend."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]
_SCHEME = "file://"


class RefusedError(Exception):
    """An error printed as `error: ...` before the engine starts."""


class Backend:
    """The project in `folder`, with its state in the folder in PULUMI_BACKEND_URL."""

    def __init__(self, env: Mapping[str, str], folder: Path) -> None:
        """Raises RefusedError without a project or a backend."""
        if not (folder / "Pulumi.yaml").is_file():
            raise RefusedError("no Pulumi.yaml project file found (searching upwards from here)")
        url = env.get("PULUMI_BACKEND_URL", "")
        if not url.startswith(_SCHEME):
            raise RefusedError(
                "PULUMI_ACCESS_TOKEN must be set for login during non-interactive CLI sessions"
            )
        self.folder = folder
        self.project = yaml.safe_load((folder / "Pulumi.yaml").read_text(encoding="utf-8"))
        self.name = str(self.project["name"])
        self._root = Path(url.removeprefix(_SCHEME)) / ".pulumi"
        self._phrase = env.get("PULUMI_CONFIG_PASSPHRASE")

    def stack(self, name: str | None) -> Stack:
        """Return a stack, by default the selected one. Raises RefusedError."""
        if name is None and not self._selected.is_file():
            raise RefusedError("no stack selected; please use `pulumi stack select` to choose one")
        name = name or json.loads(self._selected.read_text())["stack"]
        stack = Stack(self, name.rpartition("/")[2])
        if not stack.path.is_file():
            raise RefusedError(f"no stack named '{stack.name}' found")
        return stack

    def names(self) -> list[str]:
        """Return the names of the project's stacks."""
        return sorted(path.stem for path in (self._root / "stacks" / self.name).glob("*.json"))

    def create(self, name: str) -> Stack:
        """Create a stack. Raises RefusedError."""
        if self._phrase is None:
            raise RefusedError(
                "passphrase must be set with PULUMI_CONFIG_PASSPHRASE or "
                "PULUMI_CONFIG_PASSPHRASE_FILE environment variables"
            )
        stack = Stack(self, name.rpartition("/")[2])
        if stack.path.is_file():
            raise RefusedError(f"stack '{name}' already exists")
        stack.save([], [])
        document = stack.read_settings()
        stack.write_settings(document | {"encryptionsalt": f"v1:{self.digest()}"})
        return stack

    def select(self, stack: Stack) -> None:
        """Select the stack, which is the default of later commands."""
        self._selected.parent.mkdir(parents=True, exist_ok=True)
        self._selected.write_text(json.dumps({"stack": stack.name}))

    def digest(self) -> str:
        """Return a digest that identifies the passphrase."""
        return hashlib.sha256((self._phrase or "").encode()).hexdigest()[:16]

    @property
    def root(self) -> Path:
        """The state's folder."""
        return self._root

    @property
    def _selected(self) -> Path:
        key = hashlib.sha256(str(self.folder).encode()).hexdigest()[:16]
        return self._root / "workspaces" / f"{key}.json"


class Stack:
    """One stack."""

    def __init__(self, backend: Backend, name: str) -> None:
        self.backend = backend
        self.name = name
        self.path = backend.root / "stacks" / backend.name / f"{name}.json"
        self._locks = backend.root / "locks/organization" / backend.name / name
        self._own_lock: Path | None = None

    def read(self) -> tuple[list[Document], list[Document]]:
        """Return resources and pending operations. Raises RefusedError for a broken state."""
        try:
            latest = json.loads(self.path.read_text(encoding="utf-8"))["checkpoint"]["latest"]
        except ValueError:
            raise RefusedError("failed to load checkpoint: unexpected end of JSON input") from None
        return latest.get("resources", []), latest.get("pending_operations", [])

    def save(self, resources: list[Document], pending: list[Document]) -> None:
        """Replace the state and keep the previous one as `.bak`.

        Raises OSError if the disk is full; the state is then truncated, as in the acceptance of
        9e71e47 on a real engine.
        """
        latest = self._deployment(resources, pending)
        checkpoint = {"stack": f"organization/{self.backend.name}/{self.name}", "latest": latest}
        text = json.dumps({"version": 3, "checkpoint": checkpoint}, indent=4)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".new")
        try:
            fresh.write_text(text, encoding="utf-8")
            if self.path.is_file():
                shutil.copyfile(self.path, f"{self.path}.bak")
        except OSError:
            fresh.unlink(missing_ok=True)
            self.path.write_bytes(b"")
            raise
        fresh.replace(self.path)

    def export(self) -> Document:
        """Return the output of `pulumi stack export`."""
        return {"version": 3, "deployment": self._deployment(*self.read())}

    def remove(self, *, force: bool) -> None:
        """Remove the stack and its config. Raises RefusedError while it has resources."""
        if self.read()[0] and not force:
            raise RefusedError(
                f"'{self.name}' still has resources; removal rejected. Possible actions: ..."
            )
        self.path.unlink()
        self._settings.unlink(missing_ok=True)

    def lock(self) -> None:
        """Take the lock. Raises RefusedError with the recorded text when it is held."""
        self._locks.mkdir(parents=True, exist_ok=True)
        own = self._locks / f"{uuid.uuid4()}.json"
        holder = {
            "pid": os.getpid(),
            "username": getpass.getuser(),
            "hostname": socket.gethostname(),
            "timestamp": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        }
        fresh = own.with_suffix(".new")
        fresh.write_text(json.dumps(holder))
        fresh.replace(own)
        self._own_lock = own
        others = [path for path in sorted(self._locks.glob("*.json")) if path != own]
        if others:
            self.unlock()
            raise RefusedError(
                f"the stack is currently locked by {len(others)} lock(s). Either wait for the "
                "other process(es) to end or delete the lock file with `pulumi cancel`.\n"
                + "\n".join(f"  {_shown(path)}" for path in others)
            )

    def unlock(self) -> None:
        """Release the lock."""
        if self._own_lock is not None:
            self._own_lock.unlink(missing_ok=True)

    def cancel(self) -> None:
        """Remove every lock."""
        for path in self._locks.glob("*.json"):
            path.unlink(missing_ok=True)

    def read_settings(self) -> Document:
        """Return the stack's file of settings."""
        if not self._settings.is_file():
            return {}
        found: Document = yaml.safe_load(self._settings.read_text(encoding="utf-8")) or {}
        return found

    def write_settings(self, document: Document) -> None:
        """Replace the stack's file of settings."""
        self._settings.write_text(yaml.safe_dump(document), encoding="utf-8")

    def config(self) -> Document:
        """Return values by full key, including the project's defaults."""
        found = {
            f"{self.backend.name}:{key}": entry["default"]
            for key, entry in self.backend.project.get("config", {}).items()
            if isinstance(entry, dict) and "default" in entry
        }
        own: Document = self.read_settings().get("config", {})
        return found | own

    def check_passphrase(self) -> None:
        """Raises RefusedError if the passphrase differs from the stack's."""
        salt = self.read_settings().get("encryptionsalt", "").removeprefix("v1:")
        if salt and salt != self.backend.digest():
            raise RefusedError(
                "getting stack configuration: get stack secrets manager: incorrect passphrase"
            )

    def _deployment(self, resources: list[Document], pending: list[Document]) -> Document:
        manifest = {"time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "magic": "", "version": ""}
        found: Document = {"manifest": manifest}
        if resources:
            found["resources"] = resources
        if pending:
            found["pending_operations"] = pending
        return found

    @property
    def _settings(self) -> Path:
        return self.backend.folder / f"Pulumi.{self.name}.yaml"


def _shown(path: Path) -> str:
    held = json.loads(path.read_text())
    return (
        f"file://{path}?no_tmp_dir=true: created by {held['username']}@{held['hostname']} "
        f"(pid {held['pid']}) at {held['timestamp']}"
    )
