"""Plans a run on a cluster without contacting any node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath

from payload.config.run_config import RunConfig
from payload.core.durations import as_clock
from payload.machines.inventory import RANK_PORTS, ClusterInventory
from payload.orchestrate.findings.trial import Record, known_trial
from payload.orchestrate.hardware.nvidia import gpu_need
from payload.orchestrate.inventories.chosen import ResolvedInventory
from payload.orchestrate.machine_profiles.cluster_profile import (
    ASSUMED_LINK_BYTES_PER_S,
    ClusterAccess,
)
from payload.orchestrate.runs.planning import PlanTarget, resolve
from payload.orchestrate.runs.resolved_plan import ResolvedPlacement, ResolvedPlan
from payload.orchestrate.runs.run_request import PlanRequest
from payload.orchestrate.ssh.node_code import this_code
from payload.orchestrate.ssh.remote_calls import NODE_FOLDER
from payload.run_record.run_files import RunPaths

_PORT = RANK_PORTS.start  # `run` chooses a free port
_INTERFACE = "ens4"  # default interface on Compute Engine


def plan_dry_run(
    run_id: str,
    config: RunConfig,
    chosen: ResolvedInventory,
    *,
    vocab_size: int | None,
    placed: ResolvedPlacement | None,
    mean_tokens: float | None = None,
    root: Path,
    now_unix: float,
) -> ResolvedPlan:
    """Plan the run for the cluster with its newest trial below `root`. Raises ConfigError."""
    inventory = chosen.inventory
    home = default_home(inventory)
    on_gpus = gpu_need(config, inventory.nodes) is not None
    record = known_trial(inventory.cluster, inventory.nodes, root, on_gpus=on_gpus)
    target = PlanTarget(
        chosen=chosen,
        profile=dry_run_access(inventory, record, run_id=run_id),
        paths=RunPaths(Path(home / NODE_FOLDER / "runs" / run_id)),
        work_dir=Path(home),
        port=_PORT,
    )
    request = PlanRequest(config=config, vocab_size=vocab_size, mean_tokens=mean_tokens)
    planned = resolve(request, target, placed=placed)
    notes = dry_run_notes(inventory, record, now_unix=now_unix)
    return replace(planned, plan=replace(planned.plan, notes=(*planned.plan.notes, *notes)))


def default_home(inventory: ClusterInventory) -> PurePosixPath:
    """Return the user's default home folder on Linux."""
    user = inventory.ssh_user
    return PurePosixPath("/root") if user == "root" else PurePosixPath("/home", user)


def dry_run_access(
    inventory: ClusterInventory, record: Record | None, *, run_id: str
) -> ClusterAccess:
    """Return the cluster's profile from its inventory and its newest trial."""
    home = default_home(inventory)
    interfaces = record.interfaces if record else {}
    is_single = len(inventory.nodes) == 1
    return ClusterAccess(
        interface_of={
            node.name: interfaces.get(node.name, None if is_single else _INTERFACE)
            for node in inventory.nodes
        },
        memory_bytes=int(min(node.memory_gib for node in inventory.nodes) * 2**30),
        head=inventory.head.name,
        code=home / NODE_FOLDER / f"payload-{this_code().digest}",
        ssh_config=home / ".ssh" / "tileforge" / run_id / "ssh_config",
        tcmalloc_library="libtcmalloc_minimal.so.4",
        measured=record.measured if record else None,
    )


def dry_run_notes(
    inventory: ClusterInventory, record: Record | None, *, now_unix: float
) -> tuple[str, ...]:
    """Return notes about the plan's assumptions."""
    prefix = "no node was contacted; assumed: "
    guesses = [f"home {default_home(inventory)}", f"port {_PORT}"]
    if record is None:
        if len(inventory.nodes) > 1:
            speed = ASSUMED_LINK_BYTES_PER_S * 8 / 1e9
            guesses += [f"interface {_INTERFACE}", f"a network of {speed:g} Gbit/s"]
        guesses.append("cores 0 to n-1 on each node")
        return (f"{prefix}{', '.join(guesses)}. preflight measures network and cores",)
    guesses.append("cores 0 to n-1 on each node")
    age = as_clock(now_unix - record.time_unix)
    return (
        f"{prefix}{', '.join(guesses)}",
        f"interfaces, network and matmul speed: measured by preflight {age} ago",
    )
