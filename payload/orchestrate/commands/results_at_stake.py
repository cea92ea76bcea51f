"""Results that would be lost with a cluster's machines."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from payload.core.errors import ConfigError, TileforgeError
from payload.core.files import write_whole
from payload.core.regular_files import read_bytes
from payload.core.suggested_commands import command
from payload.formats.checkpoint_listing import MANIFEST_FILE, checkpoint_step
from payload.machines.inventory import ClusterInventory, Node
from payload.orchestrate.clouds.pulumi.stack_outputs import StackOutputs
from payload.orchestrate.commands.collect import collect
from payload.orchestrate.commands.run_choice import RunChoice
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.mirror import Mirrored, read_mirrored
from payload.orchestrate.runs.run_index import all_runs
from payload.run_record.run_files import RunPaths, Summary, read_json

if TYPE_CHECKING:
    from payload.orchestrate.ssh.node_runs import NodeRun
from payload.orchestrate.commands.head_runs import Head, ask_head

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


def _is_whole(paths: RunPaths, mirrored: Mirrored, there: NodeRun | None) -> bool:
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
