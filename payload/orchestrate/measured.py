"""What `preflight` measured on a cluster, kept beside its key for `plan` and `run`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from payload.errors import ConfigError
from payload.inventory import ClusterInventory
from payload.orchestrate.trial_findings import Result
from payload.results import write_whole
from payload.run_config import DtypeChoice
from payload.step_time import sends_per_byte
from payload.untrusted import build, check_schema, checked, parse_json, read_bytes

SCHEMA_VERSION = 1

# As the trainer's calibration has it: bf16 rounds, so it has to be worth it.
BF16_MIN_GAIN = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpeed:
    """One node's figures, over all of its ranks."""

    bf16_flops_per_s: float = checked(low=1)
    fp32_flops_per_s: float = checked(low=1)
    received_bytes_per_s: float | None = checked(low=1)
    """From the node before it, while all send to the next; None where it is alone."""

    def gain(self) -> float:
        """How much faster bf16 is than fp32."""
        return self.bf16_flops_per_s / self.fp32_flops_per_s

    def best_flops_per_s(self) -> float:
        """In the faster dtype."""
        return max(self.bf16_flops_per_s, self.fp32_flops_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One trial's figures."""

    world_size: int = checked(low=1)
    nodes: Mapping[str, NodeSpeed]
    """In the inventory's order."""
    all_reduce_bytes_per_s: float | None = checked(low=1)
    """Gradient bytes that all ranks have summed in a second; None with one rank."""
    latency_s: float | None = checked(low=0)
    """Of an all-reduce of 4 KiB."""

    @classmethod
    def from_result(cls, result: Result) -> Measured:
        """Sum up what rank 0 of the trial printed, see payload/train/fabric.py."""
        exchange = result.exchange
        names = [rank.node for rank in result.ranks]
        received = exchange.received_bytes_per_s if exchange else None
        nodes = {}
        for name in dict.fromkeys(names):
            first = names.index(name)
            mine = [rank for rank in result.ranks if rank.node == name]
            others = len(mine) < len(names)
            nodes[name] = NodeSpeed(
                bf16_flops_per_s=sum(rank.bf16 for rank in mine),
                fp32_flops_per_s=sum(rank.fp32 for rank in mine),
                # Its first rank's neighbour is on another node.
                received_bytes_per_s=received[first] if received and others else None,
            )
        return cls(
            world_size=len(names),
            nodes=nodes,
            all_reduce_bytes_per_s=exchange.all_reduce_bytes_per_s if exchange else None,
            latency_s=exchange.latency_s if exchange else None,
        )

    def link_bytes_per_s(self) -> float | None:
        """What one rank sends in an all-reduce while it receives as much."""
        speed = self.all_reduce_bytes_per_s
        return None if speed is None else speed * sends_per_byte(self.world_size)

    def peak_flops_per_s(self, choice: DtypeChoice) -> float:
        """Of all nodes together, in the dtype that a run would choose."""
        bf16 = sum(speed.bf16_flops_per_s for speed in self.nodes.values())
        fp32 = sum(speed.fp32_flops_per_s for speed in self.nodes.values())
        is_bf16 = bf16 >= BF16_MIN_GAIN * fp32 if choice == "auto" else choice == "bf16"
        return bf16 if is_bf16 else fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A trial that a cluster has passed."""

    nodes_sha: str
    """Of the nodes as the inventory had them."""
    code: str
    """Digest of the payload that was tried."""
    time_unix: float
    interfaces: Mapping[str, str]
    """By node: towards the others."""
    measured: Measured
    schema_version: int = SCHEMA_VERSION

    def write(self, path: Path) -> None:
        """Keep it."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(self), indent=2) + "\n")

    def is_of(self, inventory: ClusterInventory) -> bool:
        """Whether these are the nodes that were tried."""
        return self.nodes_sha == nodes_sha(inventory)


def record_path(root: Path, *, cluster: str) -> Path:
    """Where the newest trial that `cluster` passed is, under the project folder `root`."""
    return root / ".cluster" / cluster / "trial.json"


def read_record(path: Path) -> Record | None:
    """Return the record at `path`, or None when there is none that this release can read."""
    try:
        raw = parse_json(read_bytes(path), where=str(path))
        check_schema(raw, SCHEMA_VERSION, where=str(path))
        return build(Record, raw, where=str(path))
    except (OSError, ConfigError):
        return None


def known_trial(inventory: ClusterInventory, root: Path) -> Record | None:
    """The newest trial that these nodes have passed."""
    record = read_record(record_path(root, cluster=inventory.cluster))
    return record if record is not None and record.is_of(inventory) else None


def nodes_sha(inventory: ClusterInventory) -> str:
    """Equal for the same machines: made anew, they have other host keys."""
    nodes = [
        [node.name, node.address, node.host_keys, node.machine_type, node.physical_cores]
        for node in inventory.nodes
    ]
    return hashlib.sha256(json.dumps(nodes, sort_keys=True).encode()).hexdigest()
