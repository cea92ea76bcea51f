"""The stored losses: tests/golden/losses.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.golden.cases import CASES, Case
from benchmarks.golden.runs import SERIES, Run
from benchmarks.harness import REPO

PATH = REPO / "tests" / "golden" / "losses.json"
TOLERANCE = 1e-4
"""Allowed relative difference from the stored values: CPUs and kernels round differently."""
_SCHEMA_VERSION = 1


@dataclass(slots=True, kw_only=True)
class Stored:
    """Stored losses, gradient norms and validation losses, and the checksums of their inputs."""

    inputs: dict[str, str] = field(default_factory=dict)
    """The sha256 of each model and data folder."""
    runs: dict[str, Run] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = PATH) -> Stored:
        """Read the file; a missing file means no stored values."""
        if not path.exists():
            return cls()
        raw = json.loads(path.read_text(encoding="utf-8"))
        assert raw["schema_version"] == _SCHEMA_VERSION, path
        runs = {name: _run(values) for name, values in raw["runs"].items()}
        return cls(inputs=raw["inputs"], runs=runs)

    def write(self, path: Path = PATH) -> None:
        """Write the file with a line per series."""
        path.write_text(self.render(), encoding="utf-8")

    def render(self) -> str:
        """Return the file's text, sorted."""
        runs = ",\n".join(
            f"  {json.dumps(name)}: {{\n{_render_series(run)}\n  }}"
            for name, run in sorted(self.runs.items())
        )
        inputs = json.dumps(self.inputs, indent=2, sort_keys=True).replace("\n", "\n ")
        return (
            f'{{\n "schema_version": {_SCHEMA_VERSION},\n'
            f' "inputs": {inputs},\n "runs": {{\n{runs}\n }}\n}}\n'
        )

    def replace(self, runs: Mapping[str, Run], *, inputs: Mapping[str, str]) -> None:
        """Replace the values of these cases, and delete values of cases that no longer exist."""
        known = {name for name in CASES if Case.parse(name).is_portable()}
        found = self.runs | dict(runs)
        self.runs = {name: run for name, run in found.items() if name in known}
        self.inputs |= inputs

    def require(self, cases: Sequence[Case], *, inputs: Mapping[str, str]) -> None:
        """Raise SystemExit if a case has no stored values, or has values of different inputs."""
        missing = [case.name for case in cases if case.name not in self.runs]
        if missing:
            raise SystemExit(
                f"error: {PATH} has no values of {missing[0]}. Store them with --write."
            )
        other = [name for name, sha256 in inputs.items() if self.inputs.get(name) != sha256]
        if other:
            raise SystemExit(
                f"error: {', '.join(other)}: inputs differ from the inputs in {PATH}. Undo the "
                "change, or store new values with --write."
            )


def _render_series(run: Run) -> str:
    """Return a line per series, with numbers as in Python's `repr`."""
    return ",\n".join(f"   {json.dumps(key)}: {json.dumps(run.series[key])}" for key in SERIES)


def _run(raw: Mapping[str, Mapping[str, float]]) -> Run:
    """Return the run from parsed JSON, whose keys are steps as text."""
    series = {key: {int(step): value for step, value in raw[key].items()} for key in SERIES}
    return Run(series=series, weights={})
