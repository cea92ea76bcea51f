"""`down`: bring home what is missing, `pulumi destroy`, and look that nothing is left."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from payload.core.errors import ConfigError, ExitCode, TileforgeError, UsageError
from payload.core.files import write_whole
from payload.core.suggested_commands import command
from payload.core.validation import read_bytes
from payload.formats.checkpoint_files import MANIFEST_FILE, checkpoint_step
from payload.machines.inventory import ClusterInventory, Node
from payload.orchestrate.access.local import LocalAccess
from payload.orchestrate.cloud.filestore import may_delete, own_filestores
from payload.orchestrate.cloud.firewall_drift import StackState, stack_state
from payload.orchestrate.cloud.google import Endpoints, Google
from payload.orchestrate.cloud.machine_status import start_head
from payload.orchestrate.cloud.ownership import ownership_of
from payload.orchestrate.cloud.pulumi import Pulumi, PulumiError, cluster_name, settings
from payload.orchestrate.cloud.pulumi_operations import Operations
from payload.orchestrate.cloud.stack_outputs import (
    CACHE_FILE,
    MachineGoneError,
    StackOutputs,
    cluster_folder,
    forget_bucket,
    outputs_if_any,
    pin_node,
    recall_outputs,
    remember,
)
from payload.orchestrate.commands.cluster_name_conflict import own_identity, require_own_state
from payload.orchestrate.commands.run_commands import RunChoice, collect
from payload.orchestrate.commands.sweep import (
    Bucket,
    conclude,
    delete_bucket,
    destroy_and_look,
    find_bucket,
    look,
    project_of,
)
from payload.orchestrate.runs.mirror import Mirrored, read_mirrored
from payload.orchestrate.runs.run_index import all_runs
from payload.orchestrate.ssh.keys import operator_key_path, require_private
from payload.orchestrate.terminal.console import confirm, confirm_by_name, text_console
from payload.run_record.run_files import RunPaths, Summary, read_json
from payload.stack.cluster_identity import recorded_cluster_identity

if TYPE_CHECKING:
    from payload.orchestrate.ssh.files import RunThere


# A machine that has no host keys yet is booting, and nobody has reached it over SSH.
_KEYS_S = 5.0
_BOOT_S, _RETRY_S = 300.0, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The head, as far as it could be asked."""

    machine: str | None = None
    """The cloud's number of it, where known."""
    is_gone: bool = False
    """True if the cloud has no such machine any more."""
    running: str | None = None
    """The run that is going on, whoever started it."""
    runs: Sequence[RunThere] = ()
    """Its copy of every run, as far as it could be asked."""
    unasked: str | None = None
    """Why it could not be asked for one."""

    def has_lost(self, node: Node) -> bool:
        """Return whether the disk of `node`, the head of some run, went with its machine."""
        if self.machine is None or node.instance_id is None:
            return self.is_gone
        return self.machine != node.instance_id


def ask_head(
    outputs: StackOutputs,
    env: Mapping[str, str],
    *,
    folder: Path,
    more_keys: Sequence[Path],
    talk: Console,
    patience_s: float = 0.0,
) -> Head:
    """Ask it, and say so when it cannot be asked.

    The operator's key is the cluster's own in `folder`, else the first of `more_keys` that exists.
    A head that boots is asked again for `patience_s`.
    """
    inventory = outputs.inventory
    name = inventory.head.name
    talk.print(f"asking {name} whether a run is going on")
    ends = time.monotonic() + patience_s
    head = _ask(outputs, env, folder=folder, more_keys=more_keys, ends=ends, talk=talk)
    if head.is_gone:
        talk.print(f"{name}: its machine does not exist any more")
    if head.unasked:
        talk.print(f"warning: it is not known whether a run is going on: {head.unasked}")
    return head


