"""The parts that commands of many ranks share beside training: errors, progress and precision."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from payload.core.errors import ExitCode, TileforgeError
from payload.core.printable_text import printable
from payload.train.ranks.world import World, as_rank_lost

_PROGRESS_S = 10.0


def carry_out(work: Callable[[World], None], env: Mapping[str, str]) -> int:
    """Run `work` as the rank that the environment names; return the exit code.

    An error is printed as one line.
    """
    world = None
    try:
        world = World.from_env(env)
        work(world)
    except TileforgeError as error:
        return _say(error)
    except RuntimeError as error:
        lost = as_rank_lost(error, world=world) if world is not None else None
        if lost is None:
            raise
        return _say(lost)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return ExitCode.OK


def _say(error: TileforgeError) -> int:
    sys.stderr.write(f"error: {printable(str(error))}\n")
    return error.exit_code


def autocast(dtype: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes the context in which passes run in `dtype`, fp32 or bf16."""
    return lambda: torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16")


def progress(world: World, *, clock: Callable[[], float]) -> Callable[[int, int], bool]:
    """Return what prints now and then on rank 0 how many passes are done; it never asks to stop."""
    last_s = clock()

    def tell(done: int, of: int) -> bool:
        nonlocal last_s
        if world.is_main and clock() - last_s >= _PROGRESS_S:
            last_s = clock()
            sys.stderr.write(f"{done} of {of} passes\n")
        return False

    return tell
