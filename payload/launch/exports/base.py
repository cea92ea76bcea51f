"""The interface of an engine. An engine turns the requirements of a run into a job file."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from payload.config.slurm_section import SlurmSection
from payload.core.errors import UsageError
from payload.core.package_members import file_name

MOUNT = "/mnt/tileforge"
"""Mount point of the storage, which contains data/ and runs/."""
MASTER_PORT = 29500
"""The rendezvous port of ranks on dedicated nodes; it is the default of torch and Kubeflow."""
VCPUS_PER_CORE = 2
"""Hardware threads per core: clouds and Kubernetes count threads, a plan counts cores."""

_CONFIG_END = "END_OF_RUN_TOML"
_NAME_LENGTH = 40
_IMAGE = re.compile(r"[\w.:/@+-]+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """The description of a run from which every engine renders a job file."""

    run_id: str
    """Id of the run and name of its folder, so that a restarted job resumes the run."""
    config: str
    """The text of run.toml."""
    nodes: int
    ranks_per_node: int
    threads_per_rank: int
    memory_bytes_per_node: int
    """Estimated memory that the ranks of a node need."""
    environment: Mapping[str, str]
    """Environment of every rank."""
    max_restarts: int
    max_hours: float | None
    slurm: SlurmSection = field(default_factory=SlurmSection)
    """The section [slurm] of the settings, which only Slurm's job file uses."""
    image: str | None = None
    storage: str | None = None

    @property
    def name(self) -> str:
        """Return the run's name in a form that Kubernetes, SkyPilot and dstack all accept."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.run_id.lower()).strip("-")
        if not plain[:1].isalpha():
            plain = f"run-{plain}".rstrip("-")
        if plain == self.run_id and len(plain) <= _NAME_LENGTH:
            return plain
        # The hash keeps names different if ids differ only in replaced or truncated characters.
        mark = hashlib.sha256(self.run_id.encode()).hexdigest()[:4]
        return f"{plain[: _NAME_LENGTH - 5].rstrip('-')}-{mark}"

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def cores_per_node(self) -> int:
        """Return the number of physical cores that the ranks of a node use."""
        return self.ranks_per_node * self.threads_per_rank

    @property
    def memory_gib_per_node(self) -> int:
        """Return the memory to request: the estimate plus a quarter for the page cache."""
        return max(2, -(-self.memory_bytes_per_node * 5 // (4 * 2**30)))

    @property
    def run_dir(self) -> str:
        """Return the run's folder, relative to the storage."""
        return f"runs/{self.run_id}"

    def config_lines(self, target: str) -> str:
        """Return shell text that writes run.toml to `target`; the text double-quotes `target`."""
        assert _CONFIG_END not in self.config.splitlines(), "no line of TOML is a bare word"
        return f"cat >\"{target}\" <<'{_CONFIG_END}'\n{self.config.rstrip()}\n{_CONFIG_END}\n"


class Engine(ABC):
    """A system that executes a run from one job file."""

    start: ClassVar[str]
    """The command that starts the run from FILE."""
    needs_image: ClassVar[bool] = False
    takes_image: ClassVar[bool] = True
    storage: ClassVar[str]
    """The kind of storage that `--storage` names for this engine, for messages."""
    storage_pattern: ClassVar[re.Pattern[str]]
    """Pattern of a valid storage name."""
    storage_characters: ClassVar[str]
    """The characters that the pattern allows, for messages."""
    needs_storage: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Return the name of the engine's source file."""
        return file_name(self)

    def require(self, job: ExportJob) -> None:
        """Raise UsageError for a job that this engine cannot execute."""
        if self.needs_image and job.image is None:
            raise UsageError(
                f"--export {self.name} needs a container image that contains Tileforge. Build an "
                "image (docs/guides/exports.md) and pass its name with --image."
            )
        if not self.takes_image and job.image is not None:
            raise UsageError(
                f"--image {job.image}: a job for {self.name} runs directly on the nodes, without a "
                "container. Leave --image out."
            )
        if job.image is not None and not _IMAGE.fullmatch(job.image):
            raise UsageError(
                f"--image {job.image!r}: not a valid image name. Write it as REGISTRY/NAME:TAG."
            )
        if self.needs_storage and job.storage is None:
            raise UsageError(
                f"--export {self.name} needs storage that keeps data and checkpoints after the "
                f"machines are gone. Pass {self.storage} with --storage."
            )
        if job.storage is not None and not self.storage_pattern.fullmatch(job.storage):
            raise UsageError(
                f"--storage {job.storage!r}: the storage for {self.name} must be {self.storage}. "
                f"Use {self.storage_characters} only."
            )

    @abstractmethod
    def render(self, job: ExportJob) -> str:
        """Return the text of the job file. Raises UsageError."""


def torchrun_script(job: ExportJob, *, folder: str, node_rank: str, head: str) -> str:
    """Return the script that starts the ranks with torchrun on each node.

    `folder`, `node_rank` and `head` are shell expressions for the path of the storage, the index of
    the node and the address of the first node.
    """
    return (
        f"set -euo pipefail\ncd {folder}\n"
        "config=$(mktemp)\n"
        f"{job.config_lines('$config')}"
        "# A run folder with a checkpoint in it is resumed.\n"
        "exec python3 -m torch.distributed.run \\\n"
        f"  --nnodes {job.nodes} --nproc-per-node {job.ranks_per_node} --node-rank {node_rank} \\\n"
        f"  --master-addr {head} --master-port {MASTER_PORT} --max-restarts 0 \\\n"
        f'  -m payload.train --config "$config" --run-dir {job.run_dir}\n'
    )


def source_lines(checkout: str, *, venv: str) -> str:
    """Return shell text that installs the payload on a node from a checkout, without an image.

    Both arguments are shell expressions. The script is idempotent.
    """
    return f"bash {checkout}/bootstrap/install-payload.sh --venv {venv} --extras train\n"


def source_environment_lines(checkout: str, *, venv: str) -> str:
    """Return shell text that puts the environment on PATH and the checkout on PYTHONPATH."""
    return f"export PATH={venv}/bin:$PATH PYTHONPATH={checkout}\n"
