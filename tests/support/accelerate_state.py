"""Accelerate's state of the process, which would give the next run the precision of the first."""

from __future__ import annotations

import sys


def forget_accelerate() -> None:
    """Let the next run of this process use another precision."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
