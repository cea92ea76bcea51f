"""From an inventory and a config to a run folder that a supervisor can start from."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from payload.config.deepspeed_json import render_deepspeed
from payload.config.run_config import RunConfig
from payload.config.settings import AUTO as AUTO_SIZE
from payload.config.training_sections import DtypeChoice
from payload.core.dtype import Dtype
from payload.core.errors import (
    DataError,
    PreflightError,
    UsageError,
)
from payload.core.files import write_whole
from payload.estimates.batch_size import as_recorded, left_open, settle_batch
from payload.estimates.run_estimate import work_out
from payload.estimates.strategy_comparison import Compared, compare_strategies
from payload.formats.hub_names import HubName
from payload.launch.budget import time_limit
from payload.launch.environment import Rendezvous, common_environment
from payload.launch.exports.base import ExportJob
from payload.launch.exports.registry import export_job
from payload.launch.launcher import Job, Launcher, Reach
from payload.launch.launcher_files import render_accelerate, render_hosts
from payload.launch.launchers.registry import AUTO, candidates
from payload.launch.plan import LaunchPlan, auto_batch_size, rank_words
from payload.launch.ranks import Placement, render_ranks
from payload.machines.inventory import ClusterInventory, Node
from payload.machines.rank_mesh import require_tensor_ranks_on_a_node
from payload.models.spec import ModelSpec
from payload.orchestrate.hardware.nvidia import GPU_GUESS, for_prediction
from payload.orchestrate.inventories.chosen import Chosen
from payload.orchestrate.inventories.placeable import memory_warning, require_launcher
from payload.orchestrate.runs.run_index import Order
from payload.orchestrate.runs.start_checks import (
    check_data,
    initial_spec,
    rank_memory,
    rate_warning,
    require_fp8_on,
)
from payload.run_record.run_files import RunPaths, new_run_id
from payload.run_record.run_repair import known_dtype
from payload.run_record.tracker_process import missing_notes
from payload.weights.source import SCRATCH

_DTYPES: tuple[Dtype, ...] = ("bf16", "fp32")


class Access(Protocol):
    """This machine (`local.LocalAccess`), a cluster (`cluster.ClusterAccess`) or a Slurm job."""

    @property
    def launcher(self) -> str:
        """Return the meaning of `launch.launcher = "auto"`: a launcher's name, or `auto`."""

    @property
    def python(self) -> str:
        """The interpreter that the ranks run in."""

    @property
    def link_bytes_per_s(self) -> float:
        """Return the bandwidth that a gradient exchange is expected to reach."""

    def peak_flops_per_s(self, choice: DtypeChoice) -> float | None:
        """Return the matmul speed of all nodes together, or None when it was not measured."""

    def dtype(self, choice: DtypeChoice) -> Dtype:
        """Return the dtype that the trainer is expected to choose."""

    def core_flops_per_s(self, dtype: Dtype) -> float:
        """Return the peak of one core where `peak_flops_per_s` was not measured."""

    def interfaces(self, nodes: Sequence[Node]) -> Mapping[str, str]:
        """Return the network interface between the ranks, by node."""

    def program(self, paths: RunPaths) -> tuple[str, ...]:
        """Return the command line of each rank."""

    def executable(self, launcher: Launcher) -> str:
        """Return the launcher's path. Raises PreflightError that says why there is none."""

    def reach(self) -> Reach:
        """Return how a launcher on the head reaches the other nodes. Raises PreflightError."""

    def python_path(self) -> str | None:
        """Return the payload package's parent folder, or None when it is installed."""

    def tcmalloc(self) -> str:
        """Return the tcmalloc library. Raises PreflightError with the line that installs it."""

    def free_memory_bytes(self) -> int | None:
        """Return the memory of the node with the least, or None when it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """Everything that will be in the run folder before the start."""

    paths: RunPaths
    config: RunConfig
    inventory: ClusterInventory
    placement: Placement
    plan: LaunchPlan
    base: ModelSpec
    """The model below an adapter, before its task is put on it."""
    predicted: RunConfig
    """The config with the device and the dtype that it is expected to take on these nodes."""
    auto_dtype: Dtype
    """The dtype that `precision.dtype`, `auto` or not, means here without fp8."""
    core_flops_per_s: Mapping[Dtype, float]
    """GEMM peak of a core by dtype, measured or typical."""
    strategies: tuple[Compared, ...] = ()
    """Other strategies for the run's ranks, the best first."""
    free_memory_bytes: int | None = None
    """Memory of the node with the least."""

    def notes(self) -> list[str]:
        """Return what the operator should know before the start, a line each."""
        return [*(f"note: {note}" for note in self.plan.notes), *missing_notes(self.config)]

    def hosts(self) -> str:
        """Return the hosts file's text."""
        return render_hosts(self.inventory.nodes)

    def accelerate(self, node_rank: int) -> str:
        """Return one node's Accelerate config."""
        return render_accelerate(
            self.inventory.nodes,
            self.placement,
            node_rank=node_rank,
            hosts=self.paths.hosts,
            master_port=self.plan.master_port,
            precision=self.config.precision,
        )

    def files(self) -> dict[str, str]:
        """Return every file's text by its name; plan.json last, as a supervisor looks for it."""
        paths = self.paths
        texts = {
            paths.config: self.config.to_toml(),
            paths.inventory: self.inventory.to_json(),
            paths.hosts: self.hosts(),
            paths.ranks: render_ranks(self.placement.ranks),
        }
        for node_rank in range(len(self.inventory.nodes)):
            texts[paths.accelerate_config(node_rank)] = self.accelerate(node_rank)
        if self.config.distributed.strategy == "zero3":
            text = render_deepspeed(self.config, dtype=self.predicted.dtype())
            texts[paths.deepspeed_config] = text
        texts[paths.plan] = self.plan.to_json()
        return {path.name: text for path, text in texts.items()}

    def write(self, paths: RunPaths) -> None:
        """Put every file in its place in the run folder at `paths`."""
        for name, text in self.files().items():
            write_whole(paths.root / name, text)


def plan_run(
    paths: RunPaths,
    *,
    config: RunConfig,
    chosen: Chosen,
    access: Access,
    vocab_size: int | None,
    work_dir: Path,
    port: int,
    auto_size: int | None = None,
    kept_dtype: Dtype | None = None,
    resumes: bool = False,
    placement: Placement | None = None,
) -> PlannedRun:
    """Decide everything about a run, or about one that `resumes`; nothing is written or started.

    `auto_size` is what its last plan made of a micro-batch of `auto`; it stays where the ranks can
    share the batch with it, so that a resume computes the same bits. `kept_dtype` is that of the
    newest checkpoint, which a resume keeps under `auto`. `placement` is where the ranks go, if they
    were placed before. Raises ConfigError and PreflightError.
    """
    inventory = chosen.inventory
    time_limit(config.limits, inventory.nodes)
    placement = placement or chosen.place(config.launch, config.device)
    require_tensor_ranks_on_a_node(
        config.distributed.tensor_parallel, ranks_per_node=placement.ranks_per_node
    )
    config.train.require_profiled(placement.world_size)
    free_bytes = (
        rank_memory(config.device, inventory.nodes, ranks=placement.ranks_per_node)
        or access.free_memory_bytes()
    )
    base, guess = initial_spec(config, vocab_size=vocab_size)
    spec = config.adapted(base)
    left = left_open(config, auto_size=auto_size)
    on_gpus = for_prediction(config, inventory.nodes).device.kind == "cuda"
    wanted = config.precision.dtype
    if wanted == "auto":
        wanted = kept_dtype or wanted
    auto_dtype = _dtype_on_gpus(wanted) if on_gpus else access.dtype(wanted)
    dtype: Dtype = "bf16" if config.wants_bf16() else auto_dtype
    core_flops_per_s = {each: _core_flops_per_s(access, inventory, each) for each in _DTYPES}
    is_auto = left.batch.micro_batch_size == AUTO_SIZE
    config, batch = settle_batch(
        as_recorded(left, config, world_size=placement.world_size),
        spec,
        dtype=dtype,
        world_size=placement.world_size,
        ranks_per_node=placement.ranks_per_node,
        free_bytes=free_bytes,
    )
    predicted = for_prediction(config, inventory.nodes).computing_in(dtype)
    # Of GPUs, the trial says which dtype is the faster one.
    peak = access.peak_flops_per_s(wanted if on_gpus else dtype)
    arithmetic = work_out(
        predicted,
        spec=spec,
        world_size=placement.world_size,
        link_bytes_per_s=access.link_bytes_per_s,
        peak_flops_per_s=peak,
        threads=placement.threads(),
    )
    require_launcher(config, inventory)
    require_fp8_on(config.precision, inventory.nodes)
    choice = choose_launcher(config.launch.launcher, access)
    launcher = choice.launcher
    warning = memory_warning(arithmetic, placement, free_bytes=free_bytes)
    rendezvous = Rendezvous(
        address=inventory.head.address,
        port=port,
        interfaces=access.interfaces(inventory.nodes),
    )
    reach = access.reach()
    environment = _environment(
        paths, config=config, placement=placement, access=access, rendezvous=rendezvous
    )
    plan = LaunchPlan(
        run_id=paths.run_id,
        launcher=launcher.name,
        argv=launcher.argv(
            Job(
                executable=choice.executable,
                python=access.python,
                words=rank_words(paths.root),
                environment=environment,
                world_size=placement.world_size,
                ranks_per_node=placement.ranks_per_node,
                nodes=len(inventory.nodes),
                hosts=paths.hosts,
                folder=paths.root,
                rendezvous=rendezvous,
                reach=reach,
            )
        ),
        launcher_environment=launcher.settings(reach),
        ssh=reach.ssh,
        node_command=reach.node_command,
        off_head=reach.off_head,
        environment=environment,
        interfaces=rendezvous.interfaces,
        program=access.program(paths),
        work_dir=str(work_dir),
        master_port=port,
        data_dir=config.data.dir,
        world_size=placement.world_size,
        ranks_per_node=placement.ranks_per_node,
        nodes=len(inventory.nodes),
        arithmetic=arithmetic,
        auto_batch_size=config.batch.sequences() if is_auto else None,
        resumes=resumes,
        notes=(
            *choice.notes(),
            *placement.notes,
            *(chosen.gpu_notes if config.device.kind != "cpu" else ()),
            *(chosen.cuda_notes if config.device.kind == "cuda" else ()),
            *filter(None, (batch, guess, warning, rate_warning(config))),
            *([] if on_gpus else slow_bf16(config, core_flops_per_s, kept_dtype=kept_dtype)),
            *([GPU_GUESS] if on_gpus and arithmetic.step_s is not None else []),
        ),
    )
    return PlannedRun(
        paths=paths,
        config=config,
        inventory=inventory,
        placement=placement,
        plan=plan,
        predicted=predicted,
        auto_dtype=auto_dtype,
        core_flops_per_s=core_flops_per_s,
        strategies=compare_strategies(
            predicted,
            spec=spec,
            world_size=placement.world_size,
            ranks_per_node=placement.ranks_per_node,
            link_bytes_per_s=access.link_bytes_per_s,
            peak_flops_per_s=peak,
            free_bytes=free_bytes,
            threads=placement.threads(),
        ),
        free_memory_bytes=free_bytes,
        base=base,
    )


def _dtype_on_gpus(choice: DtypeChoice) -> Dtype:
    return "fp32" if choice == "fp32" else "bf16"


def slow_bf16(
    config: RunConfig, core_flops_per_s: Mapping[Dtype, float], *, kept_dtype: Dtype | None = None
) -> list[str]:
    """Return a note where a run computes in bf16 on CPUs that are faster in fp32.

    `kept_dtype` is that of the checkpoint which it resumes, if it does.
    """
    if core_flops_per_s["bf16"] >= core_flops_per_s["fp32"]:
        return []
    slow = "computes in bf16, which is slower than fp32 on CPUs like these"
    setting = config.bf16_setting()
    if setting is not None:
        return [f"{setting} {slow}"]
    if config.precision.dtype == "auto" and kept_dtype == "bf16":
        fix = "--set precision.dtype=fp32 changes it, in more memory"
        return [f"the resumed run {slow}, as before; {fix}"]
    return []


def _core_flops_per_s(access: Access, inventory: ClusterInventory, dtype: Dtype) -> float:
    """Return the peak of a core by what was measured of the nodes, else that of a typical one."""
    measured = access.peak_flops_per_s(dtype)
    cores = sum(node.physical_cores for node in inventory.nodes)
    return measured / cores if measured else access.core_flops_per_s(dtype)


