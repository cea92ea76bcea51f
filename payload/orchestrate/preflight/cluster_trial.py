"""Preflight's trial: the launcher and gloo over all nodes, as in a run, and measured."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from rich.console import Console

from payload.config.launch_sections import DeviceSection, LaunchSection
from payload.config.run_config import RunConfig
from payload.core.errors import ConfigError, PreflightError, TileforgeError
from payload.core.printable_text import shown
from payload.core.validation.records import build
from payload.launch.environment import FOREIGN_PREFIXES, Rendezvous, common_environment
from payload.launch.launcher import Job, Launcher, Reach
from payload.launch.launcher_files import render_hosts
from payload.launch.launchers.registry import AUTO, candidates
from payload.launch.ranks import Placement
from payload.machines.inventory import ClusterInventory, Node
from payload.orchestrate.access.cluster import programs_of, venv_executable
from payload.orchestrate.access.local import LOOPBACK, LocalAccess
from payload.orchestrate.access.supply import bring_code
from payload.orchestrate.findings import nodes as find
from payload.orchestrate.findings.nodes import Finding, NodeFacts
from payload.orchestrate.findings.trial import Measured, Outcome, failures
from payload.orchestrate.hardware.nvidia import gpu_need
from payload.orchestrate.inventories.chosen import Chosen
from payload.orchestrate.node.mesh import trial
from payload.orchestrate.runs.planning import choose_launcher
from payload.orchestrate.ssh.cluster import Cluster
from payload.orchestrate.ssh.node_code import Code, look, this_code
from payload.orchestrate.ssh.remote_calls import NODE_FOLDER, Left, NodeLook, ask, on_every_node
from payload.orchestrate.ssh.run_keys import install_run_key, remove_run_key
from payload.orchestrate.ssh.start_claim import HeadBusyError, claimed
from payload.stack.node_paths import VENV

# mpirun starts in a second, torch loads in three on two cores, the matmuls and the exchange have
# budgets of some seconds each. The ranks end by themselves before.
DEADLINE_S = 24.0
_RANKS_END_S = 22
# torch with CUDA loads for longer, and NCCL's first all-reduce connects every pair of GPUs.
_GPU_DEADLINE_S, _GPU_RANKS_END_S = 90.0, 88


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and how the trial's program starts."""

    placement: Placement
    interfaces: Mapping[str, str]
    address: str
    """Where the ranks meet."""
    port: int
    folder: PurePath
    """On the head; it has the hosts file, and its name marks the processes."""
    python: str
    python_path: str | None
    launcher: Launcher
    executable: str
    """The launcher's path on the head."""
    reach: Reach
    on_gpus: bool

    def deadline_s(self) -> float:
        """Return how long the launcher and its ranks may take."""
        return _GPU_DEADLINE_S if self.on_gpus else DEADLINE_S

    def arguments(self, inventory: ClusterInventory) -> dict[str, Any]:
        """Return what node/mesh.py takes."""
        rendezvous = Rendezvous(address=self.address, port=self.port, interfaces=self.interfaces)
        environment = common_environment(
            run_id=self.folder.name,
            run_dir=str(self.folder),
            rendezvous=rendezvous,
            malloc="tuned",
            tcmalloc=None,
            oversubscribed=self.placement.oversubscribed,
            python_path=self.python_path,
        )
        argv = self.launcher.argv(
            Job(
                executable=self.executable,
                python=self.python,
                words=("-m", "payload.train.fabric", json.dumps(self._ranks(inventory))),
                environment=environment,
                world_size=self.placement.world_size,
                ranks_per_node=self.placement.ranks_per_node,
                nodes=len(inventory.nodes),
                hosts=self.folder / "hosts",
                folder=self.folder,
                rendezvous=rendezvous,
                reach=self.reach,
            )
        )
        return {
            "ssh": self.reach.ssh,
            "workers": {node.name: node.address for node in inventory.nodes[1:]},
            "hosts_file": str(self.folder / "hosts"),
            "hosts": render_hosts(inventory.nodes),
            "argv": argv,
            "environment": {**self.launcher.settings(self.reach), **environment},
            # mpirun calls mpiexec.hydra, which lies beside it, by its bare name.
            "path": str(PurePath(argv[0]).parent),
            "without": FOREIGN_PREFIXES,
            "keeps": self.launcher.keeps,
            "deadline_s": self.deadline_s(),
        }

    def _ranks(self, inventory: ClusterInventory) -> dict[str, Any]:
        ranks = [
            {
                "node": rank.node,
                "node_rank": rank.node_rank,
                "local_rank": rank.local_rank,
                "cores": rank.cores,
                "threads": rank.threads,
                "interface": self.interfaces[rank.node],
            }
            for rank in self.placement.ranks
        ]
        settings = self.launcher.rank_settings(nodes=len(inventory.nodes))
        # In place of what the launcher sets, as the wrapper of a run's rank does it.
        settings |= {"MASTER_ADDR": self.address, "MASTER_PORT": str(self.port)}
        return {
            "deadline_s": _GPU_RANKS_END_S if self.on_gpus else _RANKS_END_S,
            "device": "cuda" if self.on_gpus else "cpu",
            "ranks": ranks,
            "environment": settings,
        }


