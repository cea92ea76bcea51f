"""`preflight`: checks all nodes at the same time, then tries the launcher."""

from __future__ import annotations

import contextlib
import hashlib
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import payload
from payload.config.engine_packages import has_nvidia_device
from payload.config.run_config import RunConfig
from payload.config.store_address import StoreAddress, resolve_results_address
from payload.core.errors import ConfigError, TileforgeError
from payload.core.validation.records import build
from payload.launch.launchers.registry import AUTO
from payload.machines.inventory import RANK_PORTS, SHARED_FOLDER, ClusterInventory, Node
from payload.machines.machine import discover
from payload.machines.machine_facts import read_machine_facts
from payload.orchestrate.findings import nodes as find
from payload.orchestrate.findings.nodes import (
    LOGS,
    STORE,
    STRANGER,
    Finding,
    NodeFacts,
    clock_offset_s,
    reaches,
)
from payload.orchestrate.hardware.nvidia import QUERY, GpuNeed, torch_here
from payload.orchestrate.inventories.chosen import load_cluster
from payload.orchestrate.machine_profiles.code_and_data_uploads import try_store
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.node.look import probe
from payload.orchestrate.preflight.cluster_trial import placement_or_one_rank
from payload.orchestrate.preflight.machine_screen import screen
from payload.orchestrate.preflight.report import (
    BootWait,
    Report,
    try_on_cluster,
    try_on_this_machine,
)
from payload.orchestrate.runs.launcher_choice import choose_launcher
from payload.orchestrate.runs.planning import require_placeable
from payload.orchestrate.ssh.cluster import Cluster, operator_key
from payload.orchestrate.ssh.connection import Connection
from payload.orchestrate.ssh.node_code import inspect_node, this_code
from payload.orchestrate.ssh.remote_calls import (
    Login,
    MeshAnswer,
    ask,
    on_every_node,
    require_known,
)
from payload.orchestrate.ssh.run_keys import remove_stale_keys
from payload.orchestrate.terminal.console import text_console
from payload.orchestrate.terminal.narrow import print_message
from payload.stack.node_paths import BOOTSTRAP_STATE, VENV
from payload.storage.store_access import check_store_access

_TABLE_WIDTH = 180
_PROBE_S = 15.0
_MESH_S = 6.0
_EXPOSED_S = 3.0
# The rendezvous ports, and the range from which the kernel assigns ports to gloo.
_PORT_RANGES = (RANK_PORTS, range(33_000, 60_000))
_REMOTE_TORCH = (str(VENV), "lib/python3.*/site-packages/torch/version.py")
_LOCAL_CHECKS = ("cpu", "memory", "disk", "name")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightRequest:
    """Options of `preflight`."""

    inventory: str | None
    ssh_key: Path | None
    config: RunConfig
    is_configured: bool
    """True if the operator named a config. The ranks of this config must then fit on the nodes."""
    quick: bool
    """Skip the trial and its measurements."""
    wait: float
    """Minutes to retry while machines boot."""
    json: bool


