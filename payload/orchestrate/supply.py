"""What a run's nodes lack: code, data and weights; and bringing it to them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from rich.console import Console

from payload.data_folder import META_NAME, load_meta
from payload.errors import PreflightError
from payload.inventory import ClusterInventory, Node
from payload.orchestrate.cluster import Cluster
from payload.orchestrate.cluster_access import VENV
from payload.orchestrate.code import Code, build_kernels, look, send_code, send_files
from payload.orchestrate.fanout import all_or_raise, on_every_node
from payload.orchestrate.remote_programs import NodeLook
from payload.orchestrate.weights import Weights
from payload.untrusted import shown

Answers = Mapping[str, NodeLook]
"""By node."""


def ask_nodes(
    inventory: ClusterInventory,
    cluster: Cluster,
    *,
    code: Code,
    programs: Sequence[str],
    data: Path,
    weights: Weights | None,
) -> Answers:
    """Return what every node has and lacks. Raises PreflightError where a run cannot be.

    `programs` are those that the run needs in the nodes' environment.
    """
    wholes = [_whole_data(data), *([_whole_weights(weights)] if weights else [])]
    answers = all_or_raise(
        on_every_node(
            inventory.nodes,
            lambda node: look(
                cluster.connect(node), code, venv=VENV, programs=programs, wholes=wholes
            ),
        ),
        what="looking at the nodes",
    )
    homes = {name: answer.home for name, answer in answers.items()}
    if len(set(homes.values())) > 1:
        listed = ", ".join(f"{name} {home}" for name, home in homes.items())
        raise PreflightError(
            f"the login's home is not the same on every node ({listed}); every rank starts "
            "with the same paths. Give the user the same home everywhere."
        )
    for name, answer in answers.items():
        if answer.lacking:
            raise PreflightError(
                f"{name}: it has no {shown(', '.join(answer.lacking))}. Run its bootstrap again "
                "(bootstrap/node-setup.sh)."
            )
    return answers


def bring_code(
    inventory: ClusterInventory, cluster: Cluster, answers: Answers, *, code: Code, talk: Console
) -> None:
    """To the nodes that lack it, and what is compiled of it there; failing at that is a note."""
    lacking = {name: a.missing for name, a in answers.items() if a.missing is not None}
    nodes = [node for node in inventory.nodes if node.name in lacking]
    if not nodes:
        return
    counts = ", ".join(f"{name} {len(missing)}" for name, missing in lacking.items())
    talk.print(f"payload {code.digest}: sending changed files ({counts})")

    def send(node: Node) -> str | None:
        connection, home = cluster.connect(node), _home(answers, node)
        send_code(connection, code, lacking[node.name], home=home)
        return build_kernels(connection, code, home=home, venv=VENV)

    reasons = all_or_raise(on_every_node(nodes, send), what="sending the payload")
    built = ", ".join(name for name, reason in reasons.items() if reason is None)
    if built:
        talk.print(f"kernels: built on {built}")
    for name, reason in reasons.items():
        if reason is not None:
            talk.print(f"note: {name} trains without kernels: {reason}")


def bring_data(
    inventory: ClusterInventory,
    cluster: Cluster,
    answers: Answers,
    *,
    source: Path,
    talk: Console,
) -> PurePosixPath:
    """To the nodes that lack it, each from here; returns where it is."""
    whole = _whole_data(source)
    target = _home(answers, inventory.head) / "tileforge" / PurePosixPath(whole).parent
    known = load_meta(source).all_files()
    files = {**{name: entry.sha256 for name, entry in known.items()}, META_NAME: None}
    nodes = [node for node in inventory.nodes if whole not in answers[node.name].has]
    if nodes:
        size = sum(path.stat().st_size for path in source.iterdir()) / 1e6
        names = ", ".join(node.name for node in nodes)
        talk.print(f"data {source}: sending {size:,.0f} MB to each of {names}")
    all_or_raise(
        on_every_node(nodes, lambda node: send_files(cluster.connect(node), source, target, files)),
        what="sending the data",
    )
    return target


def bring_weights(
    inventory: ClusterInventory,
    cluster: Cluster,
    answers: Answers,
    *,
    weights: Weights,
    talk: Console,
) -> PurePosixPath:
    """To the head if it lacks them, as rank 0 alone reads them; returns where they are."""
    head = inventory.head
    whole = _whole_weights(weights)
    target = _home(answers, head) / "tileforge" / PurePosixPath(whole).parent
    if whole not in answers[head.name].has:
        size = weights.size_bytes() / 1e6
        talk.print(f"weights {weights.folder}: sending {size:,.0f} MB to {head.name}")
        send_files(cluster.connect(head), weights.folder, target, weights.files)
    return target


def _whole_data(source: Path) -> str:
    """The file that a node with this data has under ~/tileforge: equal for equal data."""
    digest = hashlib.sha256((source / META_NAME).read_bytes()).hexdigest()[:16]
    return f"data/{digest}/{META_NAME}"


def _whole_weights(weights: Weights) -> str:
    return f"weights/{weights.digest}/{list(weights.files)[-1]}"


def _home(answers: Answers, node: Node) -> PurePosixPath:
    return PurePosixPath(answers[node.name].home)
