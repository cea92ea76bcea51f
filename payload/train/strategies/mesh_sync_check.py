"""Compares ranks that each hold a part of a model: all copies of a part must be equal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from payload.machines.rank_mesh import Mesh
from payload.train.ranks.world import World
from payload.train.strategies.sync_check import (
    RankState,
    digest_each,
    digest_of,
    require_equal,
    require_finite,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeshState:
    """Digests of one rank's weights and optimizer state after a step.

    The digests cover the weights that the rank computes with, and only the rank's shard of the
    optimizer state.
    """

    own: RankState
    """Digests of all weights and optimizer state of the rank. Both must be equal on replicas; on
    the shards of one model, only the weights must be equal."""
    whole: RankState
    """Digests of the parameters that tensor ranks do not split. These digests must be equal on all
    tensor ranks."""
    tied: RankState
    """Digests of the tied embedding and output head. These digests must be equal on the first and
    the last pipeline stage."""


def require_one_mesh(
    world: World,
    mesh: Mesh,
    *,
    weights: Iterable[tuple[str, Tensor]],
    state: Mapping[str, Tensor],
    split: Collection[str],
    tied: str | None,
    step: int,
    passed_step: int | None,
) -> None:
    """Compare the ranks' weights and state; raise on every rank like `require_equal_ranks`.

    `weights` are the weights that this rank computes with, and `state` is the state of its
    optimizers. `split` names the parameters that are split over tensor ranks, and `tied` the
    parameter that the first and the last stage share.
    """
    digests, bad_weight = digest_each(weights)
    of_state, bad_state = digest_each(state.items())

    def of(is_included: Callable[[str], bool]) -> RankState:
        chosen = {name: each for name, each in digests.items() if is_included(name)}
        found = {name: each for name, each in of_state.items() if is_included(_parameter(name))}
        return RankState(weights=digest_of(chosen), optimizer=digest_of(found), not_finite=None)

    states = world.gather(
        _MeshState(
            own=replace(of(lambda _name: True), not_finite=bad_weight or bad_state),
            whole=of(lambda name: name not in split),
            tied=of(lambda name: name == tied),
        ),
        _MeshState,
    )
    _require_equal_copies(
        states, mesh, is_tied=tied is not None, step=step, passed_step=passed_step
    )
    require_finite([each.own for each in states], step=step, passed_step=passed_step)


def _require_equal_copies(
    states: Sequence[_MeshState], mesh: Mesh, *, is_tied: bool, step: int, passed_step: int | None
) -> None:
    """Raise RanksDifferError if ranks with copies of the same part have different digests."""
    owns, wholes = [each.own for each in states], [each.whole for each in states]
    for rank in range(mesh.world_size):
        line = mesh.along(rank, "pipeline")
        ends = (line[0], line[-1]) if is_tied else (rank,)
        for held, peers in (
            (_weights(wholes), mesh.along(rank, "replicate", "shard", "tensor")),
            (_weights(owns), mesh.along(rank, "replicate", "shard")),
            (wholes, mesh.along(rank, "replicate", "tensor")),
            (owns, mesh.along(rank, "replicate")),
            ([each.tied for each in states], ends),
        ):
            require_equal(held, peers, step=step, passed_step=passed_step)


def _parameter(of_state: str) -> str:
    """Return the name of the parameter to which a tensor of optimizer state belongs."""
    return of_state.partition(".")[2]


def _weights(states: Sequence[RankState]) -> list[RankState]:
    """Return the states without the fields that may differ between shards."""
    return [replace(each, optimizer="", not_finite=None) for each in states]
