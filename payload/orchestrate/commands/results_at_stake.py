"""Finds and collects the results that would be lost with a cluster's machines."""

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
from payload.orchestrate.commands.head_runs import Head, query_head
from payload.orchestrate.commands.run_commands_options import RunChoice
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.mirror import Mirrored, read_mirrored
from payload.orchestrate.runs.run_index import all_runs
from payload.run_record.run_files import RunPaths, Summary, read_json

if TYPE_CHECKING:
    from payload.orchestrate.ssh.remote_run_folders import NodeRun

Copies = Sequence[tuple[RunPaths, Mirrored, ClusterInventory]]
"""The runs of a cluster that have a local copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsAtRisk:
    """Results that would be lost with the cluster's machines."""

    copies: Copies
    head: Head
    query_again: Callable[[], Head] | None
    """Queries the head again; None if the cluster was never built."""

    @property
    def missing(self) -> Sequence[RunPaths]:
        """Runs with an incomplete local copy, and runs that can still be active."""
        on_head = {run.run_id: run for run in self.head.runs}
        return [
            paths
            for paths, mirrored, inventory in self.copies
            if not self.head.has_lost(inventory.head)
            and not _is_whole(paths, mirrored, on_head.get(paths.run_id))
        ]

    @property
    def uncopied(self) -> Sequence[str]:
        """Ids of runs that have results on the head, but no local copy that can be updated."""
        known = {paths.run_id for paths, _, _ in self.copies}
        on_head = [run.run_id for run in self.head.runs if run.state or run.checkpoint]
        return [run_id for run_id in on_head if run_id not in known]

    def note_address(self, head: Node) -> None:
        """Write the head's current external address into the local copies of the head's runs."""
        for paths, _, inventory in self.copies:
            was = inventory.head
            if was.instance_id == self.head.machine and was.external_address is not None:
                node = replace(was, external_address=head.external_address)
                now = replace(inventory, nodes=(node, *inventory.nodes[1:]))
                write_whole(paths.inventory, now.to_json())

    def names(self) -> str:
        """Return the names of the runs to collect, and of the active run, as text."""
        names = ", ".join(paths.run_id for paths in self.missing) or "no run"
        return names + (f"; run {self.head.running} is active" if self.head.running else "")

    def refuse_losses(self, *, kept: str, force: str) -> None:
        """Raise ConfigError if a run can be active or has results that cannot be collected.

        `kept` completes "so ..." in the message, for example "nothing was destroyed". `force` is
        the command that ignores the results.
        """
        if self.head.query_error:
            raise ConfigError(
                f"cannot determine if a run is active, so {kept} (to continue anyway: {force}): "
                f"{self.head.query_error}"
            )
        running = self.head.running
        if running is not None:
            if running in [paths.run_id for paths, _, _ in self.copies]:
                how = _how_to_stop(running)
            else:
                how = (
                    "The run has no local copy. Stop it on the machine that started it, or attach: "
                    f"{_attach(running)}"
                )
            raise ConfigError(
                f"run {running} is active, so {kept}. {how} (to continue without its last steps: "
                f"{force})"
            )
        if self.uncopied:
            raise ConfigError(
                f"{len(self.uncopied)} run(s) have results on the head and no local copy (started "
                f"from another machine, removed or damaged): {', '.join(self.uncopied[:5])}, so "
                f"{kept}. Fetch each first: {_attach(self.uncopied[0])} (to continue without "
                f"these results: {force})"
            )

    def collect_missing(
        self, env: Mapping[str, str], *, kept: str, force: str
    ) -> Sequence[RunPaths]:
        """Collect the missing runs and return these runs. Raises ConfigError like `refuse_losses`.

        The head is queried again, because a run can have started or ended during the prompt.
        """
        now = self if self.query_again is None else replace(self, head=self.query_again())
        now.refuse_losses(kept=kept, force=force)
        missing = now.missing
        for paths in missing:
            _collect(paths, env, kept=kept, force=force)
        return missing


def results_at_risk(
    cluster: str,
    outputs: StackOutputs | None,
    env: Mapping[str, str],
    *,
    folder: Path,
    runs_dir: Path,
    talk: Console,
    retry_for_s: float = 0.0,
) -> ResultsAtRisk:
    """Compare the local copies of runs with the head; without `outputs`, the cluster was never
    built.

    If the head is booting, retry for `retry_for_s`.
    """
    project = None if outputs is None else outputs.project
    copies = list(_copies(runs_dir, cluster, project=project, talk=talk))
    # Without outputs, the machines of any earlier cluster of this name no longer exist.
    query_again, head = None, Head(is_gone=True)
    if outputs is not None:
        keys = [Path(mirrored.ssh_key) for _, mirrored, _ in copies]
        query_again = partial(query_head, outputs, env, folder=folder, other_keys=keys, talk=talk)
        head = query_again(retry_for_s=retry_for_s)
    for paths, mirrored, inventory in copies:
        if head.has_lost(inventory.head) and not _is_whole(paths, mirrored, None):
            talk.print(f"run {paths.run_id}: its results are lost: the machine no longer exists")
    return ResultsAtRisk(copies=copies, head=head, query_again=query_again)


def _copies(
    runs_dir: Path, cluster: str, *, project: str | None, talk: Console
) -> Iterator[tuple[RunPaths, Mirrored, ClusterInventory]]:
    """Yield the local copies that can be updated; damaged copies count as missing.

    A cluster of this name that is not in `project` is a different cluster.
    """
    for paths in all_runs(runs_dir):
        try:
            mirrored = read_mirrored(paths)
            if mirrored is None:
                continue
            inventory = ClusterInventory.load(paths.inventory)
        except ConfigError as error:
            talk.print(f"warning: run {paths.run_id}: the local copy is ignored: {error}")
            continue
        if inventory.cluster == cluster and (
            None in (project, inventory.project) or project == inventory.project
        ):
            yield paths, mirrored, inventory


def _is_whole(paths: RunPaths, mirrored: Mirrored, on_head: NodeRun | None) -> bool:
    """Return True if an ended run is complete locally; `on_head` lists the run's files on the head.

    The head's files are compared, because another operator can have resumed the collected run. Of
    the checkpoints, the local copy needs only the collected one: a failed run can lack a checkpoint
    of its last step.
    """
    if mirrored.alive:
        return False
    if on_head is not None:
        newest = paths.checkpoints / on_head.checkpoint / MANIFEST_FILE
        has_newest = not on_head.checkpoint or newest.is_file()
        if not has_newest or _sha256(paths.state) != on_head.state:
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
            f"run {paths.run_id} could not be collected, so {kept}: {why}. To continue without its "
            f"results: {force}"
        )
        again.exit_code = error.exit_code
        raise again from None
    mirrored = read_mirrored(paths)
    if mirrored is not None and mirrored.alive:
        raise ConfigError(
            f"run {paths.run_id} is active, so {kept}. {_how_to_stop(paths.run_id)} (to continue "
            f"without its last steps: {force})"
        )


def _attach(run_id: str) -> str:
    return command("orchestrate", "attach", run_id, "--inventory", "stack")


def _how_to_stop(run_id: str) -> str:
    return f"Stop it first: {command('orchestrate', 'stop', run_id)}"
