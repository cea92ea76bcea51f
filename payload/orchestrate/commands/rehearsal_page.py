"""Writes the Markdown page about a rehearsal."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import payload
from payload import __version__
from payload.core.durations import in_words
from payload.core.printable_text import printable
from payload.core.regular_files import read_bytes
from payload.core.validation.json_text import parse_json

REQUESTS = "requests.jsonl"
"""Log file in the rehearsal's folder, with a line for each request to Google."""
_LOG_LINES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A command of the rehearsal with its exit code."""

    name: str
    argv: Sequence[str]
    status: int
    took_s: float
    log: Path | None = None

    @property
    def is_good(self) -> bool:
        """Return True if the step succeeded."""
        return self.status == 0


def page(
    steps: Sequence[Step],
    *,
    folder: Path,
    settings: Mapping[str, str],
    hourly_usd: float,
    took_s: float,
    engine: str,
    project: str,
    trouble: str,
) -> str:
    """Return the page in Markdown, without the project's ID and addresses."""
    chosen = ", ".join(f"{key} = {value}" for key, value in sorted(settings.items()))
    lines = [
        "# A rehearsal in Google Cloud",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}: Tileforge {__version__}, Pulumi {engine}, pulumi-gcp "
        f"{_provider()}, Python {platform.python_version()}.",
        f"{in_words(took_s)}, at most ${hourly_usd * took_s / 3600:.2f}.",
        f"Settings: {chosen}.",
        *([f"It failed: {trouble}."] if trouble else []),
        "",
        "| Step | Exit code | Seconds |",
        "|---|--:|--:|",
        *(f"| {step.name} | {step.status} | {step.took_s:.1f} |" for step in steps),
        "",
        "| Resource | State | Seconds |",
        "|---|---|--:|",
        *_resource_rows(folder),
        "",
        "| Request | Count | Median s | Longest s | Failed |",
        "|---|--:|--:|--:|--:|",
        *_request_rows(folder / REQUESTS),
    ]
    failed = [step for step in steps if not step.is_good]
    if failed:
        lines += ["", "## Failed steps", "", *_report(failed)]
    return f"{_anonymous(chr(10).join(lines), project=project).rstrip()}\n"


def _report(failed: Sequence[Step]) -> list[str]:
    """Return each failed step with its command and the end of its log, to put into a bug report."""
    lines = []
    for step in failed:
        tail = []
        if step.log is not None:
            tail = printable(read_bytes(step.log).decode("utf-8", "replace")).splitlines()
        lines += [f"`{' '.join(step.argv)}` failed with exit code {step.status}:", "", "```text"]
        lines += [*tail[-_LOG_LINES:], "```", ""]
    return lines


def _anonymous(text: str, *, project: str) -> str:
    """Return the text without the project's ID, addresses and home folders."""
    placeholders = {Path.cwd(): "FOLDER", Path(sys.prefix): "PYTHON", Path.home(): "HOME"}
    placeholders[Path(payload.__file__).parents[1]] = "CHECKOUT"
    for path, placeholder in sorted(placeholders.items(), key=lambda each: -len(each[0].parts)):
        text = text if path == Path("/") else text.replace(str(path), placeholder)
    text = text.replace(project, "PROJECT")
    return re.sub(r"\b(?!10\.|127\.)\d{1,3}(?:\.\d{1,3}){3}\b", "ADDRESS", text)


def _resource_rows(folder: Path) -> list[str]:
    """Return a table row for each resource that Pulumi changed."""
    paths = [*folder.glob("up-*.json"), *folder.glob("destroy-*.json")]
    rows = []
    for path in sorted(paths, key=lambda each: each.stat().st_mtime):
        for each in parse_json(read_bytes(path), where=str(path))["resources"]:
            resource = f"{each['kind']} {each['name']}"
            rows.append(f"| {resource} | {each['state']} | {each['seconds']:.1f} |")
    return rows


def _request_rows(path: Path) -> list[str]:
    """Return a table row for each kind of request to Google."""
    by_kind: dict[str, list[tuple[float, bool]]] = {}
    if not path.exists():
        return []
    for line in read_bytes(path).splitlines():
        each = parse_json(line, where=str(path))
        by_kind.setdefault(each["what"], []).append((each["seconds"], each["failed"]))
    rows = []
    for what, times in sorted(by_kind.items()):
        seconds = [took for took, _ in times]
        failed = sum(bad for _, bad in times)
        columns = f"{len(times)} | {median(seconds):.3f} | {max(seconds):.3f} | {failed}"
        rows.append(f"| {what} | {columns} |")
    return rows


def _provider() -> str:
    try:
        return version("pulumi-gcp")
    except PackageNotFoundError:
        return "not installed"
