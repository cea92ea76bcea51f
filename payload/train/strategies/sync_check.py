"""Verifies that all ranks train the same model, by hashes of weights and optimizer state."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from payload.core.errors import RanksDifferError, TrainingError
from payload.train.optimizers.optimizer import Optimizers
from payload.train.ranks.world import World

_CHUNK_BYTES = 2**20  # Small enough to stay in the cache between hash and sum.
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """Digests of one rank's weights and optimizer state after a step."""

    weights: str
    """sha256 over all parameters; empty on a single rank."""
    optimizer: str
    """sha256 over the optimizer's state."""
    not_finite: str | None
    """Name of the first tensor with a NaN or an infinity; None if all are finite."""


def require_equal_ranks(
    optimizers: Optimizers, world: World, *, step: int, passed_step: int | None
) -> None:
    """Compare the weights and optimizer state of all ranks, and search for NaN and infinity.

    `passed_step` is the last step after which this check passed. Raises RanksDifferError or
    TrainingError on every rank; the state must not be saved in this case.
    """
    states = world.gather(rank_state(optimizers, is_alone=world.world_size == 1), RankState)
    require_one_model(states, step=step, passed_step=passed_step)


def require_one_model(
    states: Sequence[RankState], *, step: int, passed_step: int | None, shards: int = 1
) -> None:
    """Compare the ranks' states in rank order; raise the errors of `require_equal_ranks`.

    All ranks must have the same weights. Ranks with equal indices modulo `shards` must also have
    the same optimizer state.
    """
    of_weights = [replace(each, optimizer="", not_finite=None) for each in states]
    if shards > 1 and len(set(of_weights)) > 1:
        raise RanksDifferError(_difference(of_weights, step=step, passed_step=passed_step))
    for first in range(shards):
        peers = range(first, len(states), shards)
        require_equal(states, peers, step=step, passed_step=passed_step)
    require_finite(states, step=step, passed_step=passed_step)


def require_equal(
    states: Sequence[RankState], peers: Sequence[int], *, step: int, passed_step: int | None
) -> None:
    """Raise RanksDifferError if the states of the ranks in `peers` differ; `states` covers all
    ranks."""
    of_peers = [states[rank] for rank in peers]
    if len(set(of_peers)) > 1:
        raise RanksDifferError(
            _difference(of_peers, ranks=peers, step=step, passed_step=passed_step)
        )


def require_finite(states: Sequence[RankState], *, step: int, passed_step: int | None) -> None:
    """Raise TrainingError if a rank found a NaN or an infinity."""
    not_finite = next((each.not_finite for each in states if each.not_finite is not None), None)
    if not_finite is not None:
        raise TrainingError(
            f"after step {step} {not_finite} holds NaN or infinity, though loss and "
            f"gradients were finite. The state is not saved. {_resume(passed_step)} with a lower "
            'optimizer.lr, or precision.dtype = "fp32".'
        )


def rank_state(optimizers: Optimizers, *, is_alone: bool = False) -> RankState:
    """Read this rank's weights and optimizer state once; with only one rank, hash nothing."""
    with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="sync check") as pool:
        weights, bad_weight = _inspect(
            dict(optimizers.model.named_parameters()), pool, hashes=not is_alone
        )
        state, bad_state = _inspect(optimizers.state_tensors(), pool, hashes=not is_alone)
    return RankState(weights=weights, optimizer=state, not_finite=bad_weight or bad_state)


def inspect_each(tensors: Iterable[tuple[str, Tensor]]) -> tuple[str, str | None]:
    """Return the sha256 over names and contents, and the name of the first non-finite tensor.

    Only one tensor at a time is in memory.
    """
    digests, not_finite = digest_each(tensors)
    return digest_of(digests), not_finite


def digest_each(tensors: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, str], str | None]:
    """Return each tensor's sha256 by name, and the name of the first non-finite tensor.

    Only one tensor at a time is in memory.
    """
    digests, not_finite = {}, None
    with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="sync check") as pool:
        for name, tensor in tensors:
            digests[name], bad = _inspect({name: tensor}, pool, hashes=True)
            not_finite = not_finite or bad
    return digests, not_finite


