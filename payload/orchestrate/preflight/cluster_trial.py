"""Runs preflight's trial: starts the launcher and gloo as in a run, and measures the nodes."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from rich.console import Console

from payload.config.launch_sections import DeviceSection, LaunchSection
from payload.config.run_config import RunConfig
from payload.core.errors import ConfigError, PreflightError, TileforgeError
from payload.core.printable_text import shown
from payload.core.validation.records import build
from payload.launch.environment import FOREIGN_PREFIXES
from payload.launch.launcher import Launcher
from payload.launch.launcher_files import render_hosts
from payload.launch.launchers.registry import AUTO, candidates
from payload.launch.ranks import Placement, place_ranks
from payload.machines.inventory import Node
from payload.machines.machine import Domain
from payload.orchestrate.findings import nodes as find
from payload.orchestrate.findings.nodes import Finding, NodeFacts
from payload.orchestrate.findings.trial import Measured, Outcome, failures
from payload.orchestrate.hardware.nvidia import gpu_need
from payload.orchestrate.machine_profiles.cluster_profile import (
    Answers,
    ClusterAccess,
    fitting_launcher,
    programs_of,
    venv_executable,
)
from payload.orchestrate.machine_profiles.code_and_data_uploads import upload_code
from payload.orchestrate.machine_profiles.local_profile import LocalAccess, port_of
from payload.orchestrate.node.mesh import trial
from payload.orchestrate.runs.launcher_choice import LauncherChoice, choose_launcher
from payload.orchestrate.runs.launcher_command import launch_command
from payload.orchestrate.runs.machine_profile import MachineProfile
from payload.orchestrate.ssh.cluster import Cluster
from payload.orchestrate.ssh.node_code import Code, inspect_node, this_code
from payload.orchestrate.ssh.remote_calls import NODE_FOLDER, Left, NodeState, ask, on_every_node
from payload.orchestrate.ssh.run_keys import install_run_key, remove_run_key
from payload.orchestrate.ssh.start_claim import HeadBusyError, claimed
from payload.run_record.run_files import RunPaths
from payload.stack.node_paths import VENV

# mpirun starts in a second, torch loads in three seconds on two cores, and the matmuls and the
# all-reduces take some seconds each. Busy nodes and shared folders took over 24 s in all. The ranks
# end by themselves before this deadline.
DEADLINE_S = 60.0
_RANKS_END_S = 58
# torch with CUDA takes longer to load, and NCCL's first all-reduce connects every pair of GPUs.
_GPU_DEADLINE_S, _GPU_RANKS_END_S = 90.0, 88


def _deadline_s(*, on_gpus: bool) -> float:
    """Return the time limit of the launcher and its ranks."""
    return _GPU_DEADLINE_S if on_gpus else DEADLINE_S


def trial_arguments(
    choice: LauncherChoice,
    profile: MachineProfile,
    nodes: Sequence[Node],
    placement: Placement,
    *,
    paths: RunPaths,
    port: int,
    on_gpus: bool,
) -> dict[str, Any]:
    """Return the arguments of node/mesh.py, which starts the trial.

    The trial's command is the command of a run, but its ranks run the trial instead of the trainer.
    `paths.root` is the trial's folder on the head. The folder's path identifies the trial's
    processes.
    """
    settings = _rank_settings(
        placement,
        profile.interfaces(nodes),
        settings={
            **choice.launcher.rank_settings(nodes=len(nodes)),
            # These override the launcher's values, as the wrapper of a rank does in a run.
            "MASTER_ADDR": nodes[0].address,
            "MASTER_PORT": str(port),
        },
        on_gpus=on_gpus,
    )
    command = launch_command(
        choice,
        profile,
        nodes,
        placement,
        paths=paths,
        rank_arguments=("-m", "payload.train.fabric", json.dumps(settings)),
        port=port,
        malloc="tuned",
    )
    return {
        "ssh": command.reach.ssh,
        "workers": {node.name: node.address for node in nodes[1:]},
        "hosts_file": str(paths.hosts),
        "hosts": render_hosts(nodes),
        "argv": command.argv,
        "environment": {**command.settings, **command.environment},
        # mpirun finds mpiexec.hydra, which is in the same folder, through PATH.
        "path": str(PurePath(command.argv[0]).parent),
        "without": FOREIGN_PREFIXES,
        "keeps": choice.launcher.keeps,
        "deadline_s": _deadline_s(on_gpus=on_gpus),
    }


def _rank_settings(
    placement: Placement,
    interfaces: Mapping[str, str],
    *,
    settings: Mapping[str, str],
    on_gpus: bool,
) -> dict[str, Any]:
    """Return the arguments of payload/train/fabric.py."""
    ranks = [
        {
            "node": rank.node,
            "node_rank": rank.node_rank,
            "local_rank": rank.local_rank,
            "cores": rank.cores,
            "threads": rank.threads,
            "interface": interfaces[rank.node],
        }
        for rank in placement.ranks
    ]
    return {
        "deadline_s": _GPU_RANKS_END_S if on_gpus else _RANKS_END_S,
        "device": "cuda" if on_gpus else "cpu",
        "ranks": ranks,
        "environment": settings,
    }


_MARGIN_S = 20.0
_ACTION_S = 20.0
_CPU = DeviceSection(kind="cpu")
"""Device of a trial on this machine, for a run that does not compute on GPUs."""
# If a killed command leaves the key, the key expires after ten times a trial's duration.
_KEY_LASTS_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Result of a trial."""

    launcher: str = ""
    """The name of the launcher that was tried."""
    measured: Measured | None = None
    findings: list[Finding] = field(default_factory=list)
    note: str | None = None
    """The reason why there was no trial."""
    on_gpus: bool = False
    """True if the ranks computed on GPUs and communicated over NCCL."""


