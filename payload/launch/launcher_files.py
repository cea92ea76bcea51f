"""Renders the files that launchers read: a hosts file for mpirun, a config for Accelerate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from payload.config.training_sections import PrecisionSection
from payload.launch.ranks import Placement
from payload.machines.inventory import Node


def render_hosts(nodes: Sequence[Node]) -> str:
    """Return the hosts file for `mpirun -f`: one address per line, the head first."""
    return "".join(f"{node.address}\n" for node in nodes)


def render_accelerate(
    nodes: Sequence[Node],
    placement: Placement,
    *,
    node_rank: int,
    hosts: Path,
    master_port: int,
    precision: PrecisionSection,
) -> str:
    """Return the config of one node for `accelerate launch --config_file`.

    The config of the head names the hosts file, so that `accelerate launch` starts all ranks
    through mpirun. Otherwise, accelerate 1.15 silently starts a single process for MULTI_CPU. The
    configs of the other nodes are for processes that mpirun on the head starts.
    """
    is_head = node_rank == 0
    usage = (
        "Starts all ranks through mpirun: accelerate launch --config_file THIS script.py"
        if is_head
        else "Used on this node under mpirun, which starts on the head."
    )
    settings: dict[str, str | int | bool] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "MULTI_CPU",
        "downcast_bf16": False,
        "enable_cpu_affinity": False,
        "machine_rank": node_rank,
        "main_process_ip": nodes[0].address,
        "main_process_port": master_port,
        "main_training_function": "main",
        "mixed_precision": "no" if precision.dtype == "fp32" else "bf16",
        "num_machines": len(nodes),
        "num_processes": placement.world_size,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": True,
    }
    lines = [
        f"# {usage}",
        *(f"{key}: {_scalar(value)}" for key, value in settings.items()),
    ]
    if is_head:
        lines += [
            "mpirun_config:",
            f"  mpirun_hostfile: {_scalar(str(hosts))}",
        ]
    return "\n".join(lines) + "\n"


def _scalar(value: str | int | bool) -> str:
    """Return a YAML scalar; JSON scalars, with quotes and escapes, are valid YAML."""
    return json.dumps(value, ensure_ascii=False)
