"""Controls one run on a cluster over SSH: updates its copy, signals it and collects results."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from signal import Signals
from typing import Any, TypeVar

from payload.config.run_config import load_run_config
from payload.core.errors import (
    AnswerError,
    CheckpointError,
    ConfigError,
    NodesError,
    RankLostError,
    TileforgeError,
)
from payload.core.files import make_shared, write_whole
from payload.core.printable_text import shown
from payload.core.python_processes import module_command
from payload.formats.checkpoint_listing import (
    CHECKPOINTS_NAME,
    FOLDER_NAME,
    MANIFEST_FILE,
    checkpoint_step,
)
from payload.launch.plan_record import LaunchPlan
from payload.launch.ranks import load_ranks
from payload.machines.inventory import ClusterInventory, Node
from payload.machines.rank_variables import RUN_DIR
from payload.orchestrate.runs.mirror import (
    FileRequest,
    file_request,
    locked,
    merge,
    record_contact,
)
from payload.orchestrate.ssh.cluster import Cluster
from payload.orchestrate.ssh.connection import Connection
from payload.orchestrate.ssh.files import fetch_checkpoint, get
from payload.orchestrate.ssh.remote_calls import (
    FOLDER,
    Begun,
    Left,
    Part,
    Signalled,
    ask,
    on_every_node,
)
from payload.orchestrate.ssh.run_keys import remove_stale_keys
from payload.run_record.approved_settings import MOST_WAIT_S, bounded_wait_s, record_approved
from payload.run_record.checkpoint_grace import GracePeriod
from payload.run_record.checkpoint_manifest_hashes import HASHES_FILE, ManifestHashes, parse_hashes
from payload.run_record.run_files import NAMES, RunPaths, RunState, StopRequest, read_json
from payload.run_record.run_identity import (
    IDENTITY_FILE,
    RunIdentity,
    parse_identity,
    require_same_run,
)

_ACTION_S = 20.0
_RECORD_BYTES = 2**20
_START_S = 60.0
_LEAVE_S = 10.0
_KILL_S = 60.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """Result of an update of the local copy. The copies of the head's files are now up to date."""

    alive: bool
    """True if the run has a living supervisor."""
    missed: Mapping[str, TileforgeError]
    """Error of each worker for which the local copy is not up to date, by node."""
    damaged: Sequence[str]
    """A message for each damaged file on a node; the local copy of that file is unchanged."""


