"""`python -m payload.train.fabric`: the measurements of one rank in `preflight`'s trial.

Started on every node like the ranks of a run. Each stdout line that begins with MARK is a JSON
object: the rank's stage, its error, or, from rank 0, the measurements.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from payload.machines.rank_variables import NODE_RANK, TORCH, identify

if TYPE_CHECKING:
    from payload.train.ranks.world import DeviceKind, World

MARK = "tileforge-trial "
_ROUNDS = 5
_ROUND_S = 0.12
_SUMMED = 256
# mpirun ends all ranks when the first one fails; the delay lets other ranks report their errors.
_REPORT_DELAY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The matmul speeds of one rank, in FLOP/s."""

    node: str
    bf16: float
    fp32: float


def main(argv: Sequence[str], env: MutableMapping[str, str]) -> int:
    """Measure and return 0; report an error on stdout and return 1.

    The argument is a JSON object: `deadline_s`; `device` (cpu or cuda); `ranks`, each with node,
    node_rank, local_rank, cores, threads and interface; and `environment`, variables that override
    the variables of the launcher.
    """
    parser = argparse.ArgumentParser(prog="payload.train.fabric")
    parser.add_argument("arguments", type=json.loads, metavar="JSON", help="what to measure")
    arguments = parser.parse_args(argv).arguments
    # SIGALRM without a handler ends the process even if gloo blocks.
    signal.alarm(int(arguments["deadline_s"]))
    rank = _rank(env, arguments["ranks"])
    place = arguments["ranks"][rank]
    env.update({**arguments["environment"], TORCH.rank: str(rank)})
    report(rank=rank, node=place["node"], stage="started")
    try:
        _apply_placement(place, env)
        _measure(env, rank=rank, place=place, device=arguments["device"])
    except (Exception, SystemExit) as error:
        report(rank=rank, node=place["node"], error=f"{type(error).__name__}: {error}"[:600])
        time.sleep(_REPORT_DELAY_S)
        return 1
    return 0


def report(**record: Any) -> None:
    """Print a marked line in one write, so that mpirun does not mix it with other ranks' lines."""
    os.write(1, f"{MARK}{json.dumps(record)}\n".encode())


def _rank(env: Mapping[str, str], ranks: Sequence[Mapping[str, Any]]) -> int:
    """Return this process's index in `ranks`; without NODE_RANK, return the launcher's rank."""
    names = identify(env)
    if names is None:
        return 0
    if NODE_RANK not in env:
        return int(env[names.rank])
    place = (env[NODE_RANK], env[names.local_rank])
    places = [(str(rank["node_rank"]), str(rank["local_rank"])) for rank in ranks]
    return places.index(place)


def _apply_placement(place: Mapping[str, Any], env: MutableMapping[str, str]) -> None:
    """Apply the rank's cores, threads and interface; must be called before torch is imported."""
    env["OMP_NUM_THREADS"] = str(place["threads"])
    env["GLOO_SOCKET_IFNAME"] = place["interface"]
    env["TILEFORGE_NODE"] = place["node"]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, place["cores"])


def _measure(
    env: Mapping[str, str], *, rank: int, place: Mapping[str, Any], device: DeviceKind
) -> None:
    from payload.config.launch_sections import DeviceSection, DistributedSection
    from payload.train.gemm_and_network_benchmark import gemm_rounds_flops_per_s
    from payload.train.ranks.world import World

    world = World.from_env(env).on(DeviceSection(kind=device))
    world.join(DistributedSection(timeout_s=60.0))
    world.barrier()
    report(rank=rank, node=place["node"], stage="joined")
    _require_sum(world)
    report(rank=rank, node=place["node"], stage="summed")
    speeds = gemm_rounds_flops_per_s(world, rounds=_ROUNDS, round_s=_ROUND_S)
    own = Speeds(node=world.node, bf16=speeds["bf16"], fp32=speeds["fp32"])
    products = [asdict(each) for each in world.gather(own, Speeds)]
    exchange = _exchange(world)
    if world.is_main:
        report(result={"ranks": products, "world_size": world.world_size, **exchange})
    world.barrier()  # no rank may close a connection that another still reads
    world.leave()


def _require_sum(world: World) -> None:
    """Raise RuntimeError if an all-reduce over the ranks returns a wrong sum.

    This is the first communication between the ranks' devices, on GPUs over NCCL.
    """
    import torch

    values = torch.full((_SUMMED,), float(world.rank + 1), device=world.device)
    summed = world.sum(values)
    expected = world.world_size * (world.world_size + 1) / 2
    if not bool((summed == expected).all()):
        raise RuntimeError(f"an all-reduce returned {float(summed[0]):g} instead of {expected:g}")


def _exchange(world: World) -> dict[str, Any]:
    """Measure the all-reduce and each rank's receive rate from the previous rank."""
    from payload.train.gemm_and_network_benchmark import measure_exchange, receive_bytes_per_s

    if world.world_size == 1:
        return {"exchange": None}
    found = measure_exchange(world)
    received = world.gather(receive_bytes_per_s(world, num_bytes=found.num_bytes), float)
    return {
        "exchange": {
            "num_bytes": found.num_bytes,
            "all_reduce_bytes_per_s": found.bytes_per_s(),
            "latency_s": found.latency_s,
            "received_bytes_per_s": received,
        }
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
