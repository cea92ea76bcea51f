"""LaunchPlan: what will be started, word for word; plan.json is all of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Literal

from payload.errors import ConfigError
from payload.launch.arithmetic import Arithmetic
from payload.untrusted import RUN_ID, build, check_schema, checked, parse_json, read_bytes

SCHEMA_VERSION = 1
_FIX = "Start the run again."

Launcher = Literal["mpirun", "torchrun"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One run, ready to start. The ranks' places are in ranks.json."""

    run_id: str = checked(pattern=RUN_ID, wanted="a run id")
    launcher: Launcher
    argv: tuple[str, ...]
    """The launcher's command line."""
    launcher_environment: Mapping[str, str]
    """What the launcher itself gets besides the caller's environment."""
    environment: Mapping[str, str]
    """What every rank gets."""
    interfaces: Mapping[str, str]
    """Network interface of each node by the node's name."""
    program: tuple[str, ...]
    """What each rank runs, below `payload.supervise.rank`."""
    work_dir: str
    """Where the ranks run; relative paths of the config start here."""
    master_port: int = checked(low=1, high=65535)
    world_size: int = checked(low=1)
    ranks_per_node: int = checked(low=1)
    nodes: int = checked(low=1)
    arithmetic: Arithmetic
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """The text of plan.json."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str) -> LaunchPlan:
        """Read plan.json; `where` names it in messages. Raises ConfigError."""
        raw = parse_json(text, where=where, fix=_FIX)
        check_schema(raw, SCHEMA_VERSION, where=where, fix=_FIX)
        return build(cls, raw, where=where, fix=_FIX)

    @classmethod
    def load(cls, path: Path) -> LaunchPlan:
        """Read the plan.json at `path`. Raises ConfigError."""
        try:
            text = read_bytes(path)
        except OSError as error:
            raise ConfigError(f"plan {path}: {error.strerror}. {_FIX}") from None
        return cls.from_json(text, where=str(path))


def rank_program(*, python: str, run_dir: Path) -> tuple[str, ...]:
    """The trainer as a rank runs it."""
    return (python, "-m", "payload.train", "--run-dir", str(run_dir))


def mpirun_argv(
    *,
    mpirun: str,
    hosts: Path,
    world_size: int,
    ranks_per_node: int,
    environment: Mapping[str, str],
    python: str,
    run_dir: Path,
) -> tuple[str, ...]:
    """Intel MPI's command line, in the seeds' spelling."""
    return mpirun_program_argv(
        (python, "-m", "payload.supervise.rank", "--run-dir", str(run_dir)),
        mpirun=mpirun,
        hosts=hosts,
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        environment=environment,
    )


def mpirun_program_argv(
    program: Sequence[str],
    *,
    mpirun: str,
    hosts: PurePath,
    world_size: int,
    ranks_per_node: int,
    environment: Mapping[str, str],
) -> tuple[str, ...]:
    """The same for any program."""
    variables = [word for item in sorted(environment.items()) for word in ("-genv", *item)]
    return (
        mpirun,
        *("-f", str(hosts), "-n", str(world_size), "-ppn", str(ranks_per_node)),
        *variables,
        *program,
    )


def torchrun_argv(
    *, python: str, world_size: int, master_address: str, master_port: int, run_dir: Path
) -> tuple[str, ...]:
    """torchrun's command line for one node; the environment is given to torchrun itself."""
    return (
        *(python, "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc-per-node", str(world_size)),
        *("--master-addr", master_address, "--master-port", str(master_port)),
        # By default its own files go to a new folder in the temporary one, and stay there.
        *("--max-restarts", "0", "--log-dir", str(run_dir / "logs" / "torchrun")),
        *("-m", "payload.supervise.rank", "--run-dir", str(run_dir)),
    )
