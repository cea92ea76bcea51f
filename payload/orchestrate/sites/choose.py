"""Which cluster or site a command works on, why, and the cheap checks before a run starts there."""

from __future__ import annotations

import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, ClassVar

from rich.console import Console

from payload.config.launch_sections import DeviceSection, LaunchSection
from payload.config.run_config import RunConfig
from payload.core.errors import ConfigError, RankLostError
from payload.core.untrusted import build
from payload.launch.arithmetic import Arithmetic
from payload.launch.launchers.registry import AUTO, candidates
from payload.launch.ranks import Placement, count_ranks_per_node, place_ranks
from payload.machines.inventory import ClusterInventory
from payload.machines.machine import Domain, discover
from payload.machines.mesh import require_tensor_ranks_on_a_node
from payload.orchestrate import sites
from payload.orchestrate.node.look import nvidia
from payload.orchestrate.nvidia import (
    QUERY,
    GpuNeed,
    NvidiaFacts,
    gpu_need,
    smi_fault,
    torch_here,
    with_gpus,
)
from payload.orchestrate.run.console import text_console
from payload.orchestrate.run.mirror import mirror_file, read_mirrored
from payload.orchestrate.run.store import Order, is_copy, room_for
from payload.run_record.results import RunJob, RunPaths, StopRequest, last_record
from payload.run_record.run_hints import run_command
from payload.run_record.run_lock import FORCE_SIGNAL, is_supervised, starting
from payload.run_record.run_repair import known_config

if TYPE_CHECKING:
    from payload.orchestrate.cloud.stack import StackOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Result of one look at a run, whose new data is then in the run folder here."""

    alive: bool
    """True if the run goes on, or waits for its nodes."""
    news: Sequence[str] = ()
    """News for the operator, a sentence each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """The outcome of bringing a run's results here."""

    alive: bool
    """True if the run goes on, or was started again: its processes stay."""
    checkpoint: Path | None = None
    """The newest one that was brought; None where there is none yet, or nothing to bring."""
    left: RankLostError | None = None
    """Processes that do not end."""


