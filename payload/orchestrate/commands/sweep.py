"""`sweep` and teardown: is anything left in the cloud? Lists it, and removes it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import quote

from rich.console import Console
from rich.table import Table

from payload.core.durations import in_words
from payload.core.errors import (
    CloudAuthError,
    CloudError,
    ConfigError,
    ExitCode,
    TeardownError,
    TileforgeError,
    UsageError,
)
from payload.core.suggested_commands import command
from payload.core.validation import checked, shown
from payload.orchestrate.cloud.failures import StackBusyError, explain
from payload.orchestrate.cloud.filestore import may_delete
from payload.orchestrate.cloud.firewall_drift import StackState
from payload.orchestrate.cloud.google import CloudMissingError, Endpoints, Google
from payload.orchestrate.cloud.listing import bucket_in, list_everything, remove
from payload.orchestrate.cloud.ownership import (
    NO_IDENTITY,
    Ownership,
    describe_others,
    ownership_of,
    removable,
)
from payload.orchestrate.cloud.pulumi import PulumiError
from payload.orchestrate.cloud.pulumi_operations import Operations
from payload.orchestrate.cloud.resources import (
    BUCKET,
    CLUSTER_LABEL,
    FILESTORE,
    KEPT_LABEL,
    KINDS,
    RUNNING,
    Resource,
    by_cluster,
    check_cluster_name,
    expiry_of,
    in_order,
    is_made_by_program,
)
from payload.orchestrate.cloud.stack_outputs import recall, remembered_clusters
from payload.orchestrate.terminal.console import confirm, confirm_by_name, text_console
from payload.orchestrate.terminal.tables import table
from payload.pricing.cloud_prices import filestore_price
from payload.stack.cloud_need import CLOUD_NAME
from payload.stack.cluster_identity import (
    PATTERN,
    WANTED,
    identity_in,
    known_cluster_identity,
    recorded_cluster_identity,
)

_SCHEMA_VERSION = 1
_LOSSES = {BUCKET: "  # deletes the results in it", FILESTORE: "  # deletes the data on it"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Result of a search of the project."""

    project: str
    cluster: str | None
    left: Mapping[str, Sequence[Resource]]
    """By cluster: what should not be there."""
    owns: Callable[[Resource], bool]
    """Tells what of `left` may be removed from here: what carries the cluster's identity."""
    others: Sequence[Resource] = ()
    """Resources with a named cluster's name, or in its network, that are not its own."""
    kept: Sequence[Resource] = ()
    """Resources that stay on purpose: buckets."""
    living: Mapping[str, Sequence[Resource]] = field(default_factory=dict)
    """Clusters within their lifetime; only looked at when none was named."""
    blind: Sequence[str] = ()
    """Why not everything was seen."""
    node_usd: Mapping[str, float | None]
    now_unix: float

    def all_left(self) -> list[Resource]:
        """Return everything that should not be there."""
        return [each for resources in self.left.values() for each in resources]

    def removable(self) -> list[Resource]:
        """Return what is left and may be removed from here, in the order of removal."""
        return removable(filter(self.owns, self.all_left()))

    def named(self) -> list[str]:
        """Return the options of `sweep` that look for the same."""
        cluster = ["--cluster", self.cluster] if self.cluster else []
        return [*cluster, "--project", self.project]

    def may_live(self) -> bool:
        """Return whether resources that look left may be in use.

        No cluster was named, and machines that would show that theirs lives may be where it was not
        possible to look.
        """
        return self.cluster is None and bool(self.blind)

    def usd(self, resource: Resource) -> float | None:
        """Return dollars an hour, where known.

        They are of running machines that this folder has seen come up, and of Filestore instances.
        """
        if resource.kind == FILESTORE and resource.gib is not None:
            region = resource.location.rpartition("-")[0]
            return filestore_price(gib=resource.gib, region=region)
        if resource.kind != "instance" or resource.status not in RUNNING:
            return None
        return self.node_usd.get(resource.name)

    def table(self) -> Table:
        """Return a table of resources that are left, kept or in use."""
        made = table("cluster", "kind", "name", "where", "age", "$/h", "status")
        for cluster, resources in self.left.items():
            for each in resources:
                self._row(made, cluster, each, self._word(resources))
        for each in self.kept:
            self._row(made, self.cluster or "-", each, "kept: it holds results")
        for each in self.others:
            self._row(made, "-", each, "not this cluster's")
        for cluster, resources in self.living.items():
            for each in resources:
                self._row(made, cluster, each, self._word(resources))
        return made

    def _row(self, table: Table, cluster: str, each: Resource, word: str) -> None:
        usd = self.usd(each)
        made = each.created_unix
        table.add_row(
            cluster,
            each.kind,
            each.name,
            each.location,
            "-" if made is None else _age(self.now_unix - made),
            "-" if usd is None else f"{usd:.3f}",
            word,
        )

    def _word(self, resources: Sequence[Resource]) -> str:
        expiry = expiry_of(resources)
        if expiry is None:
            return "left"
        if expiry < self.now_unix:
            return f"expired {_age(self.now_unix - expiry)} ago"
        return f"expires in {_age(expiry - self.now_unix)}"

    def to_json(self) -> str:
        """Return the same as JSON."""
        groups = {"left": self.left, "living": self.living}
        listed = {
            word: {c: [asdict(each) for each in found] for c, found in group.items()}
            for word, group in groups.items()
        }
        kept, others = ([asdict(each) for each in group] for group in (self.kept, self.others))
        document = {"schema_version": _SCHEMA_VERSION, "project": self.project, **listed}
        return json.dumps(
            document | {"kept": kept, "others": others, "blind": list(self.blind)}, indent=2
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Options of `sweep`."""

    cluster: str | None
    project: str | None
    identity: str | None
    keep_buckets: bool
    delete: bool
    delete_filestore: list[str]
    """Names of Filestore instances that may be deleted with their data."""
    json: bool
    yes: bool


def sweep(options: SweepOptions, env: Mapping[str, str]) -> int:
    """Look, show, and remove when asked to."""
    folder = Path.cwd()
    project = project_of(options.project, options.cluster, env, folder=folder)
    _check_identity(options)
    google = Google(project, endpoints=Endpoints.from_env(env))
    named = _named_proof(options, folder)
    again = partial(
        look,
        google,
        options.cluster,
        folder=folder,
        keep_buckets=options.keep_buckets,
        ownership=named,
    )
    found = again()
    talk = text_console(stderr=True)
    if options.delete and found.removable() and not found.may_live():
        _show(found, as_json=False)
        if named is not None and not confirm_by_name(
            f"No proof on this machine that cluster {options.cluster} (identity "
            f"{', '.join(named.identities)}) is yours. Delete its resources?",
            name=str(options.cluster),
        ):
            raise TeardownError("nothing was removed.")
        data = [each.name for each in found.removable() if each.kind == FILESTORE]
        if not may_delete(data, named=options.delete_filestore, kept="nothing was removed"):
            raise TeardownError("nothing was removed.")
        _remove(google, found, assume_yes=options.yes or named is not None, talk=talk)
        found = again()
    _show(found, as_json=options.json)
    conclude(found, talk=talk)
    return ExitCode.OK


def _named_proof(options: SweepOptions, folder: Path) -> Ownership | None:
    """Return what --identity proves, where it names another cluster than the folder's own.

    With --delete, what the folder's file says is as if it were named: its name is asked for.
    """
    if options.cluster is None:
        return None
    own, identity = _folders_own(folder, options.cluster).identities, options.identity
    if identity is None and options.delete and not own:
        with suppress(ConfigError):
            identity, _ = recorded_cluster_identity(folder, options.cluster)
    if identity is None or identity in own:
        return None
    return Ownership(identities=frozenset((identity,)), cluster=options.cluster)


def _check_identity(options: SweepOptions) -> None:
    """Raise UsageError for an --identity that cannot be."""
    identity = options.identity
    if identity is None:
        return
    if not (identity == NO_IDENTITY or PATTERN.fullmatch(identity)):
        raise UsageError(
            f"--identity {shown(identity)}: must be {WANTED} as `sweep` prints them, or "
            f"{NO_IDENTITY!r} for what has no identity."
        )
    if options.cluster is None:
        raise UsageError("--identity: name the cluster, too: --cluster NAME")


def look(
    google: Google,
    cluster: str | None,
    *,
    folder: Path,
    keep_buckets: bool,
    ownership: Ownership | None = None,
) -> Sweep:
    """Return the resources of `cluster` in the project, or of every expired cluster.

    `ownership` proves what is the named cluster's own; else the identity that `folder` keeps of it
    does. Where there is no proof, all that was built for a cluster of the name counts as left, and
    nothing of it as removable.
    """
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
    proofs = {name: _folders_own(folder, name) for name in owned}
    others: list[Resource] = []
    if cluster is not None:
        proof = proofs[cluster] = ownership or proofs.get(cluster) or Ownership()
        group = owned.get(cluster, [])
        mine, others = proof.split(group)
        if not proof.is_known:
            mine = [each for each in group if is_made_by_program(each, cluster)]
            others = [each for each in group if each not in mine]
        # A bucket of results is nobody else's where it says nothing of an identity.
        old = [each for each in others if each.kind == BUCKET and not identity_in(each.labels)]
        others = [each for each in others if each not in old]
        owned = {cluster: [*mine, *old]} if mine or old else {}
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
    for line in describe_others(found.others):
        talk.print(f"not this cluster's, and left alone: {line}")
    if left:
        _say_how_to_remove(found, talk=talk)
        usd = [price for each in left if (price := found.usd(each)) is not None]
        cost = f", at least ${sum(usd):.2f}/h" if usd else ""
        again = command("orchestrate", "sweep", *found.named(), "--delete")
        raise TeardownError(
            f"{len(left)} resource(s) {whose} left in project {found.project}{cost}. "
            + (
                f"The commands above remove them, in this order; or: {again}"
                if found.removable()
                else ""
            )
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


def _say_how_to_remove(found: Sweep, *, talk: Console) -> None:
    """Print the commands that remove what is this cluster's; name whose the rest is."""
    mine = in_order(filter(found.owns, found.all_left()))
    for each in mine:
        note = _LOSSES.get(each.kind, "")
        talk.print(f"remove with: {each.removal(project=found.project)}{note}")
    for cluster, resources in found.left.items():
        for line in describe_others([each for each in resources if each not in mine]):
            talk.print(
                f"cluster {cluster}, not known to be built from this folder, {line}. Remove it "
                "where it was built; or: "
                + command("orchestrate", "sweep", "--cluster", cluster, "--project", found.project)
                + " --identity ID --delete"
            )


def _folders_own(folder: Path, cluster: str) -> Ownership:
    """Return the proof that a folder has of its cluster; none where its record is damaged."""
    identity = None
    with suppress(ConfigError):
        identity = known_cluster_identity(folder, cluster)
    return Ownership(identities=frozenset((identity,) if identity else ()))


def project_of(
    given: str | None, cluster: str | None, env: Mapping[str, str], *, folder: Path
) -> str:
    """Return the project to look in. Raises UsageError when nothing says which.

    The environment is the operator's own; the folder's memory may have come with the folder.
    """
    if given:
        return given
    known = recall(folder, cluster) if cluster else None
    for name in ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT"):
        if found := env.get(name):
            if known is not None and known.project != found:
                text_console(stderr=True).print(
                    f"note: {name} says project {found}; this folder has {cluster} in "
                    f"{known.project}. Another one: --project"
                )
            return found
    if known is not None:
        return known.project
    projects = {each.project for each in remembered_clusters(folder)}
    if len(projects) == 1:
        return projects.pop()
    raise UsageError(
        "which project? Name it with --project"
        + (f" (this folder has used {', '.join(sorted(projects))})." if projects else ".")
    )


def _show(found: Sweep, *, as_json: bool) -> None:
    out = text_console(stderr=False)
    if as_json:
        out.print(found.to_json())
    elif found.left or found.kept or found.living:
        out.print(found.table())


def _remove(google: Google, found: Sweep, *, assume_yes: bool, talk: Console) -> None:
    going = found.removable()
    if not confirm(
        f"Remove these {len(going)} resource(s) from {found.project}? Buckets stay.",
        assume_yes=assume_yes,
    ):
        raise TeardownError("nothing was removed.")
    for reason in remove(google, going):
        talk.print(f"warning: {reason}")


_DIGITS = re.compile("[0-9]{1,19}")
_DELETES_AT_ONCE = 8
# Buckets of older releases are protected: without the flag nothing at all would be destroyed.
_WORDS = ("destroy", "--yes", "--skip-preview", "--exclude-protected")


def destroy_and_look(
    operations: Operations,
    google: Google,
    *,
    state: StackState,
    steps: int,
    may_go: Callable[[Resource], bool],
) -> None:
    """Destroy and look, as the last two of so many steps; look also when the destroy has failed.

    `state` is the stack's before. What is left and is the cluster's own, by its identity or by that
    state, is removed after a question; a Filestore instance only where `may_go` allows it. Raises
    TeardownError when something is left, or when it cannot be shown that nothing is.
    """
    talk = operations.talk
    identity = known_cluster_identity(operations.folder, operations.cluster)
    own = ownership_of(state, identity, project=google.project)
    trouble = _destroy(operations)
    talk.print(f"{steps - 1}/{steps} destroy: " + (f"FAILED: {trouble}" if trouble else "done"))
    found = _look(operations, google, own)
    # While somebody else builds, what is not in the stack is about to be.
    if not isinstance(trouble, StackBusyError):
        removed = _remove_own(operations, google, found, may_go)
        if trouble is not None and (removed or not found.left):
            trouble = _destroy(operations)
        if removed:
            found = _look(operations, google, own)
    if found.left or found.others:
        text_console(stderr=False).print(found.table())
    try:
        conclude(found, talk=talk)
    except TeardownError as error:
        talk.print(f"{steps}/{steps} sweep: not clean")
        raise TeardownError(f"{error}{f' ({trouble})' if trouble else ''}") from None
    talk.print(f"{steps}/{steps} sweep: clean")
    if trouble is not None:
        words = "See `pulumi stack`, then: pulumi refresh && pulumi destroy"
        if isinstance(trouble, PulumiError) and trouble.trouble == "damaged state":
            words = "Or go on in another stack: pulumi stack init NAME"
        raise TeardownError(f"nothing of the cluster was found, but {trouble}. {words}")


def _destroy(operations: Operations) -> TileforgeError | None:
    update = operations.run(*_WORDS)
    return explain(update) if update.status != 0 else None


def _look(operations: Operations, google: Google, own: Ownership) -> Sweep:
    cluster, folder = operations.cluster, operations.folder
    try:
        return look(google, cluster, folder=folder, keep_buckets=True, ownership=own)
    except (CloudError, CloudAuthError) as error:
        again = f"sweep --cluster {cluster} --project {google.project}"
        raise TeardownError(
            f"it is not known what is left of {cluster}: {error} Look: {again}"
        ) from None


def _remove_own(
    operations: Operations, google: Google, found: Sweep, may_go: Callable[[Resource], bool]
) -> bool:
    """Remove what is left of the cluster's own, after a question; False for nothing."""
    going = [each for each in found.removable() if each.kind != FILESTORE or may_go(each)]
    if not going:
        return False
    operations.talk.print(
        f"left of cluster {operations.cluster}: "
        + ", ".join(f"{each.kind} {each.name}" for each in going)
    )
    if not confirm(f"Remove these {len(going)}?", assume_yes=operations.assume_yes):
        return False
    for reason in remove(google, going):
        operations.talk.print(f"warning: {reason}")
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A results bucket that the operator wants gone."""

    name: str
    num_objects: int
    """Old versions are counted, too."""
    size_bytes: int

    def __str__(self) -> str:
        size = f"{self.size_bytes / 2**30:.1f} GiB" if self.size_bytes else "empty"
        return f"gs://{self.name} ({self.num_objects} objects, {size})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Object:
    name: str
    generation: str = checked(pattern=_DIGITS, wanted="an integer as text")
    size: str = checked("0", pattern=_DIGITS, wanted="an integer as text")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ObjectPage:
    items: tuple[_Object, ...] = ()
    next_page_token: str = checked("", key="nextPageToken")


def find_bucket(google: Google, name: str, *, cluster: str, own: Ownership) -> Bucket:
    """Return the cluster's results bucket of this name, with its size.

    One of an older version has no identity, and is known by its labels. Raises ConfigError for one
    that is not the cluster's, and as Google.ask does.
    """
    what = f"bucket {shown(name)}"
    if not CLOUD_NAME.fullmatch(name):
        raise ConfigError(f"--delete-bucket {shown(name)}: must be a bucket's name, without gs://.")
    found = bucket_in(google, name, what=what)
    if found is None:
        raise ConfigError(
            f"--delete-bucket {name}: there is no such bucket in project {google.project}. See "
            f"what is there: sweep --cluster {cluster} --project {google.project}"
        )
    identity = identity_in(found.labels)
    is_own = identity is None or identity in own.identities
    labelled = found.labels.get(CLUSTER_LABEL) == cluster and KEPT_LABEL in found.labels
    if not (is_own and labelled):
        raise ConfigError(
            f"--delete-bucket {name}: it is no results bucket of cluster {cluster}, by its labels, "
            f"so it stays. Delete it by hand: gcloud storage rm --recursive gs://{name}"
        )
    sizes = [int(each.size) for each in _objects(google, name)]
    return Bucket(name=name, num_objects=len(sizes), size_bytes=sum(sizes))


def delete_bucket(google: Google, bucket: Bucket) -> None:
    """Delete the bucket and all that is in it. Raises TeardownError when something stays."""
    path, what = f"/storage/v1/b/{bucket.name}", f"deleting gs://{bucket.name}"

    def delete(each: _Object) -> None:
        with suppress(CloudMissingError):
            named = f"{path}/o/{quote(each.name, safe='')}?generation={each.generation}"
            google.delete("storage", named, what=what)

    try:
        with ThreadPoolExecutor(max_workers=_DELETES_AT_ONCE) as pool:
            list(pool.map(delete, list(_objects(google, bucket.name))))
        google.delete("storage", path, what=what)
    except (CloudError, CloudAuthError) as error:
        raise TeardownError(
            f"the cluster is gone, but its bucket is not: {error} By hand: gcloud storage rm "
            f"--recursive gs://{bucket.name}"
        ) from None


def _objects(google: Google, bucket: str) -> Iterator[_Object]:
    path = f"/storage/v1/b/{bucket}/o?versions=true&maxResults=1000"
    pages = google.get_pages("storage", path, what=f"listing gs://{bucket}", shape=_ObjectPage)
    return (each for page in pages for each in page.items)


def _age(seconds: float) -> str:
    unit_s = 1 if seconds < 60 else 60
    return in_words(unit_s * round(max(0.0, seconds) / unit_s))
