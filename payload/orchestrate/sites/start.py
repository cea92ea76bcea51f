"""`run` on a cluster: check it, bring what it lacks, start the supervisor on its head, follow."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path, PurePosixPath

from rich.console import Console

from payload.engines import require_known_backend
from payload.errors import ConfigError, ExitCode, PreflightError, TileforgeError
from payload.hints import run_command
from payload.inventory import ClusterInventory, Node
from payload.launch.budget import time_limit
from payload.launch.launchers.registry import candidates
from payload.launch.plan import auto_batch_size
from payload.orchestrate.commands.attach import attach_to, follow_to_the_end, is_copy
from payload.orchestrate.planning import PlannedRun, plan_run, settle_initial
from payload.orchestrate.preflight.checks import check_cluster, lock_sha, operator_key
from payload.orchestrate.preflight.report import Report, try_if_new
from payload.orchestrate.run.follow import how_to_attach
from payload.orchestrate.run.store import create_run, find_run, room_for
from payload.orchestrate.run.store import is_copy as is_mirror
from payload.orchestrate.run.there import RemoteRun
from payload.orchestrate.sites.choose import Chosen, check_data, require_placeable
from payload.orchestrate.sites.cluster import (
    Answers,
    ClusterAccess,
    Weights,
    ask_nodes,
    bring_code,
    bring_data,
    bring_weights,
    local_weights,
    programs_of,
)
from payload.orchestrate.ssh.connection import Cluster
from payload.orchestrate.ssh.files import Code, archive, make_room_for, this_code, unpack
from payload.orchestrate.ssh.keys import (
    RunKey,
    claimed,
    install_run_key,
    remove_dead_keys,
    remove_run_key,
)
from payload.orchestrate.ssh.streams import (
    NODE_FOLDER,
    Begun,
    Login,
    NodeLook,
    all_or_raise,
    on_every_node,
)
from payload.results import RunPaths, new_run_id
from payload.run_config import LimitsSection, RunConfig
from payload.run_repair import make_room
from payload.tracking import missing_notes

# A machine of ours lives for 30 days at most; on others a run that has no limit may go on for
# longer, and needs the key again only to bring a lost rank back.
_KEY_LASTS_S = 30 * 86_400.0
# The budget counts what the run has used; between its parts may be waits for a node.
_KEY_MARGIN_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the operator asks for."""

    config: RunConfig
    data: Path
    """The data folder here."""
    vocab_size: int
    weights: Weights | None
    """What the model starts from, if that is a folder here."""
    paths: RunPaths
    """The local copy."""
    resumes: bool
    chosen: Chosen


def run_on_cluster(
    arguments: argparse.Namespace,
    chosen: Chosen,
    *,
    config_of: Callable[[RunPaths | None], RunConfig],
    env: Mapping[str, str],
    talk: Console,
) -> int:
    """Start a run on the cluster, or follow the one that is on it, and return its exit code."""
    wanted = _wanted(arguments, chosen, config_of=config_of, talk=talk)
    inventory = chosen.inventory
    key = operator_key(inventory, given=arguments.ssh_key)

    def connect() -> Cluster:
        return Cluster(inventory, login=Login(user=inventory.ssh_user, key=key), env=env)

    with connect() as cluster:
        report = check_cluster(inventory, cluster, lock_sha=lock_sha())
        if not arguments.quick:
            report = try_if_new(report, chosen, cluster, wanted.config)
        for line in report.lines():
            talk.print(line)
        if report.exit_code:
            talk.print(f"error: nothing was started: {', '.join(report.failing_nodes())} not fit")
            return report.exit_code
        answers = ask_nodes(
            inventory,
            cluster,
            code=this_code(),
            programs=programs_of(candidates(wanted.config.launch.launcher)[0]),
            data=wanted.data,
            weights=wanted.weights,
        )
        head = answers[inventory.head.name]
        found = _other_run(head, wanted)
        code = None
        if found is None:
            run_dir = PurePosixPath(head.home, NODE_FOLDER, "runs", wanted.paths.run_id)
            run = RemoteRun(wanted.paths, inventory, run_dir=run_dir, key=key, connect=connect)
            # Before anything is written or installed: two who resume one run must not mix.
            with claimed(cluster, inventory, run_dir=run_dir, say=talk.print) as claim:
                found = claim.running
                if found is None:
                    _prepare(wanted, run, cluster, report, answers, name=claim.name, talk=talk)
                    code = _start(run, cluster, arguments, name=claim.name, talk=talk)
    if found is None:
        with closing(run):
            return _follow(run, arguments, talk) if code is None else code
    theirs = RunPaths(arguments.runs_dir / found)
    if not is_copy(theirs, inventory):
        how = run_command("attach", theirs, "--inventory", arguments.inventory or "stack")
        raise ConfigError(
            f"run {found} is on this cluster, and was not started from here, so nothing was "
            f"started. Follow it with: {how}"
        )
    talk.print(f"run {found} is on this cluster, so nothing was started; following that one")
    return attach_to(
        theirs,
        inventory,
        home=PurePosixPath(head.home),
        key=key,
        connect=connect,
        arguments=arguments,
    )


