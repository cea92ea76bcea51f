"""Finds the nodes of a Slurm job, and starts a run in the job.

Jobs of `run --site slurm` execute `python -m payload.orchestrate.sites.allocation --run-dir DIR`.
That program plans the run on the nodes of the job and becomes the supervisor of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from payload.config.run_config import load_run_config
from payload.core.errors import ConfigError, ExitCode, PreflightError, TileforgeError, UsageError
from payload.core.printable_text import printable
from payload.core.python_processes import code_environment, module_command
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import NODE_NAME
from payload.core.validation.records import build
from payload.estimates.network import Link
from payload.launch.environment import launcher_environment
from payload.launch.launcher import Launcher, Reach
from payload.launch.launchers.srun import LAUNCHER, NODE_COMMAND, each_node_command
from payload.machines.inventory import Access, ClusterInventory, Node
from payload.machines.machine import Domain, discover, hostname
from payload.machines.network_interface import interface_towards
from payload.orchestrate.hardware.nvidia import NvidiaFacts, smi_fault, with_gpus
from payload.orchestrate.inventories.chosen import ResolvedInventory, nvidia_here
from payload.orchestrate.machine_profiles.local_profile import LOOPBACK, LocalAccess, port_of
from payload.orchestrate.node import control
from payload.orchestrate.runs.planning import PlanTarget, resolve
from payload.orchestrate.runs.run_input_checks import check_data
from payload.orchestrate.runs.run_request import PlanRequest
from payload.run_record.run_files import DEFAULT_GRACE_S, RunJob, RunPaths, last_record, write_json
from payload.run_record.run_repair import known_summary, move_blockers_aside

JOB_ID = "SLURM_JOB_ID"
_NODELIST = "SLURM_JOB_NODELIST"
_COMMAND_S = 30.0
_REPORT_S = 120.0
_RECORD_S = 60.0
"""Longest wait for the job's record, in seconds. A job may begin before the submitting command has
read the job id from sbatch."""
_POLL_S = 0.5
_GUESSED_BYTES_PER_S = 1.25e9
"""Assumed rate of the network between the nodes, 10 Gbit/s; this rate is not measured."""
_EXAMPLE = "for example with slurm.extra = '--gpus-per-node=1'"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """A node's report about itself, from within the job."""

    node: str = checked(pattern=NODE_NAME, wanted="a node name")
    domains: tuple[Domain, ...]
    """NUMA domains of the node, with the cores that the job may use."""
    memory_bytes: int = checked(low=0)
    interface: str | None
    """Network interface of the node towards the other nodes."""
    missing: tuple[str, ...] = ()
    """Folders of the run that the node cannot access."""
    nvidia: NvidiaFacts | None = None
    """The GPUs that the job may use on the node."""
    has_gpus: bool = False
    """True if Slurm reports that the job has GPUs on the node."""


class SlurmAccess(LocalAccess):
    """The nodes of the job that this process is in.

    In a batch script, this machine is the head. The shell of salloc may be on a login node.
    """

    launcher = LAUNCHER.name
    link = Link(bytes_per_s=_GUESSED_BYTES_PER_S)

    def __init__(self, env: Mapping[str, str], reports: Mapping[str, NodeReport]) -> None:
        super().__init__(env)
        self._reports = reports

    def interfaces(self, nodes: Sequence[Node]) -> Mapping[str, str]:
        """Return each node's network interface towards the other nodes."""
        return {node.name: self._reports[node.name].interface or LOOPBACK for node in nodes}

    def free_memory_bytes(self) -> int | None:
        """Return the memory of the node with the least memory."""
        return min(report.memory_bytes for report in self._reports.values())

    def executable(self, launcher: Launcher) -> str:
        """Return the launcher's path.

        Raises PreflightError if it cannot be used. Raises ConfigError if the launcher would start
        the ranks on this machine, but this machine is not a node of the job.
        """
        if len(self._reports) == 1 and launcher.scheduler is None and self._is_off_head():
            raise ConfigError(
                f"launch.launcher = {launcher.name!r} would start the ranks on {hostname()}, but "
                f"the job's node is {self._head()}. Use 'auto' or 'srun'."
            )
        return super().executable(launcher)

    def supervisor_words(self) -> list[str]:
        """Return the supervisor option with the time at which the job ends. Raises SlurmError.

        The run saves before that time.
        """
        ends_unix = job_ends_unix(self._env)
        return [] if ends_unix is None else ["--job-ends", f"{ends_unix:.0f}"]

    def reach(self) -> Reach:
        """Return how the nodes are reached: with srun, or by loopback on this machine alone."""
        off_head = self._is_off_head()
        if len(self._reports) == 1 and not off_head:
            return Reach(interface=LOOPBACK)
        srun = require_program("srun", self._env)
        return Reach(
            interface=self._reports[self._head()].interface or LOOPBACK,
            node_command=NODE_COMMAND,
            each_node_command=each_node_command(srun, len(self._reports)),
            off_head=off_head,
        )

    def _head(self) -> str:
        return next(iter(self._reports))

    def _is_off_head(self) -> bool:
        return _own_name(self._env) != self._head()


