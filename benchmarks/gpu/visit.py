"""Runs a stage of a visit within the remaining time."""

from __future__ import annotations

import importlib.util
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.programs import ProgramError
from benchmarks.gpu.runs import Runs
from payload.core.files import write_whole

_LIMIT_FACTOR = 3.0
"""A stage counts as hung after its estimated time, multiplied by this factor."""
_REHEARSAL_LIMIT_FACTOR = 10.0
"""The factor in a rehearsal, whose machine is slower than the estimates assume."""

Outcome = Literal["passed", "failed", "skipped", "not tried here"]


class NoGpuError(Exception):
    """There is no GPU, so no other stage can run."""


class NotTriedError(Exception):
    """The stage cannot run on this machine; the message has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a completed stage."""

    text: str
    passed: bool
    details: str = ""
    """Tables and lists for a section of the page, in Markdown."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """Measurements for the JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One comparison or measurement; a row of the page."""

    name: str
    compared: str
    wanted: str
    estimate_s: float
    """Estimated time on a machine with an H100. If less time is left, the stage is skipped."""
    run: Callable[[Runs], Found]
    """Function of the stage. Raises NoGpuError, NotTriedError and ProgramError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """A stage with its result."""

    name: str
    compared: str
    wanted: str
    found: str
    outcome: Outcome
    took_s: float = 0.0
    cause: str | None = None
    """Cause of a failure; None for any other outcome."""
    log: str | None = None
    """Log of the failed program, relative to the page's folder."""
    details: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)


def require_package(name: str, *, setting: str) -> None:
    """Raise NotTriedError if the package that a setting needs is not installed."""
    if importlib.util.find_spec(name) is None:
        raise NotTriedError(f"{setting} needs {name}, which is not installed")


def run_stage(stage: Stage, runs: Runs, *, ends_s: float) -> StageResult:
    """Return the stage's result; `ends_s` is on the monotonic clock. Raises NoGpuError."""
    started_s = time.monotonic()
    left_s = ends_s - started_s
    if stage.estimate_s > left_s:
        text = f"needs about {stage.estimate_s:.0f} s, {max(0.0, left_s):.0f} s left"
        return _result(stage, text, "skipped")
    factor = _REHEARSAL_LIMIT_FACTOR if runs.rehearsal else _LIMIT_FACTOR
    runs.programs.limit(min(left_s, factor * stage.estimate_s))
    return replace(_run(stage, runs), took_s=time.monotonic() - started_s)


def _run(stage: Stage, runs: Runs) -> StageResult:
    try:
        found = stage.run(runs)
    except NoGpuError:
        raise
    except NotTriedError as reason:
        return _result(stage, str(reason), "not tried here")
    except ProgramError as error:
        return _failed(stage, str(error), error.log)
    except Exception as error:
        # A broken stage must not stop the others on a borrowed machine.
        log = runs.programs.logs / f"{stage.name.replace(' ', '-')}.log"
        write_whole(log, traceback.format_exc())
        return _failed(stage, f"{type(error).__name__}: {error}", log)
    finally:
        runs.programs.stop()
    result = _result(stage, found.text, "passed" if found.passed else "failed")
    return replace(result, details=found.details, numbers=found.numbers)


def _result(stage: Stage, found: str, outcome: Outcome) -> StageResult:
    return StageResult(
        name=stage.name,
        compared=stage.compared,
        wanted=stage.wanted,
        found=found,
        outcome=outcome,
    )


def _failed(stage: Stage, cause: str, log: Path) -> StageResult:
    failed = _result(stage, "", "failed")
    return replace(failed, cause=" ".join(cause.split()), log=f"{log.parent.name}/{log.name}")