def _ask(
    outputs: StackOutputs,
    env: Mapping[str, str],
    *,
    folder: Path,
    more_keys: Sequence[Path],
    ends: float,
    talk: Console,
) -> Head:
    # paramiko takes half a second to import.
    from payload.orchestrate.ssh.connection import Cluster
    from payload.orchestrate.ssh.files import runs_on
    from payload.orchestrate.ssh.remote_calls import Login

    inventory = outputs.inventory
    own = cluster_folder(folder, inventory.cluster)
    try:
        node = pin_node(
            inventory.head,
            Google(outputs.project, endpoints=Endpoints.from_env(env)),
            cache=own / CACHE_FILE,
            say=talk.print,
            deadline_s=max(_KEYS_S, ends - time.monotonic()),
        )
    except MachineGoneError:
        return Head(is_gone=True)
    except TileforgeError as error:
        return Head(unasked=str(error))
    keys = [operator_key_path(folder, cluster=inventory.cluster), *more_keys]
    key = next((each for each in keys if each.exists()), None)
    if key is None:
        return Head(machine=node.instance_id, unasked=f"there is no key here: {keys[0]}")
    if key == keys[0]:
        require_private(key)
    pinned, login = replace(inventory, nodes=(node,)), Login(user=inventory.ssh_user, key=key)
    while True:
        try:
            with Cluster(pinned, login=login, env=env) as cluster:
                found = runs_on(cluster.connect(node))
            break
        except TileforgeError as error:
            if time.monotonic() + _RETRY_S > ends:
                return Head(machine=node.instance_id, unasked=str(error))
        time.sleep(_RETRY_S)
    return Head(machine=node.instance_id, running=found.running, runs=found.runs)


Copies = Sequence[tuple[RunPaths, Mirrored, ClusterInventory]]
"""The runs of a cluster that have a copy here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtStake:
    """Results that would be lost with the cluster's machines."""

    copies: Copies
    head: Head
    ask: Callable[[], Head] | None
    """A function that asks the head again; None where there is none."""

    @property
    def missing(self) -> Sequence[RunPaths]:
        """Runs whose copy here lacks something that the head has, or that may be going on."""
        there = {run.run_id: run for run in self.head.runs}
        return [
            paths
            for paths, mirrored, inventory in self.copies
            if not self.head.has_lost(inventory.head)
            and not _is_whole(paths, mirrored, there.get(paths.run_id))
        ]

    @property
    def elsewhere(self) -> Sequence[str]:
        """Runs that have something on the head and no copy here that can be brought up to date."""
        known = {paths.run_id for paths, _, _ in self.copies}
        there = [run.run_id for run in self.head.runs if run.state or run.checkpoint]
        return [run_id for run_id in there if run_id not in known]

    def note_address(self, head: Node) -> None:
        """Write the external address that the head has now into the copies of its runs."""
        for paths, _, inventory in self.copies:
            was = inventory.head
            if was.instance_id == self.head.machine and was.external_address is not None:
                node = replace(was, external_address=head.external_address)
                now = replace(inventory, nodes=(node, *inventory.nodes[1:]))
                write_whole(paths.inventory, now.to_json())

    def names(self) -> str:
        """Name the runs to collect, for people, and the one that goes on."""
        names = ", ".join(paths.run_id for paths in self.missing) or "nothing is missing here"
        return names + (f"; run {self.head.running} is going on" if self.head.running else "")

    def refuse_losses(self, *, kept: str, force: str) -> None:
        """Raise ConfigError when a run may go on, or has results that nothing here collects.

        `kept` says what is not done then, `force` is the command that does it all the same.
        """
        if self.head.unasked:
            raise ConfigError(
                f"it is not known whether a run is going on, so {kept} (go on all the same: "
                f"{force}): {self.head.unasked}"
            )
        running = self.head.running
        if running is not None:
            if running in [paths.run_id for paths, _, _ in self.copies]:
                how = _how_to_stop(running)
            else:
                how = f"It has no copy here. Stop it elsewhere, or here after: {_attach(running)}"
            raise ConfigError(
                f"run {running} is going on, so {kept}. {how} (or lose its end: {force})"
            )
        if self.elsewhere:
            raise ConfigError(
                f"{len(self.elsewhere)} run(s) that have no copy here (started elsewhere, removed "
                "or damaged) have results on the "
                f"head: {', '.join(self.elsewhere[:5])}, so {kept}. Bring each here first: "
                f"{_attach(self.elsewhere[0])} "
                f"(or lose them: {force})"
            )

    def bring_home(self, env: Mapping[str, str], *, kept: str, force: str) -> Sequence[RunPaths]:
        """Collect the runs and return them. Raises when one cannot be; the words are as above.

        The head is asked once more: a run may have begun, or gone on and ended, while the operator
        was thinking.
        """
        now = self if self.ask is None else replace(self, head=self.ask())
        now.refuse_losses(kept=kept, force=force)
        missing = now.missing
        for paths in missing:
            _collect(paths, env, kept=kept, force=force)
        return missing