def allocation(env: Mapping[str, str], *, why: str, folders: Sequence[Path] = ()) -> _Allocation:
    """Return the nodes of the job that this process is in.

    Raises ConfigError outside of a job, and PreflightError if a node cannot access `folders`.
    """
    job_id, nodelist = env.get(JOB_ID), env.get(_NODELIST)
    if not job_id or not nodelist:
        raise ConfigError(
            f"inventory ({why}): {_NODELIST if job_id else JOB_ID} is not set, so this is not a "
            "Slurm job. Submit one with run --site slurm, or start this command within salloc or "
            "sbatch."
        )
    names = run_slurm(["scontrol", "show", "hostnames", nodelist], env).split()
    facts = [
        fields(line)
        for line in run_slurm(["scontrol", "show", "node", nodelist, "-o"], env).splitlines()
    ]
    by_name = {fact.get("NodeName", ""): fact for fact in facts}
    absent = [name for name in names if name not in by_name]
    if not names or absent:
        raise PreflightError(
            f"Slurm job {job_id}: scontrol does not list {', '.join(absent) or nodelist}. See "
            "`scontrol show node`."
        )
    head, others = names[0], names[1:]
    targets = {name: by_name[head]["NodeAddr"] for name in others}
    if others:
        targets[head] = by_name[others[0]]["NodeAddr"]
    reports = inspect_nodes(names, env, targets=targets, folders=folders)
    for name, report in reports.items():
        if report.missing:
            raise PreflightError(
                f"{name}: cannot access {report.missing[0]}. A Slurm job's nodes share the run's "
                "folder and its data: put them on the shared file system (--runs-dir, data.dir)."
            )
    nodes = tuple(_node(name, by_name[name], reports[name]) for name in names)
    inventory = ClusterInventory(
        cluster=env.get("SLURM_CLUSTER_NAME") or "slurm",
        source="slurm",
        ssh_user="",
        access=Access(kind="slurm"),
        nodes=nodes,
    )
    chosen = ResolvedInventory(
        inventory=inventory,
        why=f"{why}, job {job_id}",
        domains={name: reports[name].domains for name in names},
        gpu_notes=_gpu_notes(reports, has_gpus=True),
        cuda_notes=_gpu_notes(reports, has_gpus=False),
    )
    return _Allocation(chosen=chosen, access=SlurmAccess(env, reports))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Allocation:
    """The nodes of a job, and their profile for planning and starting a run."""

    chosen: ResolvedInventory
    access: SlurmAccess


def _node(name: str, fact: Mapping[str, str], report: NodeReport) -> Node:
    listed = int(fact.get("RealMemory") or 0) / 1024  # MiB
    memory_gib = report.memory_bytes / 2**30
    node = Node(
        name=name,
        address=fact["NodeAddr"],
        ssh_port=int(fact.get("Port") or 6818),
        physical_cores=sum(len(domain.cores) for domain in report.domains),
        numa_domains=len(report.domains),
        memory_gib=round(min(memory_gib, listed) if listed > 1 else memory_gib, 1),
    )
    return node if report.nvidia is None else with_gpus(node, report.nvidia)


def _gpu_notes(reports: Mapping[str, NodeReport], *, has_gpus: bool) -> tuple[str, ...]:
    """Return notes that explain why nvidia-smi shows no GPU on some nodes.

    `has_gpus` selects the nodes with or without GPUs in the job: Slurm may hide the GPUs of a node
    from a job that did not request GPUs.
    """
    notes = []
    for report in reports.values():
        fault = None if report.nvidia is None else smi_fault(report.nvidia)
        if fault is not None and report.has_gpus == has_gpus:
            request = (
                "" if has_gpus else f"Slurm gave the job no GPU. Request GPUs, {_EXAMPLE}. Or: "
            )
            notes.append(f"no GPU was found on {report.node}: {fault.cause}. {request}{fault.fix}")
    return tuple(notes)


