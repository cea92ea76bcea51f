"""The machines that a command is about, from a file, this machine, a stack or a Slurm job."""

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
    """An inventory, and what is known of its nodes' cores."""

    inventory: ClusterInventory
    why: str
    domains: dict[str, tuple[Domain, ...]]
    """By node; empty for nodes whose cores are simply 0 to n-1."""
    nvidia: NvidiaFacts | None = None
    """This machine's GPUs; None for other machines."""
    gpu_notes: tuple[str, ...] = ()
    """Why no GPU was counted on other machines that have an nvidia-smi."""
    cuda_notes: tuple[str, ...] = ()
    """Further ones, for runs with `device.kind = "cuda"` only: others may well want no GPU."""

    def place(self, launch: LaunchSection, device: DeviceSection) -> Placement:
        """Return where a run's ranks go. Raises ConfigError."""
        return place_ranks(self.inventory.nodes, launch, device=device, domains=self.domains)

    def gpu_need(self, config: RunConfig) -> GpuNeed | None:
        """Return what a run needs of the nodes' GPUs; None where its ranks compute on CPUs."""
        nodes = self.inventory.nodes
        need = gpu_need(config, nodes)
        if need is None:
            return None
        if self.nvidia is not None:
            # Not only those that ranks can use as things are: the rest is a fault to be named.
            gpus = len(self.nvidia.visible_devices()) or len(self.nvidia.devices())
            nodes = tuple(replace(node, gpus=gpus) for node in nodes)
        try:
            count = count_ranks_per_node(
                nodes, config.launch, device=config.device, domains=self.domains
            )
        except ConfigError:  # nodes differ in GPUs: each is held to its own
            return need
        return replace(need, ranks_per_node=count)

    def headline(self) -> str:
        """Return the first line that a command prints, and a note where nvidia-smi fails here."""
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
            return f"{text}\nnote: no GPU is counted here: {failed.cause}. {failed.fix}"
        gpus = sum(node.gpus for node in nodes)
        return f"{text}, {gpus} GPU(s)" if gpus else text


def load_cluster(argument: str | None, *, env: Mapping[str, str]) -> ResolvedInventory:
    """Return the cluster that `--inventory` names; without it the selected stack's or this machine.

    A stack's machines are asked for their host keys. Raises ConfigError, and what `load_stack`
    raises.
    """
    if argument == "local":
        return _this_machine("--inventory local", env)
    if argument is None:
        # Most commands need no stack, and start sooner without.
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
            "--inventory slurm is for plan and run within a Slurm job. From a login node, `run "
            "--site slurm` submits one; attach, status and stop know a run's job by themselves."
        )
    inventory = ClusterInventory.load(Path(argument))
    if inventory.source == "slurm":
        raise ConfigError(
            f"--inventory {argument}: it is of a Slurm job, and every job gets its own nodes. Use "
            "--inventory slurm within the job."
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
    """Return what this machine's nvidia-smi prints, where it has one."""
    answer = nvidia(",".join(QUERY), torch=torch_here(), env=env)
    return build(NvidiaFacts, answer, where="this machine")


def _of_stack(outputs: StackOutputs, env: Mapping[str, str], *, why: str) -> ResolvedInventory:
    from payload.orchestrate.clouds.pulumi.stack_outputs import load_stack

    talk = text_console(stderr=True)
    talk.print(f"cluster {outputs.inventory.cluster} ({why}): looking for its machines")
    inventory = load_stack(outputs, env, folder=Path.cwd(), say=talk.print)
    return ResolvedInventory(
        inventory=inventory, why=f"{why}; {outputs.price_and_end()}", domains={}
    )
