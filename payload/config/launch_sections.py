"""CONTRACT IN: the sections of run.toml for where ranks run, how long, and what is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from payload.config.settings import AUTO
from payload.config.store_address import NONE as NO_STORE
from payload.config.store_address import StoreAddress, parse_store_address
from payload.core.printable_text import shown
from payload.core.validation.fields import checked
from payload.machines.rank_mesh import Mesh, make_mesh

TRACKERS = ("trackio", "tensorboard", "wandb", "mlflow", "csv")
"""Files of `payload/report/trackers`."""
AUTO_TRACKER = "trackio"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSection:
    """[device]"""

    kind: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that the ranks compute on. auto: CUDA where torch sees a device for each rank of the
    machine, else the CPU. The project's kernels are for CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedSection:
    """[distributed]"""

    backend: Literal["auto", "gloo", "ccl", "nccl"] = "auto"
    """auto: nccl between CUDA devices, else gloo. `ccl` needs the extra `ccl`, `nccl` CUDA."""
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients travel."""
    strategy: Literal["replicate", "shard", "zero3"] = "replicate"
    """`replicate`: each rank holds the whole model. `shard`: each holds a part of the weights,
    gradients and optimizer state, and a layer's weights are gathered for its passes (FSDP2).
    `zero3`: the same by DeepSpeed's ZeRO stage 3; needs the extra `deepspeed`."""
    shard_size: int | None = checked(None, low=1, high=2**20)
    """shard: ranks that share out one model, or one part of it; gradients are averaged over such
    groups. none = all that have it."""
    tensor_parallel: int = checked(1, low=1, high=2**10)
    """Ranks that compute each layer together, on the same data: each has a part of its heads, of
    its MLP and of the vocabulary. They share a node."""
    pipeline_parallel: int = checked(1, low=1, high=2**10)
    """Stages, each with some of the layers. What is left of the ranks is data parallel: replicas,
    or shards with `strategy = "shard"`."""
    pipeline_schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of a stage's passes. `1f1b`: backward passes begin early, and a stage keeps the
    activations of as many passes as stages follow. `gpipe`: all forward passes come first."""
    timeout_s: float = checked(600.0, above=0.0, high=1e7)
    """Longest wait of one rank for another."""

    def mesh(self, world_size: int) -> Mesh:
        """Return the mesh of `world_size` ranks. Raises ConfigError when they do not divide."""
        return make_mesh(
            world_size,
            shards=self.strategy != "replicate",
            shard_size=self.shard_size,
            tensor=self.tensor_parallel,
            pipeline=self.pipeline_parallel,
        )

    def shards(self, world_size: int) -> int:
        """Return how many parts each weight is in. Raises ConfigError when ranks do not divide."""
        return self.mesh(world_size).shard

    def longest_wait_s(self) -> float:
        """Longest time without progress in any phase; after it, ranks give each other up."""
        return 0.9 * self.timeout_s

    def splits_model(self) -> bool:
        """Say whether several ranks make one pass over the same data together."""
        return self.tensor_parallel > 1 or self.pipeline_parallel > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackSection:
    """[track]; docs/report.md has what each one keeps, and where"""

    to: tuple[str, ...] = ("auto",)
    """Trackers that also get metrics, settings, results and the report: `trackio`, `tensorboard`,
    `wandb`, `mlflow`, `csv`. `auto`: trackio where it is installed. All stay on this machine."""

    def problems(self) -> list[str]:
        """Say which name is no tracker's."""
        unknown = [name for name in self.to if name not in ("auto", *TRACKERS)]
        if not unknown:
            return []
        return [
            f"track.to = {shown(unknown[0])}: no tracker has this name. Known: auto, "
            f"{', '.join(TRACKERS)}."
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorSection:
    """[monitor]; docs/monitoring.md has the metrics, the dashboards and the alerts"""

    enabled: Literal["auto", "on", "off"] = "auto"
    """Serve the run's metrics to Prometheus, on the head's loopback address alone. auto: on a head
    that `monitoring: prometheus` has set up. Needs the extra `monitor`."""
    port: int = checked(9464, low=1024, high=65535)
    """Port on 127.0.0.1. Where it is in use, the run reports that and continues without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSection:
    """[launch]"""

    launcher: str = "auto"
    """`mpirun`, `torchrun`, or `auto`: mpirun where Intel MPI runs (x86-64 Linux), else torchrun.
    Each starts ranks on one machine or on a cluster. In a Slurm job `auto` is `srun`; one of
    several nodes takes `torchrun`, too, and refuses `mpirun`. A run says which one it takes."""
    ranks_per_node: int | None = checked(None, low=1, high=4096)
    """none = one per GPU where the inventory counts GPUs, else one per NUMA domain. On this machine
    and in a Slurm job, `nvidia-smi` counts the GPUs that `CUDA_VISIBLE_DEVICES` leaves."""
    threads_per_rank: int | None = checked(None, low=1, high=4096)
    """none = the node's physical cores shared out evenly."""
    malloc: Literal["tuned", "lean", "tcmalloc", "default"] = "tuned"
    """`tuned`: glibc kept from giving large blocks back to the kernel between uses. `lean`: made to
    give them back at once. Under `tuned`, `shard` also gives blocks of 4 MiB and more back, and
    `zero3` those of 1 MiB and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsSection:
    """[limits]; the supervisor on the head keeps them"""

    hang_timeout_s: float = checked(120.0, low=1.0)
    """A run in which no rank made progress for so long, or for ten times the median step if that is
    longer, is a hang. Loading, compiling and saving may take nine tenths of distributed.timeout_s,
    which is also the most that the limit grows to."""
    max_restarts: int = checked(3, low=0)
    """Restarts from the last checkpoint after a lost rank or node or a hang, while each attempt
    gets at least a step further; 0 = none."""
    max_hours: float | None = checked(None, above=0.0)
    """Hours that the run may take, all attempts and resumes together. Before they are over it saves
    a checkpoint and stops."""
    max_usd: float | None = checked(None, above=0.0)
    """Dollars that the run may cost, limited as by `max_hours`; the inventory needs every node's
    hourly_usd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSection:
    """[storage]; docs/storage.md"""

    results: str = AUTO
    """Store to which the head copies checkpoints, metrics and logs: `gs://BUCKET/PREFIX`, or the
    absolute path of a mounted folder. Each run has a folder of its own there. `auto`: the cluster's
    bucket, if it has one. `none`: no copy."""
    final_wait_s: float = checked(300.0, low=0.0, high=1e6)
    """Longest wait for the store at a run's end; training itself never waits for it."""

    def address(self) -> StoreAddress | None:
        """Return where runs are kept; None where they are not. Raises ConfigError."""
        if self.results in (AUTO, NO_STORE):
            return None
        return parse_store_address(self.results)
