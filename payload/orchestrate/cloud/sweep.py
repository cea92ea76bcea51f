"""`sweep`: is anything left in the cloud? Lists it, with what removes it."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from payload.errors import ExitCode, TeardownError, UsageError
from payload.hints import command
from payload.orchestrate.cloud.asks import confirm
from payload.orchestrate.cloud.endpoints import Endpoints
from payload.orchestrate.cloud.google import Google
from payload.orchestrate.cloud.listing import list_everything, remove
from payload.orchestrate.cloud.resources import (
    BUCKET,
    KEPT_LABEL,
    KINDS,
    Resource,
    by_cluster,
    check_cluster_name,
    expiry_of,
)
from payload.orchestrate.cloud.stack import recall, remembered_clusters
from payload.orchestrate.console import text_console

_SCHEMA_VERSION = 1
_RUNNING = ("RUNNING", "STAGING", "PROVISIONING", "REPAIRING")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What a look at the project has shown."""

    project: str
    cluster: str | None
    left: Mapping[str, Sequence[Resource]]
    """By cluster: what should not be there."""
    kept: Sequence[Resource] = ()
    """What stays on purpose: buckets."""
    living: Mapping[str, Sequence[Resource]] = field(default_factory=dict)
    """Clusters within their lifetime; only looked at when none was named."""
    blind: Sequence[str] = ()
    """Why not everything was seen."""
    node_usd: Mapping[str, float | None]
    now_unix: float

    def all_left(self) -> list[Resource]:
        """Everything that should not be there."""
        return [each for resources in self.left.values() for each in resources]

    def named(self) -> list[str]:
        """Return the options of `sweep` that look for the same."""
        cluster = ["--cluster", self.cluster] if self.cluster else []
        return [*cluster, "--project", self.project]

    def may_live(self) -> bool:
        """Whether what looks left may be in use: no cluster was named, and machines that would show
        that theirs lives may be where it was not possible to look."""
        return self.cluster is None and bool(self.blind)

    def usd(self, resource: Resource) -> float | None:
        """Dollars per hour, where known: of running machines that this folder has seen come up."""
        if resource.kind != "instance" or resource.status not in _RUNNING:
            return None
        return self.node_usd.get(resource.name)

    def table(self) -> Table:
        """What is left, and what is kept or living."""
        table = Table(box=None, pad_edge=False)
        for name in ("cluster", "kind", "name", "where", "age", "$/h", "status"):
            table.add_column(name, no_wrap=True)
        for cluster, resources in self.left.items():
            for each in resources:
                self._row(table, cluster, each, self._word(resources))
        for each in self.kept:
            self._row(table, self.cluster or "-", each, "kept: it holds results")
        for cluster, resources in self.living.items():
            for each in resources:
                self._row(table, cluster, each, self._word(resources))
        return table

    def _row(self, table: Table, cluster: str, each: Resource, word: str) -> None:
        usd = self.usd(each)
        made = each.created_unix
        table.add_row(
            cluster,
            each.kind,
            each.name,
            each.location,
            "-" if made is None else age(self.now_unix - made),
            "-" if usd is None else f"{usd:.3f}",
            word,
        )

    def _word(self, resources: Sequence[Resource]) -> str:
        expiry = expiry_of(resources)
        if expiry is None:
            return "left"
        if expiry < self.now_unix:
            return f"expired {age(self.now_unix - expiry)} ago"
        return f"expires in {age(expiry - self.now_unix)}"

    def to_json(self) -> str:
        """The same for programs."""
        groups = {"left": self.left, "living": self.living}
        listed = {
            word: {c: [asdict(each) for each in found] for c, found in group.items()}
            for word, group in groups.items()
        }
        kept = [asdict(each) for each in self.kept]
        document = {"schema_version": _SCHEMA_VERSION, "project": self.project, **listed}
        return json.dumps(document | {"kept": kept, "blind": list(self.blind)}, indent=2)


