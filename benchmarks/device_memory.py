"""The peak memory of this process on the device it trains on."""

from __future__ import annotations

from typing import TypedDict

import torch

from benchmarks.peers.timed_steps import peak_rss_bytes


class PeakMemory(TypedDict):
    """Peak memory of a training program, in bytes."""

    allocated_bytes: int
    """Largest memory of all tensors on the GPU; on the CPU, the process's peak resident set."""
    reserved_bytes: int | None
    """Largest memory that torch reserved on the GPU; None on the CPU."""


def peak_memory(device: str) -> PeakMemory:
    """Return this process's peak memory on `device`, cpu or cuda."""
    if device == "cpu":
        return {"allocated_bytes": peak_rss_bytes(), "reserved_bytes": None}
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }
