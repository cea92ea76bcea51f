"""Places the ranks: assigns each rank a node, cores and threads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from payload.config.launch_sections import DeviceSection, LaunchSection
from payload.core.errors import ConfigError
from payload.core.regular_files import read_bytes
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import NODE_NAME
from payload.core.validation.records import build, check_schema
from payload.machines.inventory import Node
from payload.machines.machine import Domain

SCHEMA_VERSION = 1
_FIX = "Start the run again."

_ANY_DEVICE = DeviceSection()

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One training process and its placement."""

    rank: int = checked(low=0)
    node: str = checked(pattern=NODE_NAME, wanted="a node name")
    node_rank: int = checked(low=0)
    local_rank: int = checked(low=0)
    numa_domain: int | None
    """NUMA domain of the rank; None if the rank spans several domains."""
    cores: tuple[int, ...] = checked(low=0)
    """Logical CPUs that the process may run on."""
    threads: int = checked(low=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankFile:
    """The contents of ranks.json."""

    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """All ranks, and notes on their placement for the user."""

    ranks: tuple[Rank, ...]
    ranks_per_node: int
    oversubscribed: bool
    """True if ranks share cores."""
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    def threads(self) -> int:
        """Return the lowest thread count of a rank; the other ranks wait for that rank."""
        return min(rank.threads for rank in self.ranks)

    def all_threads(self) -> int:
        """Return the number of threads of all ranks together."""
        return sum(rank.threads for rank in self.ranks)


def default_domains(node: Node) -> tuple[Domain, ...]:
    """Return the node's NUMA domains with cores 0 to n-1 in order. Raises ConfigError."""
    if node.numa_domains > node.physical_cores:
        raise ConfigError(
            f"node {node.name}: numa_domains = {node.numa_domains} is more than physical_cores = "
            f"{node.physical_cores}. Correct the inventory."
        )
    cores = range(node.physical_cores)
    return tuple(
        Domain(id=i, cores=_share(cores, index=i, shares=node.numa_domains))
        for i in range(node.numa_domains)
    )


def place_ranks(
    nodes: Sequence[Node],
    settings: LaunchSection,
    *,
    device: DeviceSection = _ANY_DEVICE,
    domains: Mapping[str, tuple[Domain, ...]] | None = None,
) -> Placement:
    """Split the physical cores of every node among its ranks.

    `domains` maps the names of nodes to their cores; a node without an entry has cores 0 to n-1.
    Raises ConfigError.
    """
    of_node = _domains_by_node(nodes, domains)
    ranks_per_node = count_ranks_per_node(nodes, settings, device=device, domains=domains)
    ranks: list[Rank] = []
    for node_rank, node in enumerate(nodes):
        ranks += _place_on_node(
            node.name,
            of_node[node.name],
            node_rank=node_rank,
            ranks_per_node=ranks_per_node,
            threads_per_rank=settings.threads_per_rank,
        )
    num_cores = {name: sum(len(d.cores) for d in found) for name, found in of_node.items()}
    return Placement(
        ranks=tuple(ranks),
        ranks_per_node=ranks_per_node,
        oversubscribed=any(cores < ranks_per_node for cores in num_cores.values()),
        notes=_notes(ranks, num_cores=num_cores, ranks_per_node=ranks_per_node),
    )


def count_ranks_per_node(
    nodes: Sequence[Node],
    settings: LaunchSection,
    *,
    device: DeviceSection = _ANY_DEVICE,
    domains: Mapping[str, tuple[Domain, ...]] | None = None,
) -> int:
    """Return the number of ranks per node (-ppn of mpirun). Raises ConfigError.

    The default is one rank per GPU, or one per NUMA domain if no GPUs are used.
    """
    return (
        settings.ranks_per_node
        or _gpus_of_all(nodes, device)
        or _domains_of_all(_domains_by_node(nodes, domains))
    )


def _domains_by_node(
    nodes: Sequence[Node], domains: Mapping[str, tuple[Domain, ...]] | None
) -> dict[str, tuple[Domain, ...]]:
    known = domains or {}
    return {node.name: known.get(node.name) or default_domains(node) for node in nodes}


def render_ranks(ranks: Sequence[Rank]) -> str:
    """Return the text of ranks.json."""
    lines = ",\n".join("    " + json.dumps(asdict(rank)) for rank in ranks)
    return f'{{\n  "schema_version": {SCHEMA_VERSION},\n  "ranks": [\n{lines}\n  ]\n}}\n'


def parse_ranks(text: str | bytes, *, where: str) -> tuple[Rank, ...]:
    """Read ranks.json; `where` names it in messages. Raises ConfigError."""
    raw = parse_json(text, where=where, fix=_FIX)
    check_schema(raw, SCHEMA_VERSION, where=where, fix=_FIX)
    return build(_RankFile, raw, where=where, fix=_FIX).ranks


def load_ranks(path: Path) -> tuple[Rank, ...]:
    """Read the ranks.json at `path`. Raises ConfigError."""
    try:
        text = read_bytes(path)
    except OSError as error:
        raise ConfigError(f"rank file {path}: {error.strerror}. {_FIX}") from None
    return parse_ranks(text, where=str(path))


def _gpus_of_all(nodes: Sequence[Node], device: DeviceSection) -> int:
    """Return the number of GPUs of each node; 0 if the ranks compute on CPUs.

    Raises ConfigError if the nodes differ.
    """
    counts = {node.name: node.gpus for node in nodes}
    if device.kind == "cpu" or not any(counts.values()):
        return 0
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ConfigError(
            f"the nodes differ in GPUs ({listed}), but every node runs the same number of ranks. "
            'Set launch.ranks_per_node, or device.kind = "cpu".'
        )
    return next(iter(counts.values()))


def _domains_of_all(of_node: Mapping[str, tuple[Domain, ...]]) -> int:
    """Return the number of NUMA domains of each node. Raises ConfigError if the nodes differ."""
    counts = {name: len(domains) for name, domains in of_node.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ConfigError(
            f"the nodes differ in NUMA domains ({listed}), but every node runs the same number of "
            f"ranks. Set launch.ranks_per_node, for example to {min(counts.values())}."
        )
    return next(iter(counts.values()))


def _place_on_node(
    name: str,
    domains: Sequence[Domain],
    *,
    node_rank: int,
    ranks_per_node: int,
    threads_per_rank: int | None,
) -> list[Rank]:
    ranks = []
    for local_rank in range(ranks_per_node):
        cores, domain = _cores_of(domains, local_rank=local_rank, ranks_per_node=ranks_per_node)
        threads = threads_per_rank or len(cores)
        if threads > len(cores):
            raise ConfigError(
                f"launch.threads_per_rank = {threads}, but node {name} has {len(cores)} physical "
                f"core(s) for each of its {ranks_per_node} rank(s). Use {len(cores)} or less, or "
                "lower launch.ranks_per_node."
            )
        ranks.append(
            Rank(
                rank=node_rank * ranks_per_node + local_rank,
                node=name,
                node_rank=node_rank,
                local_rank=local_rank,
                numa_domain=domain,
                cores=cores,
                threads=threads,
            )
        )
    return ranks


def _cores_of(
    domains: Sequence[Domain], *, local_rank: int, ranks_per_node: int
) -> tuple[tuple[int, ...], int | None]:
    """Return the cores and the NUMA domain of one rank.

    If a node has more domains than ranks, each rank has complete domains.
    """
    if ranks_per_node < len(domains):
        own_domains = _share(domains, index=local_rank, shares=ranks_per_node)
        cores = tuple(core for domain in own_domains for core in domain.cores)
        return cores, own_domains[0].id if len(own_domains) == 1 else None
    of_domain = [
        [local for local in range(ranks_per_node) if local * len(domains) // ranks_per_node == i]
        for i in range(len(domains))
    ]
    index = next(i for i, locals_ in enumerate(of_domain) if local_rank in locals_)
    domain, neighbours = domains[index], of_domain[index]
    position = neighbours.index(local_rank)
    if len(neighbours) > len(domain.cores):
        return (domain.cores[position % len(domain.cores)],), domain.id
    return _share(domain.cores, index=position, shares=len(neighbours)), domain.id


def _share(items: Sequence[_T], *, index: int, shares: int) -> tuple[_T, ...]:
    """Return one of `shares` consecutive slices of almost equal length, the longer slices first."""
    size, longer = divmod(len(items), shares)
    start = index * size + min(index, longer)
    return tuple(items[start : start + size + (index < longer)])


def _notes(
    ranks: Sequence[Rank], *, num_cores: Mapping[str, int], ranks_per_node: int
) -> tuple[str, ...]:
    notes = []
    for name, cores in num_cores.items():
        sizes = sorted({len(rank.cores) for rank in ranks if rank.node == name})
        threads = sum(rank.threads for rank in ranks if rank.node == name)
        if cores < ranks_per_node:
            notes.append(
                f"node {name}: {ranks_per_node} ranks share {cores} physical core(s), one thread "
                "each; the results are correct, but no faster than with one rank a core"
            )
        elif len(sizes) > 1:
            notes.append(
                f"node {name}: {cores} cores are not a multiple of {ranks_per_node} ranks, so the "
                f"ranks have {sizes[0]} to {sizes[-1]} cores; the ranks with the fewest cores set "
                "the pace"
            )
        elif threads < cores:
            notes.append(f"node {name}: {threads} threads on {cores} physical cores")
    return tuple(notes)