def _wanted(
    arguments: argparse.Namespace,
    chosen: Chosen,
    *,
    config_of: Callable[[RunPaths | None], RunConfig],
    talk: Console,
) -> Wanted:
    """Config and place of the run; what is wrong with them is found here. Raises ConfigError."""
    resumed = find_run(arguments.runs_dir, arguments.resume) if arguments.resume else None
    if resumed is not None:
        _refuse_another_place(resumed, chosen.inventory, talk=talk)
    config = config_of(resumed)
    require_placeable(config, chosen)
    time_limit(config.limits, chosen.inventory)
    require_known_backend(config.distributed)
    data = Path(config.data.dir)
    vocab_size = check_data(
        data, sequence_length=config.data.sequence_length, task=config.task.kind
    )
    if resumed is None:
        config = settle_initial(config, vocab_size=vocab_size, say=talk.print, download=False)
    now, suffix = datetime.now(), secrets.token_hex(2)
    run_id = arguments.run_id or new_run_id(config.run.name, now=now, suffix=suffix)
    return Wanted(
        config=config,
        data=data,
        vocab_size=vocab_size,
        weights=_weights(config.model.init, resumes=resumed is not None),
        paths=resumed or RunPaths(arguments.runs_dir / run_id),
        resumes=resumed is not None,
        chosen=chosen,
    )


def _weights(init: str, *, resumes: bool) -> Weights | None:
    """A resumed run starts from its checkpoint, so that the folder may be gone by now."""
    return None if resumes and not Path(init).exists() else local_weights(init)


def _refuse_another_place(paths: RunPaths, inventory: ClusterInventory, *, talk: Console) -> None:
    try:
        was = ClusterInventory.load(paths.inventory)
    except ConfigError as error:
        if not is_mirror(paths):
            raise
        talk.print(f"warning: {error} The run is taken for one of {inventory.cluster}.")
        return
    if was.access.kind == "local" or was.cluster != inventory.cluster:
        raise ConfigError(
            f"run {paths.run_id} was on {was.cluster}, and its checkpoints are not on "
            f"{inventory.cluster}. Resume it where it was."
        )


def _other_run(answer: NodeLook, wanted: Wanted) -> str | None:
    """The run that the head is busy with, if any."""
    running = answer.running
    if running is None and not wanted.resumes and wanted.paths.root.exists():
        raise ConfigError(
            f"run {wanted.paths.run_id} exists in {wanted.paths.root.parent}. Continue it with "
            f"--resume {wanted.paths.run_id}, or choose another --run-id."
        )
    return running


def _prepare(
    wanted: Wanted,
    run: RemoteRun,
    cluster: Cluster,
    report: Report,
    answers: Answers,
    *,
    name: str,
    talk: Console,
) -> None:
    """Bring code, data, key and run folder to every node; nothing runs yet.

    `name` is the attempt's, which has the claim on the head.
    """
    inventory = wanted.chosen.inventory
    home = PurePosixPath(answers[inventory.head.name].home)
    code = this_code()
    bring_code(inventory, cluster, answers, code=code, talk=talk)
    config = replace(
        wanted.config,
        data=replace(
            wanted.config.data,
            dir=str(bring_data(inventory, cluster, answers, source=wanted.data, talk=talk)),
        ),
    )
    if wanted.weights is not None:
        init = bring_weights(inventory, cluster, answers, weights=wanted.weights, talk=talk)
        config = replace(config, model=replace(config.model, init=str(init)))
    for dead in remove_dead_keys(cluster, inventory):
        talk.print(f"note: the key {dead} was left on the nodes; it is gone now")
    try:
        lasts_s = _key_lasts_s(config.limits, inventory)
        run_key = install_run_key(cluster, inventory, name=name, lasts_s=lasts_s)
        planned = _plan(wanted, report, answers, code=code, run_key=run_key, home=home)
        _write(wanted, planned, cluster, there=config, talk=talk)
        with room_for(run.paths):
            run.note(alive=True)
    except BaseException:
        # Also at Ctrl-C: nothing else would ever remove it.
        _remove_key(cluster, inventory, name, talk)
        raise
    for note in planned.plan.notes:
        talk.print(f"note: {note}")
    for line in missing_notes(planned.config):
        talk.print(line)
    talk.print(
        f"run {wanted.paths.run_id}: {planned.plan.world_size} rank(s) on {len(inventory.nodes)} "
        f"node(s) through {planned.plan.launcher}; a copy of everything in {wanted.paths.root}"
    )


