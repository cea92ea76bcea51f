"""The report of a visit: a page after each stage, lines on stderr, and JSON."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.facts import device_facts
from benchmarks.gpu.visit import Outcome, StageResult
from benchmarks.harness import PAGE_HEAD, markdown_table, one_line
from payload.core.files import write_whole

_HEAD = "| Stage | Compared | Required | Found | Outcome | Seconds |\n|---|---|---|---|---|---|"

_OTHER_OUTCOMES: tuple[Outcome, ...] = ("failed", "skipped", "not tried here")
_WIDTH = 80


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

    def begin(self, name: str) -> None:
        """Print the name of the stage that begins."""
        _say(f"stage {len(self._results) + 1} of {len(self._stages)}: {name}")

    def add(self, result: StageResult, *, device: Mapping[str, Any], used_s: float) -> None:
        """Print the result and write the page; `device` has the probe's facts if it ran."""
        if self._page is None:
            # The logs are in a temporary folder.
            result = replace(result, log=None)
        self._results.append(result)
        after = f" after {result.took_s:.0f} s" if result.took_s else ""
        _say(f"  {result.outcome}{after}: {result.cause or result.found}")
        self._facts["Budget"] = f"{self._budget_s:.0f} s, {used_s:.0f} s used"
        self._facts |= device_facts(device)
        if self._page is not None:
            not_run = self._stages[len(self._results) :]
            write_whole(self._page, render(self._results, facts=self._facts, not_run=not_run))

    def has_failures(self) -> bool:
        """Return whether a stage failed."""
        return bool(self._named("failed"))

    def say_verdict(self, *, took_s: float) -> None:
        """Print how many stages passed, and the names of the others by outcome."""
        passed = len(self._named("passed"))
        others = "".join(
            f"; {outcome}: {', '.join(names)}"
            for outcome in _OTHER_OUTCOMES
            if (names := self._named(outcome))
        )
        _say(f"{passed} of {len(self._stages)} stages passed in {took_s:.0f} s{others}")

    def as_json(self) -> dict[str, Any]:
        """Return facts and results as one JSON object."""
        stages = [asdict(each) for each in self._results]
        return {"benchmark": "gpu", "facts": self._facts, "stages": stages}

    def _named(self, outcome: Outcome) -> list[str]:
        return [each.name for each in self._results if each.outcome == outcome]


def render(
    results: Sequence[StageResult], *, facts: Mapping[str, str], not_run: Sequence[str]
) -> str:
    """Return the page in Markdown; `not_run` names the stages without a result."""
    counts = ", ".join(
        f"{number} {outcome}"
        for outcome in ("passed", *_OTHER_OUTCOMES)
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
    for each in results:
        if each.details:
            parts += [f"## {each.name}", each.details]
    if not_run:
        parts.append(f"Not run yet: {', '.join(not_run)}.")
    return "\n\n".join(parts) + "\n"


def _cells(result: StageResult) -> list[str]:
    found = result.found or "see below"
    texts = [result.name, result.compared, result.wanted, found, result.outcome]
    return [*texts, f"{result.took_s:.0f}"]


def _say(text: str) -> None:
    """Print to stderr, in lines that fit a narrow terminal."""
    print(textwrap.fill(text, _WIDTH, subsequent_indent="    "), file=sys.stderr, flush=True)
