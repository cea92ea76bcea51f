"""The operator's machine, for runs on nodes that are real sshd."""

from __future__ import annotations

from pathlib import Path

from tests.orchestrate import operator
from tests.orchestrate.cluster.separate import SeparateNodes
from tests.support.waiting import DEADLINE_S, wait_until

__all__ = ["DEADLINE_S", "Operator", "wait_for_nobody"]


class Operator(operator.Operator):
    """A person with the nodes' key, whose runs are started without preflight's trial of mpirun."""

    def __init__(self, folder: Path, nodes: SeparateNodes) -> None:
        super().__init__(
            folder, nodes.inventory, key=nodes.key, around=lambda argv: [*nodes.inside, *argv]
        )
        self.nodes = nodes

    def run_words(self, run_id: str, *settings: str) -> list[str]:
        """`run` on the cluster."""
        return [*super().run_words(run_id, *settings), "--quick"]


def wait_for_nobody(operator: Operator) -> None:
    """Until no process of ours is left on any node."""
    wait_until(lambda: not operator.nodes.processes(), what="all processes on the nodes to end")