def _key_lasts_s(limits: LimitsSection, inventory: ClusterInventory) -> float:
    """How long the nodes trust the run's key, also if nobody ever removes it."""
    limit = time_limit(limits, inventory)
    return _KEY_LASTS_S if limit is None else min(_KEY_LASTS_S, limit.seconds + _KEY_MARGIN_S)


def _write(
    wanted: Wanted, planned: PlannedRun, cluster: Cluster, *, there: RunConfig, talk: Console
) -> None:
    """Write the run folder, here and on every node.

    `there` is the config with the nodes' own paths. What lies in a file's place is set aside.
    """
    paths = wanted.paths
    with room_for(paths):
        if not wanted.resumes:
            create_run(paths.root.parent, paths.run_id)
        for sentence in make_room(paths):
            talk.print(f"warning: {sentence}")
        for stale in (paths.summary, paths.state, *paths.root.glob("exits/*.json")):
            stale.unlink(missing_ok=True)
        planned.write(paths)
    decided = planned.config
    there = replace(there, batch=decided.batch, memory=decided.memory)
    files = replace(planned, config=there).files()
    content = archive({name: text.encode() for name, text in files.items()})
    run_dir = PurePosixPath(planned.paths.root)
    python, python_path = planned.plan.program[0], planned.plan.environment["PYTHONPATH"]

    def bring(node: Node) -> list[str]:
        connection = cluster.connect(node)
        moved = make_room_for(connection, run_dir, python=python, python_path=python_path)
        unpack(connection, content, run_dir)
        return moved

    outcomes = on_every_node(wanted.chosen.inventory.nodes, bring)
    for name, sentences in all_or_raise(outcomes, what="writing the run folder").items():
        for sentence in sentences:
            talk.print(f"warning: {name}: {sentence}")


def _plan(
    wanted: Wanted,
    report: Report,
    answers: Answers,
    *,
    code: Code,
    run_key: RunKey,
    home: PurePosixPath,
) -> PlannedRun:
    """The plan as it holds on the nodes."""
    root = home / NODE_FOLDER
    libraries = {answer.tcmalloc for answer in answers.values()}
    head = wanted.chosen.inventory.head.name
    port = answers[head].port
    if port is None:
        raise PreflightError(f"{head}: it has no free port for the ranks. Stop what holds them.")
    return plan_run(
        RunPaths(Path(root / "runs" / wanted.paths.run_id)),
        config=wanted.config,
        chosen=wanted.chosen,
        access=ClusterAccess(
            interface_of={name: facts.interface for name, facts in report.facts.items()},
            memory_bytes=report.least_memory_bytes(),
            head=head,
            code=root / f"payload-{code.digest}",
            ssh_config=run_key.config,
            tcmalloc_library=libraries.pop() if len(libraries) == 1 else None,
            measured=report.measured,
        ),
        vocab_size=wanted.vocab_size,
        work_dir=Path(home),
        port=port,
        auto_size=auto_batch_size(wanted.paths.plan),
    )


def _start(
    run: RemoteRun, cluster: Cluster, arguments: argparse.Namespace, *, name: str, talk: Console
) -> int | None:
    """Start the supervisor; returns the exit code where it has not begun."""
    try:
        begun = run.start(grace_s=arguments.grace, name=name)
    except (KeyboardInterrupt, TileforgeError):
        # It has a session of its own there, and may begin although nobody waits for it here.
        talk.print(f"whether the run has begun is not known; if so, {how_to_attach(run.paths)}")
        run.close()
        raise
    if begun.pid is not None:
        return None
    words = begun.said or f"run {begun.running} was started in between"
    talk.print(f"error: the supervisor did not start: {words}")
    _remove_key(cluster, run.inventory, name, talk)
    return _failure_code(begun)


def _failure_code(begun: Begun) -> int:
    """Return how the supervisor ended; a signal has no exit code, and 0 would be no failure."""
    known = [int(code) for code in ExitCode if code != ExitCode.OK]
    return next((code for code in known if code == begun.status), ExitCode.PREFLIGHT)


def _follow(run: RemoteRun, arguments: argparse.Namespace, talk: Console) -> int:
    """Follow the run to its end unless detached."""
    if arguments.detach:
        talk.print(f"detached; {how_to_attach(run.paths)}")
        run.refresh()
        return ExitCode.OK
    return follow_to_the_end(run, arguments=arguments, talk=talk)


def _remove_key(cluster: Cluster, inventory: ClusterInventory, name: str, talk: Console) -> None:
    """Take an attempt's key back; a failure to is said, and does not hide why it is taken back."""
    try:
        remove_run_key(cluster, inventory, name)
    except TileforgeError as error:
        talk.print(f"warning: {error}")
