"""The clock, the model and the report of every peer of `benchmarks.gpu`."""

from __future__ import annotations

import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.device_memory import peak_memory
from benchmarks.peers.step_peft import peft_model
from benchmarks.peers.work import Work
from payload.core.files import write_whole


class Clock:
    """Measures the steps after the warm-up, and waits for the device only at both ends."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._step = 0
        self._started_s = self.took_s = 0.0

    def step_done(self) -> None:
        """Count a step."""
        self._step += 1
        if self._step == self._work.warm_up_steps:
            self._started_s = self._now_s()
        elif self._step == self._work.all_steps():
            self.took_s = self._now_s() - self._started_s

    def _now_s(self) -> float:
        if self._work.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def causal_model(work: Work) -> Any:
    """Return transformers' model of the folder with SDPA, with PEFT's adapter if the work has one.

    The model is on the CPU.
    """
    import transformers

    classes: Any = transformers
    model = classes.AutoModelForCausalLM.from_pretrained(
        work.folder, dtype=getattr(torch, work.weights_dtype()), attn_implementation="sdpa"
    )
    return model.train() if work.adapter is None else peft_model(model, dict(work.adapter))


def write_report(work: Work, clock: Clock, *, loss: float, packages: tuple[str, ...]) -> None:
    """Write seconds, steps, peak memory, the loss and the versions as JSON."""
    report = {
        "took_s": clock.took_s,
        "steps": work.steps,
        **peak_memory(work.device),
        "loss": loss,
        "versions": {name: version(name) for name in packages},
    }
    write_whole(Path(work.report), json.dumps(report))
