"""Starts a run on a cluster over SSH: writes its files on the nodes and starts its supervisor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rich.console import Console

from payload.core.errors import (
    ConnectionLostError,
    ExitCode,
    NodesError,
    TileforgeError,
)
from payload.core.regular_files import can_see, home_path
from payload.launch.budget import TimeLimit
from payload.machines.inventory import Node
from payload.orchestrate.machine_profiles.cluster_profile import Answers
from payload.orchestrate.machine_profiles.code_and_data_uploads import (
    Weights,
    local_weights,
    upload_data,
    upload_weights,
)
from payload.orchestrate.runs.remote_run import RemoteRun
from payload.orchestrate.runs.resolved_plan import NodeCopies, ResolvedPlan
from payload.orchestrate.runs.run_request import RunRequest
from payload.orchestrate.runs.site import how_to_attach
from payload.orchestrate.ssh.cluster import Cluster
from payload.orchestrate.ssh.node_code import archive, unpack
from payload.orchestrate.ssh.remote_calls import Begun, all_or_raise, on_every_node
from payload.orchestrate.ssh.remote_run_folders import make_room_for
from payload.orchestrate.ssh.run_keys import remove_run_key
from payload.run_record.checkpoint_manifest_hashes import HASHES_FILE, ManifestHashes
from payload.run_record.run_files import RunPaths
from payload.run_record.run_identity import RunIdentity

# Machines that this program creates run for at most 30 days. On other machines, a run without a
# limit may run longer; it then needs the key only to restart a lost rank.
_KEY_LASTS_S = 30 * 86_400.0
# The time limit does not include the time that a run waits for a node.
_KEY_MARGIN_S = 86_400.0


class ClusterNotReadyError(TileforgeError):
    """The run was not started. The exit code comes from the check or program that failed."""

    def __init__(self, cause: str, code: int) -> None:
        super().__init__(cause)
        self.exit_code = ExitCode(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFiles:
    """Local files that the nodes need."""

    data: Path
    weights: Weights | None
    """Initial weights, if they are a local folder."""

    @classmethod
    def of(cls, request: RunRequest) -> LocalFiles:
        """Return the files that a run needs. Raises ConfigError.

        A resumed run starts from its checkpoint, so the initial weights may be missing.
        """
        init = request.config.model.init
        is_gone = request.resumes and not can_see(home_path(init))
        return cls(
            data=request.config.data.folder(), weights=None if is_gone else local_weights(init)
        )

    def upload(self, cluster: Cluster, answers: Answers, *, talk: Console) -> NodeCopies:
        """Upload data and weights to the nodes that lack them; return the remote paths."""
        nodes, head = cluster.inventory.nodes, cluster.inventory.head
        data = upload_data(nodes, cluster, answers, source=self.data, talk=talk)
        if self.weights is None:
            return NodeCopies(data_dir=str(data))
        init = upload_weights(head, cluster, answers, weights=self.weights, talk=talk)
        return NodeCopies(data_dir=str(data), init=str(init))


def lost_connections(error: TileforgeError) -> str:
    """Return which connections broke, and why. Raises `error` if it also has other causes."""
    failures = list(error.failures.values()) if isinstance(error, NodesError) else [error]
    if not all(isinstance(each, ConnectionLostError) for each in failures):
        raise error
    return "; ".join(each.cause for each in failures)


def stale_records(paths: RunPaths) -> Iterator[Path]:
    """Yield records of an earlier attempt, which must not appear as records of this attempt."""
    yield paths.summary
    yield paths.state
    yield paths.job
    yield from paths.root.glob("exits/*.json")


def key_lasts_s(limit: TimeLimit | None) -> float:
    """Return the time after which the run's key expires on the nodes."""
    return _KEY_LASTS_S if limit is None else min(_KEY_LASTS_S, limit.seconds + _KEY_MARGIN_S)


def write_on_nodes(
    planned: ResolvedPlan,
    cluster: Cluster,
    *,
    own: RunIdentity,
    hashes: ManifestHashes,
    talk: Console,
) -> None:
    """Write the run folder on every node; move non-regular files aside.

    `own` is the identity of the run. With `hashes`, the head can verify checkpoints in the store.
    """
    files = {planned.paths.identity.name: own.to_json()}
    if hashes.hashes:
        files[HASHES_FILE] = hashes.to_json()
    files |= planned.files_on_nodes()
    content = archive({name: text.encode() for name, text in files.items()})
    run_dir = PurePosixPath(planned.paths.root)
    python, python_path = planned.plan.program[0], planned.plan.environment["PYTHONPATH"]

    def write(node: Node) -> list[str]:
        connection = cluster.connect(node)
        moved = make_room_for(connection, run_dir, python=python, python_path=python_path)
        unpack(connection, content, run_dir)
        return moved

    outcomes = on_every_node(planned.inventory.nodes, write)
    for name, sentences in all_or_raise(outcomes, what="writing the run folder").items():
        for sentence in sentences:
            talk.print(f"warning: {name}: {sentence}")


def start_supervisor(
    run: RemoteRun, cluster: Cluster, *, grace_s: float, name: str, talk: Console
) -> None:
    """Start the supervisor. Raises ClusterNotReadyError if the supervisor has not begun."""
    try:
        begun = run.start(grace_s=grace_s, name=name)
    except (KeyboardInterrupt, TileforgeError):
        # The supervisor has its own session on the head, so it may begin after this command ends.
        talk.print(f"it is unknown whether the run has begun; if so, {how_to_attach(run.paths)}")
        run.close()
        raise
    if begun.pid is not None:
        return
    reason = begun.said or f"another operator has started run {begun.running} in the meantime"
    remove_key(cluster, name, talk)
    run.close()
    raise ClusterNotReadyError(f"the supervisor did not start: {reason}", _failure_code(begun))


def _failure_code(begun: Begun) -> int:
    """Return the supervisor's exit code, or PREFLIGHT if it exited with 0 or was killed."""
    known = [int(code) for code in ExitCode if code != ExitCode.OK]
    return next((code for code in known if code == begun.status), ExitCode.PREFLIGHT)


def remove_key(cluster: Cluster, name: str, talk: Console) -> None:
    """Revoke the key of an attempt; print a failure, so that it does not hide an earlier error."""
    try:
        remove_run_key(cluster, name)
    except TileforgeError as error:
        talk.print(f"warning: {error}")