def try_cluster(
    nodes: Sequence[Node],
    cluster: Cluster,
    facts: Mapping[str, NodeFacts],
    *,
    config: RunConfig,
    talk: Console,
    placement: Placement | None = None,
) -> Trial:
    """Run the trial on nodes that have passed the other checks.

    The head receives a key for the other nodes; the key is always removed after the trial.
    `placement` is the placement of the run's ranks, if it is already known.
    """
    architectures = {each.architecture for each in facts.values()}
    try:
        launcher = fitting_launcher(config.launch.launcher, architectures)
    except PreflightError as error:
        (launcher,) = candidates(config.launch.launcher)
        return Trial(findings=[_of_error(nodes[0], error, launcher)], launcher=launcher.name)
    trial = _ClusterTrial(
        nodes=nodes,
        cluster=cluster,
        facts=facts,
        launcher=launcher,
        placement=placement or placement_or_one_rank(nodes, config, domains={}),
        on_gpus=gpu_need(config, nodes) is not None,
    )
    outcomes = on_every_node(
        nodes,
        lambda node: inspect_node(
            cluster.connect(node), this_code(), venv=VENV, programs=programs_of(launcher)
        ),
    )
    refused = [*_missing_programs(nodes, outcomes, launcher)]
    if refused:
        return Trial(findings=refused, launcher=launcher.name)
    answers = {name: got for name, got in outcomes.items() if isinstance(got, NodeState)}
    head = answers[nodes[0].name]
    if head.running is not None:
        return _not_measured(head.running)
    try:
        outcome = trial.run(answers, talk=talk)
    except ConfigError:
        raise
    except HeadBusyError as error:
        return Trial(note=f"nothing was measured: {error}")
    except TileforgeError as error:
        return Trial(findings=[_of_error(nodes[0], error, launcher)], launcher=launcher.name)
    if isinstance(outcome, str):
        return _not_measured(outcome)
    hostnames = {facts[node.name].hostname: node.name for node in nodes}
    return _result(nodes, outcome, launcher, hostnames=hostnames, on_gpus=trial.on_gpus)


def _not_measured(running: str) -> Trial:
    return Trial(note=f"nothing was measured, because run {running} is active")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClusterTrial:
    """A trial on a cluster. All nodes have the required programs."""

    nodes: Sequence[Node]
    cluster: Cluster
    facts: Mapping[str, NodeFacts]
    launcher: Launcher
    placement: Placement
    on_gpus: bool

    def run(self, answers: Answers, *, talk: Console) -> Outcome | str:
        """Run the trial and return its outcome.

        If a run is active on the head, return its id instead. Raises HeadBusyError and errors of
        the connection.
        """
        cluster, code = self.cluster, this_code()
        head = answers[self.nodes[0].name]
        run_id = f"preflight-{secrets.token_hex(4)}"
        run_dir = PurePosixPath(head.home, NODE_FOLDER, "runs", run_id)
        with claimed(cluster, run_dir=run_dir, say=talk.print) as claim:
            if claim.running is not None:
                return claim.running
            upload_code(self.nodes, cluster, answers, code=code, talk=talk)
            try:
                outcome, folder = self._start(head, code, name=claim.name)
                if outcome.status != 0:
                    _end_leftovers(self.nodes, cluster, folder)
            except BaseException:
                with contextlib.suppress(TileforgeError):  # it would replace the first error
                    remove_run_key(cluster, claim.name)
                raise
            remove_run_key(cluster, claim.name)
        return outcome

    def _start(self, head: NodeState, code: Code, *, name: str) -> tuple[Outcome, PurePosixPath]:
        """Run the trial; return its outcome and the folder that identifies its processes."""
        node = self.nodes[0]
        if head.port is None:
            raise PreflightError(f"{node.name}: no port is free for the ranks.")
        key = install_run_key(self.cluster, name=name, lasts_s=_KEY_LASTS_S)
        arguments = trial_arguments(
            LauncherChoice(launcher=self.launcher, executable=venv_executable(self.launcher)),
            ClusterAccess(
                interface_of={each.name: self.facts[each.name].interface for each in self.nodes},
                memory_bytes=None,
                head=node.name,
                code=PurePosixPath(head.home) / NODE_FOLDER / f"payload-{code.digest}",
                ssh_config=key.config,
                tcmalloc_library=None,
            ),
            self.nodes,
            self.placement,
            paths=RunPaths(Path(key.folder)),
            port=head.port,
            on_gpus=self.on_gpus,
        )
        timeout_s = _deadline_s(on_gpus=self.on_gpus) + _MARGIN_S
        connection = self.cluster.connect(node)
        outcome = ask(connection, "mesh.py", Outcome, arguments, timeout_s=timeout_s)
        return outcome, key.folder


