"""The report of a visit: a page after each stage, a table on stderr, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.facts import device_facts
from benchmarks.gpu.visit import StageResult
from benchmarks.harness import PAGE_HEAD, Table, markdown_table, one_line
from payload.core.files import write_whole

_HEAD = "| Stage | Compared | Required | Found | Outcome | Seconds |\n|---|---|---|---|---|---|"


class Report:
    """Collects results; the page on disk is always complete and has every result so far."""

    def __init__(
        self, page: Path | None, *, stages: Sequence[str], budget_s: float, facts: Mapping[str, str]
    ) -> None:
        self._page = page
        self._stages = stages
        self._budget_s = budget_s
        self._facts = dict(facts)
        self._results: list[StageResult] = []
        self._table = Table("outcome", "s", "found", labels=stages)

    def add(self, result: StageResult, *, device: Mapping[str, Any], used_s: float) -> None:
        """Print the result and write the page; `device` has the probe's facts if it ran."""
        if self._page is None:
            # The logs are in a temporary folder.
            result = replace(result, log=None)
        self._results.append(result)
        self._table.row(result.name, result.outcome, f"{result.took_s:.0f}", result.found)
        if result.cause is not None:
            self._table.note(f"  {result.cause}")
        self._facts["Budget"] = f"{self._budget_s:.0f} s, {used_s:.0f} s used"
        self._facts |= device_facts(device)
        if self._page is not None:
            not_run = self._stages[len(self._results) :]
            write_whole(self._page, render(self._results, facts=self._facts, not_run=not_run))

    def has_failures(self) -> bool:
        """Return whether a stage failed."""
        return any(each.outcome == "failed" for each in self._results)

    def to_json(self) -> str:
        """Return facts and results as one JSON object."""
        stages = [asdict(each) for each in self._results]
        return json.dumps({"benchmark": "gpu", "facts": self._facts, "stages": stages})


def render(
    results: Sequence[StageResult], *, facts: Mapping[str, str], not_run: Sequence[str]
) -> str:
    """Return the page in Markdown; `not_run` names the stages without a result."""
    counts = ", ".join(
        f"{number} {outcome}"
        for outcome in ("passed", "failed", "skipped", "not tried here")
        if (number := sum(each.outcome == outcome for each in results))
    )
    parts = [
        "# Visit to a GPU",
        markdown_table(PAGE_HEAD, list(facts.items())),
        f"{len(results)} stages: {counts}.",
        markdown_table(_HEAD, [_cells(each) for each in results]),
    ]
    causes = [
        f"- {each.name}: {one_line(each.cause)}" + (f" (log: `{each.log}`)" if each.log else "")
        for each in results
        if each.cause is not None
    ]
    if causes:
        parts += ["Causes of failures:", "\n".join(causes)]
    if not_run:
        parts.append(f"Not run yet: {', '.join(not_run)}.")
    return "\n\n".join(parts) + "\n"


def _cells(result: StageResult) -> list[str]:
    found = result.found or "see below"
    texts = [result.name, result.compared, result.wanted, found, result.outcome]
    return [*texts, f"{result.took_s:.0f}"]