def fields(line: str) -> dict[str, str]:
    """Return the `Name=value` fields of a line that scontrol printed."""
    return dict(each.split("=", 1) for each in line.split() if "=" in each)


def require_program(name: str, env: Mapping[str, str]) -> str:
    """Return the path of one of Slurm's commands. Raises PreflightError if it is missing."""
    program = shutil.which(name, path=env.get("PATH", os.defpath))
    if program is None:
        raise PreflightError(
            f"no {name} on PATH. Slurm's commands are on a cluster's login nodes: log in on one, "
            "or add their folder to PATH."
        )
    return program


def run_slurm(argv: Sequence[str], env: Mapping[str, str], *, timeout_s: float = _COMMAND_S) -> str:
    """Return the output of a Slurm command.

    If the command fails, raises PreflightError with the last line of its output.
    """
    program = require_program(argv[0], env)
    try:
        done = subprocess.run(
            [program, *argv[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env=dict(env),
            # Ctrl-C must not reach the Slurm command.
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise PreflightError(
            f"{argv[0]} has not answered within {timeout_s:.0f} s: Slurm's controller is busy or "
            "down. Retry later; see `scontrol ping`."
        ) from None
    if done.returncode:
        raise SlurmError(argv[0], _last_line(done.stderr or done.stdout))
    return done.stdout


class SlurmError(PreflightError):
    """A Slurm command has failed. The text has the command's last line of output."""

    def __init__(self, program: str, message: str) -> None:
        super().__init__(f"{program}: {message}. See `sinfo` and `scontrol ping`.")
        self.message = message


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    message = (
        re.sub(r"^\w+: (?:error: |fatal: )*", "", lines[-1]) if lines else "it printed nothing"
    )
    return printable(message)[:300].rstrip(".")


def inspect_nodes(
    names: Sequence[str],
    env: Mapping[str, str],
    *,
    targets: Mapping[str, str],
    folders: Sequence[Path],
) -> dict[str, NodeReport]:
    """Collect a report from every node, through srun. Raises PreflightError."""
    request = json.dumps({"targets": targets, "folders": [str(folder) for folder in folders]})
    kept = code_environment(launcher_environment(env, {}, keeps=LAUNCHER.keeps))
    program = module_command("payload.orchestrate.sites.allocation", "--look", request)
    argv = [*each_node_command("srun", len(names)), "--quiet", *program]
    printed = run_slurm(argv, kept, timeout_s=_REPORT_S)
    reports = {}
    for line in printed.splitlines():
        with suppress(ConfigError):
            report = build(NodeReport, parse_json(line, where="srun"), where="srun")
            reports[report.node] = report
    silent = [name for name in names if name not in reports]
    if silent:
        raise PreflightError(
            f"{', '.join(silent)}: did not answer through srun. Check that {sys.executable} and "
            "the payload have the same path on every node."
        )
    return {name: reports[name] for name in names}


def _own_name(env: Mapping[str, str]) -> str:
    """Return the node name that Slurm gave this machine; on a login node, return the hostname."""
    return env.get("SLURMD_NODENAME") or hostname()


def report_of_this_node(request: str, env: Mapping[str, str]) -> NodeReport:
    """Return a report on the resources that the job has on this node."""
    raw = json.loads(request)
    name = _own_name(env)
    target = raw["targets"].get(name)
    machine = discover()
    cpus = len(os.sched_getaffinity(0))
    threads = max(1, cpus // max(1, machine.num_cores()))
    granted = int(env.get("SLURM_CPUS_ON_NODE") or cpus) // threads
    return NodeReport(
        node=name,
        domains=_first_cores(machine.domains, max(1, granted)),
        memory_bytes=machine.memory_bytes,
        interface=interface_towards(target) if target is not None else None,
        missing=tuple(each for each in raw["folders"] if not Path(each).is_dir()),
        nvidia=nvidia_here(env),
        has_gpus=_has_gpus(env),
    )


def _has_gpus(env: Mapping[str, str]) -> bool:
    """Return whether Slurm gave GPUs to this step, by their number or their indices."""
    listed = any(env.get(name) for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"))
    return listed or env.get("SLURM_GPUS_ON_NODE", "0") not in ("", "0")


def _first_cores(domains: Sequence[Domain], most: int) -> tuple[Domain, ...]:
    """Return the domains, limited to their first `most` cores in total."""
    found = []
    for domain in domains:
        cores = domain.cores[:most]
        most -= len(cores)
        if cores:
            found.append(replace(domain, cores=cores))
    return tuple(found)


def job_ends_unix(env: Mapping[str, str]) -> float | None:
    """Return when Slurm will kill the job that this process is in; None without a limit."""
    left = run_slurm(["squeue", "--noheader", "--jobs", env[JOB_ID], "--format", "%L"], env).strip()
    seconds = time_left_s(left)
    return None if seconds is None else time.time() + seconds


def time_left_s(text: str) -> float | None:
    """Convert `D-HH:MM:SS`, `HH:MM:SS` or `MM:SS` to seconds; return None for UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Supervise a run as the program of a job, or print the report of one node."""
    parser = argparse.ArgumentParser(prog="payload.orchestrate.sites.allocation")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run-dir", type=Path, metavar="DIR")
    which.add_argument("--look", metavar="JSON", help="print this node's resources")
    parser.add_argument("--grace", type=float, default=DEFAULT_GRACE_S, metavar="SECONDS")
    arguments = parser.parse_args(argv)
    if arguments.look is not None:
        sys.stdout.write(json.dumps(asdict(report_of_this_node(arguments.look, env))) + "\n")
        return ExitCode.OK
    paths = RunPaths(arguments.run_dir.resolve())
    try:
        return _supervise(paths, env, grace_s=arguments.grace)
    except TileforgeError as error:
        sys.stderr.write(f"error: {printable(str(error))}\n")
        return error.exit_code


def _own_record(paths: RunPaths, job_id: str | None) -> RunJob:
    """Wait for the job's record, which the submitting command writes, and return it.

    Raises UsageError if the record does not appear.
    """
    if job_id is None:
        raise UsageError(
            f"{JOB_ID} is not set, so this is not a Slurm job. Submit the run with run --site "
            "slurm."
        )
    deadline = time.monotonic() + _RECORD_S
    while True:
        job = last_record(RunJob, paths.job)
        if job is not None and job.job_id == job_id:
            return job
        if time.monotonic() > deadline:
            raise UsageError(
                f"{paths.job}: not the record of Slurm job {job_id}. Submit the run again."
            )
        time.sleep(_POLL_S)


def _supervise(paths: RunPaths, env: Mapping[str, str], *, grace_s: float) -> int:
    """Plan the run on the nodes of the job, then become the run's supervisor."""
    job = _own_record(paths, env.get(JOB_ID))
    config = load_run_config(paths.config)
    summary = known_summary(paths)
    if summary and summary.status == "finished" and summary.steps >= config.train.steps:
        return ExitCode.OK  # requeued after it finished
    data = config.data.folder()
    found = allocation(env, why="run --site slurm", folders=(paths.root, data))
    meta = check_data(data, sequence_length=config.data.sequence_length, task=config.task.data())
    holder = found.access.reserve_port()
    planned = resolve(
        PlanRequest.of_run(paths, config, vocab_size=meta.vocab_size, resumes=paths.state.exists()),
        PlanTarget(chosen=found.chosen, profile=found.access, paths=paths, port=port_of(holder)),
    )
    for line in (
        *planned.notes(),
        *(f"warning: {sentence}" for sentence in move_blockers_aside(paths)),
    ):
        sys.stderr.write(f"{printable(line)}\n")
    planned.write(paths)
    write_json(
        paths.job, replace(job, pid=os.getpid(), restarts=int(env.get("SLURM_RESTART_COUNT", 0)))
    )
    arguments = ["--run-dir", str(paths.root), "--grace", f"{grace_s:g}"]
    arguments += found.access.supervisor_words()
    # The supervisor unblocks and handles these signals once it is ready.
    signal.pthread_sigmask(signal.SIG_BLOCK, control.STOP_SIGNALS)
    program = module_command("payload.supervise", *arguments)
    # The port stays reserved until the supervisor has bound it.
    os.set_inheritable(holder.fileno(), True)
    os.execve(program[0], program, code_environment(env))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
