"""The site for clusters over SSH: checks a run, uploads its inputs and starts it on the head."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from rich.console import Console

from payload.config.run_config import RunConfig
from payload.core.errors import (
    ConfigError,
    ConnectionLostError,
    NodesError,
    PreflightError,
    TileforgeError,
    UsageError,
)
from payload.launch.ranks import Placement
from payload.machines.inventory import ClusterInventory, Node
from payload.orchestrate.inventories.chosen import ResolvedInventory
from payload.orchestrate.machine_profiles.cluster_profile import Answers, ClusterAccess, programs_of
from payload.orchestrate.machine_profiles.code_and_data_uploads import (
    inspect_nodes,
    try_store,
    upload_code,
)
from payload.orchestrate.machine_profiles.offline_plan import plan_dry_run
from payload.orchestrate.preflight.checks import check_cluster, lock_sha
from payload.orchestrate.preflight.report import Report, try_if_new, with_known_trial
from payload.orchestrate.runs.mirror import merge_hashes
from payload.orchestrate.runs.planning import PlanTarget, resolve, resolve_placement
from payload.orchestrate.runs.remote_run import RemoteRun, remote_hashes, require_own_remote
from payload.orchestrate.runs.resolved_plan import NodeCopies, ResolvedPlacement, ResolvedPlan
from payload.orchestrate.runs.run_index import is_copy, require_new, room_for
from payload.orchestrate.runs.run_request import RunRequest
from payload.orchestrate.runs.site import (
    FindActiveRun,
    InventorySite,
    SiteRun,
    refuse_active,
    refuse_where_copied_alive,
)
from payload.orchestrate.sites.ssh_run import ClusterRun, adopted, is_copy_of
from payload.orchestrate.sites.ssh_start import (
    ClusterNotReadyError,
    LocalFiles,
    key_lasts_s,
    lost_connections,
    remove_key,
    stale_records,
    start_supervisor,
    write_on_nodes,
)
from payload.orchestrate.ssh.cluster import Cluster, operator_key
from payload.orchestrate.ssh.node_code import Code, inspect_node, this_code
from payload.orchestrate.ssh.remote_calls import NODE_FOLDER, Login, NodeState
from payload.orchestrate.ssh.run_keys import RunKey, install_run_key, remove_stale_keys
from payload.orchestrate.ssh.start_claim import Claim, attempt_name, claimed
from payload.orchestrate.terminal.narrow import print_message
from payload.run_record.run_files import RunPaths
from payload.run_record.run_identity import known_identity
from payload.run_record.run_lock import start_lock
from payload.run_record.run_repair import known_config
from payload.run_record.suggested_run_commands import run_command
from payload.stack.node_paths import VENV


class Ssh(InventorySite):
    """The cluster of an inventory. The head and the workers are reached over SSH."""

    def __init__(
        self,
        chosen: ResolvedInventory,
        *,
        env: Mapping[str, str],
        talk: Console,
        argument: str | None = None,
        ssh_key: Path | None = None,
        quick: bool = False,
    ) -> None:
        """`argument` is the value of `--inventory`, for messages.

        `quick` skips the trial of nodes that were not tried yet.
        """
        self._chosen = chosen
        self._argument = argument or "stack"
        self._inventory = chosen.inventory
        self._env = env
        self._talk = talk
        self._ssh_key = ssh_key
        self._quick = quick

    def check(self, config: RunConfig, env: Mapping[str, str]) -> ResolvedPlacement:
        """Return the placement of the ranks; devices are checked later on the nodes.

        Raises ConfigError for settings that would fail on the cluster.
        """
        return resolve_placement(config, self._chosen)

    def hold_to_resume(
        self, paths: RunPaths, find_active_run: FindActiveRun, held: ExitStack, talk: Console
    ) -> None:
        """Raise ConfigError for a run of a different cluster; the head prevents a second start."""
        with room_for(paths), start_lock(paths):  # the head has no record of a local start
            refuse_active(paths, find_active_run)
        _refuse_another_cluster(paths, self._inventory, talk=talk)

    def plan(
        self,
        paths: RunPaths,
        config: RunConfig,
        *,
        vocab_size: int | None,
        placed: ResolvedPlacement | None = None,
        mean_tokens: float | None = None,
    ) -> ResolvedPlan:
        """Return the plan of a run without starting it or contacting a node."""
        return plan_dry_run(
            paths.run_id,
            config,
            self._chosen,
            vocab_size=vocab_size,
            placed=placed,
            mean_tokens=mean_tokens,
            root=Path.cwd(),
            now_unix=time.time(),
        )

    def start(self, request: RunRequest) -> SiteRun:
        """Check the cluster, upload missing files, and start the supervisor on the head.

        If a connection breaks while files are uploaded, reconnects once; a break during the checks
        or the start is an error. If a run is already active on the cluster, returns that run.
        """
        placed, local = request.placed, LocalFiles.of(request)
        assert placed is not None, "the request has the decisions of `check`"
        key, talk = self._key(), self._talk
        with ExitStack() as held:
            cluster = held.enter_context(self._connect(key))
            report = self._require_fit(cluster, request.config, placed.placement)
            name = attempt_name(request.paths.run_id)
            stage = partial(self._stage, request, placed, local, report, name=name, held=held)
            try:
                staged = stage(cluster)
            except (ConnectionLostError, NodesError) as error:
                print_message(talk, f"note: {lost_connections(error)}. Reconnecting.")
                # Uploaded files stay, but the key is removed: the second attempt may fail early.
                held.close()
                cluster = held.enter_context(self._connect(key))
                remove_key(cluster, name, talk)
                staged = stage(cluster, lost=error)
            if staged.claim.running is None:
                start_supervisor(staged.run, cluster, grace_s=request.grace_s, name=name, talk=talk)
                return ClusterRun(staged.run, talk=talk)
        other_paths = RunPaths(request.paths.root.parent / staged.claim.running)
        return self._active_run(other_paths, home=staged.home, key=key)

    def _active_run(self, other_paths: RunPaths, *, home: PurePosixPath, key: Path) -> ClusterRun:
        """Return the run that is active on the cluster, if this machine has a copy of it."""
        run_id = other_paths.run_id
        if not is_copy_of(other_paths, self._inventory):
            raise ConfigError(
                f"run {run_id} is active on this cluster, and was not started from here, so "
                f"nothing was started. Follow it with: {self._how_to_attach(other_paths)}"
            )
        self._talk.print(
            f"run {run_id} is active on this cluster, so nothing was started; following that run"
        )
        other = self._adopted(other_paths, home=home, key=key)
        other.was_running = True
        return other

    def _stage(
        self,
        request: RunRequest,
        placed: ResolvedPlacement,
        local: LocalFiles,
        report: Report,
        cluster: Cluster,
        *,
        name: str,
        held: ExitStack,
        lost: TileforgeError | None = None,
    ) -> _Staged:
        """Claim the head until `held` is closed, and upload the files that the nodes lack.

        `name` is the name of the attempt. After a `lost` connection, this call can be repeated with
        a new connection. If a run is active, nothing is uploaded.
        """
        inventory = self._inventory
        answers = inspect_nodes(
            inventory.nodes,
            cluster,
            code=this_code(),
            programs=programs_of(placed.launcher),
            data=local.data,
            weights=local.weights,
        )
        home = PurePosixPath(answers[inventory.head.name].home)
        key = self._key()
        run = RemoteRun(
            request.paths,
            inventory,
            run_dir=home / NODE_FOLDER / "runs" / request.paths.run_id,
            key=key,
            connect=lambda: self._connect(key),
        )
        found = _other_run(answers[inventory.head.name], request)
        if found is not None:
            return _Staged(run=run, home=home, claim=Claim(name=name, running=found))
        # Claim before anything is written, so that two commands cannot resume the same run.
        claim = held.enter_context(
            claimed(
                cluster,
                run_dir=run.run_dir,
                say=self._talk.print,
                name=name,
                lost=lost,
            )
        )
        if claim.running is None:
            self._prepare(request, placed, local, run, cluster, report, answers, name)
        return _Staged(run=run, home=home, claim=claim)

    def find_run(self, run_id: str | None, *, runs_dir: Path, verb: str) -> SiteRun:
        """Find a run on the head; without an id, find the active run. Raises UsageError."""
        key = self._key()
        with self._connect(key) as cluster:
            answer = inspect_node(cluster.connect(self._inventory.head), this_code(), venv=VENV)
        run_id = run_id or answer.running
        if run_id is None:
            raise UsageError(
                f"no run is active on {self._inventory.cluster}. Choose a run: {verb} RUN."
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

    def _require_fit(self, cluster: Cluster, config: RunConfig, placement: Placement) -> Report:
        """Return the report on the nodes. Raises ClusterNotReadyError if a node is not fit."""
        need = self._chosen.gpu_need(config)
        report = check_cluster(self._inventory, cluster, lock_sha=lock_sha(), need=need)
        if self._quick:
            report = with_known_trial(report, self._inventory.nodes, config)
        else:
            report = try_if_new(report, self._inventory.nodes, cluster, config, placement)
        for line in report.lines():
            self._talk.print(line)
        if report.exit_code:
            names = ", ".join(report.failing_nodes())
            raise ClusterNotReadyError(f"nothing was started: not fit: {names}", report.exit_code)
        return report

    def _prepare(
        self,
        request: RunRequest,
        placed: ResolvedPlacement,
        local: LocalFiles,
        run: RemoteRun,
        cluster: Cluster,
        report: Report,
        answers: Answers,
        name: str,
    ) -> None:
        """Upload code, data, key and run folder to every node; nothing is started yet.

        `name` is the name of the attempt that has claimed the head.
        """
        inventory, talk, code = self._inventory, self._talk, this_code()
        head = answers[inventory.head.name]
        upload_code(inventory.nodes, cluster, answers, code=code, talk=talk)
        address = request.config.storage.address()
        if address is not None:
            new_run = None if request.resumes else request.paths.run_id
            try_store(address, cluster.connect(inventory.head), head, code=code, new_run=new_run)
        copies = local.upload(cluster, answers, talk=talk)
        for dead in remove_stale_keys(cluster):
            print_message(talk, f"note: the stale key {dead} was removed from the nodes")
        try:
            lasts_s = key_lasts_s(placed.time_limit)
            run_key = install_run_key(cluster, name=name, lasts_s=lasts_s)
            access = _access_of(report, answers, head=inventory.head, code=code, run_key=run_key)
            target = self._target(request.paths.run_id, head, access, copies)
            planned = resolve(request.to_plan(), target, placed=placed)
            if not request.resumes:
                request.confirm(planned)
            _write(planned, request, run, cluster, talk=talk)
        except BaseException:
            # Remove the key even at Ctrl-C, because no later command would remove it.
            remove_key(cluster, name, talk)
            raise
        for note in planned.notes():
            print_message(talk, note)
        talk.print(
            f"run {request.paths.run_id}: {planned.plan.world_size} rank(s) on "
            f"{len(inventory.nodes)} node(s) through {planned.plan.launcher}; files are copied to "
            f"{request.paths.root}"
        )

    def _target(
        self, run_id: str, head: NodeState, access: ClusterAccess, copies: NodeCopies
    ) -> PlanTarget:
        if head.port is None:
            raise PreflightError(
                f"{access.head}: no port is free for the ranks. Stop programs that use many ports."
            )
        return PlanTarget(
            chosen=self._chosen,
            profile=access,
            paths=RunPaths(Path(head.home, NODE_FOLDER, "runs", run_id)),
            work_dir=Path(head.home),
            port=head.port,
            copies=copies,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """The result of staging: the files of the run are on the nodes, or another run is active
    there."""

    run: RemoteRun
    home: PurePosixPath
    """The login's home directory on the nodes."""
    claim: Claim