def try_this_machine(
    nodes: Sequence[Node],
    access: LocalAccess,
    folder: Path,
    *,
    config: RunConfig,
    domains: Mapping[str, tuple[Domain, ...]],
) -> Trial:
    """Try the launcher and gloo on this machine, without ssh; `folder` must be empty.

    `domains` maps the name of the node to its NUMA domains and their cores.
    """
    choice = choose_launcher(AUTO, access)
    on_gpus = gpu_need(config, nodes) is not None
    if on_gpus:
        placement = placement_or_one_rank(nodes, config, domains=domains)
    else:
        placement = place_ranks(nodes, LaunchSection(), device=_CPU, domains=domains)
    with access.reserve_port() as holder:
        arguments = trial_arguments(
            choice,
            access,
            nodes,
            placement,
            paths=RunPaths(folder),
            port=port_of(holder),
            on_gpus=on_gpus,
        )
        answer = trial(arguments, env=access.environment())
    outcome = build(Outcome, answer, where="this machine")
    return _result(nodes, outcome, choice.launcher, hostnames={}, on_gpus=on_gpus)


def placement_or_one_rank(
    nodes: Sequence[Node], config: RunConfig, *, domains: Mapping[str, tuple[Domain, ...]]
) -> Placement:
    """Return the placement of a run's ranks, or one rank per node if they cannot be placed."""
    try:
        return place_ranks(nodes, config.launch, device=config.device, domains=domains)
    except ConfigError:
        one = LaunchSection(ranks_per_node=1)
        return place_ranks(nodes, one, device=config.device, domains=domains)


def _result(
    nodes: Sequence[Node],
    outcome: Outcome,
    launcher: Launcher,
    *,
    hostnames: Mapping[str, str],
    on_gpus: bool,
) -> Trial:
    found = failures(
        nodes,
        outcome,
        hostnames=hostnames,
        deadline_s=_deadline_s(on_gpus=on_gpus),
        launcher=launcher,
        on_gpus=on_gpus,
    )
    result = outcome.result()
    if found or result is None:
        return Trial(findings=found, launcher=launcher.name, on_gpus=on_gpus)
    names = {rank.node for rank in result.ranks}
    received = result.exchange.received_bytes_per_s if result.exchange else ()
    if names != {node.name for node in nodes} or (received and len(received) != len(result.ranks)):
        cause, fix = "its measurements are not from these nodes", "Try again."
        speed = _error(nodes[0], "speed", cause, fix)
        return Trial(findings=[speed], launcher=launcher.name, on_gpus=on_gpus)
    measured = Measured.from_result(result, on_gpus=on_gpus)
    return Trial(measured=measured, launcher=launcher.name, on_gpus=on_gpus)


def _missing_programs(
    nodes: Sequence[Node],
    outcomes: Mapping[str, NodeState | TileforgeError],
    launcher: Launcher,
) -> list[Finding]:
    """Return findings about nodes without the required programs or with a different home."""
    found = []
    homes = set()
    for node in nodes:
        answer = outcomes[node.name]
        if isinstance(answer, TileforgeError):
            found.append(find.from_error(node, answer))
            continue
        homes.add(answer.home)
        if answer.lacking:
            cause = f"lacks {shown(', '.join(answer.lacking))}"
            fix = "Run its bootstrap again (bootstrap/node-setup.sh)."
            found.append(_error(node, "payload", cause, fix))
    if len(homes) > 1:
        cause = f"the login's home differs between nodes ({', '.join(sorted(homes))})"
        fix = "Every rank starts with the same paths. Give the user the same home on every node."
        found.append(_error(nodes[0], launcher.name, cause, fix))
    return found


def _end_leftovers(nodes: Sequence[Node], cluster: Cluster, folder: PurePosixPath) -> None:
    """Kill the processes of a failed trial; on a silent node, they end after their timeout."""
    arguments = {"action": "left", "run_dir": str(folder), "kill": True}
    on_every_node(
        nodes,
        lambda node: ask(cluster.connect(node), "control.py", Left, arguments, timeout_s=_ACTION_S),
    )


def _of_error(head: Node, error: TileforgeError, launcher: Launcher) -> Finding:
    first, *rest = str(error).splitlines()
    return Finding(
        node=head.name,
        check=launcher.name,
        severity="error",
        cause=f"the trial failed: {first.rstrip('.:')}",
        fix="Fix this problem, and try again.",
        exit_code=error.exit_code,
        log=tuple(line.strip() for line in rest),
    )


def _error(node: Node, check: str, cause: str, fix: str) -> Finding:
    return Finding(node=node.name, check=check, severity="error", cause=cause, fix=fix)