def plan_order(
    paths: RunPaths, order: Order, *, chosen: Chosen, access: Access, port: int
) -> PlannedRun:
    """Plan an order's run in the folder `paths` from this process's, and write its files there."""
    planned = plan_run(
        paths,
        config=order.config,
        chosen=chosen,
        access=access,
        vocab_size=order.vocab_size,
        work_dir=Path.cwd(),
        port=port,
        auto_size=auto_batch_size(order.paths.plan),
        kept_dtype=known_dtype(order.paths),
        resumes=order.resumes,
    )
    planned.write(paths)
    return planned


def _environment(
    paths: RunPaths,
    *,
    config: RunConfig,
    placement: Placement,
    access: Access,
    rendezvous: Rendezvous,
) -> dict[str, str]:
    malloc = config.malloc()
    return common_environment(
        run_id=paths.run_id,
        run_dir=str(paths.root),
        rendezvous=rendezvous,
        malloc=malloc,
        tcmalloc=access.tcmalloc() if malloc == "tcmalloc" else None,
        oversubscribed=placement.oversubscribed,
        python_path=access.python_path(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The launcher that a run has."""

    launcher: Launcher
    executable: str
    """Its path on the head."""
    refused: Sequence[tuple[str, PreflightError]]
    """Those that were preferred, and why they cannot be used."""

    def notes(self) -> list[str]:
        """Return a sentence for each that was preferred."""
        chosen = self.launcher.name
        return [
            f"launcher: {chosen} instead of {name}, because {error}" for name, error in self.refused
        ]


def choose_launcher(wanted: str, access: Access) -> Choice:
    """Return the launcher that `launch.launcher` means here.

    Raises ConfigError for an unknown one, and PreflightError where none can be used.
    """
    refused: list[tuple[str, PreflightError]] = []
    wanted = access.launcher if wanted == AUTO else wanted
    for launcher in candidates(wanted):
        try:
            executable = access.executable(launcher)
        except PreflightError as error:
            refused.append((launcher.name, error))
            continue
        return Choice(launcher=launcher, executable=executable, refused=refused)
    raise refused[-1][1]


def plan_export(
    config: RunConfig,
    *,
    run_id: str | None,
    chosen: Chosen,
    nodes: int | None,
    image: str | None,
    storage: str | None,
) -> tuple[ExportJob, list[str]]:
    """Return the run as other engines take it, and notes for the user; nothing is written.

    What the config names by its path is looked for here and has to be on the engine's storage.
    Raises ConfigError and UsageError.
    """
    if nodes is not None and nodes < 1:
        raise UsageError(f"--nodes {nodes}: must be 1 or more.")
    data, notes = config.data.folder(), []
    try:
        vocab_size: int | None = check_data(
            data, sequence_length=config.data.sequence_length, task=config.task.data()
        )
    except DataError as error:
        vocab_size = None
        notes.append(f"the data is not here ({error})")
    spec, guess = initial_spec(config, vocab_size=vocab_size)
    job = export_job(
        config,
        run_id=run_id
        or new_run_id(config.run.name, now=datetime.now(), suffix=secrets.token_hex(2)),
        spec=config.adapted(spec),
        inventory=chosen.inventory,
        domains=chosen.domains,
        nodes=nodes,
        image=image,
        storage=storage,
    )
    notes.append(f"data.dir = {config.data.dir!r} has to be in the engine's storage")
    if config.model.init != SCRATCH and HubName.parse(config.model.init) is None:
        notes.append(f"model.init = {config.model.init!r} has to be in the engine's storage")
    return job, [*notes, *filter(None, (guess, rate_warning(config)))]