def sweep(arguments: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Look, show, and remove when asked to."""
    folder = Path.cwd()
    project = project_of(arguments.project, arguments.cluster, env, folder=folder)
    google = Google(project, endpoints=Endpoints.from_env(env))
    found = look(google, arguments.cluster, folder=folder, keep_buckets=arguments.keep_buckets)
    talk = text_console(stderr=True)
    if arguments.delete and found.all_left() and not found.may_live():
        _show(found, as_json=False)
        _remove(google, found, assume_yes=arguments.yes, talk=talk)
        found = look(google, arguments.cluster, folder=folder, keep_buckets=arguments.keep_buckets)
    _show(found, as_json=arguments.json)
    conclude(found, talk=talk)
    return ExitCode.OK


def look(google: Google, cluster: str | None, *, folder: Path, keep_buckets: bool) -> Sweep:
    """What is in the project of `cluster`, or of every cluster whose time is over."""
    if cluster is not None:
        check_cluster_name(cluster)
    now_unix = time.time()
    remembered = [each for each in remembered_clusters(folder) if each.project == google.project]
    # By its name alone a thing counts only where the cluster has come up, or was named: after an
    # `up` that found a network of that name there, the network is somebody else's.
    names = {each.cluster for each in remembered if each.came_up} | (
        {cluster} if cluster else set()
    )
    listing = list_everything(google)
    owned = by_cluster(listing.resources, known=names)
    if cluster is not None:
        owned = {name: found for name, found in owned.items() if name == cluster}
    buckets = [r for found in owned.values() for r in found if r.kind == BUCKET]
    kept = [r for r in buckets if keep_buckets or KEPT_LABEL in r.labels]
    rest = {n: [r for r in found if r not in kept] for n, found in owned.items()}
    rest = {name: found for name, found in rest.items() if found}
    living = {
        name: found
        for name, found in rest.items()
        if cluster is None and (expiry_of(owned[name]) or 0) > now_unix
    }
    return Sweep(
        project=google.project,
        cluster=cluster,
        left={name: found for name, found in rest.items() if name not in living},
        kept=kept,
        living=living,
        blind=listing.blind,
        node_usd={n: usd for each in remembered for n, usd in each.node_usd.items()},
        now_unix=now_unix,
    )


def conclude(found: Sweep, *, talk: Console) -> None:
    """Say that nothing is left. Raises TeardownError when something is, or cannot be ruled out."""
    whose = f"of cluster {found.cluster}" if found.cluster else "of expired clusters"
    left = found.all_left()
    if left and found.may_live():
        raise TeardownError(
            f"{len(left)} resource(s) in project {found.project} look left, but their cluster may "
            f"live where nobody could look, so nothing is removed: {'; '.join(found.blind)} If you "
            f"know that it is over: sweep --cluster {next(iter(found.left))} --delete"
        )
    if left:
        for each in left:
            note = "  # deletes the results in it" if each.kind == BUCKET else ""
            talk.print(f"remove with: {each.removal(project=found.project)}{note}")
        usd = [price for each in left if (price := found.usd(each)) is not None]
        cost = f", at least ${sum(usd):.2f}/h" if usd else ""
        again = command("orchestrate", "sweep", *found.named(), "--delete")
        raise TeardownError(
            f"{len(left)} resource(s) {whose} left in project {found.project}{cost}. The commands "
            f"above remove them, in this order; or: {again}"
            + (f" And not everything was seen: {'; '.join(found.blind)}" if found.blind else "")
        )
    if found.blind:
        raise TeardownError(
            f"nothing {whose} was seen in project {found.project}, but it is not shown that "
            f"nothing is left: {'; '.join(found.blind)}"
        )
    if found.kept:
        names = ", ".join(f"gs://{each.name}" for each in found.kept)
        talk.print(f"kept with its results: {names}")
    talk.print(
        f"0 resources {whose} left in project {found.project}: looked for {len(KINDS) + 3} kinds "
        "in all zones and regions"
    )


def project_of(
    given: str | None, cluster: str | None, env: Mapping[str, str], *, folder: Path
) -> str:
    """The project to look in. Raises UsageError when nothing says which."""
    if given:
        return given
    known = recall(folder, cluster) if cluster else None
    if known is not None:
        return known.project
    for name in ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT"):
        if env.get(name):
            return env[name]
    projects = {each.project for each in remembered_clusters(folder)}
    if len(projects) == 1:
        return projects.pop()
    raise UsageError(
        "which project? Name it with --project"
        + (f" (this folder has used {', '.join(sorted(projects))})." if projects else ".")
    )


def age(seconds: float) -> str:
    """`12 min`, `3.5 h` or `4 d`."""
    if seconds < 3600:
        return f"{max(0, seconds) / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} d"


def _show(found: Sweep, *, as_json: bool) -> None:
    out = text_console(stderr=False)
    if as_json:
        out.print(found.to_json())
    elif found.left or found.kept or found.living:
        out.print(found.table())


def _remove(google: Google, found: Sweep, *, assume_yes: bool, talk: Console) -> None:
    going = [each for each in found.all_left() if each.kind != BUCKET]
    if not going:
        return
    if not confirm(
        f"Remove these {len(going)} resource(s) from {found.project}? Buckets stay.",
        assume_yes=assume_yes,
    ):
        raise TeardownError("nothing was removed.")
    for reason in remove(google, going):
        talk.print(f"warning: {reason}")
