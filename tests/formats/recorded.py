"""Copies of the fixtures of 9e71e47, and its recorded results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from payload.config.run_config import load_run_config
from payload.run_record.approved_settings import settings_to_approve

FIXTURES = Path(__file__).parents[1] / "fixtures" / "9e71e47"
CLOSE = 1e-4
"""Largest relative difference of a loss from the recorded one, on any CPU."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """An operator's files of that release."""

    root: Path
    copied_ns: int
    """Time of the copy; files that commands write later are newer."""

    @classmethod
    def copied_to(cls, root: Path) -> Recorded:
        """Copy all fixtures to `root`, a new folder."""
        shutil.copytree(FIXTURES, root, symlinks=True)
        mark = root / "expected.json"
        mark.touch()
        return cls(root, mark.stat().st_mtime_ns)

    def is_new(self, path: Path) -> bool:
        """Return True if a command has written the file after the copy."""
        return path.lstat().st_mtime_ns > self.copied_ns

    def new_json(self, path: Path) -> Any:
        """Return the JSON document of a new file; fails if the file is the fixture's own."""
        assert self.is_new(path), f"{path}: no command wrote it, it is the fixture's"
        return read_json(path)

    @property
    def project(self) -> Path:
        """Return the folder where the operator typed commands: data, runs, inventories."""
        return self.root / "project"

    @property
    def store(self) -> Path:
        """Return the folder that a run's results were copied to."""
        return self.root / "results"

    @property
    def cloud(self) -> Path:
        """Return the folder of a Pulumi stack."""
        return self.root / "cloud"

    def run_dir(self, name: str) -> Path:
        """Return a run's folder."""
        return self.project / "runs" / name

    def stored_checkpoint(self, name: str) -> Path:
        """Return the newest checkpoint of a run."""
        return sorted(self.run_dir(name).glob("checkpoints/step_*"))[-1]


def named(name: str) -> list[str]:
    """Return the `--set` options of a run's settings, whose approval was not recorded then."""
    config = load_run_config(FIXTURES / "project" / "runs" / name / "run.toml")
    found = settings_to_approve(config, of=["data.dir", "model.init"])
    return [word for key, value in found.items() for word in ("--set", f"{key}={value}")]


def expected() -> Mapping[str, Any]:
    """Return the results of 9e71e47 with the fixtures."""
    loaded: dict[str, Any] = json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))
    return loaded


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def read_json(path: Path) -> Any:
    """Return the document in a file."""
    return json.loads(path.read_text(encoding="utf-8"))
