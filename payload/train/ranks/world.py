"""This process's rank, and the process group of all ranks."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import psutil
import torch
import torch.distributed as dist

from payload.config.engine_packages import ccl_missing, require_known_backend
from payload.config.launch_sections import DeviceSection, DistributedSection
from payload.core.errors import ConfigError, RankLostError, TrainingError
from payload.core.suggested_commands import command
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import check_type
from payload.machines.cgroup_limits import read_limits
from payload.machines.gpu_catalog import FP8_CAPABILITY
from payload.machines.network_interface import interface_towards
from payload.machines.rank_variables import TORCH, identify

# Texts in gloo's and NCCL's exceptions for a lost peer.
_PEER_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out",
    "timeout",
    "read error",
    "write error",
    "socketstream",
    "remote process exited",
    "nccl communicator was aborted",
)

_MAX_MESSAGE_BYTES = 2**22
"""Limit on a message between ranks; the names of gpt2-xl's optimizer state take 0.2 MB."""

_FOREIGN_RANK = "Check that all nodes run the same release and accept no other connections."

_NUMBER = re.compile(r"(-?\d{1,9})(?:\(x\d+\))?")

_T = TypeVar("_T")

DeviceKind = Literal["cpu", "cuda"]
"""The devices that `device.kind` resolves to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process's position among all ranks."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: str
    """Name of the node in the inventory."""
    kind: DeviceKind = "cpu"
    """The device that this rank computes on."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> World:
        """Read the launcher's variables; without a launcher, return a world of one process."""
        names = identify(env) or TORCH
        world = cls(
            rank=_number(env, names.rank, default=0),
            world_size=_number(env, names.world_size, default=1),
            local_rank=_number(env, names.local_rank, default=0),
            local_world_size=_number(env, names.local_world_size, default=1),
            node=env.get("TILEFORGE_NODE", platform.node()),
        )
        if not 0 <= world.rank < world.world_size:
            raise ConfigError(
                f"the environment has the invalid rank {world.rank} of {world.world_size}. Unset "
                f"{names.rank} and {names.world_size}, or start through a launcher."
            )
        return world

    @property
    def is_main(self) -> bool:
        """Return whether this rank writes the run's files."""
        return self.rank == 0

    def on(self, settings: DeviceSection, *, deterministic: bool = False) -> World:
        """Return the same rank on the device that `device.kind` resolves to.

        No other function selects the device. Raises ConfigError if the device is missing.
        """
        if settings.kind == "cpu" or not torch.cuda.is_available():
            if settings.kind == "cuda":
                raise ConfigError(
                    f"device.kind = 'cuda': torch {torch.__version__} finds no CUDA device. "
                    "Install the driver and torch's CUDA build (make setup TORCH_CUDA=1), or use "
                    "device.kind = 'cpu'."
                )
            return self
        if self.local_world_size > torch.cuda.device_count():
            if settings.kind == "auto":
                return self
            raise ConfigError(
                f"launch.ranks_per_node = {self.local_world_size}: this machine has "
                f"{torch.cuda.device_count()} CUDA device(s), and each device takes one rank. "
                "Lower ranks_per_node."
            )
        if deterministic:
            # cuBLAS reads this when it starts: https://docs.nvidia.com/cuda/cublas,
            # "reproducibility".
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            # No code reads memory before writing it; filling it would take a tenth of the step.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set by the module's class
        torch.cuda.set_device(self.local_rank)
        return dataclasses.replace(self, kind="cuda")

    @property
    def device(self) -> torch.device:
        """Return the device of this rank's tensors; no other module names a device."""
        return torch.device("cpu") if self.is_cpu else torch.device(self.kind, self.local_rank)

    @property
    def is_cpu(self) -> bool:
        """Return whether this rank computes on the CPU, as the project's kernels require."""
        return self.kind == "cpu"

    def require_fp8(self) -> None:
        """Raise ConfigError if this rank's device cannot multiply 8-bit floats."""
        fix = "Set precision.fp8 to 'emulated' for the same rounding, or to 'off'."
        if self.is_cpu:
            raise ConfigError(f"precision.fp8 = 'on': this rank computes on a CPU. {fix}")
        found = torch.cuda.get_device_capability()
        if found < FP8_CAPABILITY:
            least, capability = (".".join(map(str, each)) for each in (FP8_CAPABILITY, found))
            raise ConfigError(
                f"precision.fp8 = 'on': {torch.cuda.get_device_name()} has compute capability "
                f"{capability}; {least} is needed. {fix}"
            )

    def has_flash_attention(self) -> bool:
        """Return whether the device has FlashAttention: a GPU of compute capability 8.0 or more."""
        return self.kind == "cuda" and torch.cuda.get_device_capability() >= (8, 0)

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work; returns immediately on a CPU."""
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def queues_work(self) -> bool:
        """Return whether the device computes while this process continues, as GPUs do."""
        return not self.is_cpu

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Return the host's `values` on this rank's device, without waiting for queued work."""
        if self.is_cpu:
            return values
        return values.pin_memory().to(self.device, non_blocking=True)

    def begin_read(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy the device's `values` to the host; return a function that waits for them.

        The function does not wait for work that is queued after this call.
        """
        if self.is_cpu:
            return lambda: values
        host = torch.empty_like(values, device="cpu", pin_memory=True)
        host.copy_(values, non_blocking=True)
        copied = cast(Any, torch.cuda).Event()
        copied.record()

        def finished() -> torch.Tensor:
            copied.synchronize()
            return host

        return finished

    def free_bytes(self) -> int:
        """Return the bytes that this node's ranks can use, including memory that they already hold.

        On CUDA this is the memory of this rank's device, multiplied by the number of ranks on the
        node.
        """
        if self.kind == "cuda":
            free, _ = torch.cuda.mem_get_info()
            return (free + torch.cuda.memory_reserved()) * self.local_world_size
        available = psutil.virtual_memory().available
        limit = read_limits().free_memory_bytes
        own = psutil.Process().memory_info().rss
        return (available if limit is None else min(available, limit)) + own

    def nodes(self) -> int:
        """Return the number of nodes; all run the same number of ranks."""
        return max(1, self.world_size // self.local_world_size)

    def join(self, settings: DistributedSection) -> None:
        """Initialize the process group. Raises ConfigError for a missing backend."""
        _load_backend(settings)
        if self.world_size == 1:
            return
        # Accelerate and torch's env:// rendezvous read only these names.
        os.environ |= {
            TORCH.rank: str(self.rank),
            TORCH.world_size: str(self.world_size),
            TORCH.local_rank: str(self.local_rank),
            TORCH.local_world_size: str(self.local_world_size),
        }
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(
                f"{' and '.join(missing)} not set for a world of {self.world_size} ranks. Start "
                f"with torchrun or {command('orchestrate', 'run')}, or set them to rank 0's "
                "address and a free port."
            )
        self.name_interface()
        dist.init_process_group(
            self._backend(settings),
            rank=self.rank,
            world_size=self.world_size,
            timeout=datetime.timedelta(seconds=settings.timeout_s),
        )

    def name_interface(self) -> None:
        """Make gloo, and NCCL on GPUs, use the interface that leads to rank 0's node.

        By default gloo uses the address of this machine's host name: 127.0.1.1 on Debian. NCCL
        chooses an interface on each node, and nodes can choose different ones. The prefix `=` makes
        NCCL match the name exactly.
        """
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            towards = interface_towards(os.environ["MASTER_ADDR"])
            if towards is None:
                return
            os.environ["GLOO_SOCKET_IFNAME"] = towards
        if self.kind == "cuda":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={os.environ['GLOO_SOCKET_IFNAME']}")

    def _backend(self, settings: DistributedSection) -> str:
        """Return the backend's name for torch. Raises ConfigError for nccl without CUDA."""
        if settings.backend == "nccl" and self.kind != "cuda":
            raise ConfigError(
                "distributed.backend = 'nccl' supports only GPU tensors, but the ranks compute on "
                "CPUs. Set backend to 'gloo'."
            )
        if settings.backend not in ("auto", "nccl"):
            return settings.backend
        # Messages between ranks are CPU tensors.
        return "cpu:gloo,cuda:nccl" if self.kind == "cuda" else "gloo"

    def leave(self) -> None:
        """Close the process group; a second call does nothing."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` element-wise over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def begin_sum(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin a `sum`; return a function that waits for the result.

        All ranks must begin their sums in the same order.
        """
        work: Any = dist.all_reduce(values, async_op=True) if self.world_size > 1 else None

        def finished() -> torch.Tensor:
            if work is not None:
                work.wait()
            return values

        return finished

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.world_size > 1:
            dist.barrier()

    def broadcast(self, value: _T | None, kind: type[_T]) -> _T:
        """Return rank 0's `value` of type `kind` on every rank; values of other ranks are ignored.

        The value is sent as JSON and validated on arrival. torch's object collectives would
        unpickle the message. Unpickling can run code from another rank. Raises TrainingError for an
        invalid value.
        """
        if self.world_size == 1:
            return cast(_T, value)
        message = _encode(value if self.is_main else None)
        size = torch.tensor([len(message)])
        dist.broadcast(size, src=0)
        if not self.is_main:
            message = torch.empty(_checked_size(size, rank=0), dtype=torch.uint8)
        dist.broadcast(message, src=0)
        return _decode(message, kind, rank=0)

    def gather(self, value: _T, kind: type[_T]) -> list[_T]:
        """Return the `value` of type `kind` of every rank, in rank order, on every rank.

        Values are sent as JSON, as in `broadcast`. Raises TrainingError for an invalid value of any
        rank.
        """
        if self.world_size == 1:
            return [value]
        message = _encode(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(message)]))
        counts = [_checked_size(size, rank=rank) for rank, size in enumerate(sizes)]
        padded = torch.zeros(max(counts), dtype=torch.uint8)
        padded[: len(message)] = message
        messages = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(messages, padded)
        return [
            _decode(each[:count], kind, rank=rank)
            for rank, (each, count) in enumerate(zip(messages, counts, strict=True))
        ]


def _encode(value: object) -> torch.Tensor:
    """Return the bytes of the value's JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _checked_size(size: torch.Tensor, *, rank: int) -> int:
    count = int(size)
    if not 0 < count <= _MAX_MESSAGE_BYTES:
        raise TrainingError(
            f"rank {rank} sent an invalid message size, {count} bytes. {_FOREIGN_RANK}"
        )
    return count


def _decode(message: torch.Tensor, kind: type[_T], *, rank: int) -> _T:
    where = f"the message from rank {rank}"
    content = message.numpy().tobytes()
    raw = parse_json(content, where=where, fix=_FOREIGN_RANK, error=TrainingError)
    return check_type(kind, raw, where=where, fix=_FOREIGN_RANK, error=TrainingError)


def as_rank_lost(error: BaseException, *, world: World) -> RankLostError | None:
    """Return the error as RankLostError if its text reports a lost peer; otherwise None."""
    text = str(error)
    gloo_spoke = isinstance(error, RuntimeError) and world.world_size > 1
    if not gloo_spoke or not any(hint in text.lower() for hint in _PEER_LOST):
        return None
    return RankLostError(
        f"rank {world.rank} lost contact with another rank: {text.splitlines()[0][:200]}"
    )


def _load_backend(settings: DistributedSection) -> None:
    require_known_backend(settings)
    if settings.backend == "ccl":
        try:
            import oneccl_bindings_for_pytorch  # noqa: F401
        except ImportError as error:
            raise ccl_missing(error) from None


def _number(env: Mapping[str, str], name: str, *, default: int) -> int:
    if name not in env:
        return default
    # Slurm writes "2(x3)" for two tasks on each of three nodes.
    found = _NUMBER.fullmatch(env[name])
    if found is None:
        raise ConfigError(f"{name} = {env[name]!r} in the environment: must be a number.")
    return int(found[1])