def at_stake(
    cluster: str,
    outputs: StackOutputs | None,
    env: Mapping[str, str],
    *,
    folder: Path,
    runs_dir: Path,
    talk: Console,
    patience_s: float = 0.0,
) -> AtStake:
    """Look here and ask the head. Without `outputs` the cluster never came up, and has none.

    A head that boots is asked again for `patience_s`.
    """
    project = None if outputs is None else outputs.project
    copies = list(_copies(runs_dir, cluster, project=project, talk=talk))
    # Of a stack without outputs whatever had this name and results before is gone.
    ask, head = None, Head(is_gone=True)
    if outputs is not None:
        keys = [Path(mirrored.ssh_key) for _, mirrored, _ in copies]
        ask = partial(ask_head, outputs, env, folder=folder, more_keys=keys, talk=talk)
        head = ask(patience_s=patience_s)
    for paths, mirrored, inventory in copies:
        if head.has_lost(inventory.head) and not _is_whole(paths, mirrored, None):
            talk.print(f"run {paths.run_id}: the machine that had its results is gone")
    return AtStake(copies=copies, head=head, ask=ask)


def _copies(
    runs_dir: Path, cluster: str, *, project: str | None, talk: Console
) -> Iterator[tuple[RunPaths, Mirrored, ClusterInventory]]:
    """Yield what can be brought up to date; of a damaged copy the head tells whether it matters.

    A cluster of the name in another project than `project` is another one.
    """
    for paths in all_runs(runs_dir):
        try:
            mirrored = read_mirrored(paths)
            if mirrored is None:
                continue
            inventory = ClusterInventory.load(paths.inventory)
        except ConfigError as error:
            talk.print(f"warning: run {paths.run_id} counts as one without a copy here: {error}")
            continue
        if inventory.cluster == cluster and (
            None in (project, inventory.project) or project == inventory.project
        ):
            yield paths, mirrored, inventory


def _is_whole(paths: RunPaths, mirrored: Mirrored, there: RunThere | None) -> bool:
    """Return whether all of a run that has ended is here; `there` is what the head has of it now.

    Somebody else may have resumed it since it was collected. Without the head's word the copy's has
    to do: the newest checkpoint of a run that failed may be older than its last step, or there is
    none, so that what was collected tells.
    """
    if mirrored.alive:
        return False
    if there is not None:
        newest = paths.checkpoints / there.checkpoint / MANIFEST_FILE
        has_newest = not there.checkpoint or newest.is_file()
        if not has_newest or _sha256(paths.state) != there.state:
            return False
    collected = mirrored.collected
    if collected is not None and (not collected or (paths.checkpoints / collected).is_dir()):
        return True
    try:
        summary, checkpoint = read_json(Summary, paths.summary), paths.newest_checkpoint()
    except ConfigError:
        return False
    if summary is None or checkpoint is None or summary.status == "running":
        return False
    return checkpoint_step(checkpoint) >= summary.steps


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(read_bytes(path)).hexdigest()
    except OSError:
        return None


def _collect(paths: RunPaths, env: Mapping[str, str], *, kept: str, force: str) -> None:
    options = RunChoice(runs_dir=paths.root.parent, run=paths.run_id)
    try:
        collect(options, LocalAccess(env))
    except TileforgeError as error:
        why = str(error).rstrip(".")
        again = TileforgeError(
            f"run {paths.run_id} is not brought home, so {kept}: {why}. To go on without its "
            f"results: {force}"
        )
        again.exit_code = error.exit_code
        raise again from None
    mirrored = read_mirrored(paths)
    if mirrored is not None and mirrored.alive:
        raise ConfigError(
            f"run {paths.run_id} is going on, so {kept}. {_how_to_stop(paths.run_id)} "
            f"(or lose its end: {force})"
        )


def _attach(run_id: str) -> str:
    return command("orchestrate", "attach", run_id, "--inventory", "stack")


