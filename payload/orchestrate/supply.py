"""What a run's nodes lack, code and data, and bringing it to them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rich.console import Console

from payload.errors import PreflightError
from payload.inventory import ClusterInventory, Node
from payload.orchestrate.cluster import Cluster
from payload.orchestrate.cluster_access import VENV
from payload.orchestrate.code import Code, look, send_code, send_data
from payload.orchestrate.fanout import all_or_raise, on_every_node

Answers = Mapping[str, dict[str, Any]]
"""By node: what `look` gave, see remote/place.py."""


def data_name(source: Path) -> str:
    """The name of a data folder on the nodes: equal for equal data."""
    return hashlib.sha256((source / "meta.json").read_bytes()).hexdigest()[:16]


def ask_nodes(inventory: ClusterInventory, cluster: Cluster, *, code: Code, data: Path) -> Answers:
    """What every node has and lacks. Raises PreflightError where a run cannot be."""
    name = data_name(data)
    answers = all_or_raise(
        on_every_node(
            inventory.nodes,
            lambda node: look(cluster.connect(node), code, venv=VENV, data=name),
        ),
        what="looking at the nodes",
    )
    homes = {name: answer["home"] for name, answer in answers.items()}
    if len(set(homes.values())) > 1:
        listed = ", ".join(f"{name} {home}" for name, home in homes.items())
        raise PreflightError(
            f"the login's home is not the same on every node ({listed}); mpirun starts every rank "
            "with the same paths. Give the user the same home everywhere."
        )
    for name, answer in answers.items():
        if answer["lacking"]:
            raise PreflightError(
                f"{name}: it has no {', '.join(answer['lacking'])}. Run its bootstrap again "
                "(bootstrap/node-setup.sh)."
            )
    return answers


def bring_code(
    inventory: ClusterInventory, cluster: Cluster, answers: Answers, *, code: Code, talk: Console
) -> None:
    """To the nodes that lack it."""
    lacking = {name: a["missing"] for name, a in answers.items() if a["missing"] is not None}
    nodes = [node for node in inventory.nodes if node.name in lacking]
    if not nodes:
        return
    counts = ", ".join(f"{name} {len(missing)}" for name, missing in lacking.items())
    talk.print(f"payload {code.digest}: sending changed files ({counts})")

    def send(node: Node) -> None:
        home = PurePosixPath(answers[node.name]["home"])
        send_code(cluster.connect(node), code, lacking[node.name], home=home)

    all_or_raise(on_every_node(nodes, send), what="sending the payload")


def bring_data(
    inventory: ClusterInventory,
    cluster: Cluster,
    answers: Answers,
    *,
    source: Path,
    talk: Console,
) -> PurePosixPath:
    """To the nodes that lack it, each from here; returns where it is."""
    home = PurePosixPath(answers[inventory.head.name]["home"])
    target = home / "tileforge" / "data" / data_name(source)
    nodes = [node for node in inventory.nodes if not answers[node.name]["has_data"]]
    if nodes:
        size = sum(path.stat().st_size for path in source.iterdir()) / 1e6
        names = ", ".join(node.name for node in nodes)
        talk.print(f"data {source}: sending {size:,.0f} MB to each of {names}")
    for node in nodes:
        send_data(cluster.connect(node), source, target)
    return target
