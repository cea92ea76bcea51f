"""Resolves `--inventory` to a file's machines, this machine, a Pulumi stack or a Slurm job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from payload.config.launch_sections import DeviceSection, LaunchSection
from payload.config.run_config import RunConfig
from payload.core.errors import ConfigError
from payload.core.validation.records import build
from payload.launch.ranks import Placement, count_ranks_per_node, place_ranks
from payload.machines.inventory import ClusterInventory
from payload.machines.machine import Domain, discover
from payload.orchestrate.hardware.nvidia import (
    QUERY,
    GpuNeed,
    NvidiaFacts,
    gpu_need,
    smi_fault,
    torch_here,
    with_gpus,
)
from payload.orchestrate.node.look import nvidia
from payload.orchestrate.terminal.console import text_console

if TYPE_CHECKING:
    from payload.orchestrate.clouds.pulumi.stack_outputs import StackOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedInventory:
    """An inventory with the NUMA domains and GPUs of its nodes."""

    inventory: ClusterInventory
    why: str
    """The reason for selecting this inventory."""
    domains: dict[str, tuple[Domain, ...]]
    """NUMA domains by node. Nodes with cores 0 to n-1 have no entry."""
    nvidia: NvidiaFacts | None = None
    """This machine's GPUs; None for other machines."""
    gpu_notes: tuple[str, ...] = ()
    """Reasons why no GPU was counted on remote machines that have nvidia-smi."""
    cuda_notes: tuple[str, ...] = ()
    """Further reasons why no GPU was counted, shown only for runs with `device.kind = "cuda"`."""

    def place(self, launch: LaunchSection, device: DeviceSection) -> Placement:
        """Return the placement of a run's ranks. Raises ConfigError."""
        return place_ranks(self.inventory.nodes, launch, device=device, domains=self.domains)

    def gpu_need(self, config: RunConfig) -> GpuNeed | None:
        """Return a run's requirements on the nodes' GPUs; None if its ranks run on CPUs."""
        nodes = self.inventory.nodes
        need = gpu_need(config, nodes)
        if need is None:
            return None
        if self.nvidia is not None:
            # Also count GPUs that ranks cannot use now, so that these GPUs are reported as a fault.
            gpus = len(self.nvidia.visible_devices()) or len(self.nvidia.devices())
            nodes = tuple(replace(node, gpus=gpus) for node in nodes)
        try:
            count = count_ranks_per_node(
                nodes, config.launch, device=config.device, domains=self.domains
            )
        except ConfigError:  # GPUs differ between nodes, so each is checked separately
            return need
        return replace(need, ranks_per_node=count)

    def headline(self) -> str:
        """Return the first line of a command's output, with a note if nvidia-smi fails here."""
        nodes = self.inventory.nodes
        cores = sum(node.physical_cores for node in nodes)
        domains = sum(node.numa_domains for node in nodes)
        memory = sum(node.memory_gib for node in nodes)
        names = ", ".join(node.name for node in nodes)
        text = (
            f"inventory: {self.inventory.cluster} ({self.why}): {names}; {cores} physical core(s) "
            f"in {domains} NUMA domain(s), {memory:g} GiB"
        )
        if self.nvidia is not None and self.nvidia.devices():
            return f"{text}; {self.nvidia.describe()}"
        failed = None if self.nvidia is None else smi_fault(self.nvidia)
        if failed is not None:
            return f"{text}\nnote: GPUs of this machine are ignored: {failed.cause}. {failed.fix}"
        gpus = sum(node.gpus for node in nodes)
        return f"{text}, {gpus} GPU(s)" if gpus else text


def load_cluster(argument: str | None, *, env: Mapping[str, str]) -> ResolvedInventory:
    """Resolve `--inventory`; the default is the selected stack, or this machine if none is up.

    If the inventory is a stack, the host keys of its machines are fetched. Raises ConfigError, and
    the errors of `load_stack`.
    """
    if argument == "local":
        return _this_machine("--inventory local", env)
    if argument is None:
        # Imported inside the function, because most commands need no stack and start faster without
        # it.
        from payload.orchestrate.clouds.pulumi.stack_outputs import default_stack

        found = default_stack(env, folder=Path.cwd())
        if isinstance(found, str):
            return _this_machine(f"this machine, the default: {found}", env)
        return _of_stack(found, env, why="the selected Pulumi stack, the default")
    if _is_stack(argument):
        from payload.orchestrate.clouds.pulumi.engine import Pulumi
        from payload.orchestrate.clouds.pulumi.stack_outputs import read_outputs

        name = argument.partition(":")[2] if ":" in argument else None
        outputs = read_outputs(Pulumi(env, folder=Path.cwd(), stack=name))
        return _of_stack(outputs, env, why=f"--inventory {argument}")
    if argument == "slurm":
        raise ConfigError(
            "--inventory slurm: can be used only within a Slurm job, with the commands `plan` and "
            "`run`. On a login node, submit a job with `run --site slurm`; `attach`, `status` and "
            "`stop` need no --inventory."
        )
    inventory = ClusterInventory.load(Path(argument))
    if inventory.source == "slurm":
        raise ConfigError(
            f"--inventory {argument}: the file describes an earlier Slurm job, but each job runs "
            "on different nodes. Use --inventory slurm within the job."
        )
    return ResolvedInventory(inventory=inventory, why=f"--inventory {argument}", domains={})


def _is_stack(argument: str) -> bool:
    return argument == "stack" or argument.startswith("stack:")


def _this_machine(why: str, env: Mapping[str, str]) -> ResolvedInventory:
    machine, gpus = discover(), nvidia_here(env)
    inventory = machine.inventory()
    return ResolvedInventory(
        inventory=replace(inventory, nodes=(with_gpus(inventory.head, gpus),)),
        why=why,
        domains={machine.name: machine.domains},
        nvidia=gpus,
    )


def nvidia_here(env: Mapping[str, str]) -> NvidiaFacts:
    """Return this machine's GPUs from nvidia-smi, if nvidia-smi is installed."""
    answer = nvidia(",".join(QUERY), torch=torch_here(), env=env)
    return build(NvidiaFacts, answer, where="this machine")


def _of_stack(outputs: StackOutputs, env: Mapping[str, str], *, why: str) -> ResolvedInventory:
    from payload.orchestrate.clouds.pulumi.stack_outputs import load_stack

    talk = text_console(stderr=True)
    talk.print(f"cluster {outputs.inventory.cluster} ({why}): finding its machines")
    inventory = load_stack(outputs, env, folder=Path.cwd(), say=talk.print)
    return ResolvedInventory(
        inventory=inventory, why=f"{why}; {outputs.price_and_end()}", domains={}
    )