def preflight(options: PreflightRequest, access: LocalAccess) -> int:
    """Check the cluster that `--inventory` names, print a table, and return the exit code."""
    out, talk = text_console(stderr=False), text_console(stderr=True)
    config, env = options.config, access.environment()
    boot_wait = BootWait(60 * options.wait, talk.print)
    chosen = boot_wait.until_found(lambda: load_cluster(options.inventory, env=env))
    inventory = chosen.inventory
    print_message(talk, chosen.headline())
    if options.is_configured:
        require_placeable(config, chosen)
    began = time.monotonic()
    is_here = inventory.access.is_this_machine
    if is_here and len(inventory.nodes) > 1:
        raise ConfigError(
            f"inventory {options.inventory}: access kind 'local' with {len(inventory.nodes)} "
            "nodes; 'local' is for this machine alone. Use 'direct' or 'iap'."
        )
    need = chosen.gpu_need(config)
    if is_here:
        report = check_this_machine(inventory, access, need=need)
        if not options.quick:
            report = try_on_this_machine(
                report, inventory.nodes, access, config, domains=chosen.domains
            )
        try_it = partial(check_store_access, env=access.code_environment())
        report = _with_store(report, inventory, config, try_it)
    else:
        login = Login(user=inventory.ssh_user, key=operator_key(inventory, given=options.ssh_key))

        def check() -> Report:
            with Cluster(inventory, login=login, env=env) as cluster:
                report = check_cluster(inventory, cluster, lock_sha=lock_sha(), need=need)
                if not report.exit_code:
                    report = _without_stale_keys(report, cluster)
                if options.quick:
                    return report
                report = try_on_cluster(report, inventory.nodes, cluster, config)
                head = cluster.connect(inventory.head)
                return _with_store(report, inventory, config, partial(_try_store_from, head))

        report = boot_wait.until_ready(check)
    if options.json:
        out.print(report.to_json())
    elif is_here:
        placement = (
            None if need else placement_or_one_rank(inventory.nodes, config, domains=chosen.domains)
        )
        machine = read_machine_facts(path=env.get("PATH"))
        for line in screen(machine, report, placement, config=config):
            out.print(line)
    else:
        # A narrow terminal wraps the lines, so no text is truncated.
        out.width = max(out.width, _TABLE_WIDTH)
        out.print(report.table())
        for line in report.lines():
            out.print(line)
    took = f"({time.monotonic() - began:.1f} s)"
    failing = report.failing_nodes()
    if failing:
        talk.print(
            f"error: {len(failing)} of {len(inventory.nodes)} node(s) not fit: "
            f"{', '.join(failing)} {took}"
        )
    else:
        talk.print(f"every node is fit for a run {took}")
    return report.exit_code


def _with_store(
    report: Report,
    inventory: ClusterInventory,
    config: RunConfig,
    attempt: Callable[[StoreAddress], None],
) -> Report:
    """Return the report, with a check of the store if the report has no errors."""
    results = resolve_results_address(config.storage.results, bucket=inventory.bucket)
    address = replace(config.storage, results=results).address()
    if address is None or report.exit_code:
        return report
    name = inventory.head.name
    found = list(report.findings)
    try:
        attempt(address)
    except TileforgeError as error:
        cause = str(error).removeprefix(f"{name}: ").rstrip(".")
        code = error.exit_code
        found.append(
            Finding(node=name, check=STORE, severity="error", cause=cause, fix="", exit_code=code)
        )
    checks = {**report.checks, name: [*report.checks[name], STORE]}
    return replace(report, checks=checks, findings=found)


def _try_store_from(head: Connection, address: StoreAddress) -> None:
    """Check that the head can use a store, with the code that the trial uploaded."""
    code = this_code()
    try_store(address, head, inspect_node(head, code, venv=VENV), code=code)


def _without_stale_keys(report: Report, cluster: Cluster) -> Report:
    """Remove keys of runs that never started because their command was killed; report each key."""
    try:
        notes = [
            f"the stale key {name} was removed from the nodes"
            for name in remove_stale_keys(cluster)
        ]
    except TileforgeError as error:
        notes = [str(error)]
    return replace(report, notes=[*report.notes, *notes])


def lock_sha() -> str | None:
    """Return the SHA-256 of the lock file (`sha` in node-setup.sh); None after a pip install."""
    lock = Path(payload.__file__).parents[1] / "bootstrap" / "requirements.lock"
    return hashlib.sha256(lock.read_bytes()).hexdigest() if lock.is_file() else None