def _how_to_stop(run_id: str) -> str:
    return f"Stop it first: {command('orchestrate', 'stop', run_id)}"


_WORDS = {"kept": "nothing was destroyed", "force": "down --without-collect"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DownOptions:
    """Options of `down`."""

    stack: str | None
    cluster: str | None
    project: str | None
    runs_dir: Path
    without_collect: bool
    delete_bucket: str | None
    delete_filestore: list[str]
    """Names of Filestore instances that may be deleted with their data."""
    dry_run: bool
    yes: bool


def down(options: DownOptions, env: Mapping[str, str]) -> int:
    """Take the three steps and print each result. Raises TeardownError when something is left."""
    talk = text_console(stderr=True)
    folder = Path.cwd()
    pulumi = Pulumi(env, folder=folder, stack=options.stack)
    state = _state_if_readable(pulumi)
    cluster, project, outputs = _which(pulumi, options, env, state=state, folder=folder, talk=talk)
    if options.dry_run:
        identity, _ = recorded_cluster_identity(folder, cluster)
    else:
        identity = own_identity(folder, cluster, told=state.identities)
    # The state may list what is in another project than the config's.
    places = [
        (
            Google(each, endpoints=Endpoints.from_env(env)),
            ownership_of(state, identity, project=each),
        )
        for each in dict.fromkeys((project, *state.projects))
    ]
    google, own = places[0]
    # Before anything is destroyed: without these the last step could not look.
    google.check_credentials()
    for where, proof in places if state.parts else ():
        require_own_state(where, cluster, proof, kept="nothing was destroyed", talk=talk)
    instances = (own_filestores(where, state, proof) for where, proof in places)
    data = sorted(set(chain.from_iterable(instances)))
    # First of all: without the instance nothing of its network can be destroyed, and a stopped head
    # is started, and billed, only for a cluster that goes.
    if not options.dry_run and not may_delete(
        data, named=options.delete_filestore, kept=_WORDS["kept"]
    ):
        talk.print("nothing was destroyed")
        return ExitCode.OK
    stake = None
    if not options.without_collect:
        started = None
        if outputs is not None:
            started = start_head(
                google,
                outputs.inventory,
                own,
                dry_run=options.dry_run,
                assume_yes=options.yes,
                talk=talk,
            )
        if outputs is not None and started is not None:
            outputs = replace(outputs, inventory=started)
        stake = at_stake(
            cluster,
            outputs,
            env,
            folder=folder,
            runs_dir=options.runs_dir,
            talk=talk,
            patience_s=0.0 if started is None else _BOOT_S,
        )
        if started is not None:
            stake.note_address(started.head)
    bucket = None
    if options.delete_bucket is not None:
        bucket = find_bucket(google, options.delete_bucket, cluster=cluster, own=own)
    _say_plan(stake, cluster, project, bucket, data, talk=talk)
    if options.dry_run:
        found = look(google, cluster, folder=folder, keep_buckets=True, ownership=own)
        text_console(stderr=False).print(found.table())
        talk.print("dry run: nothing was collected or destroyed")
        return ExitCode.OK
    if stake is not None:
        stake.refuse_losses(**_WORDS)
    if not confirm(f"Destroy cluster {cluster}?", assume_yes=options.yes):
        talk.print("nothing was destroyed")
        return ExitCode.OK
    if bucket is not None and not confirm_by_name(f"Delete {bucket} for good?", name=bucket.name):
        talk.print("nothing was destroyed")
        return ExitCode.OK
    brought = [] if stake is None else stake.bring_home(env, **_WORDS)
    talk.print(f"1/3 collect: {len(brought)} run(s) brought home")
    try:
        operations = Operations(
            pulumi=pulumi, cluster=cluster, folder=folder, talk=talk, assume_yes=options.yes
        )
        destroy_and_look(
            operations, google, state=state, steps=3, may_go=lambda each: each.name in data
        )
        for where, proof in places[1:]:
            left = look(where, cluster, folder=folder, keep_buckets=True, ownership=proof)
            conclude(left, talk=talk)
        if bucket is not None:
            delete_bucket(google, bucket)
            talk.print(f"gs://{bucket.name}: deleted")
            _forget(bucket.name, cluster, pulumi, folder=folder, talk=talk)
    except KeyboardInterrupt:
        talk.print(
            f"down was interrupted: what is left of {cluster} is billed until its lifetime ends, "
            "and it was not looked what that is. Go on with: "
            f"{command('orchestrate', 'down')}; "
            f"look with: sweep --cluster {cluster} --project {project}"
        )
        raise
    return ExitCode.OK


def _forget(bucket: str, cluster: str, pulumi: Pulumi, *, folder: Path, talk: Console) -> None:
    """Take a deleted bucket out of record and config: anybody may take its name."""
    forget_bucket(folder, cluster, bucket)
    with suppress(PulumiError):
        if settings(pulumi).get("bucket") == bucket:
            pulumi.ask("config", "set", "bucket", "create")
            talk.print("the stack's config named it; the next `up` makes another: bucket create")


def _state_if_readable(pulumi: Pulumi) -> StackState:
    """Return the stack's state; of a damaged one nothing, so that the identity alone is proof."""
    try:
        return stack_state(pulumi)
    except PulumiError as error:
        if error.trouble != "damaged state":
            raise
        return StackState(machines=(), parts=())


def _which(
    pulumi: Pulumi,
    options: DownOptions,
    env: Mapping[str, str],
    *,
    state: StackState,
    folder: Path,
    talk: Console,
) -> tuple[str, str, StackOutputs | None]:
    """Return the cluster, its project, and its outputs if it ever came up.

    Those of a damaged state are the ones that this folder remembers. Raises ConfigError where it
    remembers none, unless results may be lost.
    """
    try:
        outputs = outputs_if_any(pulumi)
    except PulumiError as error:
        if error.trouble != "damaged state":
            raise
        return _without_state(error, pulumi, options, env, folder=folder, talk=talk)
    if outputs is None:
        # It failed half-way, and is the one that must go.
        known = settings(pulumi)
        cluster = options.cluster or cluster_name(pulumi, known)
        given = options.project or next(iter(state.projects), None) or known.get("project")
        return cluster, project_of(given, cluster, env, folder=folder), None
    remember(outputs, folder=folder, made_bucket=state.bucket)
    cluster = outputs.inventory.cluster
    if options.cluster not in (None, cluster):
        raise ConfigError(f"--cluster {options.cluster}: the stack's cluster is {cluster}.")
    if options.project not in (None, outputs.project):
        raise ConfigError(f"--project {options.project}: the stack's is {outputs.project}.")
    return cluster, outputs.project, outputs


def _without_state(
    error: PulumiError,
    pulumi: Pulumi,
    options: DownOptions,
    env: Mapping[str, str],
    *,
    folder: Path,
    talk: Console,
) -> tuple[str, str, StackOutputs | None]:
    talk.print(f"warning: {error}")
    known: dict[str, Any] = {}
    with suppress(PulumiError):
        known = settings(pulumi)
    try:
        cluster = options.cluster or cluster_name(pulumi, known)
    except PulumiError:
        raise UsageError("which cluster? Name it with --cluster.") from None
    project = project_of(options.project or known.get("project"), cluster, env, folder=folder)
    outputs = recall_outputs(folder, cluster, project=project)
    if outputs is None and not options.without_collect:
        raise ConfigError(
            f"the state is damaged, and this folder has never reached {cluster}, so it is not "
            "known whether results are on its head, and nothing was destroyed. Repair the state "
            "as above; or destroy them too: "
            + command(
                *("orchestrate", "down", "--without-collect"),
                *("--cluster", cluster, "--project", project),
            )
        )
    talk.print(f"what {cluster} has in {project} comes from Google Cloud, without the state")
    return cluster, project, outputs


def _say_plan(
    stake: AtStake | None,
    cluster: str,
    project: str,
    bucket: Bucket | None,
    data: Sequence[str],
    *,
    talk: Console,
) -> None:
    """Say what the steps will do; lines with a step's number are results."""
    last = "a results bucket stays" if bucket is None else f"then {bucket}"
    first = "left out (--without-collect)" if stake is None else stake.names()
    also = "".join(f", Filestore {name} with all data on it" for name in data)
    talk.print(f"to collect: {first}")
    talk.print(f"to destroy: every machine, disk and network{also}; {last}")
    talk.print(f"to look for: what is left of {cluster} in {project}")
