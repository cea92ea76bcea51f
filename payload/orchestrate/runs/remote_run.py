"""One run on a cluster: read, signalled, ended and brought home over SSH."""

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
from payload.core.files import write_whole
from payload.core.printable_text import shown
from payload.core.python_processes import module_words
from payload.formats.checkpoint_listing import (
    CHECKPOINTS_NAME,
    FOLDER_NAME,
    MANIFEST_FILE,
    checkpoint_step,
)
from payload.launch.plan import LaunchPlan
from payload.launch.ranks import load_ranks
from payload.machines.inventory import ClusterInventory, Node
from payload.machines.rank_variables import RUN_DIR
from payload.orchestrate.runs.mirror import (
    Wanted,
    alone,
    merge,
    note_seen,
    wanted_of,
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
from payload.orchestrate.ssh.run_keys import remove_dead_keys
from payload.run_record.approved_settings import bounded_wait_s, note_named
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
class Look:
    """Result of an update of the local copy; the head's part is here."""

    alive: bool
    """True if a supervisor holds the run."""
    missed: Mapping[str, TileforgeError]
    """Why some worker's part is not here, by node."""
    damaged: Sequence[str]
    """Damaged files there, one sentence each; their copies stayed as they were."""


class RemoteRun:
    """A run whose supervisor is on the head; `paths` is its local copy."""

    def __init__(
        self,
        paths: RunPaths,
        inventory: ClusterInventory,
        *,
        run_dir: PurePosixPath,
        key: Path,
        connect: Callable[[], Cluster],
    ) -> None:
        """`connect` makes the connections, again after they broke."""
        self.paths = paths
        self.inventory = inventory
        self.run_dir = run_dir
        """On the nodes."""
        self._key = key.absolute()
        self._connect = connect
        self._cluster: Cluster | None = None

    def apart(self) -> RemoteRun:
        """Return the same run with connections of its own, for another thread."""
        return RemoteRun(
            self.paths, self.inventory, run_dir=self.run_dir, key=self._key, connect=self._connect
        )

    @property
    def cluster(self) -> Cluster:
        """The connections."""
        if self._cluster is None:
            self._cluster = self._connect()
        return self._cluster

    def close(self) -> None:
        """Close the connections; the next action makes new ones."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def start(self, *, grace_s: float, name: str) -> Begun:
        """Start the supervisor on the head, which `name` has claimed; see node/control.py."""
        plan = LaunchPlan.load(self.paths.plan)
        words = ["--run-dir", str(self.run_dir), "--grace", f"{grace_s:g}"]
        return self._act(
            self.inventory.head,
            Begun,
            action="start",
            name=name,
            timeout_s=_START_S,
            argv=module_words("payload.supervise", *words, python=plan.program[0]),
            python_path=plan.environment["PYTHONPATH"],
        )

    def refresh(self) -> bool:
        """Bring the local copy up to date from the head; says whether the run is alive."""
        return self.look().alive

    def look_at_all(self) -> Look:
        """Look with every worker's logs and records."""
        return self.look(*self.inventory.nodes[1:])

    def look(self, *others: Node, enough: Callable[[], bool] = lambda: False) -> Look:
        """Bring the local copy up to date from the head and, at the same time, from `others`.

        Raises what the head's part ends with; a worker that is gone takes nothing from the rest.
        `enough` is asked between the parts of a long file: what is not here comes the next time.
        """
        head = self.inventory.head
        # The head's last: an old record that a worker still has counts for less.
        nodes = [*(node for node in others if node.name != head.name), head]
        # Before the lock, as others should not wait for a node that does not answer.
        on_every_node(nodes, self.cluster.connect)
        with alone(self.paths, "copy"):
            # A look at the head alone is one of many, to follow the run.
            seen, damaged = self._read(nodes, enough=enough, brief=not others)
            alive = seen.pop(head.name)
            if isinstance(alive, TileforgeError):
                raise alive
            self.note(alive=alive)
        missed = {name: got for name, got in seen.items() if isinstance(got, TileforgeError)}
        return Look(alive=alive, missed=missed, damaged=damaged)

    def note(self, *, alive: bool) -> None:
        """Write down that this is a cluster's run, and how to reach it."""
        note_seen(self.paths, alive=alive, ssh_key=self._key)

    def signal(self, numbers: Sequence[Signals], *, request: StopRequest | None = None) -> bool:
        """Send signals, and leave `request` for the supervisor; says whether it lives."""
        answer = self._act(
            self.inventory.head,
            Signalled,
            action="signal",
            signals=[int(number) for number in numbers],
            request=asdict(request) if request else None,
        )
        return answer.alive

    def is_alive(self) -> bool:
        """Return whether a supervisor holds the run at this moment."""
        return self.signal([])

    def end_leftovers(
        self, *, at_once: bool = False, say: Callable[[str], None] = lambda _: None
    ) -> None:
        """See to it that no node has a process of a run that has ended.

        Ranks whose supervisor died have the time to save, as on the head itself, but not with
        `at_once`. Does nothing to a run that was started again. Raises RankLostError with the
        processes that do not end, else NodesError with the nodes where it cannot be seen.
        """
        gone: dict[str, TileforgeError] = {}
        found: dict[str, list[int]] = {}

        def ask(nodes: Sequence[Node], *, kill: bool = False) -> list[Node]:
            """Return those that have processes."""
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
            say("its supervisor is gone: waiting until its ranks have saved")
            while self.inventory.head in left and not grace_period.is_over():
                time.sleep(0.5)
                self.refresh()
                left = ask(left)
        while left and time.monotonic() < ends:
            time.sleep(0.5)
            left = ask(left)
        if left and self.is_alive():
            return
        if left:
            # A killed rank with tens of GB stays for seconds, until the kernel has freed them.
            ends = time.monotonic() + _KILL_S
            while (left := ask(left, kill=True)) and time.monotonic() < ends:
                time.sleep(0.5)
        if left:
            listed = "; ".join(f"{node.name}: {found[node.name]}" for node in left)
            raise RankLostError(f"processes of run {self.paths.run_id} do not end: {listed}.")
        if gone:
            raise NodesError(f"looking for processes of run {self.paths.run_id}", gone)

    def _grace_period(self) -> GracePeriod | None:
        """Return the time that ranks have whose supervisor died; None where none did."""
        self.refresh()
        state = read_json(RunState, self.paths.state)
        if state is None or state.exit_class is not None:
            return None
        config = load_run_config(self.paths.config)
        stall_timeout_s = bounded_wait_s(self.paths, config, "limits.hang_timeout_s")
        return GracePeriod(self.paths, grace_s=state.grace_s, stall_timeout_s=stall_timeout_s)

    def remove_key(self) -> None:
        """Let no node trust the key of this run, or of another one, once the run has ended."""
        remove_dead_keys(self.cluster)

    def collect_checkpoint(self, *, say: Callable[[str], None] = lambda _: None) -> Path | None:
        """Bring the newest sound checkpoint home; goes on where it broke off.

        One that is here already has to be the head's, file by file. A damaged one is named, and the
        one before it is taken. Raises the newest one's error when none can be had.
        """
        folders = self._checkpoints_there()
        failures: list[TileforgeError] = []
        for folder in reversed(folders):
            try:
                with alone(self.paths, "checkpoint"):
                    return fetch_checkpoint(
                        self.cluster.connect(self.inventory.head), folder, self.paths
                    )
            except (AnswerError, CheckpointError) as error:
                failures.append(error)
                say(f"warning: checkpoint {folder.name} is passed over: {error}")
        if failures:
            raise failures[0]
        return None

    def newest_checkpoint_there(self) -> str | None:
        """Return the name of the head's newest checkpoint, sound or not; None where it has none."""
        folders = self._checkpoints_there()
        return folders[-1].name if folders else None

    def _checkpoints_there(self) -> list[PurePosixPath]:
        """List the head's checkpoints that have a manifest, oldest first."""
        head = self.cluster.connect(self.inventory.head)
        folder = self.run_dir / CHECKPOINTS_NAME
        pattern = f"*/{MANIFEST_FILE}"
        argv = ["find", str(folder), "-maxdepth", "2", "-path", pattern, "-printf", "%h\n"]
        lines = head.run(argv, timeout_s=_ACTION_S).stdout.decode(errors="replace").splitlines()
        names = {name for line in lines if FOLDER_NAME.fullmatch(name := PurePosixPath(line).name)}
        return sorted((folder / name for name in names), key=checkpoint_step)

    def adopt(self) -> None:
        """Make the local copy of a run that was started elsewhere: whole, or absent.

        Its settings are the head's word; the nodes and their host keys are the operator's own.
        """
        head = self.cluster.connect(self.inventory.head)
        runs_dir, run_id = self.paths.root.parent, self.paths.run_id
        runs_dir.mkdir(parents=True, exist_ok=True)
        staging = RunPaths(Path(tempfile.mkdtemp(prefix=f".{run_id}.", dir=runs_dir)))
        try:
            for path in (staging.config, staging.hosts, staging.ranks, staging.plan):
                get(head, str(self.run_dir / path.name), path, timeout_s=_ACTION_S)
            found = identity_there(head, self.run_dir)
            if found is not None:
                write_whole(staging.identity, found.to_json())
            staging.inventory.write_text(self.inventory.to_json(), encoding="utf-8")
            load_run_config(staging.config)
            load_ranks(staging.ranks)
            plan = LaunchPlan.load(staging.plan)
            if (plan.run_id, plan.environment.get(RUN_DIR)) != (run_id, str(self.run_dir)):
                raise AnswerError(f"{head.node.name}: its plan.json is of another run.")
            note_named(staging, {}, becomes=self.paths.root)
            note_seen(staging, alive=True, ssh_key=self._key)
            staging.root.chmod(0o755)
            staging.root.rename(self.paths.root)
        except OSError as error:
            raise ConfigError(f"{self.paths.root}: {error.strerror}. Try again.") from None
        finally:
            shutil.rmtree(staging.root, ignore_errors=True)

    def _read(
        self, nodes: Sequence[Node], *, enough: Callable[[], bool], brief: bool
    ) -> tuple[dict[str, bool | TileforgeError], list[str]]:
        """Bring all that is new here.

        Returns whether each node has a supervisor of the run, and what is damaged there.
        """
        seen: dict[str, bool | TileforgeError] = {}
        left: dict[str, int] = {}
        damaged: dict[str, list[str]] = {}
        head, waiting = self.inventory.head.name, list(nodes)
        while waiting:
            wanted = {
                node.name: wanted_of(self.paths, node.name, is_head=node.name == head, brief=brief)
                for node in waiting
            }
            answers = on_every_node(
                waiting,
                partial(self._read_part, wanted),
            )
            for node in tuple(waiting):
                answer = answers[node.name]
                if not isinstance(answer, TileforgeError):
                    answer = self._merged(answer, wanted[node.name], damaged)
                if isinstance(answer, TileforgeError):
                    seen[node.name] = answer
                    waiting.remove(node)
                    continue
                seen.setdefault(node.name, answer.alive)
                before, left[node.name] = left.get(node.name), answer.left
                # What grows faster than it comes is left for the next time.
                shrinks = before is None or left[node.name] < before
                if left[node.name] == 0 or not shrinks or enough():
                    waiting.remove(node)
        return seen, [problem for problems in damaged.values() for problem in problems]

    def _merged(
        self, answer: Part, wanted: Wanted, damaged: dict[str, list[str]]
    ) -> Part | AnswerError:
        """Return the answer, which is here now; or why none of it is."""
        try:
            damaged[wanted.node] = merge(self.paths, answer, wanted)
        except AnswerError as error:
            return error
        return answer

    def _ask(
        self, nodes: Sequence[Node], answer: type[_T], **arguments: Any
    ) -> dict[str, _T | TileforgeError]:
        return on_every_node(nodes, lambda node: self._act(node, answer, **arguments))

    def _read_part(self, wanted: Mapping[str, Wanted], node: Node) -> Part:
        return self._act(node, Part, action="read", **wanted[node.name].arguments())

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


def identity_there(head: Connection, run_dir: PurePosixPath) -> RunIdentity | None:
    """Return the identity of the run in the head's folder; None where it has none."""
    text = _record_there(head, run_dir / IDENTITY_FILE)
    return None if text is None else parse_identity(text, where=str(run_dir / IDENTITY_FILE))


def hashes_there(head: Connection, run_dir: PurePosixPath) -> ManifestHashes:
    """Return the hashes in the head's folder; none where it has none, or a damaged record."""
    with suppress(AnswerError, ConfigError):
        text = _record_there(head, run_dir / HASHES_FILE)
        return parse_hashes(text or b"", where=str(run_dir / HASHES_FILE))
    return ManifestHashes()


def _record_there(head: Connection, place: PurePosixPath) -> bytes | None:
    argv = ["cat", "--", str(place)]
    done = head.run(argv, timeout_s=_ACTION_S, most_bytes=_RECORD_BYTES)
    return done.stdout if done.status == 0 else None


def require_own_there(head: Connection, run_dir: PurePosixPath, run: RunIdentity) -> None:
    """Raise ConfigError where the head's folder is of another run that has begun.

    A run of an older version may have a folder there without an identity.
    """
    there = identity_there(head, run_dir) or RunIdentity()
    if there.identity is None and (run.is_older or run.identity is None):
        return
    if there.identity == run.identity or not _has_begun(head, run_dir):
        return
    require_same_run(
        run,
        there,
        place=f"run {run_dir.name} here",
        other=f"{run_dir} on {head.node.name}",
        fix="Start this one under another id with --run-id, or name another --runs-dir to follow "
        "that one.",
    )


def _has_begun(head: Connection, run_dir: PurePosixPath) -> bool:
    """Say whether a run's folder there is more than a start that was given up."""
    signs = (NAMES.state, NAMES.checkpoints, NAMES.metrics)
    words = [word for sign in signs for word in ("-o", "-e", str(run_dir / sign))]
    return head.run(["test", *words[1:]], timeout_s=_ACTION_S).status == 0


def planned_run_dir(paths: RunPaths) -> PurePosixPath:
    """Return where the nodes have the run whose local copy is at `paths`. Raises ConfigError."""
    found = LaunchPlan.load(paths.plan).environment.get(RUN_DIR, "")
    if not FOLDER.fullmatch(found) or PurePosixPath(found).name != paths.run_id:
        raise ConfigError(
            f"{paths.plan}: {RUN_DIR} = {shown(found)} is no folder of run {paths.run_id}. Name "
            "another run."
        )
    return PurePosixPath(found)