def check_cluster(
    inventory: ClusterInventory,
    cluster: Cluster,
    *,
    state_file: str = BOOTSTRAP_STATE,
    lock_sha: str | None = None,
    mesh_s: float = _MESH_S,
    need: GpuNeed | None = None,
) -> Report:
    """Check every node over SSH, then the connections between nodes for at most `mesh_s` seconds.

    `lock_sha` is the SHA-256 of the expected lock file, if known. `need` is the run's need for
    GPUs.
    """
    began = time.monotonic()
    nodes = inventory.nodes
    outcomes = on_every_node(nodes, lambda node: _probe(node, inventory, cluster, state_file))
    for outcome in outcomes.values():
        if isinstance(outcome, ConfigError):
            raise outcome  # an error on this machine, which is the same for all nodes
    facts = {name: got for name, got in outcomes.items() if isinstance(got, NodeFacts)}
    reachable = [node for node in nodes if node.name in facts]
    errors = [
        find.from_error(node, got)
        for node in nodes
        if isinstance(got := outcomes[node.name], TileforgeError)
    ]
    checks = {node.name: ["ssh"] for node in nodes}
    for node in reachable:
        skipped = set() if find.is_ready(facts[node.name].bootstrap) else {"payload"}
        if len(nodes) == 1:
            skipped.add("route")
        checks[node.name] += [name for name in find.PROBED[1:-1] if name not in skipped]
        if need is not None:
            checks[node.name].append(find.GPU)
        if facts[node.name].shared is not None:
            checks[node.name].append(find.SHARED)
    mesh: list[Finding] = []
    with ThreadPoolExecutor(1) as pool:
        exposed = pool.submit(_exposed, inventory, cluster) if inventory.head in reachable else None
        if len(reachable) > 1:
            mesh = _mesh(reachable, facts, cluster, mesh_s)
            for node in reachable:
                checks[node.name].append("ports")
    mesh += exposed.result() if exposed else []
    return Report(
        cluster=inventory.cluster,
        checks=checks,
        facts=facts,
        findings=[*errors, *decide(nodes, facts, lock_sha=lock_sha, need=need), *mesh],
        took_s=time.monotonic() - began,
        notes=find.gpu_notes(nodes, facts) if need is not None else [],
    )


def decide(
    nodes: Sequence[Node],
    facts: Mapping[str, NodeFacts],
    *,
    lock_sha: str | None,
    need: GpuNeed | None = None,
) -> list[Finding]:
    """Return the findings about each node that answered, except findings about connections."""
    found: list[Finding] = []
    for node in nodes:
        if node.name in facts:
            of_node = facts[node.name]
            found += find.bootstrap_findings(node, of_node)
            found += find.cpu_findings(node, of_node)
            found += find.capacity_findings(node, of_node)
            found += find.name_findings(node, of_node)
            found += find.gpu_findings(node, of_node, need)
            found += find.shared_findings(node, of_node)
            if len(nodes) > 1:
                found += find.route_findings(node, of_node)
    found += find.payload_findings(nodes, facts, version=payload.__version__, lock_sha=lock_sha)
    found += find.clock_findings(nodes, facts)
    return found


def check_this_machine(
    inventory: ClusterInventory, access: LocalAccess, *, need: GpuNeed | None = None
) -> Report:
    """Make the checks for this machine alone, which need neither SSH nor other nodes."""
    began = time.monotonic()
    node = inventory.head
    raw = probe(_probe_arguments(state_file=BOOTSTRAP_STATE, route_to=None, torch=torch_here()))
    # In a container, this process may use only a part of the machine's resources.
    machine = discover()
    facts = replace(
        build(NodeFacts, raw, where="this machine"),
        physical_cores=machine.num_cores(),
        numa_domains=len(machine.domains),
        memory_bytes=machine.memory_bytes,
    )
    found = [
        *find.cpu_findings(node, facts),
        *find.capacity_findings(node, facts),
        *find.name_findings(node, facts),
        *find.gpu_findings(node, facts, need, has_device=has_nvidia_device()),
        *find.shared_findings(node, facts),
    ]
    choice = choose_launcher(AUTO, access)
    for _, error in choice.refused:
        cause = f"ranks will start through {choice.launcher.name}: {error}"
        found.append(
            Finding(node=node.name, check="payload", severity="warning", cause=cause, fix="")
        )
    queried = facts.nvidia is not None and facts.nvidia.smi is not None
    gpu = [find.GPU] if need is not None and queried else []
    made = [*_LOCAL_CHECKS, *gpu, *([find.SHARED] if facts.shared else [])]
    return Report(
        cluster=inventory.cluster,
        checks={node.name: [*made, "payload"]},
        facts={node.name: facts},
        findings=found,
        took_s=time.monotonic() - began,
        notes=find.gpu_notes([node], {node.name: facts}) if need else [],
    )


