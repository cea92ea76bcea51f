"""The complete plan of a run: placement of the ranks, settings, files and launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from payload.config.deepspeed_settings import render_deepspeed
from payload.config.run_config import RunConfig
from payload.core.dtype import Dtype
from payload.core.files import write_whole
from payload.estimates.network import Link
from payload.estimates.strategy_comparison import StrategyPrediction
from payload.launch.budget import TimeLimit
from payload.launch.launcher import Launcher
from payload.launch.launcher_files import render_accelerate, render_hosts
from payload.launch.plan_record import LaunchPlan
from payload.launch.ranks import Placement, render_ranks
from payload.machines.inventory import ClusterInventory
from payload.models.spec import ModelSpec
from payload.run_record.run_files import RunPaths
from payload.run_record.tracker_process import missing_notes


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPlacement:
    """The decisions that need no data from the nodes, made before anything is copied or started."""

    placement: Placement
    launcher: Launcher
    """The first launcher that `launch.launcher` allows."""
    time_limit: TimeLimit | None
    """Time limit of the run; None if no limit is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCopies:
    """Paths of the data and weights that were copied to the nodes."""

    data_dir: str
    init: str | None = None
    """Path of the initial weights; None if the weights are not a local folder of the operator."""

    def apply_to(self, config: RunConfig) -> RunConfig:
        """Return the config with the paths on the nodes instead of the operator's local paths."""
        config = replace(config, data=replace(config.data, dir=self.data_dir))
        if self.init is not None:
            config = replace(config, model=replace(config.model, init=self.init))
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPlan:
    """All decisions about a run before its start; a site only executes them."""

    paths: RunPaths
    """The run's folder on the nodes."""
    config: RunConfig
    """The settings with the operator's local paths."""
    copies: NodeCopies | None
    inventory: ClusterInventory
    placement: Placement
    plan: LaunchPlan
    base: ModelSpec
    """The model without adapter and task head."""
    predicted: RunConfig
    """The config with the expected device and dtype on these nodes."""
    auto_dtype: Dtype
    """The resolved compute dtype without fp8."""
    core_flops_per_s: Mapping[Dtype, float]
    """GEMM peak of a core for each dtype: measured if possible, otherwise typical."""
    link: Link
    """The connection between ranks: measured if possible."""
    speed_source: str = ""
    """Where the measured speeds come from; empty if the machines were not measured."""
    strategies: tuple[StrategyPrediction, ...] = ()
    """Predictions for the alternative strategies on the run's ranks, the best first."""
    free_memory_bytes: int | None = None
    """Lowest free memory of a node."""

    def notes(self) -> list[str]:
        """Return the notes for the operator before the start, one per line."""
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
        """Return each file's text by name; plan.json is last, because a supervisor waits for this
        file."""
        return self._files(self.config)

    def files_on_nodes(self) -> dict[str, str]:
        """Return the text of every file for the nodes: run.toml has the paths on the nodes."""
        copies = self.copies
        return self._files(self.config if copies is None else copies.apply_to(self.config))

    def write(self, paths: RunPaths) -> None:
        """Write every file to the run folder at `paths`."""
        for name, text in self.files().items():
            write_whole(paths.root / name, text)

    def _files(self, config: RunConfig) -> dict[str, str]:
        paths = self.paths
        texts = {
            paths.config: config.to_toml(),
            paths.inventory: self.inventory.to_json(),
            paths.hosts: self.hosts(),
            paths.ranks: render_ranks(self.placement.ranks),
        }
        for node_rank in range(len(self.inventory.nodes)):
            texts[paths.accelerate_config(node_rank)] = self.accelerate(node_rank)
        if config.distributed.strategy == "zero3":
            text = render_deepspeed(config, dtype=self.predicted.dtype())
            texts[paths.deepspeed_config] = text
        texts[paths.plan] = self.plan.to_json()
        return {path.name: text for path, text in texts.items()}
