"""Ports for what a test starts."""

from __future__ import annotations

import itertools
import os
import random
import socket

from payload.machines.inventory import RANK_PORTS

# Below those that the kernel gives to connections (32768 on, Linux's default) and those of a run's
# ranks (payload.machines.inventory.RANK_PORTS): what is started seconds later still finds its port
# free.
_FIRST = 11_000
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_EACH = min(1000, (RANK_PORTS.start - _FIRST) // _WORKERS)


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that nothing listens on now and that no other worker of pytest-xdist takes."""
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


# Another session of tests on this machine begins elsewhere.
_PLACES = itertools.cycle(random.SystemRandom().sample(range(_EACH), _EACH))