def _probe(node: Node, inventory: ClusterInventory, cluster: Cluster, state_file: str) -> NodeFacts:
    others = [other for other in inventory.nodes if other.name != node.name]
    # Workers probe the route to the head, and the head probes the route to the first worker.
    arguments = _probe_arguments(
        state_file=state_file, route_to=others[0].address if others else None
    )
    connection = cluster.connect(node)
    sent_unix = time.time()
    facts = ask(connection, "look.py", NodeFacts, arguments, timeout_s=_PROBE_S)
    offset_s = clock_offset_s(
        sent_unix=sent_unix,
        received_unix=time.time(),
        node_unix=facts.time_unix,
        took_s=facts.took_s,
    )
    return replace(facts, clock_offset_s=offset_s)


def _mesh(
    nodes: Sequence[Node], facts: Mapping[str, NodeFacts], cluster: Cluster, mesh_s: float
) -> list[Finding]:
    outcomes = _try_mesh(nodes, facts, cluster, mesh_s)
    if any(isinstance(got, MeshAnswer) and got.port_taken for got in outcomes.values()):
        outcomes = _try_mesh(nodes, facts, cluster, mesh_s)  # on other ports
    answers = {name: got for name, got in outcomes.items() if not isinstance(got, TileforgeError)}
    mtus = {name: mtu for name in answers if (mtu := facts[name].mtu) is not None}
    lost = [
        find.from_error(node, got)
        for node in nodes
        if isinstance(got := outcomes[node.name], TileforgeError)
    ]
    return [*lost, *find.mesh_findings(nodes, answers, mtus=mtus)]


def _try_mesh(
    nodes: Sequence[Node], facts: Mapping[str, NodeFacts], cluster: Cluster, mesh_s: float
) -> dict[str, MeshAnswer | TileforgeError]:
    ports = [random.choice(numbers) for numbers in _PORT_RANGES]
    trial = secrets.token_hex(8)

    def attempt(node: Node) -> MeshAnswer:
        peers = {other.name: other.address for other in nodes if other.name != node.name}
        arguments = {
            "me": node.name,
            "address": node.address,
            "ports": ports,
            "peers": peers,
            "trial": trial,
            "deadline_s": mesh_s,
            "mtu": facts[node.name].mtu,
        }
        connection = cluster.connect(node)
        answer = ask(connection, "mesh.py", MeshAnswer, arguments, timeout_s=mesh_s + _PROBE_S)
        require_known(answer.pairs, peers, node=node.name, what="pairs: the node")
        return answer

    return on_every_node(nodes, attempt)


def _exposed(inventory: ClusterInventory, cluster: Cluster) -> list[Finding]:
    """Return a warning if this machine can reach a port of the head in the rendezvous range.

    Like the rendezvous, the check listens on all interfaces of the head.
    """
    head, port, trial = inventory.head, random.choice(_PORT_RANGES[0]), secrets.token_hex(8)
    arguments = {
        "me": head.name,
        "address": "0.0.0.0",
        "ports": [port],
        "peers": {},
        "strangers": [STRANGER],
        "trial": trial,
        "deadline_s": _EXPOSED_S,
        "mtu": None,
    }

    def listen() -> None:
        with contextlib.suppress(TileforgeError):  # other checks report the error
            ask(cluster.connect(head), "mesh.py", MeshAnswer, arguments, timeout_s=_PROBE_S)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(listen)
        within_s = _EXPOSED_S
        open_to_us = reaches(head, inventory.nodes, port=port, trial=trial, within_s=within_s)
    return [find.exposure_finding(head, port=port)] if open_to_us else []


def _probe_arguments(
    *, state_file: str, route_to: str | None, torch: tuple[str, str] = _REMOTE_TORCH
) -> dict[str, Any]:
    return {
        "action": "probe",
        "state_file": state_file,
        "logs": LOGS,
        "route_to": route_to,
        "shared_folder": SHARED_FOLDER,
        "gpu_query": ",".join(QUERY),
        "torch": torch,
    }