_MARGIN_S = 20.0
_ACTION_S = 20.0
_CPU = DeviceSection(kind="cpu")
"""On this machine the trial measures cores, unless the run computes on its GPUs."""
# Ten times what a trial takes; it is for an operator who is killed before removing the key.
_KEY_LASTS_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Result of a trial."""

    launcher: str = ""
    """The name of the one that was tried."""
    measured: Measured | None = None
    findings: list[Finding] = field(default_factory=list)
    note: str | None = None
    """Why there was none."""
    on_gpus: bool = False
    """True if its ranks computed on GPUs and exchanged over NCCL."""


def try_cluster(
    chosen: Chosen,
    cluster: Cluster,
    facts: Mapping[str, NodeFacts],
    *,
    config: RunConfig,
    talk: Console,
    placement: Placement | None = None,
) -> Trial:
    """Start the program on nodes that have passed the other checks.

    The key by which the head reaches the others is made for this, and removed whatever happens.
    `placement` is where a run's ranks go, if they were placed before.
    """
    inventory, code = chosen.inventory, this_code()
    launcher = candidates(config.launch.launcher)[0]
    placement = placement or _placement(chosen, config)
    on_gpus = gpu_need(config, inventory.nodes) is not None
    outcomes = on_every_node(
        inventory.nodes,
        lambda node: look(cluster.connect(node), code, venv=VENV, programs=programs_of(launcher)),
    )
    refused = [*_not_looked_at(inventory, outcomes, launcher)]
    if refused:
        return Trial(findings=refused, launcher=launcher.name)
    answers = {name: got for name, got in outcomes.items() if isinstance(got, NodeLook)}
    head = answers[inventory.head.name]
    if head.running is not None:
        return _not_measured(head.running)
    run_id = f"preflight-{secrets.token_hex(4)}"
    run_dir = PurePosixPath(head.home, NODE_FOLDER, "runs", run_id)
    try:
        with claimed(cluster, inventory.head, run_dir=run_dir, say=talk.print) as claim:
            if claim.running is not None:
                return _not_measured(claim.running)
            bring_code(inventory.nodes, cluster, answers, code=code, talk=talk)
            try:
                outcome, folder = _start(
                    inventory,
                    cluster,
                    facts,
                    head,
                    code,
                    placement,
                    launcher,
                    name=claim.name,
                    on_gpus=on_gpus,
                )
                if outcome.status != 0:
                    _end_leftovers(inventory, cluster, folder)
            except BaseException:
                with contextlib.suppress(TileforgeError):  # it would hide the first one
                    remove_run_key(cluster, inventory, claim.name)
                raise
            remove_run_key(cluster, inventory, claim.name)
    except ConfigError:
        raise
    except HeadBusyError as error:
        return Trial(note=f"nothing was measured: {error}")
    except TileforgeError as error:
        return Trial(findings=[_of_error(inventory.head, error, launcher)], launcher=launcher.name)
    hostnames = {facts[node.name].hostname: node.name for node in inventory.nodes}
    return _judged(inventory, outcome, launcher, hostnames=hostnames, on_gpus=on_gpus)


def _not_measured(running: str) -> Trial:
    return Trial(note=f"nothing was measured, as run {running} is under way")


def try_this_machine(
    chosen: Chosen, access: LocalAccess, folder: Path, *, config: RunConfig
) -> Trial:
    """Try the launcher and gloo on this machine, without ssh; `folder` is an empty one."""
    inventory = chosen.inventory
    choice = choose_launcher(AUTO, access)
    on_gpus = gpu_need(config, inventory.nodes) is not None
    placement = _placement(chosen, config) if on_gpus else chosen.place(LaunchSection(), _CPU)
    with access.reserve_port() as holder:
        setting = Setting(
            placement=placement,
            interfaces=access.interfaces(inventory.nodes),
            address=inventory.head.address,
            port=int(holder.getsockname()[1]),
            folder=folder,
            python=access.python,
            python_path=access.python_path(),
            launcher=choice.launcher,
            executable=choice.executable,
            reach=access.reach(),
            on_gpus=on_gpus,
        )
        answer = trial(setting.arguments(inventory), env=access.environment())
    outcome = build(Outcome, answer, where="this machine")
    return _judged(inventory, outcome, choice.launcher, hostnames={}, on_gpus=on_gpus)


def _start(
    inventory: ClusterInventory,
    cluster: Cluster,
    facts: Mapping[str, NodeFacts],
    head: NodeLook,
    code: Code,
    placement: Placement,
    launcher: Launcher,
    *,
    name: str,
    on_gpus: bool,
) -> tuple[Outcome, PurePosixPath]:
    """Return the program's outcome, and the folder that marks the processes."""
    if head.port is None:
        raise PreflightError(f"{inventory.head.name}: it has no free port for the ranks.")
    key = install_run_key(cluster, inventory, name=name, lasts_s=_KEY_LASTS_S)
    alone = len(inventory.nodes) == 1
    interfaces = {node.name: facts[node.name].interface or LOOPBACK for node in inventory.nodes}
    setting = Setting(
        placement=placement,
        interfaces=interfaces,
        address=inventory.head.address,
        port=head.port,
        folder=key.folder,
        python=str(VENV / "bin" / "python"),
        python_path=str(PurePosixPath(head.home) / NODE_FOLDER / f"payload-{code.digest}"),
        launcher=launcher,
        executable=venv_executable(launcher),
        reach=Reach(
            interface=LOOPBACK if alone else interfaces[inventory.head.name],
            ssh=() if alone else ("-F", str(key.config)),
        ),
        on_gpus=on_gpus,
    )
    arguments = setting.arguments(inventory)
    connection = cluster.connect(inventory.head)
    timeout_s = setting.deadline_s() + _MARGIN_S
    outcome = ask(connection, "mesh.py", Outcome, arguments, timeout_s=timeout_s)
    return outcome, key.folder