def digest_of(digests: Mapping[str, str]) -> str:
    """Return one sha256 over the digests of several tensors."""
    return _combined(digests, [digest.encode() for digest in digests.values()])


def _difference(
    states: Sequence[RankState],
    *,
    step: int,
    passed_step: int | None,
    ranks: Sequence[int] | None = None,
) -> str:
    """Return the message that names the differing ranks, what differs between them, and the fix.

    `states` holds one state for each rank in `ranks`; by default, for ranks 0, 1 and so on.
    """
    numbers = range(len(states)) if ranks is None else ranks
    common, votes = Counter(states).most_common(1)[0]
    if votes * 2 > len(states):
        odd = [rank for rank, state in zip(numbers, states, strict=True) if state != common]
        who = f"rank {odd[0]} differs" if len(odd) == 1 else f"ranks {odd} differ"
        who += " from the others"
        suspect = "that node's memory"
    else:
        listed = ", ".join(
            f"rank {rank} {state.weights[:8]}/{state.optimizer[:8]}"
            for rank, state in zip(numbers, states, strict=True)
        )
        who = f"no majority of the ranks agrees, so the wrong rank is unknown ({listed})"
        suspect = "the memory of each of their nodes"
    has_one_model = len({state.weights for state in states}) == 1
    what = "optimizer state" if has_one_model else "model"
    return (
        f"after step {step} the ranks no longer hold the same {what}: {who}. The run was stopped, "
        f"and nothing was saved since the last check that passed. {_resume(passed_step)}; if the "
        f"difference appears again, suspect {suspect}."
    )


def _resume(passed_step: int | None) -> str:
    """Return the sentence that names the checkpoint from which to resume.

    Every checkpoint was saved right after a check that passed.
    """
    if passed_step is None:
        return "Resume from the last checkpoint"
    return f"Resume from the last checkpoint, which is of step {passed_step} or earlier"


def _inspect(
    tensors: Mapping[str, Tensor], pool: ThreadPoolExecutor, *, hashes: bool
) -> tuple[str, str | None]:
    """Return the sha256 over names and contents, and the name of the first non-finite tensor."""
    chunks = [
        (name, chunk)
        for name, tensor in tensors.items()
        for chunk in torch.split(tensor.detach().contiguous().view(-1), _chunk_size(tensor))
    ]

    def inspect(named: tuple[str, Tensor]) -> tuple[bytes, bool]:
        chunk = named[1].cpu()
        return (_sha256(chunk) if hashes else b""), _is_finite(chunk)

    found = list(pool.map(inspect, chunks))
    not_finite = next(
        (name for (name, _), (_, is_finite) in zip(chunks, found, strict=True) if not is_finite),
        None,
    )
    names = (name for name, _ in chunks)
    return _combined(names, [digest for digest, _ in found]) if hashes else "", not_finite


def _combined(names: Iterable[str], digests: Iterable[bytes]) -> str:
    combined = hashlib.sha256()
    for name, digest in zip(names, digests, strict=True):
        combined.update(name.encode() + b"\0" + digest)
    return combined.hexdigest()


def _chunk_size(tensor: Tensor) -> int:
    return max(1, _CHUNK_BYTES // tensor.element_size())


def _sha256(chunk: Tensor) -> bytes:
    # Viewed as integers, since numpy has no bf16. hashlib releases the GIL.
    return hashlib.sha256(chunk.view(_INTEGERS[chunk.element_size()]).numpy().data).digest()


def _is_finite(chunk: Tensor) -> bool:
    if not chunk.is_floating_point():
        return True
    if chunk.dtype == torch.bfloat16:
        return bool(torch.isfinite(chunk).all())
    values = chunk.numpy()
    with np.errstate(all="ignore"):
        # A sum is NaN or infinite if one of its terms is; otherwise it rarely is.
        return bool(np.isfinite(values.sum()) or np.isfinite(values).all())
