"""Runs of the trainer below one folder, on the device and on the CPU."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.measured_run import MEMORY_FILE
from benchmarks.gpu.models import small_llama, small_mixture, write_small
from benchmarks.gpu.programs import Program, Programs
from payload.run_record.metrics_log import read_metrics
from payload.run_record.run_files import RunPaths, Summary, read_json
from tests.support.data_folders import make_data_folder

Rows = list[Mapping[str, Any]]
"""Rows of metrics.jsonl with a loss, one per step."""
Settings = Mapping[str, object]
"""Settings of run.toml by `section.key`."""

ON_CPU: Settings = {"device.kind": "cpu", "engine.kernels": "off"}
"""Settings of the reference runs: stock PyTorch on the CPU."""


class Runs:
    """Trains each run once, on generated data."""

    def __init__(self, folder: Path, programs: Programs, *, rehearsal: bool) -> None:
        self.folder = folder
        self.programs = programs
        self.rehearsal = rehearsal
        """True for a rehearsal on the CPU, with small sizes."""
        self.device = "cpu" if rehearsal else "cuda"
        self.vocab_size = 512 if rehearsal else 50257
        self.facts: Mapping[str, Any] = {}
        """The device's facts, from the first stage."""
        self._rows: dict[str, Rows] = {}

    def train(
        self,
        settings: Mapping[str, Settings],
        *,
        module: str = "payload.train",
        limit_s: float = math.inf,
    ) -> None:
        """Train the named runs at the same time, each for at most `limit_s`; reuse existing runs.

        Raises ProgramError.
        """
        names = [name for name in settings if name not in self._rows]
        # More threads than cores slow each other down; small sizes gain nothing from a second.
        cores = 1 if self.rehearsal else os.cpu_count() or 1
        threads = max(1, cores // max(1, len(names)))
        started = {name: self._start(name, settings[name], module, threads) for name in names}
        for name, program in started.items():
            self.programs.wait(program, limit_s=limit_s)
            rows = read_metrics(self.paths(name).metrics)
            self._rows[name] = [row for row in rows if "loss" in row]

    def rows(self, name: str) -> Rows:
        """Return the rows of a trained run."""
        return self._rows[name]

    def paths(self, name: str) -> RunPaths:
        """Return the paths of a run."""
        return RunPaths(self.folder / name)

    def summary(self, name: str) -> Summary:
        """Return the summary of a trained run."""
        found = read_json(Summary, self.paths(name).summary)
        assert found is not None, f"{name} has no summary"
        return found

    def peak_memory(self, name: str) -> dict[str, Any]:
        """Return the peak memory of a run that `benchmarks.gpu.measured_run` trained, in bytes."""
        text = (self.paths(name).root / MEMORY_FILE).read_text(encoding="utf-8")
        found: dict[str, Any] = json.loads(text)
        return found

    def data(self, vocab_size: int) -> Path:
        """Return a data folder whose tokens fit a vocabulary of `vocab_size`."""
        # A larger vocabulary would need four bytes for each token.
        vocab_size = min(vocab_size, self.vocab_size)
        folder = self.folder / f"data-{vocab_size}"
        if not folder.exists():
            count = 20_000 if self.rehearsal else 2_000_000
            make_data_folder(folder, vocab_size=vocab_size, num_train_tokens=count)
        return folder

    def sequence_length(self) -> int:
        """Return the sequence length of comparisons with the CPU."""
        return 32 if self.rehearsal else 256

    def fp8(self) -> str:
        """Return `precision.fp8` for the device: a CPU has no 8-bit matmuls."""
        return "emulated" if self.rehearsal else "on"

    def llama(self) -> Path:
        """Return the folder of a small Llama with random weights."""
        folder = self.folder / "model-llama"
        return folder if folder.exists() else write_small(folder, small_llama(self.vocab_size))

    def mixture(self) -> Path:
        """Return the folder of a small mixture of experts with random weights."""
        folder = self.folder / "model-mixture"
        return folder if folder.exists() else write_small(folder, small_mixture(self.vocab_size))

    def _start(self, name: str, settings: Settings, module: str, threads: int) -> Program:
        defaults: Settings = {
            "data.dir": self.data(self.vocab_size),
            "data.sequence_length": self.sequence_length(),
            "batch.global_batch_size": 8,
            "batch.micro_batch_size": 4,
            "device.kind": self.device,
            "precision.dtype": "fp32",
            "train.steps": 6 if self.rehearsal else 20,
            "train.eval_every": 0,
            "train.eval_tokens": 256,
        }
        pairs = {**defaults, **settings}.items()
        options = [each for key, value in pairs for each in ("--set", f"{key}={value}")]
        empty = self.folder / "empty.toml"
        empty.touch()
        where = ("--config", str(empty), "--run-dir", str(self.paths(name).root))
        return self.programs.start(name, module, *where, *options, threads=threads)
