"""Finds resources that clusters left in a project, and reports the commands that remove them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

from payload.core.durations import in_words
from payload.core.errors import ConfigError, TeardownError
from payload.core.suggested_commands import command
from payload.orchestrate.clouds.cluster_records import recorded_clusters
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.cluster_of_resource import (
    by_cluster,
    check_cluster_name,
    expiry_of,
    is_made_by_program,
)
from payload.orchestrate.clouds.gcp.listing import list_everything
from payload.orchestrate.clouds.gcp.ownership import Ownership, describe_others, removable
from payload.orchestrate.clouds.gcp.removal_order import Resource, in_order
from payload.orchestrate.clouds.gcp.resource_kinds import (
    BUCKET,
    FILESTORE,
    KINDS,
    RUNNING,
    SAVED,
    SERVICE_ACCOUNT,
)
from payload.orchestrate.terminal.console import text_console
from payload.orchestrate.terminal.tables import table_lines
from payload.pricing.cloud_prices import filestore_price
from payload.stack.cluster_identity import IDENTITY_LABEL, identity_in, known_cluster_identity
from payload.stack.resource_labels import KEPT_LABEL

_SCHEMA_VERSION = 1
_LOSSES = {
    BUCKET: "  # deletes the results in the bucket",
    FILESTORE: "  # deletes the data on the instance",
    **dict.fromkeys(SAVED, "  # deletes the saved data"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Result of a search of the project."""

    project: str
    cluster: str | None
    left: Mapping[str, Sequence[Resource]]
    """Leftover resources by cluster."""
    owns: Callable[[Resource], bool]
    """Returns True for a leftover that has the cluster's identity, so that this folder can remove
    it."""
    others: Sequence[Resource] = ()
    """Resources with the cluster's name or in its network that belong to other users."""
    kept: Sequence[Resource] = ()
    """Buckets, which are kept on purpose."""
    living: Mapping[str, Sequence[Resource]] = field(default_factory=dict)
    """Resources of clusters within their lifetime, by cluster; empty if the search is for one
    cluster."""
    blind: Sequence[str] = ()
    """Reasons why some resources could not be listed."""
    node_usd: Mapping[str, float | None]
    now_unix: float

    def all_left(self) -> list[Resource]:
        """Return the leftovers of all clusters."""
        return [each for resources in self.left.values() for each in resources]

    def removable(self) -> list[Resource]:
        """Return the leftovers that this folder can remove, in the order of removal."""
        return removable(filter(self.owns, self.all_left()))

    def named(self) -> list[str]:
        """Return the options with which `sweep` repeats this search."""
        cluster = ["--cluster", self.cluster] if self.cluster else []
        return [*cluster, "--project", self.project]

    def may_live(self) -> bool:
        """Return whether resources that seem to be leftovers may be in use.

        True if the search was for all clusters and some locations could not be listed: a machine in
        such a location would show that its cluster is in use.
        """
        return self.cluster is None and bool(self.blind)

    def usd(self, resource: Resource) -> float | None:
        """Return dollars per hour, or None if unknown.

        The price is known for Filestore instances, and for running machines of clusters built from
        this folder.
        """
        if resource.kind == FILESTORE and resource.gib is not None:
            region = resource.location.rpartition("-")[0]
            return filestore_price(gib=resource.gib, region=region)
        if resource.kind != "instance" or resource.status not in RUNNING:
            return None
        return self.node_usd.get(resource.name)

    def lines(self, *, width: int) -> list[str]:
        """Return a table for each group: leftovers by cluster, kept, foreign, and in use."""
        names = ("kind", "name", "where", "age", "$/h")
        lines = []
        for title, resources in (
            *self._titled(self.left),
            ("kept, with results", self.kept),
            ("not this cluster's", self.others),
            *self._titled(self.living),
        ):
            if resources:
                rows = [self._row(each) for each in resources]
                lines += [title, *table_lines(names, rows, width=width)]
        return lines

    def _titled(
        self, groups: Mapping[str, Sequence[Resource]]
    ) -> list[tuple[str, Sequence[Resource]]]:
        return [
            (f"cluster {name}: {self._expiry_text(each)}", each) for name, each in groups.items()
        ]

    def _row(self, each: Resource) -> tuple[str, ...]:
        usd, made = self.usd(each), each.created_unix
        # The part before @ is unique in the project; the rest of the address repeats the project.
        name = each.name.partition("@")[0] if each.kind == SERVICE_ACCOUNT else each.name
        age = "-" if made is None else _age(self.now_unix - made)
        return each.kind, name, each.location, age, "-" if usd is None else f"{usd:.3f}"

    def _expiry_text(self, resources: Sequence[Resource]) -> str:
        expiry = expiry_of(resources)
        if expiry is None:
            return "left"
        if expiry < self.now_unix:
            return f"expired {_age(self.now_unix - expiry)} ago"
        return f"expires in {_age(expiry - self.now_unix)}"

    def to_json(self) -> str:
        """Return the result as a JSON document."""
        groups = {"left": self.left, "living": self.living}
        listed = {
            key: {c: [asdict(each) for each in found] for c, found in group.items()}
            for key, group in groups.items()
        }
        kept, others = ([asdict(each) for each in group] for group in (self.kept, self.others))
        document = {"schema_version": _SCHEMA_VERSION, "project": self.project, **listed}
        return json.dumps(
            document | {"kept": kept, "others": others, "blind": list(self.blind)}, indent=2
        )