def _placement(chosen: Chosen, config: RunConfig) -> Placement:
    """Return where a run's ranks would go; one a node where they cannot be placed."""
    try:
        return chosen.place(config.launch, config.device)
    except ConfigError:
        return chosen.place(LaunchSection(ranks_per_node=1), config.device)


def _judged(
    inventory: ClusterInventory,
    outcome: Outcome,
    launcher: Launcher,
    *,
    hostnames: Mapping[str, str],
    on_gpus: bool,
) -> Trial:
    found = failures(
        inventory.nodes,
        outcome,
        hostnames=hostnames,
        deadline_s=_GPU_DEADLINE_S if on_gpus else DEADLINE_S,
        launcher=launcher,
        on_gpus=on_gpus,
    )
    result = outcome.result()
    if found or result is None:
        return Trial(findings=found, launcher=launcher.name, on_gpus=on_gpus)
    names = {rank.node for rank in result.ranks}
    received = result.exchange.received_bytes_per_s if result.exchange else ()
    if names != {node.name for node in inventory.nodes} or (
        received and len(received) != len(result.ranks)
    ):
        cause, fix = "the figures it sent are not those of these nodes", "Try again."
        speed = _error(inventory.head, "speed", cause, fix)
        return Trial(findings=[speed], launcher=launcher.name, on_gpus=on_gpus)
    measured = Measured.from_result(result, on_gpus=on_gpus)
    return Trial(measured=measured, launcher=launcher.name, on_gpus=on_gpus)


def _not_looked_at(
    inventory: ClusterInventory,
    outcomes: Mapping[str, NodeLook | TileforgeError],
    launcher: Launcher,
) -> list[Finding]:
    """Return the nodes where the program cannot be."""
    found = []
    homes = set()
    for node in inventory.nodes:
        answer = outcomes[node.name]
        if isinstance(answer, TileforgeError):
            found.append(find.from_error(node, answer))
            continue
        homes.add(answer.home)
        if answer.lacking:
            cause = f"it has no {shown(', '.join(answer.lacking))}"
            fix = "Run its bootstrap again (bootstrap/node-setup.sh)."
            found.append(_error(node, "payload", cause, fix))
    if len(homes) > 1:
        cause = f"the login's home is not the same on every node ({', '.join(sorted(homes))})"
        fix = "Every rank starts with the same paths. Give the user one home everywhere."
        found.append(_error(inventory.head, launcher.name, cause, fix))
    return found


def _end_leftovers(inventory: ClusterInventory, cluster: Cluster, folder: PurePosixPath) -> None:
    """Kill what a failed trial has left; a node that does not answer ends it by its own alarm."""
    arguments = {"action": "left", "run_dir": str(folder), "kill": True}
    on_every_node(
        inventory.nodes,
        lambda node: ask(cluster.connect(node), "control.py", Left, arguments, timeout_s=_ACTION_S),
    )


def _of_error(head: Node, error: TileforgeError, launcher: Launcher) -> Finding:
    first, *rest = str(error).splitlines()
    return Finding(
        node=head.name,
        check=launcher.name,
        severity="error",
        cause=f"the trial could not be made: {first.rstrip('.:')}",
        fix="Fix that and try again.",
        exit_code=error.exit_code,
        log=tuple(line.strip() for line in rest),
    )


def _error(node: Node, check: str, cause: str, fix: str) -> Finding:
    return Finding(node=node.name, check=check, severity="error", cause=cause, fix=fix)
