"""Proof that the ranks train one model: a hash of all parameters, compared across ranks."""

from __future__ import annotations

import hashlib
from collections import Counter

import torch
from torch import nn

from payload.errors import RanksDifferError
from payload.train.world import World


def parameter_hash(model: nn.Module) -> str:
    """sha256 over the names and bytes of all parameters, in order."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        flat = parameter.detach().contiguous().view(-1).view(torch.uint8)
        digest.update(flat.numpy().data)
    return digest.hexdigest()


def require_identical_ranks(model: nn.Module, world: World, *, step: int) -> str:
    """Compare all ranks' hashes; return the common one. Raises RanksDifferError on every rank."""
    hashes = world.gather(parameter_hash(model), str)
    common, votes = Counter(hashes).most_common(1)[0]
    if votes == world.world_size:
        return common
    if votes * 2 > world.world_size:
        odd = [rank for rank, value in enumerate(hashes) if value != common]
        who = f"rank {odd[0]} differs" if len(odd) == 1 else f"ranks {odd} differ"
        who += " from the others"
    else:
        listed = ", ".join(f"rank {rank} {value[:8]}" for rank, value in enumerate(hashes))
        who = f"no majority agrees ({listed})"
    raise RanksDifferError(
        f"after step {step} the ranks do not hold one model: {who}. Stopped; checkpoints up to "
        "the last passed check are good. Run again from there; if it returns, suspect that node's "
        "memory."
    )
