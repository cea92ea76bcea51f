"""One action on every node at once; every outcome is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from payload.errors import NodesError, TileforgeError
from payload.inventory import Node

T = TypeVar("T")


def on_every_node(
    nodes: Sequence[Node], action: Callable[[Node], T], *, to_the_end: bool = False
) -> dict[str, T | TileforgeError]:
    """What `action` returned for each node by its name, or the error it ended with.

    Waits for all of them: `action` has deadlines of its own. An error that is not ours is a bug and
    is raised once all have ended. After Ctrl-C they go on by themselves; `to_the_end` waits for
    them then, too, which is for what is to be undone afterwards.
    """

    def attempt(node: Node) -> T | TileforgeError:
        try:
            return action(node)
        except TileforgeError as error:
            return error

    with ThreadPoolExecutor(max_workers=max(1, len(nodes))) as pool:
        outcomes = [pool.submit(attempt, node) for node in nodes]
        if to_the_end:
            wait(outcomes)  # Ctrl-C ends this; the pool's own end then waits as well
    return {node.name: outcome.result() for node, outcome in zip(nodes, outcomes, strict=True)}


def all_or_raise(outcomes: Mapping[str, T | TileforgeError], *, what: str) -> dict[str, T]:
    """The values, if every node has one. Raises NodesError that names each node that failed."""
    values: dict[str, T] = {}
    failures: dict[str, TileforgeError] = {}
    for name, outcome in outcomes.items():
        if isinstance(outcome, TileforgeError):
            failures[name] = outcome
        else:
            values[name] = outcome
    if failures:
        raise NodesError(what, failures)
    return values
