"""A program for ranks that trains or evaluates several runs in turn.

Its argument is a JSON list of `Planned`. Each rank writes the output of a run into a file.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from payload.core.errors import ExitCode, RanksDifferError
from payload.evaluate.__main__ import main as evaluate
from payload.train import __main__ as program
from tests.support.accelerate_state import forget_accelerate
from tests.support.brief_calibration import calibrate_briefly


@dataclass(frozen=True, slots=True)
class Planned:
    """A run to train or evaluate."""

    port: int
    """MASTER_PORT."""
    printed: str
    """Path of the output files without the suffix of the rank."""
    arguments: list[str]
    """Arguments of `python -m payload.train` or `payload.evaluate`."""
    evaluates: bool = False
    spoiled: tuple[int, str] | None = None
    """A rank and a parameter that differs on it from step 3; the run must fail."""


def main() -> None:
    """Train or evaluate each run. An error ends the process, as it ends a rank."""
    rank = os.environ.get("PMI_RANK", "0")
    calibrate_briefly()
    for each in json.loads(sys.argv[1]):
        planned = Planned(**each)
        os.environ["MASTER_PORT"] = str(planned.port)
        with Path(f"{planned.printed}.{rank}").open("wb") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        if planned.evaluates:
            assert evaluate(planned.arguments, os.environ) == ExitCode.OK
        elif planned.spoiled is None:
            assert program.main(planned.arguments, os.environ) == ExitCode.OK
        else:
            _train_spoiled(planned.arguments, *planned.spoiled)
        sys.stdout.flush()
        _forget()


def _forget() -> None:
    """Reset Accelerate and DeepSpeed for another precision and the next run's process group."""
    forget_accelerate()
    if "deepspeed" in sys.modules:
        sys.modules["deepspeed.utils.groups"]._release_process_group_references()
        sys.modules["deepspeed.comm.comm"].cdb = None  # type: ignore[attr-defined]


def _train_spoiled(arguments: list[str], rank: int, parameter: str) -> None:
    """Flip a bit on one rank after step 2, like broken RAM; require the run to fail."""
    import torch
    from torch import distributed

    from payload.train.trainer import Trainer

    step = Trainer._train_step

    def spoiled(trainer: Any) -> bool:
        stopping = step(trainer)
        if trainer._context.world.rank == rank and trainer._step == 2:
            with torch.no_grad():
                trainer._context.optimizers.trained()[parameter].view(-1)[5] += 1e-6
        return stopping

    with mock.patch.object(Trainer, "_train_step", spoiled):
        try:
            program.main(arguments, os.environ)
        except RanksDifferError as error:
            # It would end this process.
            with mock.patch.object(program, "exit_now") as exit_now:
                sys.excepthook(type(error), error, error.__traceback__)
            exit_now.assert_called_once_with(ExitCode.TRAINING)
        else:
            raise AssertionError("the ranks differ, and the run did not fail")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