class SiteRun(ABC):
    """One run at its site, as the commands here follow, stop and collect it."""

    paths: RunPaths
    """Its folder, or the copy of it, here."""
    nodes: int
    """How many it runs on."""
    where: str
    """For messages, such as `job 12 on 2 node(s)`."""
    every_s: ClassVar[float] = 1.0
    """Time between two looks."""
    outlives_us: bool = True
    """True if it goes on when nobody follows it, so that Ctrl-C detaches first."""
    was_under_way: bool = False
    """True if `start` has found it running, so that it is followed even by `run --detach`."""
    has_job: ClassVar[bool] = True
    """True if a scheduler knows better than the run's files whether it goes on."""
    is_copied: ClassVar[bool] = False
    """True if its folder here is a copy, so that even an ended run has results to bring."""
    force_s: ClassVar[float] = math.inf
    """Time that a stop at once may take before the run is `overdue`."""

    @abstractmethod
    def look(
        self,
        *,
        say: Callable[[str], None] = lambda _: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Seen:
        """Bring what is new here; a site that must wait for a connection does until interrupted."""

    @abstractmethod
    def signal(self, number: Signals, request: StopRequest) -> bool:
        """Ask for a stop, by SIGTERM or at once by FORCE_SIGNAL; return whether the run lives."""

    @abstractmethod
    def bring_home(self, *, at_once: bool = False) -> Home:
        """Collect results and end what is left of the run; with `at_once`, let no rank save."""

    def start_line(self) -> str | None:
        """Return what `run` prints once the run is started; None where the site has said it."""
        return f"run {self.paths.run_id}: {self.where}; everything in {self.paths.root}"

    def detached(self) -> str | None:
        """Return words for a command that leaves the run; None where it has ended already."""
        return f"detached; {how_to_attach(self.paths)}"

    @contextmanager
    def watched(self, node: str | None = None) -> Iterator[Callable[[], bool]]:
        """Yield a function that brings what is new here and returns whether the run goes on.

        `node` is the one besides the head whose files are wanted; None stands for all nodes.
        """
        said: set[str] = set()
        yield lambda: looks_alive(self, said)

    @contextmanager
    def followed(self, say: Callable[[str], None]) -> Iterator[None]:
        """Do, until the exit, what only a command that follows the run to its end does."""
        yield

    def ended_as(self) -> str:
        """Return words to follow `run ID is not running`."""
        return f": {self.where} has ended"

    def result_line(self) -> str | None:
        """Return a stopped run's result as one line; None for all that `run` prints at an end."""
        return None

    def end_without_record(self) -> tuple[int, str] | None:
        """Return exit code and words of a run that ended before it could leave its own, or None."""
        return None

    def abandon(self) -> str:
        """End a run that does not stop when it is asked; return what was done about it."""
        self.signal(FORCE_SIGNAL, StopRequest())
        return "it was told to end at once"

    def overdue(self, waited_s: float, *, force: bool, talk: Console) -> None:
        """End a run that has not stopped in its time, or raise RankLostError with what to do."""
        waited = f"run {self.paths.run_id} has not ended within {waited_s:.0f} s"
        raise RankLostError(f"{waited}: {self.abandon()}.")

    def close(self) -> None:
        """Let go of connections and locks; the run goes on."""
        return


def how_to_attach(paths: RunPaths) -> str:
    """Return the commands that follow and end a run which nobody follows now."""
    return (
        f"run {paths.run_id} goes on. Follow it with: {run_command('attach', paths)}; end it with: "
        f"{run_command('stop', paths)}"
    )


def looks_alive(run: SiteRun, said: set[str]) -> bool:
    """Return whether a run goes on; print each warning that is not in `said`, once."""
    seen = run.look()
    for sentence in seen.news:
        if sentence.startswith("warning: ") and sentence not in said:
            said.add(sentence)
            text_console(stderr=True).print(f"{sentence} (run {run.paths.run_id})")
    return seen.alive


class Site(ABC):
    """A place where runs live: one file of this package with a class below."""

    uses_this_environment: ClassVar[bool] = False
    """True if ranks use the packages and the model cache of this process."""

    @property
    def name(self) -> str:
        """Return the name of its file, which `--site` takes."""
        return type(self).__module__.rpartition(".")[2]

    def check(self, config: RunConfig, env: Mapping[str, str]) -> None:
        """Raise ConfigError or PreflightError for what would fail there later."""
        return

    def hold_to_resume(
        self, paths: RunPaths, env: Mapping[str, str], held: ExitStack, talk: Console
    ) -> None:
        """Keep other commands from starting the run until `held` is closed.

        Raises ConfigError where one has, and where the run lives elsewhere.
        """
        _refuse_to_resume(paths, env)
        with room_for(paths):
            held.enter_context(starting(paths))
        _refuse_to_resume(paths, env)  # by now another command may have started it

    @abstractmethod
    def start(self, order: Order) -> SiteRun:
        """Bring what the run needs there, and start it or have it started."""


class NamedSite(Site):
    """A site that `--site` names, and no inventory is of. Its file has the object `SITE`.

    Its run has a record, job.json, with the site's name and the run's number there.
    """

    @abstractmethod
    def run_of(self, paths: RunPaths, job: RunJob, env: Mapping[str, str]) -> SiteRun:
        """Return the run that a record is of."""


def _refuse_to_resume(paths: RunPaths, env: Mapping[str, str]) -> None:
    """Raise ConfigError for a run that goes on, or that only a cluster has."""
    if is_copy(paths):
        if known_config(paths).storage.address() is None:
            raise ConfigError(
                f"run {paths.run_id} is on a cluster, this is its copy. Name the cluster with "
                "--inventory FILE."
            )
        refuse_where_copied_alive(paths)
    refuse_under_way(paths, env)


def refuse_under_way(paths: RunPaths, env: Mapping[str, str]) -> None:
    """Raise ConfigError for a run that goes on here or in a scheduler's job."""
    if is_supervised(paths):
        raise ConfigError(
            f"run {paths.run_id} is running. Look at it with: " + run_command("status", paths)
        )
    under_way = run_at_site(paths, env)
    if under_way is not None and under_way.look().alive:
        raise ConfigError(
            f"run {paths.run_id} has not ended: {under_way.where}. Follow it with: "
            + run_command("attach", paths)
        )


def refuse_where_copied_alive(paths: RunPaths) -> None:
    """Raise ConfigError for a copy whose run went on when its cluster was last reached."""
    mirrored = read_mirrored(paths)
    if mirrored is not None and mirrored.alive:
        raise ConfigError(
            f"run {paths.run_id} went on on its cluster when that was last reached. Look again "
            f"with: {run_command('status', paths)}. If the cluster is gone, remove "
            f"{mirror_file(paths)}, and resume again."
        )


_NOT_SITES = (
    "allocation",
    "checkpoint_copies",
    "choose",
    "cluster",
    "cluster_run",
    "local",
    "ssh",
)
"""This machine and clusters over SSH are what an inventory says, not `--site`."""


def site_names() -> list[str]:
    """Return what `--site` takes, in alphabetical order."""
    found = (module.name for module in pkgutil.iter_modules(sites.__path__))
    return sorted(name for name in found if name not in _NOT_SITES)


def find_site(name: str) -> NamedSite:
    """Return the site of that name. Raises ConfigError that lists those that there are."""
    if name not in site_names():
        raise ConfigError(f"site {name!r}: there is no such site. Use {', '.join(site_names())}.")
    site: NamedSite = importlib.import_module(f"{sites.__name__}.{name}").SITE
    return site


def run_at_site(paths: RunPaths, env: Mapping[str, str]) -> SiteRun | None:
    """Return the run by the record in its folder; None where no site has it."""
    job = last_record(RunJob, paths.job)
    return None if job is None else find_site(job.site).run_of(paths, job, env)


def require_one_machine(chosen: Chosen) -> None:
    """Raise ConfigError for nodes that are neither this machine alone nor a Slurm job's."""
    inventory = chosen.inventory
    access = inventory.access
    if not access.shares_folder or (access.is_this_machine and len(inventory.nodes) > 1):
        raise ConfigError(
            f"inventory ({chosen.why}): access kind {access.kind!r} with "
            f"{len(inventory.nodes)} node(s); 'local' is for one node, this machine. Use 'direct' "
            "or 'iap' for others."
        )


def load_cluster(argument: str | None, *, env: Mapping[str, str]) -> Chosen:
    """Return the cluster that `--inventory` names; without it the selected stack's or this machine.

    A stack's machines are asked for their host keys. Raises ConfigError, and what `load_stack`
    raises.
    """
    if argument == "local":
        return _this_machine("--inventory local", env)
    if argument is None:
        # Most commands need no stack, and start sooner without.
        from payload.orchestrate.cloud.stack import default_stack

        found = default_stack(env, folder=Path.cwd())
        if isinstance(found, str):
            return _this_machine(f"this machine, the default: {found}", env)
        return _of_stack(found, env, why="the selected Pulumi stack, the default")
    if _is_stack(argument):
        from payload.orchestrate.cloud.pulumi import Pulumi
        from payload.orchestrate.cloud.stack import read_outputs

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
    return Chosen(inventory=inventory, why=f"--inventory {argument}", domains={})


def _is_stack(argument: str) -> bool:
    return argument == "stack" or argument.startswith("stack:")


def _this_machine(why: str, env: Mapping[str, str]) -> Chosen:
    machine, gpus = discover(), nvidia_here(env)
    inventory = machine.inventory()
    return Chosen(
        inventory=replace(inventory, nodes=(with_gpus(inventory.head, gpus),)),
        why=why,
        domains={machine.name: machine.domains},
        nvidia=gpus,
    )


def nvidia_here(env: Mapping[str, str]) -> NvidiaFacts:
    """Return what this machine's nvidia-smi prints, where it has one."""
    answer = nvidia(",".join(QUERY), torch=torch_here(), env=env)
    return build(NvidiaFacts, answer, where="this machine")


def _of_stack(outputs: StackOutputs, env: Mapping[str, str], *, why: str) -> Chosen:
    from payload.orchestrate.cloud.stack import load_stack

    talk = text_console(stderr=True)
    talk.print(f"cluster {outputs.inventory.cluster} ({why}): looking for its machines")
    inventory = load_stack(outputs, env, folder=Path.cwd(), say=talk.print)
    return Chosen(inventory=inventory, why=f"{why}; {outputs.price_and_end()}", domains={})


_GIB = 2**30


def require_launcher_of_jobs(config: RunConfig, *, nodes: int) -> None:
    """Raise ConfigError for a launcher that cannot start ranks in a Slurm job of so many nodes."""
    if config.launch.launcher == AUTO or nodes == 1:
        return
    launcher = candidates(config.launch.launcher)[0]
    if launcher.needs_ssh:
        raise ConfigError(
            f"launch.launcher = {launcher.name!r} reaches other nodes by SSH with the run's key, "
            f"which the {nodes} nodes of a Slurm job do not have. Use 'auto', 'srun' or 'torchrun'."
        )


def require_launcher(config: RunConfig, inventory: ClusterInventory) -> None:
    """Raise ConfigError for a launcher that is unknown, or cannot span the inventory's nodes."""
    if inventory.source == "slurm":
        require_launcher_of_jobs(config, nodes=len(inventory.nodes))
    launcher = candidates(config.launch.launcher)[0]
    if launcher.scheduler not in (None, inventory.source):
        raise ConfigError(
            f"launch.launcher = {launcher.name!r} starts ranks in a Slurm job, and "
            f"{inventory.cluster} is none. Use 'auto', or submit a job with --site slurm."
        )
    if len(inventory.nodes) > 1 and not launcher.spans_nodes:
        raise ConfigError(
            f"launch.launcher = {launcher.name!r} is for one machine, and {inventory.cluster} has "
            f"{len(inventory.nodes)}. Use 'mpirun' here."
        )


def require_placeable(config: RunConfig, chosen: Chosen) -> Placement:
    """Return where the ranks go.

    Raises ConfigError for an unknown launcher, and for ranks that cannot be placed, would share the
    batch unevenly, or would not record what is wanted.
    """
    require_launcher(config, chosen.inventory)
    placement = chosen.place(config.launch, config.device)
    require_tensor_ranks_on_a_node(
        config.distributed.tensor_parallel, ranks_per_node=placement.ranks_per_node
    )
    config.require_even(placement.world_size)
    return placement


def memory_warning(
    arithmetic: Arithmetic, placement: Placement, *, free_bytes: int | None
) -> str | None:
    """Return a warning when the node's ranks likely need more memory than is free."""
    need = arithmetic.memory_bytes_per_rank * placement.ranks_per_node
    if free_bytes is None or need <= free_bytes:
        return None
    return (
        f"the ranks need about {need / _GIB:.1f} GiB ({placement.ranks_per_node} x "
        f"{arithmetic.memory_bytes_per_rank / _GIB:.1f}), {free_bytes / _GIB:.1f} GiB are free; "
        "lower batch.micro_batch_size or launch.ranks_per_node if ranks get killed"
    )
