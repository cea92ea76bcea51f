"""Free ports for the servers of tests."""

from __future__ import annotations

import itertools
import os
import random
import socket

from payload.machines.inventory import RANK_PORTS

# Below Linux' default range for outgoing connections (from 32768) and the ports of a run's ranks
# (payload.machines.inventory.RANK_PORTS), so that a port stays free for seconds.
_FIRST = 11_000
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_EACH = min(1000, (RANK_PORTS.start - _FIRST) // _WORKERS)


def free_port(address: str = "127.0.0.1") -> int:
    """Return a free port that no other worker of pytest-xdist uses."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for _ in range(_EACH):
        port = _FIRST + worker * _EACH + next(_PLACES)
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
        return port
    raise RuntimeError(f"{address}: no port is free")


# Another test session on this machine starts at another port.
_PLACES = itertools.cycle(random.SystemRandom().sample(range(_EACH), _EACH))