def find_leftovers(
    google: Google,
    cluster: str | None,
    *,
    folder: Path,
    keep_buckets: bool,
    ownership: Ownership | None = None,
) -> Sweep:
    """Search the project for resources of `cluster`, or of every expired cluster.

    `ownership` proves which resources belong to `cluster`. By default the identity stored in
    `folder` is the proof. Without a proof, all resources built for a cluster of that name count as
    leftovers, and no resource can be removed.
    """
    if cluster is not None:
        check_cluster_name(cluster)
    now_unix = time.time()
    remembered = [each for each in recorded_clusters(folder) if each.project == google.project]
    # A resource's name is evidence only if the cluster was built or is named on the command line.
    # If `up` failed because a network of that name existed, the network belongs to another user.
    names = {each.cluster for each in remembered if each.came_up} | (
        {cluster} if cluster else set()
    )
    listing = list_everything(google)
    owned = by_cluster(listing.resources, known=names)
    proofs = {name: folder_ownership(folder, name) for name in owned}
    others: list[Resource] = []
    if cluster is not None:
        proof = proofs[cluster] = ownership or proofs.get(cluster) or Ownership()
        mine, others = _split(owned.get(cluster, []), proof, cluster)
        owned = {cluster: mine} if mine else {}
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
        owns=lambda each: any(proof.owns(each) for proof in proofs.values()),
        others=others,
        kept=kept,
        living=living,
        blind=listing.blind,
        node_usd={n: usd for each in remembered for n, usd in each.node_usd.items()},
        now_unix=now_unix,
    )


def _split(
    group: Sequence[Resource], proof: Ownership, cluster: str
) -> tuple[list[Resource], list[Resource]]:
    """Return this cluster's resources, and the resources of other clusters with the same name."""
    mine, others = proof.split(group)
    if not proof.is_known:
        mine = [each for each in group if is_made_by_program(each, cluster)]
        others = [each for each in group if each not in mine]
    # An older version created this cluster's results buckets without an identity.
    old = [each for each in others if each.kind == BUCKET and not identity_in(each.labels)]
    return [*mine, *old], [each for each in others if each not in old]


def print_leftovers(found: Sweep) -> None:
    """Print the tables of `found` to stdout."""
    out = text_console(stderr=False)
    for line in found.lines(width=out.width):
        out.print(line)


def report_leftovers(found: Sweep, *, talk: Console) -> None:
    """Report that no resource is left.

    Raises TeardownError if resources are left or may be left.
    """
    whose = f"of cluster {found.cluster}" if found.cluster else "of expired clusters"
    left = found.all_left()
    if left and found.may_live():
        raise TeardownError(
            f"{len(left)} resource(s) in project {found.project} look left over, but their "
            f"cluster can be in use in locations that were not listed: {'; '.join(found.blind)} "
            "Nothing was removed. If the cluster no longer exists, remove them: "
            + command("orchestrate", "sweep", "--cluster", next(iter(found.left)), "--delete")
        )
    for line in describe_others(found.others):
        talk.print(f"not this cluster's, kept: {line}")
    if left:
        _print_removal_commands(found, talk=talk)
        usd = [price for each in left if (price := found.usd(each)) is not None]
        cost = f", at least ${sum(usd):.2f}/h" if usd else ""
        again = command("orchestrate", "sweep", *found.named(), "--delete")
        raise TeardownError(
            f"{len(left)} resource(s) {whose} left in project {found.project}{cost}. "
            + (f"Remove them with the commands above, or: {again}" if found.removable() else "")
            + (f" Some could not be listed: {'; '.join(found.blind)}" if found.blind else "")
        )
    if found.blind:
        raise TeardownError(
            f"no resources {whose} found in project {found.project}, but some could not be "
            f"listed: {'; '.join(found.blind)}"
        )
    if found.kept:
        names = ", ".join(f"gs://{each.name}" for each in found.kept)
        talk.print(f"kept with its results: {names}")
    talk.print(
        f"0 resources {whose} left in project {found.project}: checked {len(KINDS) + 3} kinds in "
        "all zones and regions"
    )
    if found.cluster is None:
        talk.print(
            "note: only clusters whose lifetime has ended count; --cluster NAME searches for one "
            "cluster"
        )


def _print_removal_commands(found: Sweep, *, talk: Console) -> None:
    """Print a removal command for each leftover that this folder owns, and who owns the rest."""
    mine = in_order(filter(found.owns, found.all_left()))
    for each in mine:
        note = _LOSSES.get(each.kind, "")
        talk.print(f"remove with: {each.removal(project=found.project)}{note}")
    for cluster, resources in found.left.items():
        for line in describe_others([each for each in resources if each not in mine]):
            talk.print(
                f"cluster {cluster}: {line}. Its label `{IDENTITY_LABEL}` is not this folder's, so "
                "this cluster was built from another folder. Run "
                f"`{command('orchestrate', 'down')}` in that folder. If the folder is lost: "
                + command("orchestrate", "sweep", "--cluster", cluster, "--project", found.project)
                + " --identity ID --delete, where ID is the value of that label (`none` if it is "
                "missing)"
            )


def folder_ownership(folder: Path, cluster: str) -> Ownership:
    """Return the folder's stored identity as proof of ownership; a damaged file proves nothing."""
    identity = None
    with suppress(ConfigError):
        identity = known_cluster_identity(folder, cluster)
    return Ownership(identities=frozenset((identity,) if identity else ()))


def _age(seconds: float) -> str:
    unit_s = 1 if seconds < 60 else 60
    return in_words(unit_s * round(max(0.0, seconds) / unit_s))
