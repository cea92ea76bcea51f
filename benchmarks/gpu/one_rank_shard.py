"""Train with `strategy = "shard"` on one rank, with FSDP2 and the collectives of a group of one.

`payload.train` uses `replicate` on one rank, which needs no collectives. With one GPU this is the
only way to run FSDP2 and NCCL: NCCL refuses two ranks on the same device.
"""

from __future__ import annotations

import os
import sys
from unittest.mock import patch

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from payload.config.launch_sections import DistributedSection
from payload.core.errors import ExitCode
from payload.train import session
from payload.train.__main__ import exit_now
from payload.train.__main__ import main as train
from payload.train.ranks.world import World
from payload.train.strategies.shard import Shard


def make_shard(settings: DistributedSection, world: World) -> Shard:
    """Initialise the group of one rank and return the strategy."""
    backend = "gloo" if world.is_cpu else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return Shard(settings, world)


def main() -> ExitCode:
    """Train as `payload.train` does with these arguments."""
    with patch.object(session, "choose_strategy", side_effect=make_shard) as chosen:
        code = train(sys.argv[1:], os.environ)
    assert chosen.call_count == 1, "the trainer chose its strategy"
    return code


if __name__ == "__main__":
    exit_now(main())
