"""`plan` for a cluster, whose nodes it does not ask: what it takes for granted, and says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath

from payload.inventory import ClusterInventory
from payload.orchestrate.checks import require_launcher
from payload.orchestrate.cluster_access import ASSUMED_LINK_BYTES_PER_S, ClusterAccess
from payload.orchestrate.code import this_code
from payload.orchestrate.inventories import Chosen
from payload.orchestrate.live import duration
from payload.orchestrate.measured import Record, known_trial
from payload.orchestrate.planning import PlannedRun, plan_run
from payload.results import RunPaths
from payload.run_config import RunConfig

_PORT = 20_000  # the first of those that `run` chooses from
_INTERFACE = "ens4"  # Compute Engine's


def plan_elsewhere(
    run_id: str,
    config: RunConfig,
    chosen: Chosen,
    *,
    vocab_size: int | None,
    root: Path,
    now_unix: float,
) -> PlannedRun:
    """The run as it would be on the cluster; its newest trial is below the project folder `root`.

    Raises ConfigError.
    """
    inventory = chosen.inventory
    require_launcher(config, inventory)
    home = assumed_home(inventory)
    record = known_trial(inventory, root)
    planned = plan_run(
        RunPaths(Path(home / "tileforge" / "runs" / run_id)),
        config=config,
        chosen=chosen,
        access=assumed_access(inventory, record, run_id=run_id),
        vocab_size=vocab_size,
        work_dir=Path(home),
        port=_PORT,
    )
    notes = assumptions(inventory, record, now_unix=now_unix)
    return replace(planned, plan=replace(planned.plan, notes=(*planned.plan.notes, *notes)))


def assumed_home(inventory: ClusterInventory) -> PurePosixPath:
    """Where Linux has the login's files."""
    user = inventory.ssh_user
    return PurePosixPath("/root") if user == "root" else PurePosixPath("/home", user)


def assumed_access(
    inventory: ClusterInventory, record: Record | None, *, run_id: str
) -> ClusterAccess:
    """The cluster as its inventory and its newest trial show it."""
    home = assumed_home(inventory)
    interfaces = record.interfaces if record else {}
    alone = len(inventory.nodes) == 1
    return ClusterAccess(
        interface_of={
            node.name: interfaces.get(node.name, None if alone else _INTERFACE)
            for node in inventory.nodes
        },
        memory_bytes=int(min(node.memory_gib for node in inventory.nodes) * 2**30),
        head=inventory.head.name,
        code=home / "tileforge" / f"payload-{this_code().digest}",
        ssh_config=home / ".ssh" / "tileforge" / run_id / "ssh_config",
        tcmalloc_library="libtcmalloc_minimal.so.4",
        measured=record.measured if record else None,
    )


def assumptions(
    inventory: ClusterInventory, record: Record | None, *, now_unix: float
) -> tuple[str, ...]:
    """The same in words."""
    asked = "no node was asked: "
    guesses = [f"home {assumed_home(inventory)}", f"port {_PORT}"]
    if record is None:
        if len(inventory.nodes) > 1:
            speed = ASSUMED_LINK_BYTES_PER_S * 8 / 1e9
            guesses += [f"interface {_INTERFACE}", f"a network of {speed:g} Gbit/s"]
        guesses.append("the cores 0 to n-1 of each node")
        return (f"{asked}{', '.join(guesses)} are assumed; preflight measures network and cores",)
    guesses.append("the cores 0 to n-1 of each node")
    age = duration(now_unix - record.time_unix)
    return (
        f"{asked}{', '.join(guesses)} are assumed",
        f"interfaces, network and products are those of the trial {age} ago (preflight)",
    )
