"""CONTRACT IN: the sections of run.toml for launching, limits, tracking and storage."""

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
"""Names of the trackers; each is a file in `payload/report/trackers`."""
AUTO_TRACKER = "trackio"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSection:
    """[device]; docs/guides/gpu.md"""

    kind: Literal["auto", "cpu", "cuda"] = "auto"
    """Device on which the ranks compute. `auto` means CUDA if torch finds a CUDA device for each
    rank of the machine, otherwise the CPU. The project's kernels run only on CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedSection:
    """[distributed]; docs/explanations/strategies.md"""

    backend: Literal["auto", "gloo", "ccl", "nccl"] = "auto"
    """Library with which the ranks communicate. `auto` means `nccl` for CUDA devices, otherwise
    `gloo`. `ccl` needs the extra `ccl`. `nccl` needs CUDA."""
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type in which the ranks send gradients, in the all-reduce or the reduce-scatter."""
    strategy: Literal["replicate", "shard", "zero3"] = "replicate"
    """Placement of the model on the ranks. With `replicate`, each rank holds the whole model. With
    `shard`, each rank holds a shard of the weights, gradients and optimizer state. A rank gathers
    the weights of a layer before it computes the layer (FSDP2). `zero3` works like `shard`, but
    uses DeepSpeed's ZeRO stage 3 and needs the extra `deepspeed`."""
    shard_size: int | None = checked(None, low=1, high=2**20, unit="ranks")
    """Only with `strategy = "shard"`: number of ranks that together hold one copy of the model. If
    tensor or pipeline parallelism splits the model into parts, these ranks hold one copy of one
    part. Gradients are averaged over all copies. none = all ranks share one copy."""
    tensor_parallel: int = checked(1, low=1, high=2**10, unit="ranks")
    """Number of ranks that compute each layer together, on the same data. Each of these ranks has a
    part of the heads, the MLP and the vocabulary. These ranks must be on one node."""
    pipeline_parallel: int = checked(1, low=1, high=2**10, unit="stages")
    """Number of pipeline stages. Each stage has some of the layers. If there are more ranks than
    one pipeline needs, the ranks form several pipelines, which train on different data. With
    `strategy = "replicate"`, each pipeline has all weights. With `strategy = "shard"`, each
    pipeline has a shard of the weights."""
    pipeline_schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order in which a stage computes its micro-batches. With `1f1b`, backward passes begin early.
    A stage then keeps the activations of at most as many micro-batches as there are stages. With
    `gpipe`, all forward passes come before the first backward pass."""
    timeout_s: float = checked(600.0, above=0.0, high=1e7, unit="seconds")
    """Maximum time that a rank waits for another rank."""

    def mesh(self, world_size: int) -> Mesh:
        """Return the mesh of `world_size` ranks.

        Raises ConfigError if a dimension of the mesh does not divide `world_size`.
        """
        return make_mesh(
            world_size,
            shards=self.strategy != "replicate",
            shard_size=self.shard_size,
            tensor=self.tensor_parallel,
            pipeline=self.pipeline_parallel,
        )

    def shards(self, world_size: int) -> int:
        """Return the number of shards of each weight.

        Raises ConfigError if a dimension of the mesh does not divide `world_size`.
        """
        return self.mesh(world_size).shard

    def longest_wait_s(self) -> float:
        """Return the longest allowed time without progress in any phase: 0.9 * `timeout_s`."""
        return 0.9 * self.timeout_s

    def splits_model(self) -> bool:
        """Return True if tensor or pipeline parallelism splits the model between ranks."""
        return self.tensor_parallel > 1 or self.pipeline_parallel > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackSection:
    """[track]; docs/guides/report.md lists what each tracker stores, and where"""

    to: tuple[str, ...] = ("auto",)
    """Trackers that also get the run's metrics, settings, results and report: `trackio`,
    `tensorboard`, `wandb`, `mlflow` or `csv`. `auto` means `trackio` if it is installed, otherwise
    no tracker. By default, no tracker sends data off this machine."""

    def problems(self) -> list[str]:
        """Return a sentence about the first unknown tracker, or nothing."""
        unknown = [name for name in self.to if name not in ("auto", *TRACKERS)]
        if not unknown:
            return []
        return [
            f"track.to = {shown(unknown[0])}: unknown tracker. Known: auto, {', '.join(TRACKERS)}."
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorSection:
    """[monitor]; docs/guides/monitoring.md lists metrics, dashboards and alerts"""

    enabled: Literal["auto", "on", "off"] = "auto"
    """Serve the run's metrics to Prometheus. The metrics are served only on the head's
    loopback address. This needs the extra `monitor`. `auto` means `on` if the head was set up with
    `monitoring: prometheus`, otherwise `off`."""
    port: int = checked(9464, low=1024, high=65535)
    """Port on 127.0.0.1 for the metrics. If this port is in use, the run logs a message and serves
    no metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSection:
    """[launch]; docs/explanations/scaling.md"""

    launcher: str = "auto"
    """Program that starts the ranks. Outside Slurm, `mpirun` and `torchrun` start ranks on one
    machine or on a cluster. `auto` then means `mpirun` on x86-64 Linux, which Intel MPI supports,
    otherwise `torchrun`. In a Slurm job, `auto` means `srun`. A Slurm job of several nodes also
    supports `torchrun`, but not `mpirun`. The run logs the launcher."""
    ranks_per_node: int | None = checked(None, low=1, high=4096, unit="ranks")
    """Number of ranks on each node. none = one rank per GPU if the inventory lists GPUs, otherwise
    one rank per NUMA domain. In a local run and in a Slurm job, only the GPUs in
    `CUDA_VISIBLE_DEVICES` count."""
    threads_per_rank: int | None = checked(None, low=1, high=4096, unit="threads")
    """Number of threads of each rank. none = the node's physical cores, divided evenly among the
    node's ranks."""
    malloc: Literal["tuned", "lean", "tcmalloc", "default"] = "tuned"
    """Memory allocator of the ranks. With `tuned`, glibc keeps large freed blocks for reuse. With
    `lean`, glibc returns these blocks to the kernel immediately. With `tcmalloc`, that library
    replaces glibc's malloc. With `default`, glibc's settings are unchanged. The strategy `zero3`
    changes `tuned` to `lean`. With `tuned` or `lean`, tensors on a CPU need no extra space for
    alignment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsSection:
    """[limits]; the supervisor on the head enforces them; docs/guides/recovery.md"""

    hang_timeout_s: float = checked(120.0, low=1.0, unit="seconds")
    """If no rank makes progress for this time, the supervisor treats the run as hung. If ten times
    the median step is longer, the supervisor waits for that time instead. It never waits longer
    than nine tenths of distributed.timeout_s. While ranks load, compile or save, it waits for
    nine tenths of distributed.timeout_s."""
    max_restarts: int = checked(3, low=0, unit="restarts")
    """Maximum number of restarts after a lost rank, a lost node or a hang; 0 = no restarts. Each
    restart resumes from the last checkpoint. If an attempt completes no further step, the run is
    not restarted."""
    max_hours: float | None = checked(None, above=0.0, unit="hours")
    """Maximum duration of the run in hours, summed over all attempts and resumes. Shortly before
    the limit, the run saves a checkpoint and stops. The machines of a cluster are billed until
    `down`."""
    max_usd: float | None = checked(None, above=0.0, unit="US dollars")
    """Maximum cost of the nodes while the run lasts, summed over all attempts and resumes. Shortly
    before the limit, the run saves a checkpoint and stops. The inventory must give hourly_usd for
    every node. The setting does not limit the bill: after the run, the machines are billed until
    `down`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSection:
    """[storage]; docs/guides/storage.md"""

    results: str = AUTO
    """Store to which the head copies checkpoints, metrics and logs. `auto` means the cluster's
    bucket, if the cluster has a bucket. `none` means no copy. Otherwise, write
    `gs://BUCKET/PREFIX`, or the absolute path of a mounted folder. Each run has its own folder in
    the store."""
    final_wait_s: float = checked(300.0, low=0.0, high=1e6, unit="seconds")
    """Maximum time to finish the uploads to the store at the end of a run. Training never waits for
    the store."""

    def address(self) -> StoreAddress | None:
        """Return the address of the store, or None if the run has no store. Raises ConfigError."""
        if self.results in (AUTO, NO_STORE):
            return None
        return parse_store_address(self.results)
