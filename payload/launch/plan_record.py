"""Reads and writes plan.json, which describes the processes that a run starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from payload.core.errors import ConfigError
from payload.core.printable_text import PLAIN_TEXT
from payload.core.regular_files import read_bytes
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import MEMBER_NAME, RUN_ID
from payload.core.validation.records import build, check_schema
from payload.estimates.run_estimate import RunEstimate

SCHEMA_VERSION = 1
_FIX = "Start the run again."


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The contents of plan.json; the placement of the ranks is in ranks.json."""

    run_id: str = checked(pattern=RUN_ID, wanted="a run id")
    launcher: str = checked(pattern=MEMBER_NAME, wanted="a launcher's name")
    """Name of the launcher's file in `launch/launchers`."""
    argv: tuple[str, ...]
    """The launcher's command line."""
    launcher_environment: Mapping[str, str]
    """Variables of the launcher process only, in addition to the supervisor's environment."""
    environment: Mapping[str, str]
    """Environment variables of every rank."""
    interfaces: Mapping[str, str]
    """Network interface of each node by the node's name."""
    program: tuple[str, ...]
    """The program of each rank, started by `payload.supervise.rank`."""
    work_dir: str = checked(pattern=PLAIN_TEXT, wanted="a path without control characters")
    """Working folder of the ranks; relative paths in the config refer to it."""
    master_port: int = checked(low=1, high=65535)
    world_size: int = checked(low=1)
    ranks_per_node: int = checked(low=1)
    nodes: int = checked(low=1)
    arithmetic: RunEstimate
    ssh: tuple[str, ...] = ()
    """Arguments of ssh on the head to reach the other nodes; empty for a single node."""
    node_command: tuple[str, ...] = ()
    """Command prefix with which the head runs a command on the node `{node}` without ssh."""
    off_head: bool = False
    """True if the supervisor is not on the head, for example in a salloc shell on a login node. In
    this case, the supervisor reaches the head like every other node, through `node_command`."""
    auto_batch_size: int | None = checked(None, low=1)
    """The value chosen for `batch.micro_batch_size = "auto"`; None if the settings have a number.
    A different number of ranks may need a different value to share the batch evenly."""
    resumes: bool = False
    """True for a run that resumes from its last checkpoint, local or in its store."""
    data_dir: str = ""
    """The operator's local path for `data.dir`; run.toml on a node has the path on that node."""
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """Return the text of plan.json."""
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


def auto_batch_size(path: Path) -> int | None:
    """Return the micro-batch size that plan.json records for `auto`; None without a valid file."""
    try:
        return LaunchPlan.load(path).auto_batch_size
    except ConfigError:
        return None


def operators_data(path: Path) -> str | None:
    """Return the operator's `data.dir` from the plan.json at `path`; None if unknown."""
    try:
        return LaunchPlan.load(path).data_dir or None
    except ConfigError:
        return None


def rank_program(*, python: str, run_dir: Path) -> tuple[str, ...]:
    """Return the command line of the trainer on a rank."""
    return (python, "-m", "payload.train", "--run-dir", str(run_dir))


def rank_arguments(run_dir: Path) -> tuple[str, ...]:
    """Return the arguments with which Python runs a rank's wrapper, which starts the trainer."""
    return ("-m", "payload.supervise.rank", "--run-dir", str(run_dir))