def _access_of(
    report: Report, answers: Answers, *, head: Node, code: Code, run_key: RunKey
) -> ClusterAccess:
    """Return the machine profile of the cluster, from the report and the answers of its nodes."""
    libraries = {answer.tcmalloc for answer in answers.values()}
    return ClusterAccess(
        interface_of={name: facts.interface for name, facts in report.facts.items()},
        memory_bytes=report.least_memory_bytes(),
        head=head.name,
        code=PurePosixPath(answers[head.name].home, NODE_FOLDER, f"payload-{code.digest}"),
        ssh_config=run_key.config,
        tcmalloc_library=libraries.pop() if len(libraries) == 1 else None,
        measured=report.measured,
        has_bf16=report.have_bf16(),
        architectures=frozenset(facts.architecture for facts in report.facts.values()),
    )


def _write(
    planned: ResolvedPlan, request: RunRequest, run: RemoteRun, cluster: Cluster, *, talk: Console
) -> None:
    """Write the run folder on the nodes and locally.

    Raises ConfigError if the folder belongs to a different run.
    """
    with request.folder() as paths:
        own = known_identity(paths)
        head = cluster.connect(cluster.inventory.head)
        require_own_remote(head, run.run_dir, own)
        hashes = merge_hashes(paths, remote_hashes(head, run.run_dir))
        # Nodes first: if a connection breaks, a resumed run's local records are unchanged.
        write_on_nodes(planned, cluster, own=own, hashes=hashes, talk=talk)
        for stale in stale_records(request.paths):
            stale.unlink(missing_ok=True)
        planned.write(request.paths)
    with room_for(run.paths):
        run.note(alive=True)


def _refuse_another_cluster(paths: RunPaths, inventory: ClusterInventory, *, talk: Console) -> None:
    """Raise ConfigError for a run of a different cluster.

    A run that has ended and has a store is allowed.
    """
    has_store = known_config(paths).storage.address() is not None
    try:
        was = ClusterInventory.load(paths.inventory)
    except ConfigError as error:
        if is_copy(paths):
            talk.print(f"warning: {error} The run is treated as a run of {inventory.cluster}.")
        elif not has_store:
            raise
        return
    if not was.access.is_this_machine and was.cluster == inventory.cluster:
        return
    if not has_store:
        raise ConfigError(
            f"run {paths.run_id} was on {was.cluster}, and its checkpoints are not on "
            f"{inventory.cluster}. Resume it on its own cluster."
        )
    refuse_where_copied_alive(paths)


def _other_run(answer: NodeState, request: RunRequest) -> str | None:
    """Return the id of the active run on the head. Raises ConfigError if a new id is in use."""
    if answer.running is None and not request.resumes:
        require_new(request.paths)
    return answer.running