class RemoteRun:
    """A run with its supervisor on the head. `paths` is the run's local copy."""

    def __init__(
        self,
        paths: RunPaths,
        inventory: ClusterInventory,
        *,
        run_dir: PurePosixPath,
        key: Path,
        connect: Callable[[], Cluster],
    ) -> None:
        """`connect` opens connections to the nodes; it is called again after a failure."""
        self.paths = paths
        self.inventory = inventory
        self.run_dir = run_dir
        """The run's folder on the nodes."""
        self._key = key.absolute()
        self._connect = connect
        self._cluster: Cluster | None = None

    def apart(self) -> RemoteRun:
        """Return the same run with separate connections, for another thread."""
        return RemoteRun(
            self.paths, self.inventory, run_dir=self.run_dir, key=self._key, connect=self._connect
        )

    @property
    def cluster(self) -> Cluster:
        """Return the connections, opened on first use."""
        if self._cluster is None:
            self._cluster = self._connect()
        return self._cluster

    def close(self) -> None:
        """Close the connections; the next action opens new ones."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def start(self, *, grace_s: float, name: str) -> Begun:
        """Start the supervisor on the head. The attempt `name` must have claimed the head.

        See node/control.py.
        """
        plan = LaunchPlan.load(self.paths.plan)
        arguments = ["--run-dir", str(self.run_dir), "--grace", f"{grace_s:g}"]
        return self._act(
            self.inventory.head,
            Begun,
            action="start",
            name=name,
            timeout_s=_START_S,
            argv=module_command("payload.supervise", *arguments, python=plan.program[0]),
            python_path=plan.environment["PYTHONPATH"],
        )

    def refresh(self) -> bool:
        """Update the local copy from the head; return whether the run is alive."""
        return self.update().alive

    def update_all(self) -> UpdateResult:
        """Update the local copy with every worker's logs and records."""
        return self.update(*self.inventory.nodes[1:])

    def update(self, *others: Node, enough: Callable[[], bool] = lambda: False) -> UpdateResult:
        """Update the local copy from the head and, at the same time, from `others`.

        Raises an error of the head; an error of a worker does not affect the other nodes. `enough`
        is called between the pieces of a long file. If `enough` returns True, the next update
        copies the rest.
        """
        head = self.inventory.head
        # The head is last, so that its records replace old ones that a worker still has.
        nodes = [*(node for node in others if node.name != head.name), head]
        # Connect before locking, so that other commands do not wait for a node that is down.
        on_every_node(nodes, self.cluster.connect)
        with locked(self.paths, "copy"):
            # A command that follows the run updates often, and from the head alone.
            states, damaged = self._read(nodes, enough=enough, brief=not others)
            alive = states.pop(head.name)
            if isinstance(alive, TileforgeError):
                raise alive
            self.note(alive=alive)
        missed = {name: got for name, got in states.items() if isinstance(got, TileforgeError)}
        return UpdateResult(alive=alive, missed=missed, damaged=damaged)

    def note(self, *, alive: bool) -> None:
        """Record that the run is on a cluster, how to reach it, and whether it is alive."""
        record_contact(self.paths, alive=alive, ssh_key=self._key)

    def signal(self, numbers: Sequence[Signals], *, request: StopRequest | None = None) -> bool:
        """Store `request` for the supervisor and signal it; return whether it is alive."""
        answer = self._act(
            self.inventory.head,
            Signalled,
            action="signal",
            signals=[int(number) for number in numbers],
            request=asdict(request) if request else None,
        )
        return answer.alive

    def is_alive(self) -> bool:
        """Return whether the run has a living supervisor at this moment."""
        return self.signal([])

    def end_leftovers(
        self,
        *,
        at_once: bool = False,
        say: Callable[[str], None] = lambda _: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        """End all processes of a finished run on every node.

        Without `at_once`, ranks of a killed supervisor first get time to save. The wait ends
        without a kill if `interrupted` returns True. If the run was started again, nothing is
        killed. Raises RankLostError with the processes that do not end, or NodesError with the
        nodes that could not be checked.
        """
        gone: dict[str, TileforgeError] = {}
        found: dict[str, list[int]] = {}

        def ask(nodes: Sequence[Node], *, kill: bool = False) -> list[Node]:
            """Return the nodes that still have processes of the run."""
            for name, answer in self._ask(nodes, Left, action="left", kill=kill).items():
                if isinstance(answer, TileforgeError):
                    gone[name] = answer
                else:
                    found[name] = list(answer.pids)
            return [node for node in nodes if node.name not in gone and found[node.name]]

        ends = time.monotonic() + _LEAVE_S
        grace_period = None if at_once else self._grace_period()
        left = ask(self.inventory.nodes)
        if grace_period is not None and self.inventory.head in left:
            say("the run's supervisor has ended: waiting until the ranks have saved a checkpoint")
            while self.inventory.head in left and not grace_period.is_over():
                if interrupted():
                    raise RankLostError(
                        f"ranks of run {self.paths.run_id} may still be saving a checkpoint. Try "
                        "again in a minute."
                    )
                time.sleep(0.5)
                self.refresh()
                left = ask(left)
        while left and time.monotonic() < ends:
            time.sleep(0.5)
            left = ask(left)
        if left and self.is_alive():
            return
        if left:
            # The kernel takes seconds to free a killed rank with tens of GB of memory.
            ends = time.monotonic() + _KILL_S
            while (left := ask(left, kill=True)) and time.monotonic() < ends:
                time.sleep(0.5)
        if left:
            listed = "; ".join(f"{node.name}: {found[node.name]}" for node in left)
            raise RankLostError(
                f"processes of run {self.paths.run_id} do not end: {listed}. Restart these nodes, "
                "then try again."
            )
        if gone:
            raise NodesError(f"checking for processes of run {self.paths.run_id}", gone)

    def _grace_period(self) -> GracePeriod | None:
        """Return the grace period of the ranks if their supervisor was killed, or None."""
        self.refresh()
        state = read_json(RunState, self.paths.state)
        if state is None or state.exit_class is not None:
            return None
        config = load_run_config(self.paths.config)
        stall_timeout_s = bounded_wait_s(self.paths, config, "limits.hang_timeout_s")
        # The node chooses this number, so it must not hold up this command for days.
        grace_s = min(state.grace_s, MOST_WAIT_S)
        return GracePeriod(self.paths, grace_s=grace_s, stall_timeout_s=stall_timeout_s)

    def remove_key(self) -> None:
        """Remove the SSH keys of all ended runs from all nodes."""
        remove_stale_keys(self.cluster)

    def collect_checkpoint(self, *, say: Callable[[str], None] = lambda _: None) -> Path | None:
        """Fetch the newest valid checkpoint, resuming an interrupted copy.

        Every file of the copy must match the file on the head. A damaged checkpoint is reported,
        and the previous checkpoint is used. If no checkpoint is valid, raises the error of the
        newest checkpoint.
        """
        folders = self._remote_checkpoints()
        failures: list[TileforgeError] = []
        for folder in reversed(folders):
            try:
                with locked(self.paths, "checkpoint"):
                    return fetch_checkpoint(
                        self.cluster.connect(self.inventory.head), folder, self.paths
                    )
            except (AnswerError, CheckpointError) as error:
                failures.append(error)
                say(f"warning: checkpoint {folder.name} is skipped: {error}")
        if failures:
            raise failures[0]
        return None

    def newest_remote_checkpoint(self) -> str | None:
        """Return the name of the newest checkpoint on the head, even if damaged, or None."""
        folders = self._remote_checkpoints()
        return folders[-1].name if folders else None

    def _remote_checkpoints(self) -> list[PurePosixPath]:
        """List the head's checkpoints that have a manifest, oldest first."""
        head = self.cluster.connect(self.inventory.head)
        folder = self.run_dir / CHECKPOINTS_NAME
        pattern = f"*/{MANIFEST_FILE}"
        argv = ["find", str(folder), "-maxdepth", "2", "-path", pattern, "-printf", "%h\n"]
        lines = head.run(argv, timeout_s=_ACTION_S).stdout.decode(errors="replace").splitlines()
        names = {name for line in lines if FOLDER_NAME.fullmatch(name := PurePosixPath(line).name)}
        return sorted((folder / name for name in names), key=checkpoint_step)

    def adopt(self) -> None:
        """Atomically create a local copy of a run that another machine started.

        The settings are read from the head. The nodes and their host keys come from the operator's
        inventory.
        """
        head = self.cluster.connect(self.inventory.head)
        runs_dir, run_id = self.paths.root.parent, self.paths.run_id
        runs_dir.mkdir(parents=True, exist_ok=True)
        staging = RunPaths(Path(tempfile.mkdtemp(prefix=f".{run_id}.", dir=runs_dir)))
        try:
            for path in (staging.config, staging.hosts, staging.ranks, staging.plan):
                get(head, str(self.run_dir / path.name), path, timeout_s=_ACTION_S)
            found = remote_identity(head, self.run_dir)
            if found is not None:
                write_whole(staging.identity, found.to_json())
            staging.inventory.write_text(self.inventory.to_json(), encoding="utf-8")
            load_run_config(staging.config)
            load_ranks(staging.ranks)
            plan = LaunchPlan.load(staging.plan)
            if (plan.run_id, plan.environment.get(RUN_DIR)) != (run_id, str(self.run_dir)):
                raise AnswerError(f"{head.node.name}: its plan.json belongs to another run.")
            record_approved(staging, {}, becomes=self.paths.root)
            record_contact(staging, alive=True, ssh_key=self._key)
            make_shared(staging.root)
            staging.root.rename(self.paths.root)
        except OSError as error:
            raise ConfigError(f"{self.paths.root}: {error.strerror}. Try again.") from None
        finally:
            shutil.rmtree(staging.root, ignore_errors=True)

    def _read(
        self, nodes: Sequence[Node], *, enough: Callable[[], bool], brief: bool
    ) -> tuple[dict[str, bool | TileforgeError], list[str]]:
        """Copy all new data.

        Returns whether each node has a supervisor of the run, and messages about damaged files.
        """
        states: dict[str, bool | TileforgeError] = {}
        left: dict[str, int] = {}
        damaged: dict[str, list[str]] = {}
        head, waiting = self.inventory.head.name, list(nodes)
        while waiting:
            requests = {
                node.name: file_request(
                    self.paths, node.name, is_head=node.name == head, brief=brief
                )
                for node in waiting
            }
            answers = on_every_node(
                waiting,
                partial(self._read_part, requests),
            )
            for node in tuple(waiting):
                answer = answers[node.name]
                if not isinstance(answer, TileforgeError):
                    answer = self._merged(answer, requests[node.name], damaged)
                if isinstance(answer, TileforgeError):
                    states[node.name] = answer
                    waiting.remove(node)
                    continue
                states.setdefault(node.name, answer.alive)
                before, left[node.name] = left.get(node.name), answer.left
                # Data that grows faster than it can be copied is left for the next update.
                shrinks = before is None or left[node.name] < before
                if left[node.name] == 0 or not shrinks or enough():
                    waiting.remove(node)
        return states, [problem for problems in damaged.values() for problem in problems]

    def _merged(
        self, answer: Part, request: FileRequest, damaged: dict[str, list[str]]
    ) -> Part | AnswerError:
        """Merge a node's answer and return it; on an error, merge nothing and return the error."""
        try:
            damaged[request.node] = merge(self.paths, answer, request)
        except AnswerError as error:
            return error
        return answer

    def _ask(
        self, nodes: Sequence[Node], answer: type[_T], **arguments: Any
    ) -> dict[str, _T | TileforgeError]:
        return on_every_node(nodes, lambda node: self._act(node, answer, **arguments))

    def _read_part(self, requests: Mapping[str, FileRequest], node: Node) -> Part:
        return self._act(node, Part, action="read", **requests[node.name].arguments())

    def _act(
        self, node: Node, answer: type[_T], *, timeout_s: float = _ACTION_S, **arguments: Any
    ) -> _T:
        return ask(
            self.cluster.connect(node),
            "control.py",
            answer,
            {**arguments, "run_dir": str(self.run_dir)},
            timeout_s=timeout_s,
        )


def remote_identity(head: Connection, run_dir: PurePosixPath) -> RunIdentity | None:
    """Return the identity of the run in the head's folder, or None."""
    text = _remote_record(head, run_dir / IDENTITY_FILE)
    return None if text is None else parse_identity(text, where=str(run_dir / IDENTITY_FILE))


def remote_hashes(head: Connection, run_dir: PurePosixPath) -> ManifestHashes:
    """Return the manifest hashes in the head's folder; empty if their file is unreadable."""
    with suppress(AnswerError, ConfigError):
        text = _remote_record(head, run_dir / HASHES_FILE)
        return parse_hashes(text or b"", where=str(run_dir / HASHES_FILE))
    return ManifestHashes()


def _remote_record(head: Connection, path: PurePosixPath) -> bytes | None:
    argv = ["cat", "--", str(path)]
    done = head.run(argv, timeout_s=_ACTION_S, most_bytes=_RECORD_BYTES)
    return done.stdout if done.status == 0 else None


def require_own_remote(head: Connection, run_dir: PurePosixPath, run: RunIdentity) -> None:
    """Raise ConfigError if a different run has begun in the head's folder.

    A run that an older version started may have no identity.
    """
    found = remote_identity(head, run_dir) or RunIdentity()
    if found.identity is None and (run.is_older or run.identity is None):
        return
    if found.identity == run.identity or not _has_begun(head, run_dir):
        return
    require_same_run(
        run,
        found,
        place=f"run {run_dir.name} here",
        other=f"{run_dir} on {head.node.name}",
        fix="Start this run under another id with --run-id, or choose another --runs-dir to "
        "follow the run on the cluster.",
    )


def _has_begun(head: Connection, run_dir: PurePosixPath) -> bool:
    """Return whether the run in a folder on the head has begun; an aborted start is not enough."""
    signs = (NAMES.state, NAMES.checkpoints, NAMES.metrics)
    arguments = [each for sign in signs for each in ("-o", "-e", str(run_dir / sign))]
    return head.run(["test", *arguments[1:]], timeout_s=_ACTION_S).status == 0


def planned_run_dir(paths: RunPaths) -> PurePosixPath:
    """Return a run's folder on the nodes; `paths` is the run's local copy.

    Raises ConfigError.
    """
    found = LaunchPlan.load(paths.plan).environment.get(RUN_DIR, "")
    if not FOLDER.fullmatch(found) or PurePosixPath(found).name != paths.run_id:
        raise ConfigError(
            f"{paths.plan}: {RUN_DIR} = {shown(found)} is not a folder of run {paths.run_id}. "
            "Choose another run."
        )
    return PurePosixPath(found)
