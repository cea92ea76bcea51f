"""One run on a cluster: read, signalled and brought home over SSH."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from signal import Signals
from typing import Any

from payload.checkpoint_watch import Farewell
from payload.errors import NodesError, RankLostError, TileforgeError
from payload.inventory import ClusterInventory, Node
from payload.launch.environment import RUN_DIR
from payload.launch.plan import LaunchPlan
from payload.orchestrate.cluster import Cluster
from payload.orchestrate.fanout import on_every_node
from payload.orchestrate.mirror import alone, known_ends, merge, note_seen
from payload.orchestrate.remote_programs import parse_answer, remote_argv, remote_program
from payload.orchestrate.run_key import remove_dead_keys
from payload.orchestrate.transfer import get, local_sha256
from payload.results import RunPaths, RunState, StopWish, read_json
from payload.run_config import load_run_config

_ACTION_S = 20.0
_START_S = 60.0
_COPY_S = 600.0
_SLOWEST_BYTES_PER_S = 1e6
_LEAVE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What came of bringing the local copy up to date; the head's part is here."""

    alive: bool
    """Whether a supervisor holds the run."""
    missed: Mapping[str, TileforgeError]
    """Why some worker's part is not here, by node."""


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
        self._run_dir = run_dir
        self._key = key.absolute()
        self._connect = connect
        self._cluster: Cluster | None = None

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

    def start(self, *, grace_s: float, name: str) -> dict[str, Any]:
        """Start the supervisor on the head, which `name` has claimed; see remote/control.py."""
        plan = LaunchPlan.load(self.paths.plan)
        argv = [plan.program[0], "-m", "payload.supervise", "--run-dir", str(self._run_dir)]
        return self._act(
            self.inventory.head,
            action="start",
            name=name,
            timeout_s=_START_S,
            argv=[*argv, "--grace", f"{grace_s:g}"],
            python_path=plan.environment["PYTHONPATH"],
        )

    def refresh(self) -> bool:
        """Bring the local copy up to date from the head; says whether the run is alive."""
        return self.look().alive

    def look_at_all(self) -> Look:
        """`look` with every worker's logs and records."""
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
            seen = self._read(nodes, enough=enough)
            alive = seen.pop(head.name)
            if isinstance(alive, TileforgeError):
                raise alive
            self.note(alive=alive)
        missed = {name: got for name, got in seen.items() if isinstance(got, TileforgeError)}
        return Look(alive=alive, missed=missed)

    def note(self, *, alive: bool) -> None:
        """Write down that this is a cluster's run, and how to reach it."""
        note_seen(self.paths, alive=alive, ssh_key=self._key)

    def signal(self, numbers: Sequence[Signals], *, wish: StopWish | None = None) -> bool:
        """Send signals, and leave `wish` for the supervisor; says whether it lives."""
        answer = self._act(
            self.inventory.head,
            action="signal",
            signals=[int(number) for number in numbers],
            wish=asdict(wish) if wish else None,
        )
        return bool(answer["alive"])

    def is_alive(self) -> bool:
        """Whether a supervisor holds the run at this moment."""
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
            """Those that have processes."""
            for name, answer in self._ask(nodes, action="left", kill=kill).items():
                if isinstance(answer, TileforgeError):
                    gone[name] = answer
                else:
                    found[name] = answer["pids"]
            return [node for node in nodes if node.name not in gone and found[node.name]]

        ends = time.monotonic() + _LEAVE_S
        farewell = None if at_once else self._farewell()
        left = ask(self.inventory.nodes)
        if farewell is not None and self.inventory.head in left:
            say("its supervisor is gone: waiting until its ranks have saved")
            while self.inventory.head in left and not farewell.is_over():
                time.sleep(0.5)
                self.refresh()
                left = ask(left)
        while left and time.monotonic() < ends:
            time.sleep(0.5)
            left = ask(left)
        if left and self.is_alive():
            return
        if left:
            ask(left, kill=True)
            time.sleep(1.0)
            left = ask(left)
        if left:
            listed = "; ".join(f"{node.name}: {found[node.name]}" for node in left)
            raise RankLostError(f"processes of run {self.paths.run_id} do not end: {listed}.")
        if gone:
            raise NodesError(f"looking for processes of run {self.paths.run_id}", gone)

    def _farewell(self) -> Farewell | None:
        """The time that ranks have whose supervisor died without a word; None where none did."""
        self.refresh()
        state = read_json(RunState, self.paths.state)
        if state is None or state.exit_class is not None:
            return None
        patience_s = load_run_config(self.paths.config).limits.hang_timeout_s
        return Farewell(self.paths, grace_s=state.grace_s, patience_s=patience_s)

    def remove_key(self) -> None:
        """Let no node trust the key of this run, or of another one, once the run has ended."""
        remove_dead_keys(self.cluster, self.inventory)

    def collect_checkpoint(self) -> Path | None:
        """Bring the newest whole checkpoint home, unless it is here; goes on where it broke off."""
        head = self.cluster.connect(self.inventory.head)
        folder = self._run_dir / "checkpoints"
        pattern = "step_*/manifest.json"
        found = head.run(
            ["find", str(folder), "-path", f"*/{pattern}", "-printf", "%h\n"], timeout_s=_ACTION_S
        )
        names = sorted(line.rpartition("/")[2] for line in found.stdout.decode().splitlines())
        names = [name for name in names if not name.endswith(".partial")]
        if not names:
            return None
        with alone(self.paths, "checkpoint"):
            return self._fetch(str(folder), names[-1])

    def _fetch(self, folder: str, name: str) -> Path:
        target = self.paths.checkpoints / name
        if (target / "manifest.json").exists():
            return target
        partial = self.paths.checkpoints / f".{name}.collecting"
        partial.mkdir(parents=True, exist_ok=True)
        self._collect(f"{folder}/{name}", partial)
        partial.replace(target)
        for stale in self.paths.checkpoints.glob(".step_*.collecting"):
            shutil.rmtree(stale)  # of a checkpoint that is not the newest any more
        return target

    def _collect(self, source: str, partial: Path) -> None:
        """Every file of a checkpoint, checked by the manifest, which comes first."""
        head = self.cluster.connect(self.inventory.head)
        manifest = partial / "manifest.json"
        get(head, f"{source}/manifest.json", manifest, timeout_s=_ACTION_S)
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        for name, entry in files.items():
            target = partial / Path(name).name
            sha256 = entry["sha256"]
            if not (target.exists() and local_sha256(target) == sha256):
                timeout_s = _COPY_S + int(entry["bytes"]) / _SLOWEST_BYTES_PER_S
                get(head, f"{source}/{name}", target, sha256=sha256, timeout_s=timeout_s)

    def adopt(self) -> None:
        """Bring the files home that say what the run is; for one that was started elsewhere."""
        head = self.cluster.connect(self.inventory.head)
        for path in (self.paths.config, self.paths.inventory, self.paths.hosts, self.paths.ranks):
            get(head, str(self._run_dir / path.name), path, timeout_s=_ACTION_S)
        # Last, as what has a plan counts as a run.
        get(head, str(self._run_dir / "plan.json"), self.paths.plan, timeout_s=_ACTION_S)

    def _read(
        self, nodes: Sequence[Node], *, enough: Callable[[], bool]
    ) -> dict[str, bool | TileforgeError]:
        """Whether each node has a supervisor of the run; all that it had then is here."""
        seen: dict[str, bool | TileforgeError] = {}
        left: dict[str, int] = {}
        waiting = list(nodes)
        while waiting:
            answers = self._ask(waiting, action="read", known=known_ends(self.paths))
            for node in tuple(waiting):
                answer = answers[node.name]
                if isinstance(answer, TileforgeError):
                    seen[node.name] = answer
                    waiting.remove(node)
                    continue
                merge(self.paths, answer, node=node.name)
                seen.setdefault(node.name, bool(answer["alive"]))
                before, left[node.name] = left.get(node.name), int(answer["left"])
                # What grows faster than it comes is left for the next time.
                shrinks = before is None or left[node.name] < before
                if left[node.name] == 0 or not shrinks or enough():
                    waiting.remove(node)
        return seen

    def _ask(
        self, nodes: Sequence[Node], **arguments: Any
    ) -> dict[str, dict[str, Any] | TileforgeError]:
        return on_every_node(nodes, lambda node: self._act(node, **arguments))

    def _act(self, node: Node, *, timeout_s: float = _ACTION_S, **arguments: Any) -> dict[str, Any]:
        text = self.cluster.connect(node).check_run(
            remote_argv({**arguments, "run_dir": str(self._run_dir)}),
            stdin=remote_program("control.py"),
            timeout_s=timeout_s,
        )
        return parse_answer(text, node=node.name)


def planned_run_dir(paths: RunPaths) -> PurePosixPath:
    """Where the nodes have the run whose local copy is at `paths`. Raises ConfigError."""
    return PurePosixPath(LaunchPlan.load(paths.plan).environment[RUN_DIR])
