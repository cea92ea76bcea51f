"""Clusters over SSH as a site: a run is checked, brought to the nodes and started on the head."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath

from rich.console import Console

from payload.config.launch_sections import LimitsSection
from payload.config.run_config import RunConfig
from payload.core.errors import (
    ConfigError,
    ConnectionLostError,
    ExitCode,
    NodesError,
    PreflightError,
    TileforgeError,
    UsageError,
)
from payload.core.regular_files import can_see, home_path
from payload.launch.budget import time_limit
from payload.launch.launchers.registry import candidates
from payload.launch.ranks import Placement
from payload.machines.inventory import ClusterInventory, Node
from payload.orchestrate.access.cluster import Answers, ClusterAccess, programs_of
from payload.orchestrate.access.offline_plan import plan_dry_run
from payload.orchestrate.access.supply import (
    Weights,
    ask_nodes,
    bring_code,
    bring_data,
    bring_weights,
    local_weights,
    try_store,
)
from payload.orchestrate.inventories.chosen import Chosen
from payload.orchestrate.inventories.placeable import require_placeable
from payload.orchestrate.preflight.checks import check_cluster, lock_sha
from payload.orchestrate.preflight.report import Report, try_if_new, with_known_trial
from payload.orchestrate.runs.mirror import take_hashes
from payload.orchestrate.runs.planning import PlannedRun, plan_run
from payload.orchestrate.runs.remote_run import RemoteRun, hashes_there, require_own_there
from payload.orchestrate.runs.run_index import Order, is_copy, require_new, room_for
from payload.orchestrate.runs.site import (
    InventorySite,
    SiteRun,
    UnderWay,
    how_to_attach,
    refuse_under_way,
    refuse_where_copied_alive,
)
from payload.orchestrate.sites.ssh_run import ClusterRun, adopted, is_copy_of
from payload.orchestrate.ssh.cluster import Cluster, operator_key
from payload.orchestrate.ssh.node_code import Code, archive, look, make_room_for, this_code, unpack
from payload.orchestrate.ssh.remote_calls import (
    NODE_FOLDER,
    Begun,
    Login,
    NodeLook,
    all_or_raise,
    on_every_node,
)
from payload.orchestrate.ssh.run_keys import (
    RunKey,
    install_run_key,
    remove_dead_keys,
    remove_run_key,
)
from payload.orchestrate.ssh.start_claim import Claim, attempt_name, claimed
from payload.run_record.checkpoint_manifest_hashes import HASHES_FILE, ManifestHashes
from payload.run_record.run_files import RunPaths
from payload.run_record.run_identity import RunIdentity, known_identity
from payload.run_record.run_lock import starting
from payload.run_record.run_repair import known_config, known_dtype
from payload.run_record.suggested_run_commands import run_command
from payload.stack.node_paths import VENV

# A machine of ours lives for 30 days at most; on others a run that has no limit may go on for
# longer, and needs the key again only to bring a lost rank back.
_KEY_LASTS_S = 30 * 86_400.0
# The budget counts what the run has used; between its parts may be waits for a node.
_KEY_MARGIN_S = 86_400.0


class ClusterNotReadyError(TileforgeError):
    """A run was not started; the exit code is that of the check or program that failed."""

    def __init__(self, cause: str, code: int) -> None:
        super().__init__(cause)
        self.exit_code = ExitCode(code)


class Ssh(InventorySite):
    """The cluster of an inventory, whose head and workers are reached over SSH."""

    def __init__(
        self,
        chosen: Chosen,
        *,
        env: Mapping[str, str],
        talk: Console,
        argument: str | None = None,
        ssh_key: Path | None = None,
        quick: bool = False,
    ) -> None:
        """`argument` is `--inventory` as it was given, for messages.

        `quick` leaves out the trial of nodes that were not tried yet.
        """
        self._chosen = chosen
        self._argument = argument or "stack"
        self._inventory = chosen.inventory
        self._env = env
        self._talk = talk
        self._ssh_key = ssh_key
        self._quick = quick
        self._placement: Placement | None = None

    def check(self, config: RunConfig, env: Mapping[str, str]) -> None:
        """Raise ConfigError for what would fail on the cluster; devices are the nodes' to tell."""
        self._placement = require_placeable(config, self._chosen)
        time_limit(config.limits, self._inventory.nodes)

    def hold_to_resume(
        self, paths: RunPaths, under_way: UnderWay, held: ExitStack, talk: Console
    ) -> None:
        """Raise ConfigError for another cluster's run; the head keeps others from starting it."""
        with room_for(paths), starting(paths):  # the head knows nothing of a start here
            refuse_under_way(paths, under_way)
        _refuse_another_place(paths, self._inventory, talk=talk)

    def plan(self, paths: RunPaths, config: RunConfig, *, vocab_size: int | None) -> PlannedRun:
        """Return the plan of a run that is not started; no node is asked."""
        return plan_dry_run(
            paths.run_id,
            config,
            self._chosen,
            vocab_size=vocab_size,
            root=Path.cwd(),
            now_unix=time.time(),
        )

    def start(self, order: Order) -> SiteRun:
        """Check the cluster, bring what it lacks, and start the supervisor on its head.

        Connects once more where a connection breaks while the run is staged on the nodes: not
        during the checks, and not at the start itself. Returns the run that is on the cluster
        already where there is one.
        """
        local = _LocalFiles(
            data=order.config.data.folder(),
            weights=_weights(order.config.model.init, resumes=order.resumes),
        )
        key, talk = self._key(), self._talk
        with ExitStack() as held:
            cluster = held.enter_context(self._connect(key))
            report = self._require_fit(cluster, order.config)
            name = attempt_name(order.paths.run_id)
            stage = partial(self._stage, order, local, report, name=name, held=held)
            try:
                staged = stage(cluster)
            except (ConnectionLostError, NodesError) as error:
                talk.print(f"note: {_lost_connections(error)}. Connecting once more.")
                # What has arrived stays, but for the key: the second attempt may fail early.
                held.close()
                cluster = held.enter_context(self._connect(key))
                _remove_key(cluster, self._inventory, name, talk)
                staged = stage(cluster, lost=error)
            run, found, home = staged.run, staged.claim.running, staged.home
            if found is None:
                _start(run, cluster, order, name=name, talk=talk)
                return ClusterRun(run, talk=talk)
        theirs = RunPaths(order.paths.root.parent / found)
        if not is_copy_of(theirs, self._inventory):
            raise ConfigError(
                f"run {found} is on this cluster, and was not started from here, so nothing was "
                f"started. Follow it with: {self._how_to_attach(theirs)}"
            )
        talk.print(f"run {found} is on this cluster, so nothing was started; following that one")
        other = self._adopted(theirs, home=home, key=key)
        other.was_under_way = True
        return other

    def _stage(
        self,
        order: Order,
        local: _LocalFiles,
        report: Report,
        cluster: Cluster,
        *,
        name: str,
        held: ExitStack,
        lost: TileforgeError | None = None,
    ) -> _Staged:
        """Claim the head for as long as `held` lasts, and bring what the nodes lack.

        `name` is the attempt's. May be repeated with another connection where the first was `lost`.
        Brings nothing where a run is under way.
        """
        inventory = self._inventory
        answers = ask_nodes(
            inventory.nodes,
            cluster,
            code=this_code(),
            programs=programs_of(candidates(order.config.launch.launcher)[0]),
            data=local.data,
            weights=local.weights,
        )
        home = PurePosixPath(answers[inventory.head.name].home)
        key = self._key()
        run = RemoteRun(
            order.paths,
            inventory,
            run_dir=home / NODE_FOLDER / "runs" / order.paths.run_id,
            key=key,
            connect=lambda: self._connect(key),
        )
        found = _other_run(answers[inventory.head.name], order)
        if found is not None:
            return _Staged(run=run, home=home, claim=Claim(name=name, running=found))
        # Before anything is written or installed: two who resume one run must not mix.
        claim = held.enter_context(
            claimed(
                cluster,
                inventory.head,
                run_dir=run.run_dir,
                say=self._talk.print,
                name=name,
                lost=lost,
            )
        )
        if claim.running is None:
            self._prepare(order, local, run, cluster, report, answers, name)
        return _Staged(run=run, home=home, claim=claim)

    def find_run(self, run_id: str | None, *, runs_dir: Path, verb: str) -> SiteRun:
        """Ask the head for a run; without an id, for the one under way. Raises UsageError."""
        key = self._key()
        with self._connect(key) as cluster:
            answer = look(cluster.connect(self._inventory.head), this_code(), venv=VENV)
        run_id = run_id or answer.running
        if run_id is None:
            raise UsageError(
                f"no run is under way on {self._inventory.cluster}. Name one: {verb} RUN."
            )
        return self._adopted(RunPaths(runs_dir / run_id), home=PurePosixPath(answer.home), key=key)

    def _key(self) -> Path:
        return operator_key(self._inventory, given=self._ssh_key)

    def _connect(self, key: Path) -> Cluster:
        login = Login(user=self._inventory.ssh_user, key=key)
        return Cluster(self._inventory, login=login, env=self._env)

    def _adopted(self, paths: RunPaths, *, home: PurePosixPath, key: Path) -> ClusterRun:
        return adopted(
            paths,
            self._inventory,
            home=home,
            key=key,
            connect=lambda: self._connect(key),
            talk=self._talk,
        )

    def _how_to_attach(self, paths: RunPaths) -> str:
        return run_command("attach", paths, "--inventory", self._argument)

    def _require_fit(self, cluster: Cluster, config: RunConfig) -> Report:
        """Return what the nodes are. Raises ClusterNotReadyError where one is not fit."""
        need = self._chosen.gpu_need(config)
        report = check_cluster(self._inventory, cluster, lock_sha=lock_sha(), need=need)
        if self._quick:
            report = with_known_trial(report, self._chosen, config)
        else:
            report = try_if_new(report, self._chosen, cluster, config, self._placement)
        for line in report.lines():
            self._talk.print(line)
        if report.exit_code:
            names = ", ".join(report.failing_nodes())
            raise ClusterNotReadyError(f"nothing was started: {names} not fit", report.exit_code)
        return report

    def _prepare(
        self,
        order: Order,
        local: _LocalFiles,
        run: RemoteRun,
        cluster: Cluster,
        report: Report,
        answers: Answers,
        name: str,
    ) -> None:
        """Bring code, data, key and run folder to every node; nothing runs yet.

        `name` is the attempt's, which has the claim on the head.
        """
        inventory, talk, code = self._inventory, self._talk, this_code()
        bring_code(inventory.nodes, cluster, answers, code=code, talk=talk)
        address = order.config.storage.address()
        if address is not None:
            try_store(
                address,
                cluster.connect(inventory.head),
                answers[inventory.head.name],
                code=code,
                new_run=None if order.resumes else order.paths.run_id,
            )
        there = bring_data(inventory.nodes, cluster, answers, source=local.data, talk=talk)
        config = replace(order.config, data=replace(order.config.data, dir=str(there)))
        if local.weights is not None:
            init = bring_weights(inventory.head, cluster, answers, weights=local.weights, talk=talk)
            config = replace(config, model=replace(config.model, init=str(init)))
        for dead in remove_dead_keys(cluster, inventory):
            talk.print(f"note: the key {dead} was left on the nodes; it is gone now")
        try:
            lasts_s = _key_lasts_s(order.config.limits, inventory)
            run_key = install_run_key(cluster, inventory, name=name, lasts_s=lasts_s)
            planned = self._plan(order, report, answers, code=code, run_key=run_key)
            with order.folder() as paths:
                own = known_identity(paths)
                head = cluster.connect(inventory.head)
                require_own_there(head, run.run_dir, own)
                hashes = take_hashes(paths, hashes_there(head, run.run_dir))
                # First there: where a connection breaks, a resumed run's records here stay.
                _write_there(planned, cluster, config=config, own=own, hashes=hashes, talk=talk)
                for stale in _stale(order.paths):
                    stale.unlink(missing_ok=True)
                planned.write(order.paths)
            with room_for(run.paths):
                run.note(alive=True)
        except BaseException:
            # Also at Ctrl-C: nothing else would ever remove it.
            _remove_key(cluster, inventory, name, talk)
            raise
        for note in planned.notes():
            talk.print(note)
        talk.print(
            f"run {order.paths.run_id}: {planned.plan.world_size} rank(s) on "
            f"{len(inventory.nodes)} node(s) through {planned.plan.launcher}; a copy of "
            f"everything in {order.paths.root}"
        )

    def _plan(
        self, order: Order, report: Report, answers: Answers, *, code: Code, run_key: RunKey
    ) -> PlannedRun:
        """Return the plan as it holds on the nodes."""
        head = self._inventory.head.name
        home = PurePosixPath(answers[head].home)
        root = home / NODE_FOLDER
        libraries = {answer.tcmalloc for answer in answers.values()}
        port = answers[head].port
        if port is None:
            raise PreflightError(
                f"{head}: it has no free port for the ranks. Stop what holds them."
            )
        return plan_run(
            RunPaths(Path(root / "runs" / order.paths.run_id)),
            config=order.config,
            chosen=self._chosen,
            access=ClusterAccess(
                interface_of={name: facts.interface for name, facts in report.facts.items()},
                memory_bytes=report.least_memory_bytes(),
                head=head,
                code=root / f"payload-{code.digest}",
                ssh_config=run_key.config,
                tcmalloc_library=libraries.pop() if len(libraries) == 1 else None,
                measured=report.measured,
                has_bf16=report.have_bf16(),
            ),
            vocab_size=order.vocab_size,
            work_dir=Path(home),
            port=port,
            auto_size=order.auto_size(),
            kept_dtype=known_dtype(order.paths),
            placement=self._placement,
            resumes=order.resumes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LocalFiles:
    """Files here that the nodes need."""

    data: Path
    weights: Weights | None
    """Initial weights, if they are a folder here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """A run whose files are on the nodes, unless the claim says that another is under way."""

    run: RemoteRun
    home: PurePosixPath
    """The login's home on the nodes."""
    claim: Claim


def _lost_connections(error: TileforgeError) -> str:
    """Return which connections broke, and why. Raises `error` where that is not all there is."""
    failures = list(error.failures.values()) if isinstance(error, NodesError) else [error]
    if not all(isinstance(each, ConnectionLostError) for each in failures):
        raise error
    return "; ".join(each.cause for each in failures)


def _stale(paths: RunPaths) -> Iterator[Path]:
    """Yield records of an earlier attempt, which the copy must not show as this one's."""
    yield paths.summary
    yield paths.state
    yield paths.job
    yield from paths.root.glob("exits/*.json")


def _weights(init: str, *, resumes: bool) -> Weights | None:
    """Return the weights here; a resumed run starts from its checkpoint, so they may be gone."""
    return None if resumes and not can_see(home_path(init)) else local_weights(init)


def _refuse_another_place(paths: RunPaths, inventory: ClusterInventory, *, talk: Console) -> None:
    """Raise ConfigError for a run of another place, unless it has ended and is in a store."""
    has_store = known_config(paths).storage.address() is not None
    try:
        was = ClusterInventory.load(paths.inventory)
    except ConfigError as error:
        if is_copy(paths):
            talk.print(f"warning: {error} The run is taken for one of {inventory.cluster}.")
        elif not has_store:
            raise
        return
    if not was.access.is_this_machine and was.cluster == inventory.cluster:
        return
    if not has_store:
        raise ConfigError(
            f"run {paths.run_id} was on {was.cluster}, and its checkpoints are not on "
            f"{inventory.cluster}. Resume it where it was."
        )
    refuse_where_copied_alive(paths)


def _other_run(answer: NodeLook, order: Order) -> str | None:
    """Return the run that the head is busy with. Raises ConfigError for an id that is taken."""
    if answer.running is None and not order.resumes:
        require_new(order.paths)
    return answer.running


def _key_lasts_s(limits: LimitsSection, inventory: ClusterInventory) -> float:
    """Return the time for which the nodes trust the run's key, if nobody removes it."""
    limit = time_limit(limits, inventory.nodes)
    return _KEY_LASTS_S if limit is None else min(_KEY_LASTS_S, limit.seconds + _KEY_MARGIN_S)


def _write_there(
    planned: PlannedRun,
    cluster: Cluster,
    *,
    config: RunConfig,
    own: RunIdentity,
    hashes: ManifestHashes,
    talk: Console,
) -> None:
    """Write the run folder on every node; what lies in a file's place is set aside.

    `config` has the nodes' own paths, `own` is the run's identity, and by `hashes` the head knows
    the checkpoints in the store.
    """
    decided = planned.config
    there = replace(config, batch=decided.batch, memory=decided.memory)
    files = {planned.paths.identity.name: own.to_json()}
    if hashes.hashes:
        files[HASHES_FILE] = hashes.to_json()
    files |= replace(planned, config=there).files()
    content = archive({name: text.encode() for name, text in files.items()})
    run_dir = PurePosixPath(planned.paths.root)
    python, python_path = planned.plan.program[0], planned.plan.environment["PYTHONPATH"]

    def bring(node: Node) -> list[str]:
        connection = cluster.connect(node)
        moved = make_room_for(connection, run_dir, python=python, python_path=python_path)
        unpack(connection, content, run_dir)
        return moved

    outcomes = on_every_node(planned.inventory.nodes, bring)
    for name, sentences in all_or_raise(outcomes, what="writing the run folder").items():
        for sentence in sentences:
            talk.print(f"warning: {name}: {sentence}")


def _start(run: RemoteRun, cluster: Cluster, order: Order, *, name: str, talk: Console) -> None:
    """Start the supervisor. Raises ClusterNotReadyError where it has not begun."""
    try:
        begun = run.start(grace_s=order.grace_s, name=name)
    except (KeyboardInterrupt, TileforgeError):
        # It has a session of its own there, and may begin although nobody waits for it here.
        talk.print(f"whether the run has begun is not known; if so, {how_to_attach(run.paths)}")
        run.close()
        raise
    if begun.pid is not None:
        return
    words = begun.said or f"run {begun.running} was started in between"
    _remove_key(cluster, run.inventory, name, talk)
    run.close()
    raise ClusterNotReadyError(f"the supervisor did not start: {words}", _failure_code(begun))


def _failure_code(begun: Begun) -> int:
    """Return how the supervisor ended; a signal has no exit code, and 0 would be no failure."""
    known = [int(code) for code in ExitCode if code != ExitCode.OK]
    return next((code for code in known if code == begun.status), ExitCode.PREFLIGHT)


def _remove_key(cluster: Cluster, inventory: ClusterInventory, name: str, talk: Console) -> None:
    """Revoke an attempt's key; report a failure to do so without hiding the error before it."""
    try:
        remove_run_key(cluster, inventory, name)
    except TileforgeError as error:
        talk.print(f"warning: {error}")
