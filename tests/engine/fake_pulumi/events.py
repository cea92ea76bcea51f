"""Output of an operation: the event log, and printed lines."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

Document = dict[str, Any]
_DONE = {"create": "created", "update": "updated", "delete": "deleted", "same": "unchanged"}
_COUNTED = ("create", "update", "delete", "replace", "same")


class Events:
    """Writes each event immediately; threads can share it."""

    def __init__(self, log: Path | None, *, is_preview: bool) -> None:
        """`log` is the file of `--event-log`."""
        self._file = None if log is None else log.open("a", encoding="utf-8")
        self._is_preview = is_preview
        self._sequence = 0
        self._lock = threading.RLock()
        self._began = time.monotonic()
        self._said: list[str] = []
        self.changes: Counter[str] = Counter()

    def write(self, kind: str, body: Document) -> None:
        """Write one event."""
        with self._lock:
            self._sequence += 1
            line = {"sequence": self._sequence, "timestamp": int(time.time()), kind: body}
            if self._file is not None:
                self._file.write(f"{json.dumps(line)}\n")
                self._file.flush()

    def step(self, kind: str, op: str, old: Document | None, new: Document | None) -> None:
        """Write `resourcePreEvent` or `resOutputsEvent` of an operation on a resource."""
        known = new or old or {}
        self.write(kind, {"metadata": _metadata(op, old, new)})
        if kind == "resOutputsEvent" and op in _COUNTED:
            self.changes[op] += 1
        if op not in ("same", "refresh"):
            ends = {"resourcePreEvent": "...", "resOutputsEvent": " done"}[kind]
            self.say(f"    {known['type']} {known['urn'].rpartition('::')[2]} {op}{ends}")

    def failed(self, op: str, old: Document | None, new: Document | None, said: str) -> None:
        """Write that an operation on a resource failed: the provider's log, the error, the step."""
        known = new or old or {}
        log = f"  sdk-v2/provider2.go:571: sdk.helper_schema: {said}: provider=google-beta@10.2.0\n"
        self.diagnostic(log, "error", known["urn"])
        begins = f"deleting {known['urn']}: " if op.startswith("delete") else ""
        self.diagnostic(f"{begins}1 error occurred:\n\t* {said}\n\n\n", "error", known["urn"])
        step = {"metadata": _metadata(op, old, new), "status": 2, "steps": 0}
        self.write("resOpFailedEvent", step)

    def diagnostic(self, message: str, severity: str, urn: str = "") -> None:
        """Write a message."""
        body = {"message": message, "color": "never", "severity": severity}
        if urn:
            body["urn"] = urn
        if severity == "error":
            body["prefix"] = "error: "
        self.write("diagnosticEvent", body)
        with self._lock:
            self._said.append(f"    {body.get('prefix', '')}{message.strip()}")

    def say(self, line: str) -> None:
        """Print a line."""
        with self._lock:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    def conclude(self, *, succeeded: bool) -> None:
        """Write the totals and print them."""
        summary = {
            "maybeCorrupt": False,
            "durationSeconds": int(time.monotonic() - self._began),
            "resourceChanges": {op: count for op, count in self.changes.items() if count},
            "PolicyPacks": {},
            "isPreview": self._is_preview,
            "result": "succeeded" if succeeded else "failed",
        }
        self.write("summaryEvent", summary)
        self.write("cancelEvent", {})
        counts = [f"    {count} {_DONE.get(op, op)}" for op, count in sorted(self.changes.items())]
        said = ["Diagnostics:", *self._said, ""] if self._said else []
        self.say("\n".join([*said, "Resources:", *counts, ""]))


def _metadata(op: str, old: Document | None, new: Document | None) -> Document:
    known = new or old or {}
    found = {
        "op": op,
        "urn": known["urn"],
        "type": known["type"],
        "old": old,
        "new": new,
        "detailedDiff": None,
        "provider": known.get("provider", ""),
    }
    if op != "refresh":
        found["logical"] = True
    if op == "update" and old and new:
        found["diffs"] = _differing(old, new)
        kinds = {"diffKind": "update", "inputDiff": False}
        found["detailedDiff"] = dict.fromkeys(found["diffs"], kinds)
    return found


def _differing(old: Document, new: Document) -> list[str]:
    names = sorted({*old["inputs"], *new["inputs"]})
    return [key for key in names if old["inputs"].get(key) != new["inputs"].get(key)]
