"""Errors, progress and autocast for commands that run on several ranks, except training."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from payload.core.error_line import print_error
from payload.core.errors import ExitCode, TileforgeError
from payload.train.ranks.world import World, as_rank_lost

_PROGRESS_S = 10.0


def carry_out(work: Callable[[World], None], env: Mapping[str, str]) -> int:
    """Run `work` as the rank described by the environment; return the exit code.

    A TileforgeError is printed in one line.
    """
    world = None
    try:
        world = World.from_env(env)
        work(world)
    except TileforgeError as error:
        return _print_error(error)
    except RuntimeError as error:
        lost = as_rank_lost(error, world=world) if world is not None else None
        if lost is None:
            raise
        return _print_error(lost)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return ExitCode.OK


def _print_error(error: TileforgeError) -> int:
    print_error(error)
    return error.exit_code


def autocast(dtype: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return a factory of autocast contexts for `dtype`, fp32 or bf16."""
    return lambda: torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16")


def progress(world: World, *, clock: Callable[[], float]) -> Callable[[int, int], bool]:
    """Return a callback that prints progress on rank 0 at intervals; it never requests a stop."""
    last_s = clock()

    def report(done: int, of: int) -> bool:
        nonlocal last_s
        if world.is_main and clock() - last_s >= _PROGRESS_S:
            last_s = clock()
            sys.stderr.write(f"{done} of {of} batches\n")
        return False

    return report
